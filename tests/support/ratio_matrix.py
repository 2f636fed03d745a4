"""The ratio matrix: what a rollout may be sampled with, where the old log-probs come from, and
which layout trains.

One rollout per sampling option is made by the real client against the real embedded engine. The
real actor trains one step on each, with the engine's weights, with those as its reference, and with
a learning rate of 0, so that the next cell finds the same weights. In every cell the trainer's
log-probs are the engine's, the importance ratio is 1, the KL to the reference 0, and nothing is
clipped.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from support.layout_batch import ROLLOUT_ID
from support.layout_matrix import CP2, TP2, Layout, read_metrics

NATS = 1e-4  # the largest |trainer - engine| of a token
EPS_CLIP = 1e-3  # a band so narrow that a wrong distribution is clipped

LAYOUTS = {
    "dense": Layout(1),
    "moe": Layout(1, family="qwen3_moe"),
    "tp2": Layout(2, TP2),
    "cp2": Layout(2, CP2),
}

NUCLEUS = {"rollout_top_p": 0.8, "rollout_temperature": 1.3}
PLUGIN = "support.ratio_matrix."
SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"rollout_temperature": 0.7},
    "top_p": NUCLEUS,
    "top_k": {"rollout_top_k": 5, "rollout_temperature": 0.9},
    "top_p and top_k": {**NUCLEUS, "rollout_top_k": 20},
    "min_p": {"custom_generate_function_path": PLUGIN + "with_min_p"},
    "top_p and min_p": {**NUCLEUS, "custom_generate_function_path": PLUGIN + "with_min_p"},
    "stop strings": {"rollout_stop": list("aeiou13579")},
    "stop ids": {"rollout_stop_token_ids": list(range(20, 40)), **NUCLEUS},
    "special tokens skipped": {"rollout_skip_special_tokens": True},
    "partial rollout": {
        "partial_rollout": True,
        "custom_generate_function_path": PLUGIN + "in_two_parts",
    },
    "partial rollout, top_p": {
        **NUCLEUS,
        "partial_rollout": True,
        "custom_generate_function_path": PLUGIN + "in_two_parts",
    },
    "turns": {"custom_generate_function_path": PLUGIN + "in_two_turns", "rollout_temperature": 0.7},
    "turns, top_p": {**NUCLEUS, "custom_generate_function_path": PLUGIN + "in_two_turns"},
    "fan-out": {"custom_generate_function_path": PLUGIN + "as_two_samples"},
    "fan-out, top_p": {**NUCLEUS, "custom_generate_function_path": PLUGIN + "as_two_samples"},
}
OLD_LOG_PROBS: dict[str, dict[str, Any]] = {
    # the entropy asks for a pass before the step
    "recomputed": {"use_rollout_entropy": True, "use_tis": True},
    "rollout": {"use_rollout_logprobs": True},
    "captured": {"use_tis": True},  # no pass: those of the step itself
}

TRAINING: dict[str, Any] = {
    "rollout_batch_size": 4, "n_samples_per_prompt": 2, "global_batch_size": 8, "num_rollout": 1, "micro_batch_size": 3, "lr": 0.0,
    "lr_decay_style": "constant", "rollout_max_response_len": 24, "data_pad_size_multiplier": 8, "make_vocab_size_divisible_by": 16,
    "num_cpus": 4, "accelerator": "cpu", "attention_dropout": 0.0, "hidden_dropout": 0.0, "distributed_timeout_minutes": 2,
    "use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k2", "eps_clip": EPS_CLIP, "eps_clip_high": EPS_CLIP,
}  # fmt: skip


# --- generate functions ---------------------------------------------------------------------------


async def with_min_p(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """A parameter of the request that no option sets."""
    from slime.rollout.sglang_rollout import generate

    return await generate(args, sample, {**sampling_params, "min_p": 0.1})


async def in_two_parts(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Cut after three tokens as an abort cuts, and generated on."""
    from slime.rollout.sglang_rollout import generate

    await generate(args, sample, {**sampling_params, "max_new_tokens": 3})
    if sample.status is sample.Status.TRUNCATED:
        sample.status = sample.Status.ABORTED
        await generate(args, sample, dict(sampling_params))
    return sample


