"""What the rollout side logs about its samples: lengths, rewards, sources, staleness, status,
throughput. Pure functions and two shells.

A number that does not exist (a reward of None, no sample with a version) is left out of its mean
and counted, never a crash or a zero.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from slime.algorithms.table import ESTIMATORS
from slime.data.columns import source_name_of, was_cut
from slime.data.ragged import as_array
from slime.data.reasons import is_model_failure
from slime.data.rewards import SPREAD_TOLERANCE, execution_keys, execution_values, reward_number
from slime.data.structure import flatten_samples
from slime.data.weight_versions import parse_weight_version
from slime.exceptions import RolloutDataError
from slime.metrics import contributions as c
from slime.metrics.contributions import Contribution
from slime.metrics.declared import declared_contributions
from slime.metrics.statistics import (
    compute_rollout_step,
    compute_statistics,
    dict_add_prefix,
    has_repetition,
    pass_rate_contributions,
)
from slime.tracking import tracking
from slime.tracking.spans import spanned
from slime.tracking.tracing import STAGES
from slime.utils.misc import load_function

if TYPE_CHECKING:
    from slime.data.sample import Sample

MAX_REWARD_NAMES = 8
MAX_SOURCES = 64  # metric names must stay few; further sources share one name


@dataclasses.dataclass(frozen=True)
class RolloutMetricsConfig:
    """What the rollout metrics need to know of the options."""

    reward_key: str | None = None
    advantage_estimator: str = "grpo"
    log_reward_category: str | None = None
    log_passrate: bool = False
    passrate_threshold: float | None = None
    rollout_num_gpus: int | None = None
    trainer_weight_version: int | None = None
    # these samples will be: the training ranks count how old they are when it happens
    is_trained: bool = False

    @classmethod
    def from_args(
        cls, args: RolloutMetricsConfig | Any, *, evaluation: bool = False
    ) -> RolloutMetricsConfig:
        """`args` itself if it is a config, else one of the options that it has; upstream's short
        namespaces lack some, which keep their defaults.
        """
        if isinstance(args, cls):
            return args
        given = vars(args)
        config = cls(
            **{
                field.name: given[field.name]
                for field in dataclasses.fields(cls)
                if field.name in given
            }
        )
        key = given.get("eval_reward_key") if evaluation else None
        return dataclasses.replace(config, reward_key=key) if key else config


def _reward(sample: Sample, reward_key: str | None) -> float:
    """The sample's reward as a number, NaN where it has none or needs a key that it lacks."""
    try:
        return reward_number(sample.reward, reward_key, index=sample.index)
    except RolloutDataError:
        return math.nan


def _group_of(sample: Sample, position: int) -> Any:
    return ("own", position) if sample.group_index is None else sample.group_index


def sampled_lengths(samples: Sequence[Any]) -> np.ndarray:
    """Response tokens per sample that the model sampled, int64 [N]: not those that an environment
    wrote, which are masked and have log-prob 0.

    A token that the model sampled and a user's function masked counts. Where no log-prob tells them
    apart, a response that is masked as a whole counts as a whole, and of any other the trainable
    tokens count.
    """
    return np.array([_sampled_length(sample) for sample in samples], dtype=np.int64)


def _sampled_length(sample: Sample) -> int:
    if sample.loss_mask is None:
        return sample.response_length
    mask = as_array(sample.loss_mask) != 0
    log_probs = sample.rollout_log_probs
    if log_probs is not None and len(log_probs) == len(mask):
        mask = mask | (as_array(log_probs) != 0)
    return int(np.count_nonzero(mask)) or sample.response_length


