"""The stages of a rollout that need no training: gate, rewards, columns, schedule, metrics. Each
runs from its recorded input, in this process, without a Ray cluster, torch.distributed or an
engine, and writes the part that it makes.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.data.attribution import marks_of
from slime.data.batch import RolloutBatch, localize
from slime.data.from_lists import batch_from_lists
from slime.data.ragged import Ragged, Scalars
from slime.data.reasons import REASON_OF_VALUE, InvalidReason
from slime.data.sample import Sample
from slime.data.split import SplitConfig, plan_split, split_by_dp
from slime.exceptions import RolloutDataError
from slime.files.jsonl import encode as encode_record
from slime.files.sample_table import sample_table
from slime.files.train_record import TrainDump
from slime.gate.before_rewards import ResponseTally
from slime.gate.config import GateConfig, Level
from slime.gate.gate import gate_config_from_args
from slime.gate.judge import (
    PostprocessResult,
    failures_outside,
    postprocess_output_data,
)
from slime.gate.tables import schedule_table
from slime.metrics import contributions, rollout_metrics
from slime.metrics.batch_values import phase_contributions
from slime.metrics.statistics import dict_add_prefix
from slime.ray.rollout import RolloutManager
from slime.recording.manifest import ROLLOUT, TRAIN
from slime.recording.reader import JudgedSamples, RecordedRollout
from slime.recording.rollout_side import columns_table, judged_table
from slime.recording.writer import PartWriter, lines_part, table_part
from slime.rollout.rm_hub import REMOTE_TYPES, split_rm_type_name
from slime.rollout.scoring import build_gate, score_group
from slime.utils import processing_utils
from slime.utils.misc import load_function

if TYPE_CHECKING:
    import pyarrow

STAGES = ("gate", "rewards", "columns", "schedule", "metrics")
LOCAL_LAYOUT = {"dp_size": 1, "cp_size": 1, "tp_size": 1, "vpp_size": 1}


class Skipped(Exception):
    """A stage that this rollout cannot show; the message says why."""


@dataclasses.dataclass(frozen=True)
class StageInput:
    """A recorded rollout with the options under which a stage runs again. `rescore`: call reward
    functions that may have effects outside, too.
    """

    rollout: RecordedRollout
    args: argparse.Namespace
    tokenizer_folder: Path | None = None
    rescore: bool = False

    def need(self, *names: str) -> None:
        """`Skipped` where the recording lists no such part: nothing could be compared."""
        if missing := [name for name in names if name not in self.rollout]:
            raise Skipped(
                f"the recording has no {' and no '.join(missing)} of it: the run ended before, or "
                "makes none"
            )

    @functools.cached_property
    def samples(self) -> JudgedSamples:
        return self.rollout.judged_samples()

    @functools.cached_property
    def parallel(self) -> dict[str, int]:
        """How the trainers were laid out."""
        self.need("rollout")
        found = self.rollout.json("rollout").get("parallel")
        if not found:
            raise Skipped("the run had no trainers")
        return dict(found)

    @property
    def tokenizer(self) -> Any:
        folder = self.tokenizer_folder
        return None if folder is None else processing_utils.shared_tokenizer(str(folder))


class ReplayManager(RolloutManager):
    """The manager's functions between the gate and the shards, without engines, prompts or files."""

    def __init__(self, args: argparse.Namespace, parallel: Mapping[str, int]) -> None:
        self.args = args
        self.custom_reward_post_process_func = _loaded(args.custom_reward_post_process_path)
        self.custom_convert_samples_to_train_data_func = _loaded(
            args.custom_convert_samples_to_train_data_path
        )
        self.train_parallel_config = dict(parallel)
        self._reward_metrics = {}


class WithRewards(ReplayManager):
    """Builds columns of rewards that are known."""

    def __init__(
        self,
        args: argparse.Namespace,
        parallel: Mapping[str, int],
        rewards: tuple[list[float], list[float]],
    ) -> None:
        super().__init__(args, parallel)
        self._rewards = rewards

    def _post_process_rewards(self, samples: list[Sample]) -> tuple[list[float], list[float]]:
        return self._rewards


def _loaded(path: str | None) -> Any:
    return load_function(path) if path else None


