"""What a gate call found, as small columns from which every number derives, so that parts add up to
the whole exactly.

Legend: N input samples.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.data.reasons import CHEAP_REASONS, REASON_OF_VALUE, REASONS, InvalidReason
from slime.gate.before_rewards import MISSING_LOG_PROBS
from slime.gate.config import GateConfig, MismatchCause
from slime.gate.drift import expected_psi_noise, kolmogorov_smirnov, population_stability_index
from slime.gate.token_columns import as_int

if TYPE_CHECKING:
    from slime.data.sample import Sample
    from slime.gate.judge import Outcome

NO_GROUP = NO_ROLLOUT = -1
MAX_SHARE_OF_ITERATION = 0.10
_QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)
_MAX_GROUPS_IN_RECORD = 500
_MAX_SAMPLES = 1 << 28  # of one rollout in a file: above it a digit is wrong
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclasses.dataclass(frozen=True)
class Drift:
    """Kept lengths against the previous rollout and against the trailing window. NaN without
    history.
    """

    psi_previous: float = math.nan
    ks_previous: float = math.nan
    ks_previous_p: float = math.nan
    psi_window: float = math.nan
    ks_window: float = math.nan
    ks_window_p: float = math.nan
    psi_noise: float = math.nan


@dataclasses.dataclass(frozen=True, eq=False)
class GateStatistics:
    """Statistics of one gate call, or of several merged.

    codes, findings [N] int8: reason codes (0 = none); lengths [N] int32 response tokens; group_ids
    [N] int64 (-1 = none); rollout_ids [N] int64 (-1 = an execution of its own); prompt_digests [N]
    uint64. counts and seconds are sums over the parts. `iteration_seconds`: the whole iteration, if
    known.
    """

    codes: np.ndarray
    findings: np.ndarray
    lengths: np.ndarray
    group_ids: np.ndarray
    rollout_ids: np.ndarray
    prompt_digests: np.ndarray
    counts: dict[str, int]
    seconds: dict[str, float]
    versions: dict[str, str | None] = dataclasses.field(default_factory=dict)
    drift: Drift = Drift()
    iteration_seconds: float | None = None

    @staticmethod
    def merge(parts: Sequence[GateStatistics]) -> GateStatistics:
        """The statistics of the parts' samples taken together; equal to those of one call over all
        of them.
        """
        if not parts:
            raise ValueError("GateStatistics.merge needs at least one part.")
        counts: collections.Counter = collections.Counter()
        seconds: collections.Counter = collections.Counter()
        for part in parts:
            counts.update(part.counts)
            seconds.update(part.seconds)
        names = ("codes", "findings", "lengths", "group_ids", "rollout_ids", "prompt_digests")
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts]) for name in names
        }
        return GateStatistics(
            **columns, counts=dict(counts), seconds=dict(seconds), versions=dict(parts[0].versions)
        )

    @property
    def total(self) -> int:
        return len(self.codes)

    @property
    def kept(self) -> int:
        """Samples without a reason against them (those kept in spite of a finding are
        among them).
        """
        return int((self.codes == 0).sum())

    @property
    def dropped(self) -> dict[InvalidReason, int]:
        """Invalid samples by reason, marked or dropped, every reason present. kept +
        sum = total.
        """
        counts = np.bincount(self.codes, minlength=len(REASONS) + 1)
        return {reason: int(counts[reason.code]) for reason in REASONS}

    @property
    def kept_by_policy(self) -> dict[InvalidReason, int]:
        """Valid samples that carry a finding, by reason."""
        counts = np.bincount(self.findings[self.codes == 0], minlength=len(REASONS) + 1)
        return {reason: int(counts[reason.code]) for reason in REASONS}

    @property
    def failures(self) -> dict[InvalidReason, int]:
        """What the model got wrong, by reason, whether such samples are rejected, penalized or
        kept.
        """
        dropped, kept = self.dropped, self.kept_by_policy
        return {
            reason: dropped[reason] + kept[reason] for reason in REASONS if reason.is_model_failure
        }

    @property
    def drop_rate(self) -> float:
        """Invalid share of all samples in [0, 1], 0.0 of nothing."""
        return 1.0 - self.kept / self.total if self.total else 0.0

    def rate_of(self, reason: InvalidReason) -> float:
        """Share of all samples with `reason`."""
        return self.dropped[reason] / self.total if self.total else 0.0

    @property
    def alignment_failure_rate(self) -> float:
        """Share of compared texts that differ from their tokens (0.0 if none were compared)."""
        compared = self.counts.get("compared", 0)
        return self.counts.get("mismatched", 0) / compared if compared else 0.0

    @property
    def kept_lengths(self) -> np.ndarray:
        """[kept] response tokens of valid samples."""
        return self.lengths[self.codes == 0]

    @property
    def gate_seconds(self) -> float:
        return float(sum(self.seconds.values()))

    @property
    def share_of_iteration(self) -> float:
        """Gate seconds / iteration seconds, NaN if the latter is unknown."""
        return self.gate_seconds / self.iteration_seconds if self.iteration_seconds else math.nan

    @property
    def cheap_share(self) -> float:
        """Share of the invalid samples stopped before any token was read; NaN without
        invalid ones.
        """
        invalid = self.total - self.kept
        return (
            sum(count for reason, count in self.dropped.items() if reason in CHEAP_REASONS)
            / invalid
            if invalid
            else math.nan
        )

    def groups(self) -> dict[str, Any]:
        """Group integrity: number, sizes {size: groups}, groups with 0 and with 1 valid member, ids
        whose executions have different prompts.
        """
        grouped = self.group_ids != NO_GROUP
        ids, inverse, sizes = np.unique(
            self.group_ids[grouped], return_inverse=True, return_counts=True
        )
        valid = np.bincount(inverse, weights=(self.codes == 0)[grouped], minlength=len(ids))
        counted, times = np.unique(sizes, return_counts=True)
        return {
            "count": len(ids),
            "sizes": {int(size): int(count) for size, count in zip(counted, times, strict=True)},
            "without_valid": int((valid == 0).sum()),
            "with_one_valid": int((valid == 1).sum()),
            "mixed": self._mixed_groups(grouped),
            "ungrouped": int((~grouped).sum()),
        }

    def _mixed_groups(self, grouped: np.ndarray) -> list[int]:
        """Ids of groups with two executions of different prompts. An execution whose samples have
        prompts of their own (fan-out) says nothing.
        """
        ids, prompts = self.group_ids[grouped].view(np.uint64), self.prompt_digests[grouped]
        rollouts = self.rollout_ids[grouped]
        alone = rollouts == NO_ROLLOUT
        rollouts = np.where(alone, -2 - np.arange(len(rollouts)), rollouts).view(np.uint64)
        triples = np.unique(np.stack([ids, rollouts, prompts], axis=1), axis=0)
        _, execution, num_prompts = np.unique(
            triples[:, :2], axis=0, return_inverse=True, return_counts=True
        )
        plain = triples[num_prompts[execution.reshape(-1)] == 1]
        pairs = np.unique(plain[:, [0, 2]], axis=0)
        first = pairs[:, 0].view(np.int64)
        return np.unique(first[1:][first[1:] == first[:-1]]).tolist()

    def failures_by_group(self) -> dict[int, dict[str, int]]:
        """{group id: {reason: count}} over invalid samples: on which prompts did the model fail."""
        failures: dict[int, dict[str, int]] = {}
        for row in np.flatnonzero(self.codes):
            reasons = failures.setdefault(int(self.group_ids[row]), {})
            name = REASONS[self.codes[row] - 1].value
            reasons[name] = reasons.get(name, 0) + 1
        return failures

    def with_history(
        self, previous: GateStatistics | Sequence[GateStatistics] | None
    ) -> GateStatistics:
        """These statistics with drift against `previous` (the last one is the previous rollout, all
        together the window).
        """
        history = [previous] if isinstance(previous, GateStatistics) else list(previous or ())
        if not history:
            return self
        kept, last = self.kept_lengths, history[-1].kept_lengths
        window = np.concatenate([statistics.kept_lengths for statistics in history])
        ks_previous, ks_window = kolmogorov_smirnov(last, kept), kolmogorov_smirnov(window, kept)
        drift = Drift(
            psi_previous=population_stability_index(last, kept),
            ks_previous=ks_previous[0],
            ks_previous_p=ks_previous[1],
            psi_window=population_stability_index(window, kept),
            ks_window=ks_window[0],
            ks_window_p=ks_window[1],
            psi_noise=expected_psi_noise(len(last), len(kept)),
        )
        return dataclasses.replace(self, drift=drift)

    def to_history(self) -> dict[str, Any]:
        """What a later rollout is compared with, as JSON-able values: invalid samples by reason,
        kept lengths, counts, versions.
        """
        values, times = np.unique(self.kept_lengths, return_counts=True)
        return {
            "dropped": {reason.value: count for reason, count in self.dropped.items() if count},
            "kept_by_policy": {
                reason.value: count for reason, count in self.kept_by_policy.items() if count
            },
            "kept_lengths": {"tokens": values.tolist(), "samples": times.tolist()},
            "counts": {name: int(count) for name, count in sorted(self.counts.items())},
            "versions": dict(self.versions),
        }

    @staticmethod
    def from_history(record: Mapping[str, Any]) -> GateStatistics:
        """Statistics that compare as those of `to_history` did; order, groups and times are gone.
        ValueError, TypeError or LookupError for a record that is none.
        """
        codes = {
            REASON_OF_VALUE[name].code: int(count) for name, count in record["dropped"].items()
        }
        # the second name is that of earlier versions' histories
        kept = record.get("kept_by_policy", record.get("kept_in_spite", {}))
        findings = {REASON_OF_VALUE[name].code: int(count) for name, count in kept.items()}
        tokens, times = (
            np.array(record["kept_lengths"][name], dtype=np.int64) for name in ("tokens", "samples")
        )
        num_invalid = sum(codes.values())
        total = int(times.sum()) + num_invalid
        num_plain = total - num_invalid - sum(findings.values())
        if (
            tokens.ndim != 1
            or tokens.shape != times.shape
            or not 0 <= total < _MAX_SAMPLES
            or num_plain < 0
        ):
            raise ValueError(
                f"{len(tokens)} lengths, {len(times)} numbers of samples with them, {total} "
                "samples: no gate record."
            )
        kept = np.repeat(tokens.astype(np.int32), times)
        return GateStatistics(
            codes=np.repeat(np.array([0, *codes], dtype=np.int8), [len(kept), *codes.values()]),
            findings=np.repeat(
                np.array([*findings, 0], dtype=np.int8),
                [*findings.values(), total - sum(findings.values())],
            ),
            lengths=np.concatenate([kept, np.zeros(num_invalid, dtype=np.int32)]),
            group_ids=np.full(total, NO_GROUP, dtype=np.int64),
            rollout_ids=np.full(total, NO_ROLLOUT, dtype=np.int64),
            prompt_digests=np.zeros(total, dtype=np.uint64),
            counts={str(name): int(count) for name, count in record["counts"].items()},
            seconds={},
            versions=dict(record["versions"]),
        )

    def with_iteration(self, seconds: float | None) -> GateStatistics:
        """These statistics with the length of the iteration they belong to, in seconds."""
        return dataclasses.replace(self, iteration_seconds=seconds)

    def with_elapsed(self, seconds: float) -> GateStatistics:
        """These statistics with times that add up to the `seconds` that the call took: work of
        several processes at once counts once, and what belongs to no check (reading fields,
        statistics, building samples) is in "rest".
        """
        factor = min(1.0, seconds / self.gate_seconds) if self.gate_seconds else 1.0
        stages = {name: value * factor for name, value in self.seconds.items()}
        return dataclasses.replace(
            self, seconds={**stages, "rest": max(seconds - sum(stages.values()), 0.0)}
        )

    def with_early_check(self, counts: Mapping[str, int], seconds: float) -> GateStatistics:
        """These statistics with the time of the check before rewards, its comparisons in place of
        this call's, and the log-probs that it missed beside those that this call did.

        After that check a text is the tokens' text, or its sample is out: only the first comparison
        says anything. Likewise a missing log-prob is masked or its sample is out.
        """
        own = dict(self.counts)
        if counts.get("compared", 0):
            own = {
                n: c
                for n, c in own.items()
                if n not in ("compared", "mismatched") and not n.startswith("cause_")
            }
            own.update(
                {name: count for name, count in counts.items() if name not in MISSING_LOG_PROBS}
            )
        own.update(
            {
                name: own.get(name, 0) + counts[name]
                for name in MISSING_LOG_PROBS
                if counts.get(name, 0)
            }
        )
        return dataclasses.replace(
            self,
            counts=own,
            seconds={**self.seconds, **({"before_rewards": seconds} if seconds else {})},
        )

    def length_summary(self) -> dict[str, float]:
        """Mean, extremes and quantiles of kept response lengths, in tokens; {} if none is kept."""
        kept = self.kept_lengths
        if not len(kept):
            return {}
        quantiles = {
            f"p{int(q * 100):02d}": float(v)
            for q, v in zip(_QUANTILES, np.quantile(kept, _QUANTILES), strict=True)
        }
        return {
            "mean": float(kept.mean()),
            "min": int(kept.min()),
            **quantiles,
            "max": int(kept.max()),
        }

    def to_metrics(self) -> dict[str, float]:
        """Flat numbers under gate/, every reason present even at 0; values that do not exist (NaN)
        are left out.
        """
        total = max(self.total, 1)
        metrics: dict[str, float] = {
            "gate/total": self.total,
            "gate/kept": self.kept,
            "gate/drop_rate": self.drop_rate,
            "gate/alignment/failure_rate": self.alignment_failure_rate,
            "gate/alignment/compared": self.counts.get("compared", 0),
            "gate/time/total": self.gate_seconds,
            "gate/time/share_of_iteration": self.share_of_iteration,
            "gate/cheap_share": self.cheap_share,
            "gate/missing_log_probs": self.counts.get("missing_log_probs", 0),
        }
        for reason, count in self.dropped.items():
            metrics[f"gate/count/{reason.value}"] = count
            metrics[f"gate/ratio/{reason.value}"] = count / total
        metrics.update(
            {f"gate/kept_by_policy/{r.value}": c for r, c in self.kept_by_policy.items() if c}
        )
        metrics.update(
            {
                f"gate/failures/{reason.value}": count / total
                for reason, count in self.failures.items()
            }
        )
        metrics.update(
            {
                f"gate/alignment/{c.value}": self.counts.get(f"cause_{c.value}", 0)
                for c in MismatchCause
            }
        )
        metrics.update(
            {f"gate/length/{name}": value for name, value in self.length_summary().items()}
        )
        metrics.update(
            {f"gate/drift/{name}": value for name, value in dataclasses.asdict(self.drift).items()}
        )
        metrics.update({f"gate/time/{name}": seconds for name, seconds in self.seconds.items()})
        for name in ("unknown", "stop", "length", "abort"):
            metrics[f"gate/finish/{name}"] = self.counts.get(f"finish_{name}", 0) / total
        for name in ("stop_without_eos", "length_with_eos"):
            metrics[f"gate/finish/{name}"] = self.counts.get(name, 0) / total
        groups = self.groups()
        metrics.update(
            {
                f"gate/groups/{name}": groups[name]
                for name in ("count", "without_valid", "with_one_valid")
            }
        )
        metrics["gate/groups/mixed"] = len(groups["mixed"])
        return {
            name: value
            for name, value in metrics.items()
            if not (isinstance(value, float) and math.isnan(value))
        }

    def to_record(self) -> dict[str, Any]:
        """One JSON-able dictionary with everything above, versions and failures by group (at most
        500 groups).
        """
        failures = self.failures_by_group()
        groups = self.groups()
        return {
            "total": self.total,
            "kept": self.kept,
            "dropped": {reason.value: count for reason, count in self.dropped.items()},
            "kept_by_policy": {
                reason.value: count for reason, count in self.kept_by_policy.items() if count
            },
            "drop_rate": self.drop_rate,
            "alignment_failure_rate": self.alignment_failure_rate,
            "lengths": self.length_summary(),
            "drift": {
                name: _or_none(value) for name, value in dataclasses.asdict(self.drift).items()
            },
            "counts": dict(sorted(self.counts.items())),
            "seconds": {name: round(value, 6) for name, value in self.seconds.items()},
            "gate_seconds": self.gate_seconds,
            "share_of_iteration": _or_none(self.share_of_iteration),
            "cheap_share": _or_none(self.cheap_share),
            "groups": {
                **groups,
                "sizes": {str(k): v for k, v in groups["sizes"].items()},
                "mixed": groups["mixed"][:100],
            },
            "failures_by_group": {
                str(key): failures[key] for key in list(failures)[:_MAX_GROUPS_IN_RECORD]
            },
            "versions": self.versions,
        }

    def summary(self) -> str:
        """One line: totals, the reasons that occurred, lengths, time."""
        reasons = (
            ", ".join(f"{reason.value} {count}" for reason, count in self.dropped.items() if count)
            or "none"
        )
        lengths = self.length_summary()
        length = (
            f"kept length mean {lengths['mean']:.1f} p50 {lengths['p50']:.0f} p99 "
            f"{lengths['p99']:.0f}"
            if lengths
            else "nothing kept"
        )
        too_much = (
            f", above {100 * MAX_SHARE_OF_ITERATION:.0f} %"
            if self.share_of_iteration > MAX_SHARE_OF_ITERATION
            else ""
        )
        share = (
            f" ({100 * self.share_of_iteration:.2f} % of the iteration{too_much})"
            if self.iteration_seconds
            else ""
        )
        return (
            f"gate: {self.kept} of {self.total} kept ({100 * self.drop_rate:.1f} % invalid: "
            f"{reasons}); {length}; "
            f"{self.gate_seconds:.3f} s{share}"
        )


def describe_samples(
    samples: Sequence[Sample], outcome: Outcome, config: GateConfig
) -> GateStatistics:
    """Statistics of one judged batch."""
    lengths = [
        length if (length := as_int(s.response_length)) is not None and 0 <= length < 2**31 else 0
        for s in samples
    ]
    groups, rollouts = (
        [
            number
            if (number := as_int(getattr(s, name))) is not None and abs(number) < 2**62
            else -1
            for s in samples
        ]
        for name in ("group_index", "rollout_id")
    )
    return GateStatistics(
        codes=outcome.codes,
        findings=outcome.findings,
        lengths=np.array(lengths, dtype=np.int32),
        group_ids=np.array(groups, dtype=np.int64),
        rollout_ids=np.array(rollouts, dtype=np.int64),
        prompt_digests=_prompt_digests(samples),
        counts=dict(outcome.counts),
        seconds=dict(outcome.seconds),
        versions={"engine": config.engine_version, "tokenizer": config.tokenizer_version},
    )


def _prompt_digests(samples: Sequence[Sample]) -> np.ndarray:
    """[N] uint64 of the prompts' content; siblings usually share one string object, which is hashed
    once.
    """
    seen: dict[int, int] = {}
    digests = []
    for sample in samples:
        prompt = sample.prompt
        digest = seen.get(id(prompt))
        if digest is None:
            # an object without a repr of its own (an image in a message) shows its address, which
            # is no evidence about content
            text = prompt if isinstance(prompt, str) else _ADDRESS.sub("", repr(prompt))
            data = text.encode("utf-8", "surrogatepass")
            digest = seen[id(prompt)] = int.from_bytes(
                hashlib.blake2b(data, digest_size=8).digest(), "little"
            )
        digests.append(digest)
    return np.array(digests, dtype=np.uint64)


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