def compute_metrics_from_samples(
    args: RolloutMetricsConfig | Any, samples: Sequence[Any], *, filtered: Sequence[Any] = ()
) -> dict[str, float]:
    """`response_len/*`, reward, group spread, status counts, sources, staleness, speculation, cache
    and repetition of these samples.

    `samples` are all that the gate judged. `filtered` are those of groups that a filter dropped
    before: they count in what is about everything that was sampled (`reward/mean`,
    `truncated_ratio`, the counts of samples, the sources' counts and cuts) and in nothing else.
    Lengths are tokens that the model sampled; their means, and `reward/mean_kept`, are over the
    samples that the gate let pass. {} for no samples. `args` is the config or, as upstream calls
    it, a namespace of options.
    """
    config = RolloutMetricsConfig.from_args(args)
    return c.merge_all([sample_contributions(config, samples, filtered=filtered)])


def sample_contributions(
    config: RolloutMetricsConfig, samples: Sequence[Any], *, filtered: Sequence[Any] = ()
) -> dict[str, Contribution]:
    """The parts of `compute_metrics_from_samples`."""
    if not samples and not filtered:
        return {}
    everything = [*samples, *filtered]
    rewards = np.array([_reward(sample, config.reward_key) for sample in everything])
    valid = [sample for sample in samples if sample.valid]
    parts = c.add_prefix(c.summary(sampled_lengths(valid)), "response_len/")
    parts |= _reward_parts(config, everything, rewards, num_batch=len(samples))
    parts |= _status_parts(samples)
    parts["truncated_ratio"] = c.mean(_are_cut(everything), len(everything))
    parts |= _source_parts(everything, rewards, num_batch=len(samples))
    staleness = staleness_parts(samples, current_version=config.trainer_weight_version)
    left_to_training = ("staleness/mean", "staleness/max") if config.is_trained else ()
    parts |= {name: part for name, part in staleness.items() if name not in left_to_training}
    parts |= _engine_parts(everything)
    parts["top_p_kept_vocab_per_token"] = _kept_vocab(samples)
    repeats = [has_repetition(sample.response or "") for sample in samples]
    parts["repetition_frac"] = c.mean(repeats, len(samples))
    if config.log_reward_category:
        parts |= _category_parts(samples, config.log_reward_category)
    return parts


def truncated_share(samples: Sequence[Any]) -> float:
    """Share of the samples that were cut at a length limit, whatever became of them."""
    return sum(_are_cut(samples)) / max(len(samples), 1)


def _are_cut(samples: Sequence[Any]) -> list[bool]:
    return [was_cut(sample) for sample in samples]


def _reward_parts(
    config: RolloutMetricsConfig, samples: Sequence[Any], rewards: np.ndarray, *, num_batch: int
) -> dict[str, Contribution]:
    """Mean reward of everything sampled, and of what the gate kept of the first `num_batch`, with
    one vote per rollout; unscored samples; and groups whose rewards are all equal (not for ppo). A
    sample rejected for what the model wrote has reward 0; one that was lost has none. The training
    ranks log the mean over the first `num_batch` alone, with the same zeros, as raw_reward.
    """
    parts = {"reward/missing_count": c.total(~np.isfinite(rewards))}
    keys = execution_keys(samples)
    of_all = [
        0.0 if is_model_failure(sample) else r if sample.valid else math.nan
        for sample, r in zip(samples, rewards.tolist(), strict=True)
    ]
    of_kept = [
        r if s.valid else math.nan
        for s, r in zip(samples[:num_batch], rewards.tolist(), strict=False)
    ]
    for name, values in (("reward/mean", of_all), ("reward/mean_kept", of_kept)):
        votes = execution_values(values, keys[: len(values)])
        parts[name] = c.mean(list(votes.values()), len(votes))
    parts["num_sampled_rollouts"] = c.total(len(set(keys)))
    parts["num_sampled_samples"] = c.total(len(samples))
    if not ESTIMATORS[config.advantage_estimator].needs_critic:
        by_group: dict[Any, list[float]] = collections.defaultdict(list)
        members = [
            (_group_of(sample, position), key)
            for position, (sample, key) in enumerate(zip(samples, keys, strict=True))
        ]
        for (group, _), value in execution_values(of_kept, members[:num_batch]).items():
            by_group[group].append(value)
        parts |= zero_spread_parts(by_group)
    return parts