# --- gate -----------------------------------------------------------------------------------------


def replay_gate(stage: StageInput, writer: PartWriter) -> None:
    """The verdicts on the recorded batch."""
    stage.need("samples", "gate")
    samples = stage.samples
    # what the gate leaves as it is is the same object, as in a run: a NaN differs from its copy
    batch = copy.deepcopy(samples.batch)
    table = judged_table(
        batch,
        judge_again(stage, batch),
        [(reason, one) for reason, group in samples.dropped_groups for one in group],
    )
    writer.add("samples", table_part(table))


def judge_again(stage: StageInput, batch: Sequence[Sample]) -> PostprocessResult:
    """The gate's result on the recorded batch, under the stage's options."""
    return postprocess_output_data(list(batch), gate_config(stage), tokenizer=stage.tokenizer)


def gate_config(stage: StageInput) -> GateConfig:
    """The gate's config that the options give, in the state that the run had reached: the level by
    schedule, and how many texts are compared.
    """
    folder, recorded = stage.tokenizer_folder, stage.rollout.options()
    checkpoint = None if folder is None else str(folder)
    args = argparse.Namespace(**{**vars(stage.args), "hf_checkpoint": checkpoint})
    config = gate_config_from_args(args, stage.tokenizer)
    state = dict(stage.rollout.json("gate").get("state", {}))
    level = Level(state.pop("level", config.level.value))
    if args.gate_level == recorded.gate_level and args.gate_schedule == recorded.gate_schedule:
        config = dataclasses.replace(config, level=level, schedule=())
    return dataclasses.replace(config, **state)


# --- rewards --------------------------------------------------------------------------------------


def replay_scores(stage: StageInput, writer: PartWriter) -> None:
    """Each response scored again."""
    stage.need("samples")
    samples = stage.samples
    if why := _why_not_scored(stage.args, samples.batch, rescore=stage.rescore):
        raise Skipped(why)
    scored = asyncio.run(_scored_again(stage))
    table = stage.rollout.table("samples")
    rows = [*scored, *samples.samples[samples.num_batch :]]
    fresh = sample_table(rows, describe=True)
    for name in ("reward", "rest"):  # `rest` holds the verdict
        place = table.column_names.index(name)
        table = table.set_column(place, table.field(place), fresh[name])
    writer.add("samples", table_part(table))


def replay_baselines(stage: StageInput, writer: PartWriter) -> None:
    """The normalized rewards of the recorded scores."""
    stage.need("samples", "columns")
    samples, args = stage.samples, stage.args
    if args.custom_convert_samples_to_train_data_path:
        raise Skipped("a converter of yours makes rewards with its columns: see the stage columns")
    batch, sources = stage.rollout.columns()
    if sources.tolist() != samples.kept:
        raise Skipped("the columns are not of the samples that the gate handed on")
    manager = ReplayManager(args, stage.parallel)
    _, normalized = manager._post_process_rewards([samples.judged(row) for row in samples.kept])
    values = np.array(normalized, dtype=np.float64)
    batch["rewards"] = Scalars(np.where(np.isfinite(values), values, 0.0).astype(np.float32))
    writer.add("columns", table_part(_columns_table(batch, sources, samples)))


def _why_not_scored(
    args: argparse.Namespace, batch: Sequence[Sample], *, rescore: bool
) -> str | None:
    """Why no response can be scored again; None where each can, by a scorer of ours that asks
    nobody else, or with `rescore`.
    """
    kinds = {split_rm_type_name(args, one) for one in batch if not one.custom_rm_path}
    has_own = bool(args.custom_rm_path) or any(one.custom_rm_path for one in batch)
    if not args.custom_rm_path and "" in kinds:
        return "no reward function scored its samples, or some: their rewards came with them"
    if args.reward_is_random or (not args.custom_rm_path and "random" in kinds):
        return "its rewards are drawn at random"
    may_act = (
        has_own
        or bool(kinds & REMOTE_TYPES)
        or args.rm_url
        or args.custom_generate_function_path
        or any(one.generate_function_path for one in batch)
        or args.custom_reward_post_process_path
    )
    if may_act and not rescore:
        return "scores of a reward function of yours are made again with --rescore"
    return None


