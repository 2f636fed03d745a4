"""The nesting of a rollout's output - prompts, rollouts, samples - checked and made flat."""

from __future__ import annotations

from typing import Any

from slime.rollout.data_source import iter_samples
from slime.utils.types import Sample


def validate_rollout_id_annotated(node: Any, depth: int = 0) -> None:
    """AssertionError where samples of one execution (a list nested two deep or more) do not all carry the same `rollout_id`:
    they share a loss denominator, which nothing else tells."""
    if isinstance(node, Sample):
        return
    assert isinstance(node, list), (
        f"a rollout function returns Samples in nested lists; found {type(node).__name__} at depth {depth}"
    )
    samples = [entry for entry in node if isinstance(entry, Sample)]
    if depth >= 2 and len(samples) > 1:
        ids = {sample.rollout_id for sample in samples}
        assert None not in ids and len(ids) == 1, (
            f"{len(samples)} samples of one rollout (indices {[sample.index for sample in samples]}) must have the same rollout_id, "
            f"they have {sorted(ids, key=str)}. Set Sample.rollout_id in your generate function."
        )
    for entry in node:
        validate_rollout_id_annotated(entry, depth + 1)


def flatten_samples(node: Any) -> list[Sample]:
    """All samples of a nested output, in order."""
    return [node] if isinstance(node, Sample) else list(iter_samples(node))
