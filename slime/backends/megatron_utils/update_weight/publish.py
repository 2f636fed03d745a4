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
from slime.ray.utils import held, wait_for
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
    None on the others.

    Called by all ranks together. Raises EngineError when an engine refuses or, with
    --check-weight-update-equal, holds other bytes.
    """
    fingerprint = Fingerprint(
        limit=float("inf") if args.check_weight_update_equal else FINGERPRINT_BYTES
    )
    if args.update_weight_transport == "disk":
        return publish_through_disk(args, model, shape, rollout_manager, version, fingerprint)
    engines = None
    with contextlib.ExitStack() as stack:
        for bucket in spanned_items("gather_weights", iter_hf_weight_buckets(args, model, shape)):
            if not bucket:
                continue
            if engines is None:
                engines = stack.enter_context(
                    _updating(args, rollout_manager, version, fingerprint)
                )
            with span("hash_weights"):
                fingerprint.add(bucket)
            with span("send_weights", engines=len(engines)):
                reference = actors.put({name: _as_numpy(tensor) for name, tensor in bucket})
                _ask(args, engines, "update_weights", reference)
    return fingerprint.value()


@contextlib.contextmanager
def _updating(
    args: argparse.Namespace, rollout_manager: ActorHandle, version: int, fingerprint: Fingerprint
) -> Iterator[list[Any]]:
    """The engines, paused and ready for buckets; at the end they apply the version and go on."""
    engines, lock, *_ = ask_manager(args, rollout_manager.get_updatable_engines_and_lock)
    with held(lock, timeout_s=args.step_timeout):
        _ask(args, engines, "pause")
        _ask(args, engines, "begin_weight_update", str(version))
        yield engines
        checksum = fingerprint.value() if args.check_weight_update_equal else None
        _ask(args, engines, "end_weight_update", str(version), checksum)
        _ask(args, engines, "resume")
        ask_manager(args, rollout_manager.clear_updatable_num_new_engines, version)


def _ask(
    args: argparse.Namespace, engines: Sequence[Any], method: str, *values: object
) -> list[Any]:
    refs = [getattr(engine, method).remote(*values) for engine in engines]
    names = [f"engine {rank}" for rank in range(len(engines))]
    return wait_for(
        refs, what=f"weight update ({method})", timeout_s=args.step_timeout, names=names
    )


def _as_numpy(tensor: torch.Tensor) -> Any:
    """The tensor's bytes as numpy; bfloat16, which numpy lacks, as uint16."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
