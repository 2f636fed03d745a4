"""Reads a run's folder: metrics as series by step, evaluation sets, ledgers. Judges nothing."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.data.ledger import COPIES, NOT_TRAINED
from slime.data.ledger import PREFIX as LEDGER
from slime.data.reasons import DropReason
from slime.files.jsonl import NOT_FINITE, read_jsonl

# begun for a rollout, and generated again, or continued, in a later one
GIVEN_BACK = (DropReason.RETURNED_PARTIAL.value, DropReason.RETURNED_PRISTINE.value)
SAVE_FAILED = "rollout/save_failed"  # 1 after a checkpoint that could not be written, else 0

# label -> names that may carry it, the first that a run has wins
FAMILIES: dict[str, tuple[str, ...]] = {
    # over everything sampled, what the gate rejected as 0; then the mean of what it kept
    "reward": ("rollout/reward/mean", "rollout/raw_reward", "rollout/rewards"),
    "reward kept": ("rollout/reward/mean_kept",),
    "pass rate": ("passrate/pass@1", "rollout/pass@1"),
    "loss": ("train/loss",),
    "length": ("rollout/response_lengths",),  # of what trained
    "kl": ("train/kl_loss", "train/ppo_kl", "rollout/kl"),
    "logprob diff": ("train/train_rollout_logprob_abs_diff", "rollout/logprob_abs_diff/mean"),
    "grad norm": ("train/grad_norm",),
    "tokens/s": ("perf/actor_train_tok_per_s", "perf/tokens_per_gpu_per_sec", "perf/tokens_per_s"),
    "step s": ("perf/step_time",),
}
EVAL_FAMILIES: dict[str, tuple[str, ...]] = {}


def pick(metrics: Mapping[str, Any], families: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Returns the numbers of `metrics` under their short labels; with EVAL_FAMILIES, every
    evaluation set's mean reward by its name.
    """
    if families is EVAL_FAMILIES:
        known = {
            name
            for name in metrics
            if name.startswith("eval/") and name.count("/") == 1 and name != "eval/step"
        }
        # eval/<set>-<what> are details of eval/<set>
        sets = {name for name in known if not any(name.startswith(f"{other}-") for other in known)}
        return {
            name.removeprefix("eval/"): float(metrics[name])
            for name in sets
            if _is_number(metrics[name]) or is_not_finite(metrics[name])
        }
    found = {}
    for label, names in families.items():
        for name in names:
            if _is_number(metrics.get(name)) or is_not_finite(metrics.get(name)):
                found[label] = float(metrics[name])
                break
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, bool | int | float)


def is_not_finite(value: object) -> bool:
    """Whether a recorded value is not-a-number or infinite: metrics.jsonl holds those as text,
    which JSON has.
    """
    return isinstance(value, str) and value in NOT_FINITE


@dataclasses.dataclass(frozen=True)
class RunRecords:
    """A run's metrics: name -> step -> value, each on its own axis, the latest record of a step
    wins. `num_unreadable` lines were torn.
    """

    series: dict[str, dict[int, Any]]
    num_unreadable: int

    def numbers(self, name: str) -> tuple[list[int], list[float]]:
        """Returns the steps and values of `name` in step order, without what is no number."""
        points = sorted(
            (step, float(value))
            for step, value in self.series.get(name, {}).items()
            if _is_number(value)
        )
        return [step for step, _ in points], [value for _, value in points]

    def not_finite(self, name: str) -> list[int]:
        """Returns the steps at which `name` was recorded and was no number, ascending."""
        return sorted(
            step for step, value in self.series.get(name, {}).items() if is_not_finite(value)
        )

    def ends(self, name: str) -> tuple[int, int]:
        """Returns the first and the last step at which `name` was recorded, finite or not."""
        steps = [*self.numbers(name)[0], *self.not_finite(name)]
        return min(steps), max(steps)

    def first_of(self, names: Iterable[str]) -> str | None:
        """Returns the first of `names` that the run has, finite or not."""
        return next((name for name in names if self._is_logged(name)), None)

    def _is_logged(self, name: str) -> bool:
        values = self.series.get(name, {}).values()
        return any(_is_number(value) or is_not_finite(value) for value in values)