def zero_spread_parts(rewards_by_group: Mapping[Any, Sequence[float]]) -> dict[str, Contribution]:
    """`zero_std/count` and its share of the groups of two and more; `zero_std/count_all_solved`
    (equal rewards of 1), `..._all_failed` (<= 0) and `..._other`; and `zero_std/count_<reward>`,
    rounded to one digit, for the most frequent rewards: a name for each would be unbounded.
    """
    groups = [values for values in rewards_by_group.values() if len(values) > 1]
    counts = {"all_solved": 0, "all_failed": 0, "other": 0}
    by_reward: collections.Counter[float] = collections.Counter()
    for values in groups:
        low, high = min(values), max(values)
        if high - low <= SPREAD_TOLERANCE * max(1.0, abs(low), abs(high)):
            by_reward[round(low, 1)] += 1
            counts[
                "all_solved"
                if abs(low - 1) <= SPREAD_TOLERANCE
                else "all_failed"
                if low <= 0
                else "other"
            ] += 1
    total = sum(counts.values())
    named = [*counts.items(), *by_reward.most_common(MAX_REWARD_NAMES)]
    parts = {f"zero_std/count_{name}": c.total(count) for name, count in named}
    parts["zero_std/count"] = c.total(total)
    parts["zero_std/frac"] = c.mean(total, len(groups))
    return parts


def _status_parts(samples: Sequence[Any]) -> dict[str, Contribution]:
    counts = collections.Counter(sample.status.value for sample in samples)
    parts = {
        f"status/{status}": c.total(counts[status])
        for status in ("completed", "truncated", "aborted", "failed", "pending")
    }
    parts["removed_count"] = c.total([bool(sample.remove_sample) for sample in samples])
    # begun in an earlier rollout, and generated on under partial rollout
    parts["resumed_count"] = c.total(
        ["start_rollout_id" in (sample.metadata or {}) for sample in samples]
    )
    parts["invalid_count"] = c.total([not sample.valid for sample in samples])
    return parts


def _source_parts(
    samples: Sequence[Any], rewards: np.ndarray, *, num_batch: int
) -> dict[str, Contribution]:
    """Per data source: samples and truncated share of everything sampled; mean reward and length of
    what the gate kept of the first `num_batch`. Nothing where no sample names its source.
    """
    names = [source_name_of(sample) for sample in samples]
    counts = collections.Counter(names)
    if set(counts) <= {"unknown"}:
        return {}
    known = {name for name, _ in counts.most_common(MAX_SOURCES)}
    rows: dict[str, list[int]] = collections.defaultdict(list)
    for position, name in enumerate(names):
        rows[name if name in known else "other"].append(position)
    lengths = sampled_lengths(samples)
    parts: dict[str, Contribution] = {}
    for name, positions in sorted(rows.items()):
        kept = [i for i in positions if i < num_batch and samples[i].valid]
        scored = rewards[kept][np.isfinite(rewards[kept])]
        cut = _are_cut([samples[i] for i in positions])
        parts[f"source/{name}/count"] = c.total(len(positions))
        parts[f"source/{name}/response_len"] = c.mean(lengths[kept], len(kept))
        parts[f"source/{name}/truncated_ratio"] = c.mean(cut, len(cut))
        parts[f"source/{name}/reward"] = c.mean(scored, scored.size)
    return parts


