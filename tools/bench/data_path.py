"""What the columns are worth: CPU seconds and memory of the data path against an honest list-based
one, on this machine, in one run.

    python tools/bench/data_path.py [--samples 8192] [--tokens 2000] [--dp 8]

The reference does what list-based frameworks do: Python lists per sample, `torch.as_tensor` per
sample, a dict of tensors per rank through Ray, `torch.cat` per micro-batch and per metric, rewards
by group in a loop. Both sides start from the same samples, as `append_response_tokens` fills them
from an engine's arrays and the gate leaves them: lists, which here remember their arrays. Both end
on the training ranks. A last line gives this side from lists that remember nothing, as a plug-in
may build them. CPU seconds are of this process, which puts and gets.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import ray
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.core import mpu  # noqa: E402

from slime.backends.megatron_utils.data import DataIterator, get_batch, to_train_device  # noqa: E402
from slime.data.batch import RolloutBatch, localize  # noqa: E402
from slime.data.columns import ColumnsConfig, build_train_columns, compute_rewards  # noqa: E402
from slime.data.ragged import Ragged  # noqa: E402
from slime.data.rewards import normalize_rewards  # noqa: E402
from slime.data.sample import Sample  # noqa: E402
from slime.data.schedule import ScheduleConfig, plan_schedule  # noqa: E402
from slime.data.split import SplitConfig, split_by_dp  # noqa: E402
from slime.gate import GateConfig, postprocess_output_data  # noqa: E402
from slime.metrics.train_metrics import phase_contributions  # noqa: E402

CAP = 16384
PAD = 128
GROUP = 8


def make_rewards(count: int) -> tuple[list[float], list[int]]:
    """(rewards, groups) of `count` samples."""
    return [float(i % 3 == 0) for i in range(count)], [i // GROUP for i in range(count)]


def make_samples(count: int, mean: int, *, plain_lists: bool, seed: int = 0) -> list[Sample]:
    """Lognormal lengths of this mean, at most 8192; a prompt of 200 tokens; log-probs of every
    response token.
    """
    rng = np.random.default_rng(seed)
    lengths = (
        np.clip(rng.lognormal(np.log(mean) - 0.32, 0.8, count), 210, 8192).astype(int).tolist()
    )
    rewards, groups = make_rewards(count)
    samples = []
    for i, total in enumerate(lengths):
        tokens = rng.integers(0, 150_000, total, dtype=np.int32)
        log_probs = -rng.random(total - 200, dtype=np.float32)
        sample = Sample(
            index=i, group_index=groups[i], tokens=tokens[:200].tolist(), reward=rewards[i]
        )
        sample.append_response_tokens(tokens=tokens[200:], log_probs=log_probs)
        sample.status = Sample.Status.COMPLETED
        if plain_lists:
            for name in ("tokens", "loss_mask", "rollout_log_probs"):
                setattr(sample, name, list(getattr(sample, name)))
        samples.append(sample)
    return samples


def split_config(count: int, dp: int) -> SplitConfig:
    schedule = ScheduleConfig(dp, dp, CAP, packing="first_fit")
    return SplitConfig(count, count, schedule, pad_to=PAD)


# --- ours -----------------------------------------------------------------------------------------


def our_phase(samples: list[Sample], dp: int) -> list[Any]:
    """Convert, split, put, get, localize: every rank's batch as it arrives."""
    config = ColumnsConfig()
    columns = build_train_columns(samples, compute_rewards(samples, config)[:2], config)
    # as RolloutManager does
    refs = list(map(ray.put, split_by_dp(columns, split_config(len(samples), dp)).shards))
    return [localize(ray.get(ref), rank, dp_size=dp) for rank, ref in enumerate(refs)]


# --- the reference --------------------------------------------------------------------------------


def list_rewards(rewards: list[float], group_ids: list[int]) -> list[float]:
    groups: dict[int, list[int]] = {}
    for i, group in enumerate(group_ids):
        groups.setdefault(group, []).append(i)
    out = [0.0] * len(rewards)
    for members in groups.values():
        values = [rewards[i] for i in members]
        mean, std = statistics.fmean(values), statistics.stdev(values)
        for i in members:
            out[i] = (rewards[i] - mean) / (std + 1e-6)
    return out


