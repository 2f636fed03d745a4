"""Publishing: the trainer's weights become the engines' next version - all engines or none, and
every byte accounted for.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from slime.backends.megatron_utils.update_weight.disk import publish_through_disk
from slime.backends.megatron_utils.update_weight.gather import NamedTensors, iter_hf_weight_buckets
from slime.backends.megatron_utils.update_weight.manager import ask_manager
from slime.files.checksum import combine_digests, tensor_digest
from slime.models.shape import ModelShape
from slime.ray import actors
from slime.ray.servers import PublishedWeights, ask_engines
from slime.ray.utils import TRAINING_RANKS, held
from slime.tracking.spans import span, spanned_items
from slime.typing import ActorHandle

# Hashing every byte of a large model costs seconds an update, so without
# --check-weight-update-equal only the first tensors are hashed.
FINGERPRINT_BYTES = 64 * 1024**2


@dataclasses.dataclass
class Fingerprint:
    """Digests of the exported tensors: of all of them, or of the first `limit` bytes."""

    limit: float
    num_bytes: int = 0
    digests: dict[str, bytes] = dataclasses.field(default_factory=dict)

    def add(self, bucket: NamedTensors) -> None:
        for name, tensor in bucket:
            if self.num_bytes < self.limit:
                self.digests[name] = tensor_digest(name, tensor)
                self.num_bytes += tensor.numel() * tensor.element_size()

    @property
    def is_whole(self) -> bool:
        """Whether every tensor so far is in it."""
        return self.num_bytes < self.limit

    def value(self) -> str | None:
        """Hex digits, None on a rank that exported nothing."""
        return combine_digests(self.digests) if self.digests else None


def publish_weights(
    args: argparse.Namespace,
    model: Sequence[torch.nn.Module],
    shape: ModelShape,
    rollout_manager: ActorHandle,
    version: int,
) -> str | None:
    """The fingerprint of the weights that every engine now serves as `version`, on the main rank;
    None on the others. With --use-fault-tolerance an engine that dies meanwhile is left out, and
    its successor gets what the others got.

    Called by all ranks together. Raises EngineError when an engine refuses or, with
    --check-weight-update-equal, holds other bytes.
    """
    fingerprint = _new_fingerprint(args)
    if args.update_weight_transport == "disk":
        return publish_through_disk(args, model, shape, rollout_manager, version, fingerprint)
    engines = None
    kept: list[Any] = []
    with contextlib.ExitStack() as stack:
        for bucket in spanned_items("gather_weights", iter_hf_weight_buckets(args, model, shape)):
            if not bucket:
                continue
            if engines is None:
                engines = stack.enter_context(
                    _updating(args, rollout_manager, version, fingerprint, kept)
                )
            with span("hash_weights"):
                fingerprint.add(bucket)
            with span("send_weights", engines=len(engines.living)):
                reference = actors.put({name: _as_numpy(tensor) for name, tensor in bucket})
                if args.use_fault_tolerance:
                    kept.append(reference)
                engines.ask("update_weights", reference)
    return fingerprint.value()


def publish_again(
    args: argparse.Namespace,
    model: Sequence[torch.nn.Module],
    shape: ModelShape,
    rollout_manager: ActorHandle,
    version: int,
) -> None:
    """Gives new engines the version that those before had. Engines that are ours compare every byte,
    as with --check-weight-update-equal.
    """
    if args.update_weight_transport != "disk":
        args = argparse.Namespace(**{**vars(args), "check_weight_update_equal": True})
    publish_weights(args, model, shape, rollout_manager, version)


def fingerprint_weights(
    args: argparse.Namespace, model: Sequence[torch.nn.Module], shape: ModelShape
) -> str | None:
    """What `publish_weights` would return; the engines get nothing. Called by all ranks together."""
    fingerprint = _new_fingerprint(args)
    for bucket in iter_hf_weight_buckets(args, model, shape):
        fingerprint.add(bucket)
    return fingerprint.value()


def _new_fingerprint(args: argparse.Namespace) -> Fingerprint:
    return Fingerprint(limit=float("inf") if args.check_weight_update_equal else FINGERPRINT_BYTES)


@dataclasses.dataclass
class _Engines:
    """The engines of one update; `living` are those that have taken every step of it."""

    args: argparse.Namespace
    rollout_manager: ActorHandle
    living: dict[int, Any]

    def ask(self, method: str, *values: object) -> list[Any]:
        """The answers of the living. Without --use-fault-tolerance a death raises SlimeError."""
        answers = ask_engines(
            self.living,
            method,
            *values,
            what=f"weight update ({method})",
            timeout_s=self.args.step_timeout,
            outlives=self.args.use_fault_tolerance,
        )
        for rank in self.living.keys() - answers.keys():
            reason = f"it died in a weight update ({method})"
            ask_manager(self.args, self.rollout_manager.lose_engine, rank, reason)
        self.living = {rank: self.living[rank] for rank in answers}
        return list(answers.values())


@contextlib.contextmanager
def _updating(
    args: argparse.Namespace,
    rollout_manager: ActorHandle,
    version: int,
    fingerprint: Fingerprint,
    kept: list[Any],
) -> Iterator[_Engines]:
    """The engines, paused and ready for buckets; at the end they apply the version and go on, and
    the manager has the references in `kept`.
    """
    handles, lock, *_ = ask_manager(args, rollout_manager.get_updatable_engines_and_lock)
    with held(lock, timeout_s=args.step_timeout, holder=TRAINING_RANKS):
        living = dict(enumerate(handles))
        if args.use_fault_tolerance:
            # one that has been replaced before the lock was ours has another handle
            living = ask_manager(args, rollout_manager.begin_weight_update)[0]
        engines = _Engines(args, rollout_manager, living)
        engines.ask("pause")
        engines.ask("begin_weight_update", str(version))
        yield engines
        checksum = fingerprint.value() if args.check_weight_update_equal else None
        received = engines.ask("end_weight_update", str(version), checksum)
        engines.ask("resume")
        if args.use_fault_tolerance:
            whole = fingerprint.value() if fingerprint.is_whole else None
            published = PublishedWeights(str(version), next(iter(received), whole), tuple(kept))
            ask_manager(args, rollout_manager.keep_published, published)
        ask_manager(args, rollout_manager.clear_updatable_num_new_engines, version)


def _as_numpy(tensor: torch.Tensor) -> Any:
    """The tensor's bytes as numpy; bfloat16, which numpy lacks, as uint16."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
