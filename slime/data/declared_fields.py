"""Reads plug-ins' declared fields from samples, and warns once where no sample has one."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from slime.config.specs import nearest_names
from slime.data.fields import CONTRACT, FieldSpec

logger = logging.getLogger(__name__)
_missed: set[str] = set()  # fields whose warning was given


def read_source(samples: Sequence[Any], spec: FieldSpec) -> list:
    """The entries of a declared field: a Sample attribute, or a key of one that is a dict. None
    where a sample has none.
    """
    attribute, _, key = (spec.source or "").partition(".")
    values = [sample.__dict__.get(attribute) for sample in samples]
    return (
        [value.get(key) if isinstance(value, Mapping) else None for value in values]
        if key
        else values
    )


def warn_of_unfilled(samples: Sequence[Any], spec: FieldSpec) -> None:
    """Warns once that no sample has what a plug-in's field is read from, with the nearest name that
    samples do have.
    """
    if not samples or spec.name in _missed or spec not in CONTRACT.of_plug_ins:
        return
    _missed.add(spec.name)
    attribute, _, key = (spec.source or "").partition(".")
    if key:
        holders = [sample.__dict__.get(attribute) for sample in samples]
        known = sorted(
            {str(name) for holder in holders if isinstance(holder, Mapping) for name in holder}
        )
    else:
        known = sorted({name for sample in samples for name in sample.__dict__})
    near = nearest_names(key or attribute, known)
    prefix = f"{attribute}." if key else ""
    hint = (
        f"Did you mean {prefix}{near[0]}?"
        if near
        else f"{attribute if key else 'A sample'} has: {', '.join(known[:8]) or 'nothing'}."
    )
    logger.warning(
        "declare_field(%r, source=%r): no sample of %d has it, so nothing is logged. %s",
        spec.name,
        spec.source,
        len(samples),
        hint,
    )