async def _scored_again(stage: StageInput) -> list[Sample]:
    """Copies of the samples, judged and scored as after their generation. What never was, and a
    reward that is no number, stays: it came with the sample.
    """
    fresh = [copy.copy(sample) for sample in stage.samples.batch]
    groups: dict[Any, list[Sample]] = collections.defaultdict(list)
    is_judged = _was_judged_before(stage.samples)
    for place, one in enumerate(fresh):
        rejected = is_judged and not one.valid and one.invalid_reason in REASON_OF_VALUE
        if not rejected and not (one.valid and _is_score(one.reward)):
            continue
        if is_judged:
            one.valid, one.invalid_reason = True, None
        if _is_score(one.reward):
            one.reward = None
        one.metadata = copy.deepcopy(one.metadata)
        groups[("own", place) if one.group_index is None else one.group_index].append(one)
    tally = ResponseTally()
    gate = build_gate(stage.args, stage.tokenizer, lambda: tally) if is_judged else None
    for group in groups.values():
        await score_group(stage.args, group, gate)
    return fresh


def _was_judged_before(samples: JudgedSamples) -> bool:
    """Whether the rollout judged its samples before it scored them, as ours do: then the gate
    rejects none of them that was not marked, except for its reward or its end.
    """
    late = (InvalidReason.BAD_REWARD, InvalidReason.ABORTED, InvalidReason.FAILED)
    return not any(
        one.valid and not verdict.valid and verdict.reason not in late
        for one, verdict in zip(samples.batch, samples.verdicts, strict=True)
    )


def _is_score(reward: Any) -> bool:
    if isinstance(reward, float):
        return math.isfinite(reward)
    return reward is not None


# --- columns and schedule -------------------------------------------------------------------------


def replay_columns(stage: StageInput, writer: PartWriter) -> None:
    """The whole batch, from the samples that the gate handed on and their recorded rewards."""
    stage.need("samples", "columns")
    samples, args = stage.samples, stage.args
    recorded, sources = stage.rollout.columns()
    manager = ReplayManager(args, stage.parallel)
    if "raw_reward" in recorded and sources.tolist() == samples.kept:
        rewards = recorded.array("raw_reward").tolist(), recorded.array("rewards").tolist()
        manager = WithRewards(args, stage.parallel, rewards)
    data, found = manager.train_data(_as_result(samples), _marks(samples))
    # as a run splits and records them: a converter of one's own gives plain lists
    batch = batch_from_lists(data)
    writer.add("columns", table_part(_columns_table(batch, np.asarray(found), samples)))


def _as_result(samples: JudgedSamples) -> PostprocessResult:
    """The recorded outcome of the gate."""
    config = GateConfig()
    nothing = postprocess_output_data([], config)
    return dataclasses.replace(
        nothing,
        samples=[samples.judged(row) for row in samples.kept],
        verdicts=samples.verdicts,
        raw_rows=samples.kept,
        build=samples.judged,
    )


def _marks(samples: JudgedSamples) -> list[Any]:
    judged = [samples.judged(row) for row in range(samples.num_batch)]
    return marks_of(judged, samples.verdicts)


def replay_schedule(stage: StageInput, writer: PartWriter) -> None:
    """Who trains what, from the recorded columns."""
    stage.need("columns", "schedule")
    batch, sources = stage.rollout.columns()
    config = SplitConfig.from_args(stage.args, stage.parallel)
    _, plan = plan_split(batch, config)
    writer.add("schedule", table_part(schedule_table(plan, sources.tolist())))


def _columns_table(
    batch: RolloutBatch, sources: np.ndarray, samples: JudgedSamples
) -> pyarrow.Table:
    indices = [samples.samples[row].index for row in sources.tolist()]
    return columns_table(batch, sources.tolist(), indices)


# --- metrics --------------------------------------------------------------------------------------


def replay_metrics(stage: StageInput, writer: PartWriter) -> None:
    """What was logged of the rollout, from the recorded samples, columns and trained fields."""
    stage.need("samples", "gate", "rollout")
    record = stage.rollout.json("rollout")
    fresh = {**_gate_side(stage), **_rollout_side(stage, record), **_split_side(stage)}
    records = [
        {**one, "metrics": _with_fresh(one["metrics"], fresh)} for one in record.get("metrics", [])
    ]
    text = encode_record({**record, "metrics": records})
    writer.add("rollout", lambda path: path.write_bytes(text) and None)