def staleness_parts(
    samples: Sequence[Any], *, current_version: int | None = None
) -> dict[str, Contribution]:
    """`staleness/*` in policy versions between each sample's oldest tokens and `current_version`
    (default: the newest version seen): mean, max, the share of samples that span several versions,
    and how many have no version. {} where none has one.
    """
    spans = [
        [v for v in map(parse_weight_version, sample.weight_versions) if v is not None]
        for sample in samples
    ]
    known = [span for span in spans if span]
    if not known:
        return {}
    newest = max(max(span) for span in known) if current_version is None else current_version
    lags = [newest - min(span) for span in known]
    return {
        "staleness/mean": c.mean(lags, len(lags)),
        "staleness/max": c.maximum(lags),
        "staleness/mixed_frac": c.mean([min(span) != max(span) for span in known], len(known)),
        "staleness/unknown_count": c.total(len(spans) - len(known)),
    }


def _engine_parts(samples: Sequence[Any]) -> dict[str, Contribution]:
    """Speculation and prefix cache over all requests: a rate is the ratio of two sums, so that a
    short request counts less than a long one.
    """
    speculative = [sample.spec_info for sample in samples]
    drafted, passes = (
        sum(getattr(info, name) for info in speculative)
        for name in ("spec_draft_token_num", "spec_verify_ct")
    )
    made = [info.completion_token_num for info in speculative if info.spec_verify_ct]
    cached = [sample.prefix_cache_info.cached_tokens for sample in samples]
    prompts = sum(sample.prefix_cache_info.total_prompt_tokens for sample in samples)
    return {
        "spec_accept_rate": c.mean([info.spec_accept_token_num for info in speculative], drafted),
        "spec_accept_length": c.mean(made, passes),
        "prefix_cache_hit_rate": c.mean(cached, prompts),
        "avg_cached_tokens_per_sample": c.mean(cached, len(samples) if prompts else 0),
    }


def compute_top_p_kept_vocab_metrics(samples: Sequence[Any]) -> dict[str, float]:
    """`top_p_kept_vocab_per_token`: ids that nucleus sampling kept per trainable token, removed
    samples left out. {} where there is none.
    """
    return c.merge_all([{"top_p_kept_vocab_per_token": _kept_vocab(samples)}])


def _kept_vocab(samples: Sequence[Any]) -> Contribution:
    kept = tokens = 0
    for sample in samples:
        if sample.rollout_top_p_token_offsets is None or sample.remove_sample:
            continue
        sizes = np.diff(as_array(sample.rollout_top_p_token_offsets))
        mask = (
            np.ones(len(sizes), dtype=bool)
            if sample.loss_mask is None
            else as_array(sample.loss_mask) != 0
        )
        kept += int(sizes[mask].sum())
        tokens += int(mask.sum())
    return c.mean(kept, tokens)


def _category_parts(samples: Sequence[Any], key: str) -> dict[str, Contribution]:
    """Share of samples per value of `key` in dict rewards."""
    values = [
        str(sample.reward[key])
        for sample in samples
        if isinstance(sample.reward, dict) and key in sample.reward
    ]
    return {
        f"error_cat/{name}": c.mean(count, len(samples))
        for name, count in collections.Counter(values).most_common(MAX_SOURCES)
    }


# --- throughput -----------------------------------------------------------------------------------


def compute_perf_metrics_from_samples(
    args: RolloutMetricsConfig | Any, samples: Sequence[Any], rollout_time: float
) -> dict[str, float]:
    """Seconds and tokens per second of one rollout of `rollout_time` seconds, and the requests' own
    timings from `sample.trace`. `samples` are all that were generated for it, those of dropped
    groups included: the engines made their tokens in that time too. `args`: config or options.
    """
    config = RolloutMetricsConfig.from_args(args)
    metrics: dict[str, float] = {"rollout_time": rollout_time}
    if not samples:
        return metrics
    lengths = np.array([sample.response_length for sample in samples], dtype=np.float64)
    effective = sampled_lengths(samples).astype(np.float64)
    waiting = [sample.non_generation_time for sample in samples]
    if max(waiting) > 0:
        metrics.update(dict_add_prefix(compute_statistics(waiting), "non_generation_time/"))
    for prefix, tokens in (("", lengths), ("effective_", effective)):
        longest = int(tokens.argmax())
        if rollout_time > 0:
            if config.rollout_num_gpus:
                metrics[f"{prefix}tokens_per_gpu_per_sec"] = (
                    tokens.sum() / rollout_time / config.rollout_num_gpus
                )
            metrics[f"longest_{prefix}sample_tokens_per_sec"] = tokens[longest] / rollout_time
        generating = rollout_time - waiting[longest]
        if waiting[longest] > 0 and generating > 0:
            metrics[f"longest_{prefix}sample_non_generation_time"] = waiting[longest]
            metrics[f"longest_{prefix}sample_tokens_per_sec_without_non_generation"] = (
                tokens[longest] / generating
            )
    metrics.update(request_metrics(samples))
    return metrics


