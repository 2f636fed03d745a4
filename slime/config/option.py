"""`option(...)`: how an option is declared, once. Command line, YAML keys, help and docs are
generated from it.

    @dataclasses.dataclass(frozen=True)
    class RolloutOptions:
        rollout_batch_size: int = option(REQUIRED, "Prompts per rollout.")
        rollout_temperature: float = option(1.0, "Sampling temperature, > 0.")
        rollout_stop: list[str] | None = option(None, "Stop strings.")
        rewards_normalization: bool = option(True, "Subtract the group mean.",
        disable_flag="--disable-rewards-normalization")
        rollout_sample_hook_path: list[str] | None = option(None, "Hook, may be repeated.",
        repeat=True)

The flag is the field's name with dashes. The type is read from the annotation: int, float, str,
bool, `X | None`, `list[X]` (several values after one flag; with `repeat=True` one value per
repetition), `dict` (a JSON object). A bool with default False is a switch `--x`; one with default
True needs `disable_flag`, or gets `--no-x`. A class's docstring is the title of its group in
`--help`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


class _Required:
    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED = _Required()


@dataclasses.dataclass(frozen=True)
class OptionInfo:
    """What `option` stores under the key "option" of a dataclass field's metadata."""

    help: str
    choices: tuple[Any, ...] | None = None
    flag: str | None = None
    aliases: tuple[str, ...] = ()
    disable_flag: str | None = None
    repeat: bool = False
    metavar: str | None = None
    required: bool = False


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[Any] | None = None,
    flag: str | None = None,
    aliases: Sequence[str] = (),
    disable_flag: str | None = None,
    repeat: bool = False,
    metavar: str | None = None,
) -> Any:
    """Returns a dataclass field with `default` whose metadata["option"] is an `OptionInfo`. List
    and dict defaults are copied per instance.
    """
    info = OptionInfo(
        help=help,
        choices=tuple(choices) if choices is not None else None,
        flag=flag,
        aliases=tuple(aliases),
        disable_flag=disable_flag,
        repeat=repeat,
        metavar=metavar,
        required=default is REQUIRED,
    )
    metadata = {"option": info}
    if default is REQUIRED:
        return dataclasses.field(default=None, metadata=metadata)
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
