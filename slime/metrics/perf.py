"""Step times and throughput of the training ranks, from the timers of the primary rank."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence

from slime.data.flops import calculate_fwd_flops
from slime.metrics.statistics import compute_rollout_step
from slime.tracking import tracking
from slime.tracking.timer import Timer


def perf_metrics(
    seconds: Mapping[str, float], *, forward_flops: float, num_tokens: int, world_size: int
) -> dict[str, float]:
    """`perf/...` of one phase: every timer in seconds; TFLOPs per GPU of each pass; trained tokens
    per second over all GPUs; the step's time and the share of it spent waiting. `forward_flops` and
    `num_tokens` are of the whole phase.
    """
    metrics = {f"perf/{name}_time": value for name, value in seconds.items()}
    tflops = forward_flops / world_size / 1e12
    for name, passes in (("log_probs", 1), ("ref_log_probs", 1), ("actor_train", 3)):
        if seconds.get(name):
            metrics[f"perf/{name}_tflops"] = passes * tflops / seconds[name]
    if seconds.get("actor_train"):
        metrics["perf/actor_train_tok_per_s"] = num_tokens / seconds["actor_train"]
    if "train_wait" in seconds and "train" in seconds:
        step = seconds["train_wait"] + seconds["train"]
        metrics["perf/step_time"] = step
        metrics["perf/wait_time_ratio"] = seconds["train_wait"] / step if step else 0.0
    return metrics


def log_perf_data_raw(
    rollout_id: int,
    args: argparse.Namespace,
    is_primary_rank: bool,
    compute_total_fwd_flops: Callable[[Sequence[int]], float] | None = None,
    extra_metrics: dict[str, float] | None = None,
    *,
    seq_lens: Sequence[int] | None = None,
) -> dict[str, float] | None:
    """Logs `perf_metrics` of this process's timers where it is the primary rank, and resets the
    timers in any case. `seq_lens`: total lengths of the samples that were trained; None: those that
    the timer keeps.
    """
    seconds = Timer().log_dict()
    Timer().reset()
    if not is_primary_rank:
        return None
    lengths = Timer().seq_lens if seq_lens is None else seq_lens
    flops = (compute_total_fwd_flops or (lambda seq_lens: calculate_fwd_flops(seq_lens, args)))(
        lengths
    )
    metrics = perf_metrics(
        seconds,
        forward_flops=flops,
        num_tokens=sum(lengths),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
    )
    metrics.update(extra_metrics or {})
    metrics["rollout/step"] = compute_rollout_step(args, rollout_id)
    tracking.log(args, metrics, step_key="rollout/step")
    return metrics
