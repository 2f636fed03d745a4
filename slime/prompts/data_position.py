"""The file of a data position: the state of a data source behind a hash, unfinished groups with
their tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from slime.data.sample import Sample
from slime.data.structure import Group
from slime.exceptions import ConfigError
from slime.files import atomic, exact_json
from slime.files.sealed import seal, unseal


def state_path(folder: str, rollout_id: int) -> Path:
    """Where the data position after a rollout is kept in a checkpoint folder."""
    return Path(folder) / "rollout" / f"global_dataset_state_dict_{rollout_id}.json"


def write_json(path: Path, state: dict[str, Any]) -> None:
    """Writes the file whole or not at all. A hash protects every byte of it."""
    atomic.write_bytes(path, seal(exact_json.dumps(state, option=orjson.OPT_SERIALIZE_NUMPY)))


def read_state(path: Path) -> dict[str, Any]:
    """The state in a file of `write_json`, or in one of an earlier version, which had no hash.
    ConfigError for a damaged one.
    """
    content = path.read_bytes()
    try:
        state = exact_json.loads(content)
        if isinstance(state, dict) and "format" in state:  # an earlier version's
            return state
        state = unseal(content)
    except ValueError as error:
        raise ConfigError(
            f"the data position {str(path)!r} is damaged ({error}). Resume from an earlier rollout."
        ) from error
    return state


def encode_group(group: Group) -> list:
    """A group as JSON-able values, nesting kept. ConfigError where a sample holds what JSON cannot
    (media, tensors).
    """
    return [
        encode_group(member) if isinstance(member, list) else _encode_sample(member)
        for member in group
    ]


def decode_group(encoded: list) -> Group:
    """The group of `encode_group`."""
    return [
        decode_group(member) if isinstance(member, list) else _decode_sample(member)
        for member in encoded
    ]


# Payloads that engines return as integer tensors; kept as lists in the file.
_TENSOR_FIELDS = (
    "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets",
    "rollout_routed_experts",
)


def _encode_sample(sample: Sample) -> dict[str, Any]:
    values = sample.to_dict()
    for name in _TENSOR_FIELDS:
        if hasattr(values[name], "tolist"):
            values[name] = values[name].tolist()
    try:
        exact_json.dumps(values)
    except orjson.JSONEncodeError as error:
        raise ConfigError(
            f"sample {sample.index} is unfinished and cannot be saved with the data position: "
            f"{error}. "
            "Switch off --partial-rollout for prompts with media, or keep metadata to plain values."
        ) from error
    return {name: value for name, value in values.items() if value is not None}


def _decode_sample(values: dict[str, Any]) -> Sample:
    sample = Sample.from_dict(values)
    for name in _TENSOR_FIELDS:
        if isinstance(getattr(sample, name), list):
            import torch

            setattr(sample, name, torch.tensor(getattr(sample, name), dtype=torch.int32))
    return sample
