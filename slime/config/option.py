"""`option(...)`: how an option is declared, once. Command line, YAML keys, help and docs are
generated from it.

    @dataclasses.dataclass(frozen=True)
    class RolloutOptions:
        rollout_batch_size: int = option(REQUIRED, "Prompts per rollout.")
        rollout_temperature: float = option(1.0, "Sampling temperature.", above=0)
        rollout_stop: list[str] | None = option(None, "Stop strings.")
        rewards_normalization: bool = option(True, "Subtract the group mean.",
        disable_flag="--disable-rewards-normalization")
        rollout_sample_hook_path: list[str] | None = option(None, "Hook, may be repeated.",
        repeat=True)

The flag is the field's name with dashes. The type is read from the annotation: int, float, str,
bool, `X | None`, `list[X]` (several values after one flag; with `repeat=True` one value per
repetition), `dict` (a JSON object). A bool with default False is a switch `--x`; one with default
True needs `disable_flag`, or gets `--no-x`. A number states its range here (`Range`);
checks, help and docs read it. None, where a type allows it, is outside the range and always right.
A class's docstring is the title of its group in `--help`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any


class _Required:
    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED = _Required()

# Seconds. What Python's threads and sockets can wait for ends at about 9.2e9.
LONGEST_WAIT = 1e9

SECRET_NAME = re.compile(
    r"(^|_)(api_key|secret|password|passwd|auth_token|access_token|hf_token)(_|$)|^wandb_key$"
)


@dataclasses.dataclass(frozen=True)
class Range:
    """The values that a number may have: at least `minimum`, above `above`, at most `maximum`, below
    `below`, and those of `also`.

    A whole number fits into 64 bits; a float is finite, but where `infinite` allows it to be
    without an upper end. `note`: why, for the error message.
    """

    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    also: tuple[float, ...] = ()
    infinite: bool = False
    note: str | None = None

    def holds(self, value: float) -> bool:
        """Whether `value` may be given."""
        if value in self.also:
            return True
        lower = (self.minimum is None or value >= self.minimum) and (
            self.above is None or value > self.above
        )
        upper = (self.maximum is None or value <= self.maximum) and (
            self.below is None or value < self.below
        )
        return lower and upper and self._is_storable(value)

    def _is_storable(self, value: float) -> bool:
        if isinstance(value, int):
            return -(2**63) <= value < 2**63
        return math.isfinite(value) or (self.infinite and value == math.inf)

    @property
    def words(self) -> str:
        """The range as one writes it: ">= 1", "> 0", "in (0, 1]", ">= 1 or -1"; "" without ends."""
        low = self.minimum if self.above is None else self.above
        high = self.maximum if self.below is None else self.below
        if low is None and high is None:
            return ""
        if low is None:
            text = f"{'<=' if self.below is None else '<'} {_number(high)}"
        elif high is None:
            text = f"{'>=' if self.above is None else '>'} {_number(low)}"
        else:
            brackets = ("[" if self.above is None else "(", "]" if self.below is None else ")")
            text = f"in {brackets[0]}{_number(low)}, {_number(high)}{brackets[1]}"
        return " or ".join([text, *map(_number, self.also)])

    def requirement(self, value: float) -> str:
        """What `value`, which does not hold, would have to be."""
        if self._is_storable(value):
            return self.words
        general = "within 64 bits" if isinstance(value, int) else "finite"
        return f"{general} and {self.words}" if self.words else general

    def nearest(self, value: float) -> float | None:
        """A value that holds, near to `value`; None where there is no end to go to."""
        candidates = [self.minimum, self.maximum]
        if self.above is not None:
            candidates.append(self.above + 1)
        if self.below is not None and self.minimum is None:
            candidates.append(self.below - 1)
        fitting = [end for end in candidates if end is not None and self.holds(end)]
        return min(fitting, key=lambda end: abs(end - value)) if fitting else None


def _number(value: float | None) -> str:
    """A number as one types it: 1e9, 0.5, 70000."""
    return f"{value:g}".replace("e+0", "e") if isinstance(value, float) else str(value)


@dataclasses.dataclass(frozen=True)
class OptionInfo:
    """What `option` stores under the key "option" of a dataclass field's metadata."""

    help: str
    choices: Collection[Any] | None = None
    flag: str | None = None
    aliases: tuple[str, ...] = ()
    disable_flag: str | None = None
    repeat: bool = False
    metavar: str | None = None
    required: bool = False
    range: Range = Range()


def option(
    default: object,
    help: str,
    *,
    choices: Collection[Any] | None = None,
    flag: str | None = None,
    aliases: Sequence[str] = (),
    disable_flag: str | None = None,
    repeat: bool = False,
    metavar: str | None = None,
    **limits: Any,
) -> Any:
    """Returns a dataclass field with `default` whose metadata["option"] is an `OptionInfo`. List
    and dict defaults are copied per instance. `limits` are the fields of a number's `Range`. A
    mapping of `choices` is asked when a value is checked: what is added to it can be chosen.
    """
    info = OptionInfo(
        help=help,
        choices=choices if choices is None or isinstance(choices, Mapping) else tuple(choices),
        flag=flag,
        aliases=tuple(aliases),
        disable_flag=disable_flag,
        repeat=repeat,
        metavar=metavar,
        required=default is REQUIRED,
        range=Range(**limits),
    )
    metadata = {"option": info}
    if default is REQUIRED:
        return dataclasses.field(default=None, metadata=metadata)
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class OptionSpec:
    """One option, in the form that the command line, YAML files, help and docs are generated from.

    `kind` is int, float, str, bool or dict; `many` says that the value is a list of `kind`;
    `optional` that None is a legal value; `unwrap` that a list of one is that one value. A bool has
    `off_flag` (sets False) and, when it is off or undecided by default, `flag` (sets True).
    """

    name: str
    kind: type
    default: Any
    help: str
    group: str
    flag: str | None
    off_flag: str | None = None
    aliases: tuple[str, ...] = ()
    many: bool = False
    repeat: bool = False
    unwrap: bool = False
    optional: bool = False
    choices: Collection[Any] | None = None
    metavar: str | None = None
    required: bool = False
    range: Range | None = None  # of a number that slime declares
    source: str = "slime"

    @property
    def flags(self) -> tuple[str, ...]:
        """Every spelling that the command line accepts."""
        return tuple(flag for flag in (self.flag, self.off_flag, *self.aliases) if flag)

    @property
    def is_secret(self) -> bool:
        """Whether the value must never be written to a file or a log."""
        return self.kind is str and bool(SECRET_NAME.search(self.name))

    @property
    def type_name(self) -> str:
        """The type in a reader's words, for help and errors."""
        if self.choices is not None:
            inner = "{" + ",".join(str(choice) for choice in self.choices) + "}"
        else:
            inner = {int: "INT", float: "FLOAT", str: "TEXT", bool: "BOOL", dict: "JSON"}[self.kind]
        return self.metavar or inner

    @property
    def range_words(self) -> str:
        """The range of a number as one writes it; "" where it has no ends."""
        return self.range.words if self.range is not None else ""


def flag_of(name: str) -> str:
    """`rollout_batch_size` -> `--rollout-batch-size`."""
    return "--" + name.replace("_", "-")
