"""The structure of a rollout function's output: the nesting of prompts, rollouts and samples, and
the routing of mixture-of-experts models.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slime.data.ragged import as_array
from slime.data.sample import Sample
from slime.exceptions import RolloutDataError

Group = list  # list[Sample], or list[list[Sample]] where a generate function fans out


def validate_rollout_id_annotated(node: object, depth: int = 0) -> None:
    """AssertionError where samples of one execution (a list nested two deep or more) do not all
    carry the same `rollout_id`: it alone shows that they share a loss denominator.
    """
    if isinstance(node, Sample):
        return
    assert isinstance(node, list), (
        f"a rollout function returns Samples in nested lists; found {type(node).__name__} at depth "
        f"{depth}"
    )
    samples = [entry for entry in node if isinstance(entry, Sample)]
    if depth >= 2 and len(samples) > 1:
        ids = {sample.rollout_id for sample in samples}
        assert None not in ids and len(ids) == 1, (
            f"{len(samples)} samples of one rollout (indices "
            f"{[sample.index for sample in samples]}) must have the same rollout_id, "
            f"they have {sorted(ids, key=str)}. Add to your generate function: for one in samples: one.rollout_id = sample.index"
        )
    for entry in node:
        validate_rollout_id_annotated(entry, depth + 1)


def with_rollout_id(
    result: Sample | list, rollout_id: int | None, group_index: int | None = None
) -> Any:
    """What a generate function returned. Several samples of one execution (fan-out) that carry no
    `rollout_id` get this one, in place: they share a loss denominator and one vote in the baseline.
    New samples without an index or a group get those of the sample that they were made of, whose
    index `rollout_id` is.
    """
    samples = flatten_samples(result)
    for sample in samples:
        if sample.index is None:
            sample.index = rollout_id
        if sample.group_index is None:
            sample.group_index = group_index
    if isinstance(result, Sample):
        return result
    if len(samples) > 1 and all(sample.rollout_id is None for sample in samples):
        for sample in samples:
            sample.rollout_id = rollout_id
    return result


def flatten_samples(node: Sample | list) -> list[Sample]:
    """All samples of a nested output, in order."""
    return [node] if isinstance(node, Sample) else list(iter_samples(node))


def groups_apart(data: Mapping[str, Mapping[str, Any]]) -> list[Sample]:
    """All samples of an evaluation, as copies in which no two datasets share a group id: each
    dataset counts its groups from 0.
    """
    samples: list[Sample] = []
    offset = 0
    for dataset in data.values():
        own = flatten_samples(dataset.get("samples") or [])
        ids = [s.group_index for s in own if type(s.group_index) is int]
        moved = [
            dataclasses.replace(s, group_index=s.group_index + offset)
            if type(s.group_index) is int
            else s
            for s in own
        ]
        samples += moved if offset else own
        offset += max(ids, default=-1) + 1
    return samples


def validate_rollout_routed_experts_for_replay(
    routed_experts: Sequence[Any], args: argparse.Namespace
) -> None:
    """RolloutDataError (a ValueError) where the expert choices of a rollout cannot be replayed.

    Each entry must be `[rows, args.num_layers, args.moe_router_topk]` with a row. With a top-k
    above 1 the choices of a token differ, so an MoE layer whose ids are all 0 was never recorded;
    `args.moe_layer_freq`, if it is a list, says which layers are MoE layers.
    """
    import numpy as np  # here: rollout functions import this module, and must start without numpy

    if not len(routed_experts):
        raise RolloutDataError("routed experts: there are none, so nothing can be replayed.")
    expected = (args.num_layers, args.moe_router_topk)
    pattern = vars(args).get("moe_layer_freq")
    is_moe = (
        np.array(pattern, dtype=bool)
        if isinstance(pattern, list | tuple)
        else np.ones(args.num_layers, dtype=bool)
    )
    for index, entry in enumerate(routed_experts):
        ids = as_array(entry, what="rollout_routed_experts")
        if ids.ndim != 3 or ids.shape[1:] != expected:
            raise RolloutDataError(
                f"Invalid rollout routed-experts shape {list(ids.shape)} of sample {index}: "
                f"expected [rows, {expected[0]}, {expected[1]}]."
            )
        if not len(ids):
            raise RolloutDataError(f"routed experts of sample {index} have no rows.")
        silent = np.flatnonzero(is_moe & ~ids.any(axis=(0, 2)))
        if args.moe_router_topk > 1 and len(silent):
            raise RolloutDataError(
                f"routed experts of sample {index} are all zero in layers {silent.tolist()}: the "
                "engine did not record them."
            )


def iter_samples(group: Group) -> Iterator[Sample]:
    """The samples of a group, also of one whose members are lists of samples."""
    for member in group:
        if isinstance(member, Sample):
            yield member
        else:
            yield from iter_samples(member)