def replay_train_metrics(stage: StageInput, writer: PartWriter) -> None:
    """What the training ranks logged of the rollout batch, from what training computed."""
    stage.need("columns", "train", "steps")
    fresh = dict_add_prefix(_train_side(stage), "rollout/")
    records = [
        {**one, "metrics": _with_fresh(one["metrics"], fresh)}
        for one in stage.rollout.metric_records("steps")
    ]
    writer.add("steps", lines_part([encode_record(one) for one in records]))


def _with_fresh(recorded: Mapping[str, Any], fresh: Mapping[str, Any]) -> dict[str, Any]:
    """The recorded metrics, those that were computed again in their new value."""
    return {name: fresh.get(name, value) for name, value in recorded.items()}


def _gate_side(stage: StageInput) -> dict[str, Any]:
    """The gate's counts; its drift and its times depend on more than this rollout."""
    names = ("gate/total", "gate/kept", "gate/drop_rate", "gate/count/", "gate/ratio/")
    found = judge_again(stage, copy.deepcopy(stage.samples.batch)).statistics.to_metrics()
    return {name: value for name, value in found.items() if name.startswith(names)}


def _rollout_side(stage: StageInput, record: Mapping[str, Any]) -> dict[str, Any]:
    args, samples = stage.args, stage.samples
    config = dataclasses.replace(
        rollout_metrics.RolloutMetricsConfig.from_args(args),
        trainer_weight_version=record.get("weight_version"),
        is_trained=not args.debug_rollout_only,
    )
    judged = [samples.judged(row) for row in range(samples.num_batch)]
    filtered = [one for _, group in samples.dropped_groups for one in group]
    found = rollout_metrics.compute_metrics_from_samples(config, judged, filtered=filtered)
    return dict_add_prefix(found, "rollout/")


def _split_side(stage: StageInput) -> dict[str, Any]:
    if "columns" not in stage.rollout:
        return {}
    batch, _ = stage.rollout.columns()
    _, plan = plan_split(batch, SplitConfig.from_args(stage.args, stage.parallel))
    return plan.metrics()


def _train_side(stage: StageInput) -> dict[str, float]:
    """The declared metrics over all trained samples, as one rank would have them."""
    batch, sources = stage.rollout.columns()
    config = SplitConfig.from_args(stage.args, {**stage.parallel, **LOCAL_LAYOUT})
    split = split_by_dp(
        batch,
        dataclasses.replace(config, pad_to=0),
        dropped_failures=failures_outside(_as_result(stage.samples), sources.tolist()),
    )
    local = localize(next(split.shards), 0, dp_size=1)
    add_trained_fields(local, stage.rollout.train())
    return contributions.merge_all([phase_contributions(local)])


def add_trained_fields(local: RolloutBatch, dump: TrainDump) -> None:
    """Puts what training computed into the batch of a rank, in its order."""
    place_of = {position: i for i, position in enumerate(dump.positions.tolist())}
    order = [place_of.get(int(position)) for position in local["partition"]]
    if any(place is None for place in order):
        raise RolloutDataError("the train part lacks samples of the schedule")
    for name, entries in dump.token_fields.items():
        if name not in local:
            parts = [entries[place] for place in order if place is not None]
            values = np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)
            local[name] = Ragged.of_lengths(values, [len(part) for part in parts])


# --- all ------------------------------------------------------------------------------------------

# by stage: who wrote the parts in a run, and what makes them again
RUN: dict[str, tuple[tuple[str, Callable[[StageInput, PartWriter], None]], ...]] = {
    "gate": ((ROLLOUT, replay_gate),),
    "rewards": ((ROLLOUT, replay_scores), (ROLLOUT, replay_baselines)),
    "columns": ((ROLLOUT, replay_columns),),
    "schedule": ((ROLLOUT, replay_schedule),),
    "metrics": ((ROLLOUT, replay_metrics), (TRAIN, replay_train_metrics)),
}
