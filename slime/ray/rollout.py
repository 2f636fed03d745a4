"""`RolloutManager`: the wiring from prompts to shards - engines, rollout function, gate, rewards,
columns, split. No arithmetic here.

    data_source -> rollout function -> gate -> rewards by group -> columns -> split by data-parallel
    rank -> [ray.put]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import ray  # noqa: F401 - tests replace ray.put through this module

from slime.data.attribution import Mark, marks_of, restore_marks, with_marks
from slime.data.columns import (
    ColumnsConfig,
    build_train_columns,
    compute_rewards,
    length_penalties_of,
)
from slime.data.ledger import Ledger, ledger_of_rollout
from slime.data.reasons import DropReason
from slime.data.sample import Sample
from slime.data.split import SplitConfig, SplitPlan, split_by_dp
from slime.data.structure import (
    flatten_samples,
    groups_apart,
    validate_rollout_id_annotated,
    validate_rollout_routed_experts_for_replay,
)
from slime.data.weight_versions import mask_older_samples, set_current_weight_version
from slime.exceptions import EngineError, RolloutDataError, SaveError
from slime.files.disk_space import disk_space
from slime.files.rollout_dump import RolloutDumper, load_debug_rollout_data, subsample_groups
from slime.gate.gate import Gate
from slime.gate.judge import PostprocessResult, failures_outside
from slime.metrics import rollout_metrics
from slime.metrics.statistics import compute_rollout_step, dict_add_prefix
from slime.plugins.watched_calls import WATCH
from slime.ray import actors
from slime.ray.engine_healing import EngineHealer
from slime.ray.rollout_servers import start_rollout_servers
from slime.ray.run_ledger import RolloutLedger, dropped_indices, row_outcomes
from slime.ray.servers import PublishedWeights
from slime.ray.utils import TRAINING_RANKS, Lock
from slime.recording.reader import is_recording, recorded_samples
from slime.recording.rollout_side import RolloutRecorder
from slime.recording.writer import STOP_TIMEOUT_S
from slime.rollout.base_types import RolloutFnTrainOutput, call_rollout_fn
from slime.rollout.engine_client import set_engines
from slime.rollout.generate_state import SharedState
from slime.rollout.reward_checks import RewardWatch
from slime.rollout.sample_hooks import set_current_rollout_id
from slime.tracking.spans import set_rollout, span, spanned, start_tracing
from slime.tracking.timer import Timer, timer
from slime.tracking.tracking import (
    collected_metrics,
    configure_logger,
    finish_tracking,
    init_tracking,
    log,
    log_dir_of,
)
from slime.utils import processing_utils
from slime.utils.http_utils import init_http_client, observe_replies
from slime.utils.misc import Box, count_rollouts_per_epoch, load_function

if TYPE_CHECKING:
    from slime.data.batch import RolloutBatch

logger = logging.getLogger(__name__)

# upstream's earlier names of what is public elsewhere by now
_compute_top_p_kept_vocab_metrics = rollout_metrics._compute_top_p_kept_vocab_metrics
_log_rollout_data = rollout_metrics.log_rollout_data
_log_eval_rollout_data = rollout_metrics.log_eval_rollout_data
_validate_rollout_id_annotated = validate_rollout_id_annotated
_validate_rollout_routed_experts_for_replay = validate_rollout_routed_experts_for_replay


class RolloutManager:
    """Ray actor that owns the data source, the engines, the rollout function and the gate."""

    def __init__(self, args: argparse.Namespace, pg: tuple) -> None:
        configure_logger("rollout-manager", log_dir=log_dir_of(args))
        self.args = args
        if (log_dir := log_dir_of(args)) is not None:
            WATCH.record_in(log_dir)
        init_tracking(args, primary=False)
        start_tracing(args, "rollout-manager", role="rollout")
        # None in a replay: it asks for no prompt, and its checkpoint has no data position
        self.data_source = (
            None if args.load_debug_rollout_data else load_function(args.data_source_path)(args)
        )
        self.ledger = RolloutLedger(args, self.data_source)
        self.generate_rollout = load_function(args.rollout_function_path)
        self.eval_generate_rollout = load_function(
            args.eval_function_path or args.rollout_function_path
        )
        self.custom_reward_post_process_func = _load_optional(args.custom_reward_post_process_path)
        self.custom_convert_samples_to_train_data_func = _load_optional(
            args.custom_convert_samples_to_train_data_path
        )
        self.gate = Gate.from_args(
            args,
            processing_utils.shared_tokenizer(args.hf_checkpoint) if args.hf_checkpoint else None,
        )
        SharedState.tally = self.gate.tally
        self.train_parallel_config: dict[str, int] | None = None
        self.rollout_engine_lock = cast(actors.ActorClass, Lock).remote()
        self.server = start_rollout_servers(args, pg)
        self.healer = EngineHealer.from_args(args, pg, self.server, self.rollout_engine_lock)
        if self.server.client_urls:
            set_engines(
                self.server.client_urls,
                is_router=self.server.router is not None,
                roster=None if self.healer is None else self.healer.roster,
            )
            init_http_client(args)
        self._num_new_engines = len(self.server.engines)
        self.dumper = RolloutDumper(args.save_debug_rollout_data)
        self.recorder = RolloutRecorder.from_args(args)
        if self.recorder is not None:
            observe_replies(self.recorder.add_reply)
        self.reward_watch = RewardWatch(args)
        self._weight_version: int | None = None  # what the engines serve now
        self._last_generate_started: float | None = None

    # --- what the driver calls --------------------------------------------------------------------

    @spanned("rollout")
    def generate(self, rollout_id: int) -> list[Box] | None:
        """A box (a reference to a shard) per data-parallel rank; None with --debug-rollout-only."""
        if self.recorder is None:
            return self._generate(rollout_id)
        self.recorder.begin(rollout_id)
        with collected_metrics() as metrics:
            boxes = self._generate(rollout_id)
        self.recorder.finish(
            metrics,
            lambda: {
                "parallel": self.train_parallel_config,
                "weight_version": self._weight_version,
                "data_position": self._data_position(rollout_id),
            },
        )
        return boxes

    def _generate(self, rollout_id: int) -> list[Box] | None:
        started = time.monotonic()
        iteration_seconds = (
            None if self._last_generate_started is None else started - self._last_generate_started
        )
        self._last_generate_started = started
        set_current_rollout_id(rollout_id)
        set_rollout(rollout_id)
        if self.healer is not None:
            self.healer.begin_rollout()
        output = self._get_rollout_data(rollout_id)
        all_samples = flatten_samples(output.samples)
        mask_older_samples(self.args, all_samples)
        rollout_time = time.monotonic() - started
        dropped_groups = [
            (reason, flatten_samples(group)) for reason, group in output.dropped_groups
        ]
        filtered = [sample for _, group in dropped_groups for sample in group]
        with timer("gate"):
            judged = self.gate.run(
                all_samples,
                rollout_id,
                iteration_seconds=iteration_seconds,
                dropped_groups=dropped_groups,
            )
        if self.recorder is not None:
            self.recorder.gate(
                all_samples, judged, dropped_groups, dropped_before=dict(output.dropped)
            )
        samples = judged.samples
        # before any of the user's functions sees them
        marks = [] if self.args.debug_rollout_only else marks_of(judged.judged, judged.verdicts)
        with span("dump"):
            dumped = self.dumper.save(samples, rollout_id=rollout_id, evaluation=False)
        seen = dict_add_prefix(self.reward_watch.metrics(samples), "rollout/")
        healed = {} if self.healer is None else self.healer.metrics()
        extra = {**(output.metrics or {}), **self.gate.metrics(judged), **seen, **dumped, **healed}
        logged = rollout_metrics.log_rollout_data(
            rollout_id,
            self.args,
            samples,
            extra,
            rollout_time,
            trainer_weight_version=self._weight_version,
            sampled=judged.judged,
            filtered=filtered,
        )
        truncated = rollout_metrics.truncated_share([*judged.judged, *filtered])
        del dropped_groups, filtered  # they are the snapshot writer's now, and go with the write
        dropped = dropped_indices(output)
        output = dataclasses.replace(output, dropped_groups=[])
        if logged is None:
            self._log_gate(self.gate.metrics(judged), rollout_id, step_key="rollout/step")
        if self.args.debug_rollout_only:
            self.ledger.enter_untrained(rollout_id, judged.judged, dropped)
            return None
        with timer("convert_samples"):
            data, sources = self.train_data(judged, marks)
            boxes, plan = self._split(data, dropped_failures=failures_outside(judged, sources))
        self.gate.record_placement(rollout_id, sources, plan)
        if self.recorder is not None:
            indices = [sample.index for sample in judged.judged]
            self.recorder.split(data, sources, plan, indices=indices)
        ledger = self._log_split(
            rollout_id, plan, output, marks, sources, {"rollout/truncated": truncated}
        )
        self.ledger.enter(rollout_id, marks, dropped, row_outcomes(sources, plan), counts=ledger)
        return boxes if ledger.trained else [Box(box.inner) for box in boxes]

    @spanned("evaluation")
    def eval(self, rollout_id: int) -> None:
        """Scores the evaluation datasets and logs the result under eval/."""
        if self.args.debug_train_only:
            return
        set_current_rollout_id(rollout_id)
        if self.recorder is None:
            self._eval(rollout_id)
            return
        self.recorder.begin(rollout_id, evaluation=True)
        with collected_metrics() as metrics:
            self._eval(rollout_id)
        self.recorder.finish(metrics, lambda: {"weight_version": self._weight_version})

    def _eval(self, rollout_id: int) -> None:
        with self._raise_as_engine_error():
            output = call_rollout_fn(
                self.eval_generate_rollout, self.args, rollout_id, self.data_source, evaluation=True
            )
        samples = [
            sample
            for dataset in output.data.values()
            for sample in flatten_samples(dataset.get("samples") or [])
        ]
        self.dumper.save(samples, rollout_id=rollout_id, evaluation=True)
        apart = groups_apart(output.data)
        judged = self.gate.run(apart, rollout_id, evaluation=True)
        if self.recorder is not None:
            self.recorder.gate(apart, judged)
        found = {f"eval/{name}": value for name, value in self.gate.metrics(judged).items()}
        found.update(self._eval_reward_metrics(output.data))
        extra = {**(output.metrics or {}), **found}
        if rollout_metrics.log_eval_rollout_data(rollout_id, self.args, output.data, extra) is None:
            self._log_gate(found, rollout_id, step_key="eval/step")

    def _eval_reward_metrics(self, data: dict[str, Any]) -> dict[str, float]:
        """What the rewards of each evaluation dataset show; groups are numbered from 0 in each."""
        found: dict[str, float] = {}
        for name, dataset in data.items():
            key = self.args.eval_reward_key or self.args.reward_key
            seen = self.reward_watch.metrics(
                flatten_samples(dataset.get("samples") or []), reward_key=key
            )
            found.update(dict_add_prefix(seen, f"eval/{name}/"))
        return found

    @spanned("save_data_position")
    def save(self, rollout_id: int) -> None:
        """Writes the data position in which `rollout_id` is the last rollout trained, and what the
        gate remembers at that point. `SaveError` where the disk refuses the data position.
        """
        if self.data_source is not None:
            try:
                self.data_source.save(rollout_id)
                self.ledger.save(rollout_id)
            except OSError as error:
                raise SaveError(
                    f"The data position after rollout {rollout_id} was not saved: {error}. Earlier "
                    f"ones are intact; {disk_space(self.args.save)}."
                ) from error
        if self.args.save is not None:
            self.gate.save(self.args.save, rollout_id)

    def load(self, rollout_id: int | None = None) -> None:
        """Restores both."""
        if self.data_source is not None:
            self.data_source.load(rollout_id)
        if self.args.load is not None and rollout_id is not None and rollout_id >= 0:
            self.gate.load(self.args.load, rollout_id)

    def begin_ledger(self, start_rollout_id: int) -> str:
        """Enters this start of the run into its ledger, after `load`; returns the start's name."""
        return self.ledger.begin(start_rollout_id)

    def offload(self) -> None:
        """Lets the engines free their memory while training runs."""
        if self.healer is not None:
            self.healer.fall_asleep()
        self.server.release_memory(timeout_s=self.args.step_timeout)

    def onload(self) -> None:
        """Gives it back to them."""
        self.server.resume_memory(timeout_s=self.args.step_timeout)
        if self.healer is not None:
            self.healer.wake()

    def get_num_rollout_per_epoch(self) -> int | None:
        """Rollouts that one pass over the prompts makes; None without a dataset. ConfigError where
        --num-epoch would run none.
        """
        num_prompts = 0 if self.data_source is None else len(self.data_source)
        if not num_prompts:
            return None
        num_epoch = self.args.num_epoch if self.args.num_rollout is None else None
        return count_rollouts_per_epoch(
            num_prompts, self.args.rollout_batch_size, num_epoch=num_epoch
        )

    def set_train_parallel_config(self, config: dict[str, int]) -> None:
        """How the trainers are laid out: dp_size (without CP), cp_size, vpp_size,
        microbatch_group_size_per_vp_stage, tp_size.
        """
        self.train_parallel_config = dict(config)

    def finish_recording(self) -> None:
        """Returns when what was recorded is on the disk."""
        if self.recorder is not None:
            self.recorder.close()

    def dispose(self) -> None:
        """Stops engines and writers."""
        self.gate.close()
        self.ledger.close()
        if self.recorder is not None:
            self.recorder.close(STOP_TIMEOUT_S)
            observe_replies(None)
        finish_tracking(self.args, primary=False)
        if self.healer is not None:
            self.healer.stop()
        self.server.stop()

    # --- engines ----------------------------------------------------------------------------------

    @property
    def rollout_engines(self) -> list[Any]:
        return list(self.server.living.values())

    def get_updatable_engines_and_lock(self) -> tuple:
        """(engines, lock, number of new engines, devices per engine, device offsets, parallel
        configs).
        """
        size = self.args.rollout_num_gpus_per_engine
        count = len(self.rollout_engines)
        offsets = [size * rank for rank in range(count)]
        return (
            self.rollout_engines,
            self.rollout_engine_lock,
            self._num_new_engines,
            [size] * count,
            offsets,
            [{}] * count,
        )

    def get_engine_urls(self) -> list[str]:
        """Every engine's own address, also behind a router."""
        return self.server.urls

    def begin_weight_update(self) -> tuple[dict[int, Any], dict[int, str]]:
        """(engines, addresses) by number, of those that are there: with --use-fault-tolerance,
        under the lock.
        """
        cast(EngineHealer, self.healer).forget_published()
        return self.server.living, self.server.addresses()

    def keep_published(self, published: PublishedWeights, taken: Sequence[int] = ()) -> None:
        """What an engine that starts later is to serve; `taken`: external servers that have it."""
        cast(EngineHealer, self.healer).keep_published(published, taken)

    def abandon_weight_update(self) -> None:
        """The training ranks have ended: an update that they may have begun holds the engines no
        longer. The next one begins anew.
        """
        actors.get(self.rollout_engine_lock.release_of.remote(TRAINING_RANKS))

    def lose_engine(self, rank: int, reason: str, pid: int | None = None) -> None:
        """Engine `rank` is dead: it is replaced."""
        cast(EngineHealer, self.healer).lost(rank, reason, pid)

    def clear_updatable_num_new_engines(self, weight_version: int | None = None) -> None:
        """Notes that every engine has the current weights, and their version."""
        self._num_new_engines = 0
        self._weight_version = weight_version
        set_current_weight_version(weight_version)

    def check_weights(self, action: str = "checksum") -> list[str]:
        """Each engine's checksum of its weights."""
        if action != "checksum":
            raise RolloutDataError(f"check_weights knows 'checksum', not {action!r}")
        return self.server.checksums(timeout_s=self.args.step_timeout)

    # --- samples to shards ------------------------------------------------------------------------

    def _get_rollout_data(self, rollout_id: int) -> RolloutFnTrainOutput:
        if self.args.load_debug_rollout_data:
            samples = self._replayed_samples(rollout_id)
            return RolloutFnTrainOutput(samples=samples)
        with timer("generate"), self._raise_as_engine_error():
            output = call_rollout_fn(
                self.generate_rollout, self.args, rollout_id, self.data_source, evaluation=False
            )
        validate_rollout_id_annotated(output.samples)
        return output

    def _replayed_samples(self, rollout_id: int) -> list[Sample]:
        path, ratio = (
            self.args.load_debug_rollout_data,
            self.args.load_debug_rollout_data_subsample,
        )
        if not is_recording(path):
            return load_debug_rollout_data(path, rollout_id=rollout_id, subsample_ratio=ratio)
        samples = recorded_samples(path, rollout_id)
        return samples if ratio is None else subsample_groups(samples, ratio)

    def _data_position(self, rollout_id: int) -> Any:
        """The data source's state after this rollout; None where it cannot say."""
        state_dict = getattr(self.data_source, "state_dict", None)
        return None if state_dict is None else state_dict(rollout_id)

    @contextlib.contextmanager
    def _raise_as_engine_error(self) -> Iterator[None]:
        """An error inside becomes an EngineError where an engine is what failed: many failed
        samples are then its consequence.
        """
        try:
            yield
        except Exception as error:
            failures = (self.healer or self.server).failures()
            if failures:
                raise EngineError(" ".join(failures)) from error
            raise

    @spanned("rewards")
    def _post_process_rewards(self, samples: list[Sample]) -> tuple[list[float], list[float]]:
        """(raw rewards, rewards): as scored, and normalized by group where the estimator asks for
        it.
        """
        if self.custom_reward_post_process_func is not None:
            return self.custom_reward_post_process_func(self.args, list(samples))
        config = ColumnsConfig.from_args(self.args)
        raw, rewards, statistics = compute_rewards(samples, config)
        self._reward_metrics = {
            **(statistics.metrics() if statistics is not None else {}),
            **length_penalties_of(samples, config)[1],
        }
        return raw, rewards

    @spanned("columns")
    def _convert_samples_to_train_data(self, samples: list[Sample]) -> Any:
        """The whole batch as columns, or what a custom converter makes of it."""
        self._reward_metrics = {}
        if self.custom_convert_samples_to_train_data_func is not None:
            return self.custom_convert_samples_to_train_data_func(self.args, list(samples))
        return build_train_columns(
            samples, self._post_process_rewards(samples), ColumnsConfig.from_args(self.args)
        )

    def train_data(self, judged: PostprocessResult, marks: Sequence[Mark]) -> tuple[Any, list[int]]:
        """The train data, in which no row of a rejected sample is valid, and the position among all
        judged samples of each row's sample.

        Users' functions hold the samples before and while this is made. The verdicts are the
        gate's, whatever they wrote into a sample.
        """
        restore_marks(judged.judged, marks)
        data = self._convert_samples_to_train_data(judged.samples)
        restore_marks(judged.judged, marks)
        return with_marks(data, marks, batch_rows=judged.raw_rows)

    def _split(
        self, data: RolloutBatch, *, dropped_failures: Sequence[int | None] = ()
    ) -> tuple[list[Box], SplitPlan]:
        if self.train_parallel_config is None:
            raise RolloutDataError(
                "the train parallel config is not set; call set_train_parallel_config first"
            )
        config = SplitConfig.from_args(self.args, self.train_parallel_config)
        with span("schedule"):
            split = split_by_dp(data, config, dropped_failures=dropped_failures)
        # map releases a shard before the next one is made: a loop's variable would keep a second
        # one in memory
        refs = list(map(actors.put, split.shards))
        return [
            Box(ref, num_samples)
            for ref, num_samples in zip(refs, split.plan.num_trained_by_rank, strict=True)
        ], split.plan

    def _split_train_data_by_dp(self, data: RolloutBatch) -> list[Box]:
        """One box per data-parallel rank, index = rank without CP."""
        return self._split(data)[0]

    def _log_gate(self, metrics: dict[str, float], rollout_id: int, *, step_key: str) -> None:
        """The gate's numbers alone, where a user's function, or reading the samples from a dump,
        takes the place of the rollout's log.
        """
        log(
            self.args,
            {**metrics, step_key: compute_rollout_step(self.args, rollout_id)},
            step_key=step_key,
        )

    def _log_split(
        self,
        rollout_id: int,
        plan: SplitPlan,
        output: RolloutFnTrainOutput,
        marks: Sequence[Mark],
        sources: list[int],
        extra_metrics: dict[str, float],
    ) -> Ledger:
        """Conservation - sampled = trained + dropped by reason - checked and logged, with the
        schedule and the timers. `trained` of what is returned are planned; that they trained, the
        driver logs.
        """
        ledger = ledger_of_rollout(
            [mark.reason for mark in marks],
            sources,
            trains=(plan.owner_ranks_N >= 0).tolist(),
            num_trained=plan.num_trained_samples,
            dropped_by_split=plan.dropped,
            dropped_before=output.dropped,
        )
        if rollout_id < self.args.num_critic_only_steps and self.args.use_critic:
            ledger = dataclasses.replace(
                ledger,
                trained=0,
                dropped={**ledger.dropped, DropReason.CRITIC_ONLY.value: ledger.trained},
            )
        elif ledger.sampled and not ledger.trained:
            logger.warning(
                "rollout %d trains nothing: all of its %d samples were dropped: %s",
                rollout_id,
                ledger.sampled,
                dict(ledger.dropped),
            )
        times = {f"perf/{name}_time": seconds for name, seconds in Timer().log_dict().items()}
        Timer().reset()
        metrics = {
            **ledger.plan_metrics(),
            **plan.metrics(),
            **self._reward_metrics,
            **extra_metrics,
            **times,
        }
        metrics["rollout/step"] = compute_rollout_step(self.args, rollout_id)
        log(self.args, metrics, step_key="rollout/step")
        return ledger


def _load_optional(path: str | None) -> Any:
    return load_function(path) if path else None
