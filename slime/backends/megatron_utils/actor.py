"""`MegatronTrainRayActor`: one Megatron rank, from its shard of a rollout to new weights in the
engines.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import slime.accelerator.before_megatron  # noqa: F401  isort: skip

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import mpu

from slime.accelerator import get_accelerator
from slime.accelerator.host_memory import OffloadedTensors
from slime.accelerator.process_groups import get_gloo_group
from slime.backends.megatron_utils import actor_state, checkpoint, checkpoint_files, initialize
from slime.backends.megatron_utils.checkpoint_files import Retention, retention_of
from slime.backends.megatron_utils.data import (
    get_data_iterator,
    log_consistency,
    log_perf_data,
    log_rollout_data,
    tensors_to_cpu,
    tensors_to_gpu,
    to_train_device,
)
from slime.backends.megatron_utils.forward import get_log_probs_and_entropy, get_values
from slime.backends.megatron_utils.log_prob_capture import (
    drain_captured_log_probs,
    enable_log_prob_capture,
    take_captured_log_probs,
)
from slime.backends.megatron_utils.log_prob_plan import LogProbPlan, reasons_to_recompute_log_probs
from slime.backends.megatron_utils.loss import compute_advantages_and_returns
from slime.backends.megatron_utils.model import forward_only, train
from slime.backends.megatron_utils.model_provider import parallel_config
from slime.backends.megatron_utils.optimizer import setup_model_and_optimizer, training_tensors
from slime.backends.megatron_utils.recorder import TrainRecorder
from slime.backends.megatron_utils.trained_samples import (
    counts_for_its_data_parallel_rank,
    find_not_trained,
    have_trainable_tokens,
    same_samples,
)
from slime.backends.megatron_utils.update_weight.publish import (
    fingerprint_weights,
    publish_again,
    publish_weights,
)
from slime.backends.megatron_utils.weight_ages import WeightAges
from slime.backends.megatron_utils.weights_backup import WeightsBackup
from slime.data.batch import RolloutBatch
from slime.files.ledger_file import copy_ledger_state
from slime.files.train_dump_utils import save_debug_train_data
from slime.metrics.statistics import compute_rollout_step
from slime.models.shape import read_model_shape
from slime.ray.train_actor import TrainRayActor
from slime.recording.writer import STOP_TIMEOUT_S
from slime.tracking.spans import set_rollout, span, spanned, start_tracing
from slime.tracking.timer import Timer, inverse_timer, timer
from slime.tracking.tracking import (
    configure_logger,
    finish_tracking,
    init_tracking,
    log,
    log_dir_of,
)
from slime.utils.data import process_rollout_data
from slime.utils.misc import load_function

logger = logging.getLogger(__name__)

NUM_VERSIONS_KEPT = 64  # in a checkpoint: samples are not older
# With --keep-old-actor: the weight set that the engines use, and the one that they used before.
ENGINES, OLD = "rollout_actor", "old_actor"
NUM_OPTIMIZER_BYTES = 16  # a number: weights, main parameter and two moments, each at most fp32


class MegatronTrainRayActor(TrainRayActor):
    """Owns a model, its optimizer and scheduler, and further weight sets (ref, teacher, old_actor)
    for the same structure.
    """

    # --- start ------------------------------------------------------------------------------------

    def init(
        self,
        args: argparse.Namespace,
        role: str,
        with_ref: bool = False,
        with_opd_teacher: bool = False,
    ) -> int:
        """Builds the model and loads its weights; returns the first rollout to run (loaded
        iteration + 1, or 0).
        """
        configure_logger(f"{role}-{self.rank}", log_dir=log_dir_of(args))
        torch.set_num_threads(1 if get_accelerator().name == "cpu" else torch.get_num_threads())
        super().init(args, role, with_ref, with_opd_teacher)
        initialize.init(args)
        init_tracking(args, primary=False)
        start_tracing(args, f"{role}-{self.rank}", role=role, rank=self.rank)
        self.model_shape = read_model_shape(args.hf_checkpoint)
        self.model, self.optimizer, self.opt_param_scheduler = setup_model_and_optimizer(args, role)
        self.weights = WeightsBackup(self.model)
        self.weight_version, self._last_train_step, self._moved_reference = 0, -1, False
        self.weight_ages = WeightAges()
        self._asleep: OffloadedTensors | None = None
        self._weights_fingerprint: str | None = None
        start = self._load()
        self._last_rollout_id: int | None = None
        self._weight_updates_since_start: int | None = None
        self.recorder = TrainRecorder(args, role) if args.record is not None else None
        Timer().start("train_wait")
        return start

    def _load(self) -> int:
        args = self.args
        if self.with_ref:
            self.load_other_checkpoint("ref", args.ref_load)
        if self.with_opd_teacher:
            self.load_other_checkpoint("teacher", args.opd_teacher_load)
        source = args.load if self.role == "actor" else args.critic_load
        iteration = checkpoint.load_checkpoint(
            args, self.model, self.optimizer, self.opt_param_scheduler, load_dir=source
        )
        self.weights.backup("actor")
        if iteration is None:
            return 0
        self._restore_state(checkpoint_files.find_checkpoint(source, args.ckpt_step)[0], iteration)
        return iteration + 1

    def _restore_state(self, folder: Path, iteration: int) -> None:
        """What this role remembered when the checkpoint was saved; versions that saved none counted
        a version per rollout.
        """
        state = actor_state.load_actor_state(folder)
        if state is None:
            self.weight_version = iteration + 1
            return
        self.weight_version, self._last_train_step = state.weight_version, state.last_train_step
        self._weights_fingerprint = state.weights_fingerprint
        self.weight_ages = WeightAges(state.rollouts_trained, dict(state.published_at))
        keeps_old = self.args.keep_old_actor
        wanted = {"ref": self.with_ref, ENGINES: keeps_old, OLD: keeps_old}
        tags = [tag for tag in state.sets if wanted.get(tag)]
        actor_state.restore_weight_sets(folder, self.model, self.weights, tags)
        self._moved_reference = "ref" in tags
        if self._moved_reference and self.rank == 0:
            logger.info(
                "The reference is the one that had moved by rollout %d, not that of --ref-load.",
                iteration,
            )

    def load_other_checkpoint(self, tag: str, path: str | None) -> None:
        """Loads the weights at `path` (Megatron or Hugging Face; None: --hf-checkpoint) and keeps
        them under `tag`.
        """
        step = {"ref": self.args.ref_ckpt_step, "teacher": self.args.opd_teacher_ckpt_step}.get(tag)
        checkpoint.load_weights(
            self.args, self.model, path or self.args.hf_checkpoint, ckpt_step=step
        )
        self.weights.backup(tag)

    @property
    def train_parallel_config(self) -> dict[str, int]:
        """What the rollout side needs to split samples for these ranks."""
        return parallel_config(self.args)

    # --- one rollout ------------------------------------------------------------------------------

    def train(
        self,
        rollout_id: int,
        rollout_data_ref: list,
        external_data: dict[str, Any] | None = None,
        *,
        weight_updates_since_start: int | None = None,
    ) -> Any:
        """Trains on one rollout. On the last pipeline stage a critic returns {"values": per-sample
        CPU tensors}, and the policy, on one rank per data-parallel rank, {"not_trained": {reason:
        `Sample.index` of the planned samples that did not train}}; else None.

        weight_updates_since_start: how many versions the engines got since the rollout was begun,
        for --keep-old-actor; None: not known.
        """
        Timer().end("train_wait")
        set_rollout(rollout_id)
        self._last_rollout_id, self._weight_updates_since_start = (
            rollout_id,
            weight_updates_since_start,
        )
        with timer("train"), self._recorded(rollout_id):
            with timer("data_preprocess"):
                rollout_data = self._get_rollout_data(rollout_data_ref)
            result = (
                self.train_critic(rollout_id, rollout_data)
                if self.role == "critic"
                else self.train_actor(rollout_id, rollout_data, external_data)
            )
        Timer().start("train_wait")
        return result

    def _recorded(self, rollout_id: int) -> contextlib.AbstractContextManager[None]:
        if self.recorder is None:
            return contextlib.nullcontext()

        def save(folder: str) -> None:
            # a replay publishes nothing: what sampled the rollout is what its engines have
            self._save_whole_state(folder, rollout_id, {ENGINES: self._sampler_tag})

        return self.recorder.rollout(rollout_id, self.model, save)

    def _get_rollout_data(self, rollout_data_ref: list) -> RolloutBatch:
        dp_rank = mpu.get_data_parallel_rank(with_context_parallel=False)
        dp_size = mpu.get_data_parallel_world_size(with_context_parallel=False)
        batch = process_rollout_data(self.args, rollout_data_ref, dp_rank, dp_size)
        return to_train_device(
            batch,
            get_accelerator().device(),
            cp_rank=mpu.get_context_parallel_rank(),
            cp_size=mpu.get_context_parallel_world_size(),
        )

    def train_actor(
        self,
        rollout_id: int,
        rollout_data: RolloutBatch,
        external_data: dict[str, Any] | None = None,
    ) -> dict[str, Any] | None:
        """Log-prob passes, advantages, metrics, optimizer steps, and the periodic refresh of the
        reference.
        """
        args = self.args
        data_iterator = get_data_iterator(rollout_data)
        has_functions = (
            args.custom_advantage_function_path is not None
            or args.rollout_data_postprocess_path is not None
        )
        trainable = have_trainable_tokens(rollout_data) if has_functions else None
        if args.compute_advantages_and_returns:
            self._compute_log_probs(rollout_data, data_iterator)
            if external_data is not None and external_data.get("values") is not None:
                rollout_data["values"] = tensors_to_gpu(external_data["values"])
            self._compute_advantages(rollout_data)
        path = args.rollout_data_postprocess_path
        if path is not None:
            with same_samples(rollout_data, "--rollout-data-postprocess-path", path):
                load_function(path)(args, rollout_id, rollout_data)
        log_rollout_data(rollout_id, args, rollout_data)
        engine_log_probs = rollout_data.get("rollout_log_probs")
        if rollout_data.get("log_probs") is None and engine_log_probs is not None:
            enable_log_prob_capture()
        try:
            with timer("actor_train"):
                logged = train(
                    args,
                    rollout_id,
                    self.model,
                    self.optimizer,
                    self.opt_param_scheduler,
                    data_iterator,
                    last_step=self._last_train_step,
                    before_update=lambda: self._look_at_log_probs(rollout_id, rollout_data),
                )
        finally:
            drain_captured_log_probs()
        skipped = self._note_steps(logged)
        self.weight_ages.trained()
        save_debug_train_data(args, rollout_id=rollout_id, rollout_data=rollout_data)
        if self.recorder is not None:
            self.recorder.fields(rollout_id, rollout_data)
        self._log_weight_change(rollout_id)
        self.weights.backup("actor")
        if (
            self.with_ref
            and args.ref_update_interval is not None
            and (rollout_id + 1) % args.ref_update_interval == 0
        ):
            self.weights.backup("ref")
            self.weights.active = "actor"
            self._moved_reference = True
        with inverse_timer("train"):
            info = rollout_data.info if isinstance(rollout_data, RolloutBatch) else {}
            log_perf_data(rollout_id, args, seq_lens=info.get("trained_lengths"))
        if not counts_for_its_data_parallel_rank():
            return None
        return {
            "not_trained": find_not_trained(
                rollout_data, trainable_before=trainable, skipped_steps=skipped
            )
        }

    @spanned("advantages")
    def _compute_advantages(self, rollout_data: RolloutBatch) -> None:
        path = self.args.custom_advantage_function_path
        if path is None:
            compute_advantages_and_returns(self.args, rollout_data)
            return
        with same_samples(rollout_data, "--custom-advantage-function-path", path):
            compute_advantages_and_returns(self.args, rollout_data)

    @spanned("consistency")
    def _look_at_log_probs(self, rollout_id: int, rollout_data: RolloutBatch) -> None:
        """Before the weights change: a gap to the engine's log-probs is then seen, and may end the
        run, before it has done harm. Where no pass computed the log-probs, those of the first step
        are the rollout's.
        """
        captured = take_captured_log_probs([int(place) for place in rollout_data["partition"]])
        if captured is not None:
            rollout_data["log_probs"] = captured
        versions = rollout_data.get("oldest_weight_version")
        log_consistency(
            rollout_id,
            self.args,
            rollout_data,
            ages_N=self.weight_ages.of(np.array([int(version) for version in versions]))
            if versions is not None
            else None,
            compares_sampler=self.args.keep_old_actor and self._sampler_tag is not None,
        )

    @spanned("weight_change")
    def _log_weight_change(self, rollout_id: int) -> None:
        # every rank looks at its own part of the model
        change = torch.tensor(self.weights.largest_change("actor"))
        dist.all_reduce(change, op=dist.ReduceOp.MAX, group=get_gloo_group())
        if initialize.is_megatron_main_rank():
            metrics = {"train/weight_delta": change.item()}
            log(
                self.args,
                metrics | {"rollout/step": compute_rollout_step(self.args, rollout_id)},
                step_key="rollout/step",
            )

    def _note_steps(self, logged: list[dict[str, float]]) -> list[int]:
        """Remembers where the train axis is. Returns which of the rollout's optimizer steps changed
        nothing, by number within the rollout; [] but on the last pipeline stage.
        """
        if logged:
            self._last_train_step = int(logged[-1]["train/step"])
        skipped = "train/critic-update_skipped" if self.role == "critic" else "train/update_skipped"
        return [step for step, metrics in enumerate(logged) if metrics.get(skipped)]

    def _compute_log_probs(self, rollout_data: RolloutBatch, data_iterator: list) -> None:
        num_microbatches = rollout_data["num_microbatches"]
        if "ref" in self.weights:
            with timer("ref_log_probs"), self.weights.borrowed("ref"):
                rollout_data.update(
                    self._log_probs(data_iterator, num_microbatches, store_prefix="ref_")
                )
        if "teacher" in self.weights:
            with timer("teacher_log_probs"), self.weights.borrowed("teacher"):
                rollout_data.update(
                    self._log_probs(data_iterator, num_microbatches, store_prefix="teacher_")
                )
        plan = LogProbPlan.from_args(self.args, num_steps=len(num_microbatches))
        if reasons_to_recompute_log_probs(plan):
            with timer("log_probs"), self._old_weights():
                rollout_data.update(
                    self._log_probs(data_iterator, num_microbatches, store_prefix="")
                )

    @contextlib.contextmanager
    def _old_weights(self) -> Iterator[None]:
        """Inside, the weights that sampled the rollout, where --keep-old-actor keeps them: those of
        the engines, or those before.
        """
        if self._sampler_tag is None:
            yield
            return
        with self.weights.borrowed(self._sampler_tag):
            yield

    @property
    def _sampler_tag(self) -> str | None:
        """The kept weights that sampled this rollout; None where there are none."""
        tag = OLD if self._weight_updates_since_start else ENGINES
        return tag if self._weight_updates_since_start is not None and tag in self.weights else None

    def _log_probs(
        self, data_iterator: list, num_microbatches: list[int], *, store_prefix: str
    ) -> RolloutBatch:
        return forward_only(
            get_log_probs_and_entropy,
            self.args,
            self.model,
            data_iterator,
            num_microbatches,
            store_prefix=store_prefix,
            # the loss replays the nucleus: what it compares with is of the same distribution
            use_rollout_top_p_replay=True,
        )

    def train_critic(self, rollout_id: int, rollout_data: RolloutBatch) -> dict[str, Any] | None:
        """Values of the rollout, returns from them, and the critic's steps. Returns the values for
        the actor.
        """
        data_iterator = get_data_iterator(rollout_data)
        with timer("values"):
            rollout_data.update(
                forward_only(
                    get_values,
                    self.args,
                    self.model,
                    data_iterator,
                    rollout_data["num_microbatches"],
                )
            )
        self._compute_advantages(rollout_data)
        with timer("actor_train"):
            logged = train(
                self.args,
                rollout_id,
                self.model,
                self.optimizer,
                self.opt_param_scheduler,
                data_iterator,
                role="critic",
                last_step=self._last_train_step,
            )
        self._note_steps(logged)
        with inverse_timer("train"):
            self._log_critic_times(rollout_id)
        # a rollout without a valid sample has no micro-batch, and so no values
        values = rollout_data.get("values", [])
        return {"values": tensors_to_cpu(list(values))} if mpu.is_pipeline_last_stage() else None

    def _log_critic_times(self, rollout_id: int) -> None:
        """Under names of its own: the policy's ranks log perf/ of the same rollout."""
        metrics = {
            f"perf/critic-{name}_time": seconds for name, seconds in Timer().log_dict().items()
        }
        Timer().reset()
        if initialize.is_megatron_main_rank():
            log(
                self.args,
                metrics | {"rollout/step": compute_rollout_step(self.args, rollout_id)},
                step_key="rollout/step",
            )

    # --- weights ----------------------------------------------------------------------------------

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        """Publishes a checkpoint of iteration `rollout_id`, and a Hugging Face folder where
        --save-hf asks for one.

        Every save has been read back when this returns, so upstream's `force_sync` has nothing to
        force.
        """
        del force_sync
        args = self.args
        folder = args.save if self.role == "actor" else args.critic_save
        if folder is not None:
            with timer("save_model"):
                checkpoint.save_checkpoint(
                    args,
                    rollout_id,
                    self.model,
                    self.optimizer,
                    self.opt_param_scheduler,
                    save_dir=folder,
                    write_extra=lambda writing: self._save_with_ledger(writing, rollout_id),
                    retention=retention_of(self.role, args.keep_checkpoints, args.save),
                )
        if args.save_hf is not None and self.role == "actor":
            with span("save_hf"):
                checkpoint.save_hf_checkpoint(args, rollout_id, self.model)

    def finish_recording(self) -> None:
        """Returns when what this rank recorded is on the disk."""
        if self.recorder is not None:
            self.recorder.close()

    def publish_state(self, folder: str, iteration: int) -> None:
        """Writes the whole state below `folder` as `iteration`, beside those of before, for
        processes that go on in place of these.
        """
        self.finish_recording()
        self._save_whole_state(folder, iteration, {ENGINES: ENGINES, OLD: OLD})

    def state_bytes(self) -> int:
        """At least as many as this rank's part of `publish_state` takes."""
        numbers = sum(tensor.numel() for chunk in self.model for tensor in chunk.parameters())
        return numbers * (NUM_OPTIMIZER_BYTES + 4 * self.weights.num_sets)

    def _save_whole_state(
        self, folder: str, iteration: int, kept_as: Mapping[str, str | None]
    ) -> None:
        whole = argparse.Namespace(
            **{**vars(self.args), "no_save_optim": False, "no_save_rng": False}
        )
        checkpoint.save_checkpoint(
            whole,
            iteration,
            self.model,
            self.optimizer,
            self.opt_param_scheduler,
            save_dir=folder,
            write_extra=functools.partial(self._save_state, kept_as=kept_as),
            retention=Retention(None),
        )

    def _save_with_ledger(self, folder: Path, rollout_id: int) -> None:
        self._save_state(folder, kept_as={ENGINES: ENGINES})
        if self.role == "actor" and dist.get_rank() == 0:
            copy_ledger_state(self.args.save, rollout_id, folder)

    def _save_state(self, folder: Path, kept_as: Mapping[str, str | None]) -> None:
        """`kept_as`: which kept weights are saved, where there are such, by the name that they get;
        beside them a reference that has moved.
        """
        kept = {name: tag for name, tag in kept_as.items() if tag and tag in self.weights}
        if self._moved_reference:
            kept["ref"] = "ref"
        ages = self.weight_ages
        recent = dict(list(ages.trained_at.items())[-NUM_VERSIONS_KEPT:])
        state = actor_state.ActorState(
            self.weight_version,
            self._last_train_step,
            self._weights_fingerprint,
            ages.num_trained,
            recent,
            tuple(kept),
        )
        actor_state.save_actor_state(folder, state, self.model, self.weights, kept_as=kept)

    def update_weights(self, *, sends: bool = True) -> None:
        """Sends the weights to every engine as the next version. sends=False: the engines have that
        version, from ranks that these replace.
        """
        if self.args.debug_train_only or self.args.debug_rollout_only:
            return
        with timer("update_weights"):
            before, self.weight_version = self._weights_fingerprint, self.weight_version + 1
            weights = (self.args, self.model, self.model_shape)
            self._weights_fingerprint = (
                publish_weights(*weights, self.rollout_manager, self.weight_version)
                if sends
                else fingerprint_weights(*weights)
            )
        self.weight_ages.published(self.weight_version)
        if self.args.keep_old_actor:
            self.weights.move(ENGINES, to=OLD)
            self.weights.backup(ENGINES)
            self.weights.active = "actor"
        is_new = before is not None and self._weights_fingerprint is not None  # on one rank
        if is_new and self._last_rollout_id is not None:
            metrics = {
                "perf/weight_version": self.weight_version,
                "train/weights_checksum_changed": int(before != self._weights_fingerprint),
                "rollout/step": compute_rollout_step(self.args, self._last_rollout_id),
            }
            log(self.args, metrics, step_key="rollout/step")

    def send_weights_again(self) -> None:
        """Sends the version that engines before had to those in their place, which hash every byte
        of it.
        """
        publish_again(
            self.args, self.model, self.model_shape, self.rollout_manager, self.weight_version
        )

    @spanned("sleep")
    def sleep(self) -> None:
        """Moves what only training needs out of the device's memory: weights, gradients and
        optimizer state.
        """
        if self._asleep is None:
            self._asleep = get_accelerator().offload(
                training_tensors(self.model, self.optimizer), folder=self.args.run_dir
            )

    @spanned("wake_up")
    def wake_up(self) -> None:
        """Makes training possible again after `sleep`."""
        if self._asleep is not None:
            self._asleep.restore()
            self._asleep = None

    def stop(self) -> None:
        """Closes the sinks and leaves the process group."""
        if self.recorder is not None:
            self.recorder.close(STOP_TIMEOUT_S)
        finish_tracking(self.args, primary=False)
        mpu.destroy_model_parallel()
        super().stop()
