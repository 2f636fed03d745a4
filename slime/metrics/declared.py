"""Plug-ins' declared fields of an evaluation, reduced as training reduces them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.data.declared_fields import read_source, warn_of_unfilled
from slime.data.fields import CONTRACT, FieldSpec, Reduce, Scope
from slime.data.ragged import as_array
from slime.data.rewards import execution_keys, execution_values
from slime.metrics import contributions
from slime.metrics.contributions import Contribution

if TYPE_CHECKING:
    from slime.data.sample import Sample


def declared_contributions(samples: Sequence[Any]) -> dict[str, Contribution]:
    """{metric name: contribution} of every plug-in's field that is read from samples and has a
    reduction, as training reduces it.
    """
    parts = {}
    keys = execution_keys(samples)
    for spec in CONTRACT.of_plug_ins:
        if (
            not spec.source
            or spec.reduce is Reduce.NONE
            or spec.scope not in (Scope.SAMPLE, Scope.TOKEN)
        ):
            continue
        values = read_source(samples, spec)
        present = [i for i, value in enumerate(values) if value is not None]
        if not present:
            warn_of_unfilled(samples, spec)
            continue
        part = _contribution(
            spec,
            [values[i] for i in present],
            [samples[i] for i in present],
            [keys[i] for i in present],
        )
        if part is not None:
            parts[spec.metric_name] = part
    return parts


def _contribution(spec: FieldSpec, values: list, samples: list, keys: list) -> Contribution | None:
    """What these samples give; numbers that are not finite are left out, as in training."""
    if spec.scope is Scope.TOKEN:
        masks = [
            _mask_of(sample, len(value)) for sample, value in zip(samples, values, strict=True)
        ]
        arrays = [
            np.asarray(as_array(value), dtype=np.float64)[mask]
            for value, mask in zip(values, masks, strict=True)
        ]
        if spec.reduce is Reduce.ROLLOUT_MEAN:
            by_key: dict[Any, list[np.ndarray]] = {}
            for key, array in zip(keys, arrays, strict=True):
                by_key.setdefault(key, []).append(array)
            means = [
                np.concatenate(found).mean() for found in by_key.values() if sum(map(len, found))
            ]
            return _mean_of_rollouts(means)
        numbers = np.concatenate(arrays)
    else:
        numbers = np.array([float(value) for value in values])
        if spec.reduce in (Reduce.SAMPLE_MEAN, Reduce.ROLLOUT_MEAN):
            votes = execution_values(numbers.tolist(), keys)
            return _mean_of_rollouts(list(votes.values()))
    is_mean = spec.reduce in (Reduce.TOKEN_MEAN, Reduce.SAMPLE_MEAN)
    return contributions.of_values(Reduce.MEAN if is_mean else spec.reduce, numbers)


def _mean_of_rollouts(values: list) -> Contribution | None:
    """None where one of them is not finite: a mean over the others would be of other rollouts."""
    is_number = bool(np.isfinite(values).all())
    return contributions.mean(values, len(values)) if is_number else None


def _mask_of(sample: Sample, length: int) -> np.ndarray:
    if sample.loss_mask is None or len(sample.loss_mask) != length:
        return np.ones(length, dtype=bool)
    return as_array(sample.loss_mask) != 0