def read_run(run_dir: str | os.PathLike[str]) -> RunRecords:
    """Reads <run_dir>/metrics.jsonl. FileNotFoundError, naming it, when there is none."""
    path = Path(run_dir) / "metrics.jsonl"
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing: {run_dir} is no run folder, or the run logged nothing"
        )
    return series_of(*read_jsonl(path))


def series_of(records: Iterable[Mapping[str, Any]], num_unreadable: int = 0) -> RunRecords:
    """The series of what was logged: {"step_key", "step", "metrics"} each."""
    series: dict[str, dict[int, Any]] = {}
    for record in records:
        if "step_key" not in record:
            continue
        for name, value in record["metrics"].items():
            series.setdefault(name, {})[record["step"]] = value
    return RunRecords(series, num_unreadable)


def _by_reason(counts: Mapping[str, int]) -> str:
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()) if count)
    return f" ({reasons})" if reasons else ""


@dataclasses.dataclass(frozen=True)
class LedgerTotals:
    """Samples of a run: sampled = trained + the sum of dropped, by reason; also those that were
    planned and did not train. A sample that was given back counts again where a later rollout has
    it; as text it is named apart. `copies`: further rows that a custom converter made of samples;
    trained and dropped count rows.
    """

    sampled: int
    trained: int
    dropped: dict[str, int]
    copies: int = 0

    @property
    def missing(self) -> int:
        """Samples that neither were trained nor have a reason; negative when more came out than
        went in.
        """
        return self.sampled + self.copies - self.trained - sum(self.dropped.values())

    def __str__(self) -> str:
        copies = f" + {self.copies} copies" if self.copies else ""
        gone = {reason: n for reason, n in self.dropped.items() if reason not in GIVEN_BACK}
        back = {reason: n for reason, n in self.dropped.items() if reason in GIVEN_BACK}
        return (
            f"{self.sampled - sum(back.values())} sampled{copies} = {self.trained} trained + "
            f"{sum(gone.values())} dropped{_by_reason(gone)}"
        ) + (
            f"; {sum(back.values())} more were begun and given back{_by_reason(back)}"
            if any(back.values())
            else ""
        )


def read_ledgers(run: RunRecords) -> dict[int, LedgerTotals]:
    """Returns the ledger of every rollout that reported one. Samples of a rollout whose training
    did not finish are not trained.
    """
    steps = run.numbers(LEDGER + "sampled")[0]
    reasons = [name for name in run.series if name.startswith((LEDGER + "dropped/", NOT_TRAINED))]
    finished = run.series.get(LEDGER + "trained", {})

    def count(name: str, step: int) -> int:
        value = run.series.get(name, {}).get(step, 0)
        return int(value) if _is_number(value) else 0

    def dropped(step: int) -> dict[str, int]:
        by_reason = {
            name.removeprefix(LEDGER + "dropped/").removeprefix(NOT_TRAINED): count(name, step)
            for name in reasons
        }
        return (
            by_reason
            if step in finished
            else {**by_reason, DropReason.UNFINISHED.value: count(LEDGER + "planned", step)}
        )

    return {
        step: LedgerTotals(
            count(LEDGER + "sampled", step),
            count(LEDGER + "trained", step),
            dropped(step),
            count(COPIES, step),
        )
        for step in steps
    }


def total_ledger(ledgers: Mapping[int, LedgerTotals]) -> LedgerTotals:
    """Returns the sum over rollouts."""
    dropped: dict[str, int] = {}
    for ledger in ledgers.values():
        for reason, count in ledger.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + count
    sampled, trained, copies = (
        sum(getattr(one, name) for one in ledgers.values())
        for name in ("sampled", "trained", "copies")
    )
    return LedgerTotals(sampled, trained, dropped, copies)


def eval_sets(run: RunRecords) -> list[str]:
    """Returns the names of the evaluation sets, as in eval/<name>."""
    last = {name: next(reversed(points.values())) for name, points in run.series.items() if points}
    return sorted(pick(last, EVAL_FAMILIES))