def request_metrics(samples: Iterable[Any]) -> dict[str, float]:
    """Statistics of the engine's requests, from `sample.trace` events of type `span_end` named
    `sglang_generate`; and the numbers of requests and of requests with timings.
    """
    names = {
        "e2e_latency": "request/e2e_latency",
        "queue_time": "request/queue_time",
        "decode_throughput": "decode/throughput",
    }
    requests = [attrs for sample in samples for attrs in _requests_of(sample.__dict__.get("trace"))]
    if not requests:
        return {}
    profiled = sum(not names.keys().isdisjoint(attrs) for attrs in requests)
    metrics = {"request/count": float(len(requests)), "request/profiled_count": float(profiled)}
    for key in dict.fromkeys(key for attrs in requests for key in attrs):
        name = names.get(key) or ("/".join(key.split("_", 1)) if key.startswith(STAGES) else None)
        if name is None:
            continue
        values = [attrs[key] for attrs in requests if key in attrs]
        numbers = [value for value in values if type(value) is float or type(value) is int]
        if numbers:
            metrics.update(dict_add_prefix(compute_statistics(numbers), f"{name}/"))
    return metrics


def _requests_of(trace: object) -> Iterator[dict[str, Any]]:
    """Of each request in a sample's trace what the engine measured: the span's attributes, and the
    durations of the stages below it.
    """
    events = trace.get("events") or [] if isinstance(trace, dict) else []
    ends = [event for event in events if event.get("type") == "span_end"]
    for request in ends:
        if request.get("name") != "sglang_generate":
            continue
        stages = {
            event["name"]: event["duration"]
            for event in (ends if len(ends) > 1 else ())
            if event.get("parent_id") == request.get("span_id", 0)
            and str(event.get("name")).startswith(STAGES)
            and "duration" in event
        }
        attrs = request.get("attrs") or {}
        yield {**attrs, **stages} if stages else attrs


# --- shells ---------------------------------------------------------------------------------------