def list_phase(samples: list[Sample], dp: int, partitions: list[list[int]]) -> list[dict[str, Any]]:
    """The list-based path to the same place, with the schedule given (it is not what is compared
    here).
    """
    rewards = list_rewards(
        [sample.reward for sample in samples], [sample.group_index for sample in samples]
    )
    data = {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": rewards,
        "raw_reward": [sample.reward for sample in samples],
        "truncated": [int(sample.status is Sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "loss_masks": [sample.loss_mask for sample in samples],
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
    }
    data["rollout_mask_sums"] = [sum(mask) for mask in data["loss_masks"]]
    totals = [len(tokens) for tokens in data["tokens"]]
    dtypes = {"tokens": torch.int64, "loss_masks": torch.int32, "rollout_log_probs": torch.float32}
    refs = []
    for partition in partitions:
        shard: dict[str, Any] = {
            "partition": partition,
            "total_lengths": totals,
            "raw_reward": data["raw_reward"],
        }
        for name, values in data.items():
            if name != "raw_reward":
                chosen = [values[i] for i in partition]
                dtype = dtypes.get(name)
                shard[name] = (
                    chosen
                    if dtype is None
                    else [torch.as_tensor(value, dtype=dtype) for value in chosen]
                )
        refs.append(ray.put(shard))
    batches = []
    for ref in refs:
        batch = ray.get(ref)
        part = batch["partition"]
        batch["total_lengths"] = [batch["total_lengths"][i] for i in part]
        batch["local_raw_reward"] = [batch["raw_reward"][i] for i in part]
        batches.append(batch)
    return batches


def list_get_batch(batch: dict[str, Any], indices: list[int]) -> dict[str, Any]:
    """Concatenate, pad, and build masks and bounds of one micro-batch."""
    tokens = [batch["tokens"][i] for i in indices]
    row = torch.cat(tokens)
    pad = -len(row) % PAD
    masks = []
    for i in indices:
        total, response = batch["total_lengths"][i], batch["response_lengths"][i]
        masks.append(torch.nn.functional.pad(batch["loss_masks"][i], (total - response - 1, 1)))
    bounds = [0]
    for t in tokens:
        bounds.append(bounds[-1] + len(t))
    if pad:
        bounds.append(bounds[-1] + pad)
    keys = (
        "loss_masks",
        "rollout_log_probs",
        "total_lengths",
        "response_lengths",
        "rollout_mask_sums",
    )
    return {
        "tokens": torch.nn.functional.pad(row, (0, pad)).unsqueeze(0),
        "full_loss_masks": torch.nn.functional.pad(torch.cat(masks), (0, pad)).unsqueeze(0),
        "cu_seqlens": torch.tensor(bounds, dtype=torch.int32),
        **{key: [batch[key][i] for i in indices] for key in keys},
    }


def list_log(batch: dict[str, Any]) -> dict[str, float]:
    """Per-field reducers over lists of tensors: a loop over samples for every per-token field."""
    out: dict[str, float] = {}
    for name in ("rollout_log_probs", "log_probs", "ref_log_probs", "kl", "advantages", "returns"):
        values = torch.cat(batch[name]).split(batch["response_lengths"])
        total = 0.0
        for value, mask, denominator in zip(
            values, batch["loss_masks"], batch["rollout_mask_sums"], strict=True
        ):
            total += ((value * mask).sum() / max(denominator, 1)).item()
        out[name] = total / len(values)
    for name in ("rewards", "raw_reward", "response_lengths", "total_lengths", "truncated"):
        out[name] = sum(batch[name]) / max(len(batch[name]), 1)
    return out


# --- measuring ------------------------------------------------------------------------------------


def cpu_seconds(fn: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of this process, and the result."""
    gc.collect()
    start = time.process_time()
    result = fn()
    return time.process_time() - start, result


def steady(fn: Callable[[], Any], repeats: int = 5) -> tuple[float, float, Any]:
    """(first call, median of the calls after it, last result)."""
    first, result = cpu_seconds(fn)
    times = []
    for _ in range(repeats):
        result = None
        seconds, result = cpu_seconds(fn)
        times.append(seconds)
    return first, statistics.median(times), result


def report(name: str, reference: float, ours: float, target: float | None = None) -> None:
    ratio = reference / ours if ours else float("inf")
    wanted = "" if target is None else f"  (target {target}x)"
    print(f"{name:42s} {reference * 1e3:9.1f} ms {ours * 1e3:9.1f} ms  {ratio:7.1f}x{wanted}")


def with_computed(batch: Any, micro_batches: list[list[int]]) -> Any:
    """The batch with what training adds, as each side's training leaves it. Lists: log-probs as one
    tensor per micro-batch, KL and advantages as one per rank, split by sample. Columns: one column
    per field (`forward_only`, `compute_advantages_and_returns`). Under GRPO the returns are the
    advantages.
    """
    source = [torch.as_tensor(value) for value in batch["rollout_log_probs"]]
    lengths = [len(value) for value in source]
    columns = isinstance(batch, RolloutBatch)
    for name in ("log_probs", "ref_log_probs"):
        by_sample: list[Any] = [None] * len(source)
        for indices in micro_batches:
            made = torch.cat([source[i] for i in indices])
            for i, value in zip(indices, made.split([lengths[i] for i in indices]), strict=True):
                by_sample[i] = value
        batch[name] = Ragged.of_tensors(by_sample) if columns else by_sample
    advantages = torch.cat(source)
    for name, flat in (
        ("kl", torch.cat(source)),
        ("advantages", advantages),
        ("returns", advantages),
    ):
        batch[name] = Ragged.of_lengths(flat, lengths) if columns else list(flat.split(lengths))
    return batch


def private_bytes() -> int:
    """This process's anonymous memory (Linux), in bytes: what it holds beside the object store,
    whose pages are shared.
    """
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return 1024 * int(line.split()[1])
    raise OSError("/proc/self/smaps_rollup has no line 'Anonymous:'")


def measure_getter(ref: Any) -> int:
    """Private memory that getting and localizing one shard adds."""
    gc.collect()
    before = private_bytes()
    batch = localize(ray.get(ref), 0)
    checksum = int(batch.raw("tokens").values[::1024].sum())
    return private_bytes() - before + 0 * checksum


def no_parallelism() -> Any:
    return mock.patch.multiple(
        mpu,
        get_context_parallel_world_size=lambda: 1,
        get_tensor_model_parallel_world_size=lambda: 1,
    )


def measure_phase(
    count: int, mean: int, dp: int, repeats: int
) -> tuple[dict[str, float], list[Any], list[Sample]]:
    """(seconds and bytes of the way from samples to ranks, every rank's batch, the samples)."""
    samples = postprocess_output_data(
        make_samples(count, mean, plain_lists=False), GateConfig()
    ).samples
    found: dict[str, float] = {"tokens": float(sum(len(sample.tokens) for sample in samples))}
    found["first"], found["phase"], batches = steady(lambda: our_phase(samples, dp), repeats)
    config = ColumnsConfig()
    columns = build_train_columns(samples, compute_rewards(samples, config)[:2], config)
    before = private_bytes()
    shipped = peak = 0

    def put(shard: Any) -> Any:
        nonlocal shipped, peak
        ref = ray.put(shard)
        shipped, peak = shipped + shard.num_bytes(), max(peak, private_bytes() - before)
        return ref

    refs = list(map(put, split_by_dp(columns, split_config(count, dp)).shards))
    found.update(memory=(shipped + peak) / shipped, shipped=shipped, getter=measure_getter(refs[0]))
    return found, batches, samples


def run_columns(count: int, mean: int, dp: int, repeats: int) -> dict[str, float]:
    """This package's numbers, in seconds of CPU, and its memory."""
    rewards, groups = make_rewards(count)
    grpo = steady(
        lambda: normalize_rewards(rewards, groups, [True] * count, divide_by_std=True), 9
    )[1]
    found, batches, samples = measure_phase(count, mean, dp, repeats)
    found["grpo"] = grpo
    samples = make_samples(count, mean, plain_lists=True)
    found["plain"] = steady(functools.partial(our_phase, samples, dp), 2)[1]
    samples.clear()  # a training rank holds none, and Python's collector would walk over them
    local = [to_train_device(batch, "cpu") for batch in batches]
    keys = [
        "tokens",
        "loss_masks",
        "rollout_log_probs",
        "total_lengths",
        "response_lengths",
        "rollout_mask_sums",
    ]

    def micro_batches() -> None:
        for batch in local:
            batch.cache.clear()
            iterator = DataIterator(batch, batch["micro_batch_indices"])
            for _ in batch["micro_batch_indices"]:
                get_batch(iterator, keys, PAD)

    with no_parallelism():
        _, found["get_batch"], _ = steady(micro_batches, repeats)
    local = [with_computed(batch, batch["micro_batch_indices"]) for batch in local]
    _, found["log"], _ = steady(lambda: [phase_contributions(batch) for batch in local], repeats)
    return found


def run_lists(count: int, mean: int, dp: int, repeats: int) -> dict[str, float]:
    """The reference's numbers. Its schedule is ours, made beforehand: scheduling is not what is
    compared.
    """
    rewards, groups = make_rewards(count)
    _, grpo, theirs = steady(lambda: list_rewards(rewards, groups), 9)
    assert np.allclose(
        normalize_rewards(rewards, groups, [True] * count, divide_by_std=True)[0], theirs
    )
    samples = make_samples(count, mean, plain_lists=True)
    lengths = [len(sample.tokens) for sample in samples]
    plan = plan_schedule(
        lengths, range(count), step_sizes=[count], config=split_config(count, dp).schedule
    )
    found: dict[str, float] = {"grpo": grpo}
    found["first"], found["phase"], batches = steady(
        lambda: list_phase(samples, dp, plan.partitions), repeats
    )

    def micro_batches() -> None:
        for batch, micro in zip(batches, plan.micro_batch_indices, strict=True):
            for indices in micro:
                list_get_batch(batch, indices)

    _, found["get_batch"], _ = steady(micro_batches, repeats)
    batches = [with_computed(*pair) for pair in zip(batches, plan.micro_batch_indices, strict=True)]
    _, found["log"], _ = steady(lambda: [list_log(batch) for batch in batches], repeats)
    return found


def run_side(side: str, args: argparse.Namespace) -> dict[str, float]:
    """One side in a fresh process, so that its first call really is one."""
    command = [sys.executable, __file__, "--side", side, "--repeats", str(args.repeats)]
    command += ["--samples", str(args.samples), "--tokens", str(args.tokens), "--dp", str(args.dp)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out.splitlines()[-1])


def print_report(
    lists: dict[str, float], columns: dict[str, float], args: argparse.Namespace
) -> None:
    print(
        f"{args.samples} samples, {columns['tokens']:.0f} tokens, dp {args.dp}; CPU of the process "
        "that puts and gets\n"
    )
    print(f"{'':42s} {'lists':>12s} {'columns':>12s}")
    report("convert + split + put + get, steady", lists["phase"], columns["phase"], 20)
    report("convert + split + put + get, first call", lists["first"], columns["first"], 12)
    report("the same from lists without arrays", lists["phase"], columns["plain"])
    report("get_batch over a phase", lists["get_batch"], columns["get_batch"], 5)
    report("log_rollout_data, all ranks", lists["log"], columns["log"], 10)
    report("GRPO normalization", lists["grpo"], columns["grpo"], 5)
    shipped = columns["shipped"] / 2**20
    print(
        f"{'(store + peak beside it) / bytes shipped':42s} {columns['memory']:.2f}  (target 1.3), "
        f"{shipped:.0f} MiB shipped"
    )
    print(
        f"{'private memory of a getter':42s} {columns['getter'] / 2**20:.2f} MiB of "
        f"{shipped / args.dp:.1f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=2000, help="mean tokens per sample")
    parser.add_argument("--dp", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--side", choices=("lists", "columns"), help="measure one side and print it as JSON"
    )
    args = parser.parse_args()
    if args.side is None:
        print_report(run_side("lists", args), run_side("columns", args), args)
        return
    torch.set_num_threads(1)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        object_store_memory=2 * 2**30,
    )
    try:
        ray.get(ray.put(np.zeros(1000)))  # connections and serializers are neither side's
        measure = run_lists if args.side == "lists" else run_columns
        print(json.dumps(measure(args.samples, args.tokens, args.dp, args.repeats)))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