async def in_two_turns(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Two sampled turns with six ids of an environment between them."""
    from slime.rollout.sglang_rollout import generate

    await generate(args, sample, {**sampling_params, "max_new_tokens": 5})
    sample.append_response_tokens(tokens=[10, 11, 12, 13, 14, 15], trainable=False)
    sample.status = sample.Status.PENDING
    return await generate(args, sample, dict(sampling_params))


async def as_two_samples(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """A sample, and a second one of the same rollout with another prompt."""
    from slime.rollout.sglang_rollout import generate
    from slime.rollout.turns import fork_sample

    await generate(args, sample, {**sampling_params, "max_new_tokens": 6})
    fork = fork_sample(sample, [*sample.tokens[:2], 30, 31])
    return [sample, await generate(args, fork, dict(sampling_params))]


# --- rollouts -------------------------------------------------------------------------------------


def record_rollouts(model: Path, folder: Path, names: Iterable[str]) -> dict[str, str]:
    """{sampling option: template of the dump that holds its rollout}, sampled by an engine with the
    weights in `model`.
    """
    from support.rollout_args import fresh_rollout_state, rollout_args, write_prompts

    from slime.backends.torch_engine.engine_config import EngineConfig
    from slime.backends.torch_engine.server_thread import EngineServerThread
    from slime.data.structure import iter_samples
    from slime.files.rollout_dump import save_debug_rollout_data
    from slime.prompts.data_source import RolloutDataSourceWithBuffer
    from slime.rollout.sglang_rollout import generate_rollout

    folder.mkdir(parents=True, exist_ok=True)
    prompts, templates = write_prompts(folder / "prompts.jsonl", 4), {}
    common = {
        "hf_checkpoint": str(model),
        "prompt_data": prompts,
        "sglang_enable_deterministic_inference": True,
        "rollout_max_response_len": 24,
    }
    with EngineServerThread(
        EngineConfig(hf_checkpoint=str(model), device="cpu", deterministic=True)
    ) as server:
        for name in names:
            args = rollout_args(**common, **SAMPLING[name])
            with fresh_rollout_state(server.url):
                samples = list(
                    iter_samples(
                        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)).samples
                    )
                )
            assert all(sample.status.value in ("completed", "truncated") for sample in samples), [
                sample.metadata for sample in samples
            ]
            for index, sample in enumerate(samples):
                # the gate is not the subject
                sample.reward, sample.valid, sample.invalid_reason = (
                    float(index % 3 == 0),
                    True,
                    None,
                )
            templates[name] = str(folder / f"{name.replace(' ', '_')}_{{rollout_id}}.jsonl")
            save_debug_rollout_data(
                templates[name], samples, rollout_id=ROLLOUT_ID, evaluation=False
            )
    return templates


# --- one rank -------------------------------------------------------------------------------------


@dataclasses.dataclass
class CellResult:
    """Of one rank: the largest |trainer - engine| log-prob of a trained token, nats, and how many
    were compared.
    """

    largest_gap: float
    num_tokens: int


def train_cells(
    rank: int, world_size: int, jobs: Sequence[tuple[Any, list[tuple[str, str, str]]]]
) -> dict[tuple, CellResult]:
    """{(layout, sampling, old): result} for jobs of (args with `layout`, [(sampling, old, template
    of its rollout)]); one actor a job.
    """
    import os

    os.environ["SLIME_ACCELERATOR"] = "cpu"
    from slime.backends.megatron_utils import initialize  # noqa: F401  before anything imports Megatron

    results: dict[tuple, CellResult] = {}
    for args, cells in jobs:
        results.update(_train_one_layout(rank, world_size, args, cells))
    return results


def _train_one_layout(
    rank: int, world_size: int, args: Any, cells: list[tuple[str, str, str]]
) -> dict[tuple, CellResult]:
    results = {}
    with _running_actor(rank, world_size, args) as actor:
        for number, (sampling, old, template) in enumerate(cells):
            trained = {
                name: value
                for name, value in SAMPLING[sampling].items()
                if name in ("rollout_temperature", "rollout_top_p")
            }
            boxes = _boxes(
                actor, args, load_debug_rollout_data=template, **OLD_LOG_PROBS[old], **trained
            )
            actor.train(number, boxes)
            results[args.layout, sampling, old] = _gap(actor.batch, args.context_parallel_size)
    return results


def train_or_stop(
    rank: int, world_size: int, args: Any, template: str
) -> dict[tuple[str, float], tuple[str, float]]:
    """{(old, --logprob-diff-stop): (the error's words, how far the largest weight moved)} of a step
    on the rollout in `template`.
    """
    import os

    os.environ["SLIME_ACCELERATOR"] = "cpu"
    from slime.backends.megatron_utils import initialize  # noqa: F401  before anything imports Megatron
    from slime.exceptions import RolloutDataError
    from slime.tracking.timer import timer

    results = {}
    with _running_actor(rank, world_size, args) as actor:
        for stop in (0.2, 5.0):
            for number, old in enumerate(OLD_LOG_PROBS):
                boxes = _boxes(
                    actor,
                    args,
                    load_debug_rollout_data=template,
                    **OLD_LOG_PROBS[old],
                    logprob_diff_stop=stop,
                )
                actor.weights.restore("ref")
                actor.weights.backup("actor")
                words = ""
                try:
                    with timer("train"):
                        actor.train_actor(number, actor._get_rollout_data(boxes))
                except RolloutDataError as error:
                    words = str(error)
                results[old, stop] = (words, actor.weights.largest_change("ref"))
    return results


@contextlib.contextmanager
def _running_actor(rank: int, world_size: int, args: Any) -> Iterator[Any]:
    from support.layout_cell import _without_ray_and_with_our_groups

    from slime.backends.megatron_utils.actor import MegatronTrainRayActor
    from slime.tracking.timer import Timer
    from slime.tracking.tracking import finish_tracking

    class CellActor(MegatronTrainRayActor):
        def __init__(self) -> None:
            self.rank, self.world_size, self._weight_updates_since_start = rank, world_size, None
            self.master_addr, self.master_port = "groups-are-made", 0
            self.recorder = None

        def _get_rollout_data(self, rollout_data_ref: list) -> Any:
            self.batch = super()._get_rollout_data(rollout_data_ref)
            return self.batch

    with _without_ray_and_with_our_groups():
        actor = CellActor()
        actor.init(copy.copy(args), "actor", True, False)
        yield actor
        finish_tracking(args)
        Timer().end("train_wait")
        Timer().reset()


def _boxes(actor: Any, args: Any, **changed: Any) -> list:
    """Gives the actor `args` with changes, and returns the shards that the rollout manager makes of
    their dump.
    """
    from slime.ray.rollout import RolloutManager

    manager = RolloutManager.__new__(RolloutManager)
    actor.args = manager.args = argparse.Namespace(**{**vars(args), **changed})
    manager.custom_reward_post_process_func = manager.custom_convert_samples_to_train_data_func = (
        None
    )
    manager.set_train_parallel_config(actor.train_parallel_config)
    samples = manager._get_rollout_data(ROLLOUT_ID).samples
    return manager._split_train_data_by_dp(manager._convert_samples_to_train_data(samples))


def _gap(batch: Any, cp_size: int) -> CellResult:
    from megatron.core import mpu
    from support.layout_cell import owned_places

    largest, count = 0.0, 0
    for index, mask in enumerate(batch["loss_masks"]):
        total, response = int(batch["total_lengths"][index]), int(batch["response_lengths"][index])
        places = owned_places(
            total, response, cp_size=cp_size, cp_rank=mpu.get_context_parallel_rank()
        )
        kept = torch.as_tensor(mask)[places] != 0
        gaps = (batch["log_probs"][index] - batch["rollout_log_probs"][index])[kept].abs()
        largest, count = max([largest, *gaps.tolist()]), count + gaps.numel()
    return CellResult(largest, count)


# --- the matrix -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cell:
    """What one step of a cell reported; `problem` says what is not as it must be, ""
    where all is.
    """

    layout: str
    sampling: str
    old: str
    largest_gap: float
    metrics: dict[str, float]
    problem: str


class RatioMatrix:
    """Makes models and rollouts below `root` once, and runs cells on them."""

    def __init__(self, root: Path) -> None:
        from support.tiny_models import make_tiny_checkpoint

        self.root = root
        self.models = {
            family: make_tiny_checkpoint(root / family, family) for family in ("qwen3", "qwen3_moe")
        }
        self._templates: dict[str, dict[str, str]] = {family: {} for family in self.models}
        self._runs = 0

    def rollout(self, family: str, sampling: Iterable[str]) -> dict[str, str]:
        """The dumps of these sampling options, sampled where they were not yet."""
        known = self._templates[family]
        missing = [name for name in sampling if name not in known]
        if missing:
            known |= record_rollouts(self.models[family], self.root / "rollouts" / family, missing)
        return known

    def run(self, cells: Sequence[tuple[str, str, str]], *, timeout: float = 300) -> list[Cell]:
        """The (layout, sampling, old) cells, whose layouts have one number of ranks, in one set of
        processes.
        """
        from support.distributed import run_distributed

        (ranks,) = {LAYOUTS[layout].ranks for layout, _, _ in cells}
        jobs, folders = [], {}
        for layout in dict.fromkeys(layout for layout, _, _ in cells):
            self._runs += 1
            folders[layout] = self.root / "runs" / str(self._runs)
            mine = [(sampling, old) for name, sampling, old in cells if name == layout]
            templates = self.rollout(LAYOUTS[layout].family, [sampling for sampling, _ in mine])
            jobs.append(
                (
                    self._args(layout, folders[layout]),
                    [(sampling, old, templates[sampling]) for sampling, old in mine],
                )
            )
        by_rank = run_distributed(train_cells, ranks, jobs, timeout=timeout)
        results = []
        for args, mine in jobs:
            steps = read_metrics(folders[args.layout])["train/step"]
            assert len(steps) == len(mine), (
                f"{args.layout}: {len(steps)} steps of {len(mine)} cells"
            )
            for (sampling, old, _), (_, metrics) in zip(mine, steps, strict=True):
                gaps = [rank[args.layout, sampling, old] for rank in by_rank]
                results.append(judged((args.layout, sampling, old), gaps, metrics))
        return results

    def run_far_rollout(self, gap: float) -> dict[tuple[str, float], tuple[str, float]]:
        """`train_or_stop` on a rollout whose engine log-probs are `gap` nats too low."""
        from support.distributed import run_distributed

        from slime.files.rollout_dump import read_rollout_dump, save_debug_rollout_data

        samples = read_rollout_dump(
            self.rollout("qwen3", ["plain"])["plain"].format(rollout_id=ROLLOUT_ID)
        )
        for sample in samples:
            sample.rollout_log_probs = [value - gap for value in sample.rollout_log_probs]
        template = str(self.root / "far_{rollout_id}.jsonl")
        save_debug_rollout_data(template, samples, rollout_id=ROLLOUT_ID, evaluation=False)
        args = self._args("dense", self.root / "far", lr=1e-2, eps_clip=10.0, eps_clip_high=10.0)
        return run_distributed(train_or_stop, 1, args, template)[0]

    def _args(self, layout: str, folder: Path, **changed: Any) -> Any:
        from slime.utils.arguments import parse_args

        chosen = LAYOUTS[layout]
        folder.mkdir(parents=True)
        model = self.models[chosen.family]
        options = {
            **TRAINING,
            **chosen.options,
            **changed,
            "hf_checkpoint": model,
            "load": model,
            "ref_load": model,
            "run_dir": folder,
        }
        options |= {
            "actor_num_gpus_per_node": chosen.ranks,
            "load_debug_rollout_data": self.root / "{rollout_id}",
        }
        if chosen.family == "qwen3_moe":
            options["moe_aux_loss_coeff"] = 0.0
        words = []
        for name, value in options.items():
            words += ["--" + name.replace("_", "-")] + ([] if value is True else [str(value)])
        args = parse_args(words)
        args.layout = layout
        return args


def judged(
    cell: tuple[str, str, str], gaps: Sequence[CellResult], metrics: dict[str, float]
) -> Cell:
    """The cell with what is wrong in it."""
    largest, count = max(gap.largest_gap for gap in gaps), sum(gap.num_tokens for gap in gaps)
    limits = {
        "train/ppo_kl": NATS,
        "train/pg_clipfrac": 0.0,
        "train/kl_loss": 1e-12,
        "train/train_rollout_logprob_abs_diff": NATS,
    }
    if cell[2] != "rollout":
        limits |= {"train/ppo_kl": 1e-6, "train/tis_abs": NATS, "train/tis_clipfrac": 1.0}
    problems = [
        f"{name} is {metrics.get(name)}"
        for name, limit in limits.items()
        if not abs(metrics.get(name, float("nan"))) <= limit
    ]
    if not largest <= NATS:
        problems.append(f"a token's trainer and engine log-probs are {largest:.3g} nats apart")
    if count < 20:
        problems.append(f"only {count} tokens were compared")
    return Cell(*cell, largest, metrics, "; ".join(problems))
