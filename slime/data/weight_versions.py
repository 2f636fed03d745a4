"""Which weight version sampled which tokens of a response, and the loss masks that follow from it.

A version is the number under which weights were published. Spans are (version, tokens) in order of
the response; None where the version is unknown.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from slime.data.ragged import as_array
from slime.data.sample import Sample

_current_weight_version: str | None = None


def set_current_weight_version(version: object) -> None:
    """Notes which weights the engines serve now; None: not known."""
    global _current_weight_version
    _current_weight_version = None if version is None else str(version)


def parse_weight_version(version: object) -> int | None:
    """The number in a weight version ("7", 7, "v7"), or None."""
    text = str(version).lstrip("v")
    return int(text) if text.isdecimal() else None


def version_spans(sample: Sample) -> list[tuple[str | None, int]]:
    """(version, tokens) over the whole response. Where the spans do not cover it (tokens that were
    set by hand), the oldest version that the sample names counts for all of it.
    """
    spans = [(version, int(count)) for version, count in sample.weight_version_spans]
    if sum(count for _, count in spans) == sample.response_length:
        return spans
    named = sorted(
        sample.weight_versions,
        key=lambda version: (
            parse_weight_version(version) is not None,
            parse_weight_version(version) or 0,
        ),
    )
    return [(str(named[0]) if named else None, sample.response_length)]


def oldest_version(sample: Sample) -> int | None:
    """The number of the oldest weights that sampled one of its tokens; None where no version is a
    number.
    """
    versions = [*(version for version, _ in sample.weight_version_spans), *sample.weight_versions]
    return min(
        (number for number in map(parse_weight_version, versions) if number is not None),
        default=None,
    )


def mask_older_tokens(sample: Sample, *, unknown_is_older: bool) -> None:
    """Takes every token of older weights than the engines serve now out of the loss.
    `unknown_is_older`: tokens without a known version too, as they were there before this rollout
    began; where the engines' version is unknown, this is every token.
    """
    import numpy as np  # here: rollout functions import this module, and must start without numpy

    current = parse_weight_version(_current_weight_version)

    def stays(version: str | None) -> bool:
        number = parse_weight_version(version)
        return not unknown_is_older if number is None or current is None else number >= current

    if not sample.response_length:
        return
    keep = np.concatenate(
        [np.full(count, stays(version)) for version, count in version_spans(sample)]
    )
    if keep.all():
        return
    mask = (
        np.ones(sample.response_length, dtype=np.int64)
        if sample.loss_mask is None
        else as_array(sample.loss_mask)
    )
    if len(mask) != len(keep):
        return  # the gate rejects the sample, and says why
    sample.loss_mask = (mask * keep).tolist()


def mask_older_samples(args: argparse.Namespace, samples: Iterable[Sample]) -> None:
    """`mask_older_tokens` of a finished rollout's samples, where
    --mask-offpolicy-in-partial-rollout asks for it.
    """
    if args.partial_rollout and args.mask_offpolicy_in_partial_rollout:
        for sample in samples:
            mask_older_tokens(sample, unknown_is_older=False)