@spanned("rollout_metrics")
def log_rollout_data(
    rollout_id: int,
    args: argparse.Namespace,
    samples: Sequence[Any],
    rollout_extra_metrics: dict[str, Any] | None,
    rollout_time: float,
    *,
    trainer_weight_version: int | None = None,
    sampled: Sequence[Any] | None = None,
    filtered: Sequence[Any] = (),
) -> dict[str, Any] | None:
    """Logs one rollout's `rollout/*` and `perf/*` at `rollout/step`, beside the rollout function's
    own metrics. A custom log function that returns True replaces all of it; so does reading the
    samples from a dump. Returns what was logged.

    trainer_weight_version: the newest published version, from which staleness is counted; None: the
    newest that a sample has. sampled: all samples that the gate judged, where `samples` lacks those
    that its policy drops. filtered: samples of groups that a filter dropped before.
    """
    if args.custom_rollout_log_function_path:
        custom = load_function(args.custom_rollout_log_function_path)
        if custom(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
            return None
    if args.load_debug_rollout_data:
        return None
    judged = samples if sampled is None else sampled
    config = dataclasses.replace(
        RolloutMetricsConfig.from_args(args),
        trainer_weight_version=trainer_weight_version,
        is_trained=not args.debug_rollout_only,
    )
    metrics = {
        **(rollout_extra_metrics or {}),
        **dict_add_prefix(
            compute_metrics_from_samples(config, judged, filtered=filtered), "rollout/"
        ),
        **dict_add_prefix(
            compute_perf_metrics_from_samples(config, [*judged, *filtered], rollout_time), "perf/"
        ),
        "rollout/step": compute_rollout_step(args, rollout_id),
    }
    tracking.log(args, metrics, step_key="rollout/step")
    return metrics


def log_eval_rollout_data(
    rollout_id: int,
    args: argparse.Namespace,
    data: Mapping[str, Mapping[str, Any]],
    extra_metrics: dict[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Logs `eval/<dataset>` (mean reward) and its sample metrics, truncated share and pass@k at
    `eval/step`. Returns what was logged.
    """
    if args.custom_eval_rollout_log_function_path:
        custom = load_function(args.custom_eval_rollout_log_function_path)
        if custom(rollout_id, args, data, extra_metrics):
            return None
    metrics: dict[str, Any] = dict(extra_metrics or {})
    config = RolloutMetricsConfig.from_args(args, evaluation=True)
    for name, dataset in data.items():
        metrics.update(
            dict_add_prefix(
                eval_metrics(config, dataset, group_size=args.n_samples_per_eval_prompt),
                f"eval/{name}",
            )
        )
    metrics["eval/step"] = compute_rollout_step(args, rollout_id)
    tracking.log(args, metrics, step_key="eval/step")
    return metrics


def eval_metrics(
    config: RolloutMetricsConfig, dataset: Mapping[str, Any], *, group_size: int
) -> dict[str, float]:
    """One evaluation dataset's numbers; the key "" is its mean reward."""
    return c.merge_all([eval_contributions(config, dataset, group_size=group_size)])


def eval_contributions(
    config: RolloutMetricsConfig, dataset: Mapping[str, Any], *, group_size: int
) -> dict[str, Contribution]:
    """The parts of `eval_metrics`. An attempt (the samples of
    one `rollout_id`) has one vote: its mean reward in the mean, its best in pass@k. Groups are
    blocks of `group_size`, or `Sample.group_index` where set.
    """
    rewards = np.array(
        [reward_number(r, None, index=position) for position, r in enumerate(dataset["rewards"])],
        dtype=np.float64,
    )
    samples = flatten_samples(dataset.get("samples") or [])
    keys = execution_keys(samples) if len(samples) == len(rewards) else list(range(len(rewards)))
    votes = execution_values(rewards.tolist(), keys)
    parts = {"-num_samples": c.total(len(rewards)), "": c.mean(list(votes.values()), len(votes))}
    if samples:
        parts |= c.add_prefix(sample_contributions(config, samples), "/")
        parts |= c.add_prefix(declared_contributions(samples), "/")
    truncated = dataset.get("truncated")
    if truncated is not None:
        parts["-truncated_ratio"] = c.mean([bool(cut) for cut in truncated], len(truncated))
    if config.log_passrate:
        by_id = len(samples) == len(rewards) and all(
            sample.group_index is not None for sample in samples
        )
        places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        groups = {
            key: samples[position].group_index if by_id else places[key] // group_size
            for position, key in enumerate(keys)
        }
        best = execution_values(rewards.tolist(), keys, best=True)
        rates = pass_rate_contributions(
            list(best.values()),
            [cast(int, groups[key]) for key in best],
            threshold=config.passrate_threshold,
        )
        parts |= c.add_prefix(rates, "-")
    return parts


def _compute_top_p_kept_vocab_metrics(
    args: argparse.Namespace, samples: Sequence[Any]
) -> dict[str, float]:
    """Upstream's name and arguments for `compute_top_p_kept_vocab_metrics`; `args` is not read."""
    return compute_top_p_kept_vocab_metrics(samples)
