"""Reads the option dataclasses into one flat list of `OptionSpec`, and converts text to an option's
type.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import json
import math
import re
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from slime.config import CONCERNS
from slime.config.megatron import megatron_specs
from slime.config.option import OptionInfo, OptionSpec, flag_of
from slime.exceptions import ConfigError

SCALAR_KINDS = (int, float, str, bool, dict)
INT_TEXT = re.compile(r"[+-]?\d+(_\d+)*")


def read_annotation(annotation: object) -> tuple[type, bool, bool, tuple[Any, ...] | None]:
    """Returns (kind, many, optional, choices) of a type annotation. Raises TypeError for a type no
    command line can express.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not type(None)]
        if len(inner) != 1:
            raise TypeError(f"an option cannot be {annotation}: one type and None at most")
        kind, many, _, choices = read_annotation(inner[0])
        return kind, many, len(inner) < len(arguments), choices
    if origin is typing.Literal:
        return type(arguments[0]), False, False, tuple(arguments)
    if origin in (list, tuple, typing.Sequence) or origin is Sequence:
        kind, _, _, choices = read_annotation(arguments[0])
        return kind, True, False, choices
    if origin is dict or annotation is dict:
        return dict, False, False, None
    if annotation in SCALAR_KINDS:
        return annotation, False, False, None
    if annotation is list:
        return str, True, False, None
    raise TypeError(
        f"an option cannot be {annotation}: use int, float, str, bool, dict, list[...] or X | None"
    )


def specs_of_dataclass(cls: type) -> list[OptionSpec]:
    """Returns one spec per field of an option dataclass. Raises TypeError for a field without
    `option(...)` or with a foreign type.
    """
    group = (cls.__doc__ or cls.__name__).strip().splitlines()[0].rstrip(".")
    hints = typing.get_type_hints(cls)
    return [
        _spec_of_field(cls, field, hints[field.name], group) for field in dataclasses.fields(cls)
    ]


def _spec_of_field(
    cls: type, field: dataclasses.Field, annotation: object, group: str
) -> OptionSpec:
    info = field.metadata.get("option")
    if not isinstance(info, OptionInfo):
        raise TypeError(f"{cls.__name__}.{field.name} is not declared with option(...)")
    try:
        kind, many, optional, choices = read_annotation(annotation)
    except TypeError as error:
        raise TypeError(f"{cls.__name__}.{field.name}: {error}") from error
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    flag: str | None
    off_flag: str | None
    flag, off_flag = info.flag or flag_of(field.name), info.disable_flag
    if kind is bool and not many:
        if default is True:
            flag, off_flag = info.flag, off_flag or "--no-" + flag_of(field.name)[2:]
        elif default is None and off_flag is None:
            off_flag = "--no-" + flag_of(field.name)[2:]
    return OptionSpec(
        name=field.name,
        kind=kind,
        default=default,
        help=info.help,
        group=group,
        flag=flag,
        off_flag=off_flag,
        aliases=info.aliases,
        many=many,
        repeat=info.repeat,
        optional=optional or default is None,
        choices=info.choices or choices,
        metavar=info.metavar,
        required=info.required,
        range=info.range if kind in (int, float) else None,
    )


def option_classes(concerns: Iterable[str] = CONCERNS) -> list[type]:
    """Returns the option dataclasses of `slime/config/<concern>.py` in order of declaration."""
    classes = []
    for concern in concerns:
        module = importlib.import_module(f"slime.config.{concern}")
        for value in vars(module).values():
            if (
                isinstance(value, type)
                and dataclasses.is_dataclass(value)
                and value.__module__ == module.__name__
            ):
                if any("option" in field.metadata for field in dataclasses.fields(value)):
                    classes.append(value)
    return classes


def slime_specs() -> list[OptionSpec]:
    """Returns the specs of all option dataclasses of slime. Raises ConfigError when two of them
    claim one name or flag.
    """
    specs = [spec for cls in option_classes() for spec in specs_of_dataclass(cls)]
    require_unique(specs)
    return specs


def require_unique(specs: Iterable[OptionSpec]) -> None:
    """Raises ConfigError that names every option name and flag which is declared twice, with the
    groups that declare it.
    """
    owners: dict[str, str] = {}
    clashes = []
    for spec in specs:
        for word in (spec.name, *spec.flags):
            if word in owners:
                clashes.append(f"{word} is declared in '{owners[word]}' and in '{spec.group}'")
            owners[word] = spec.group
    if clashes:
        raise ConfigError("Options declared twice:\n  " + "\n  ".join(clashes))


@functools.lru_cache(maxsize=1)
def all_specs() -> tuple[OptionSpec, ...]:
    """Returns every option: slime's dataclasses, then Megatron's own. Megatron's configs are read
    from source, torch is not imported.
    """
    own = slime_specs()
    specs = own + megatron_specs(
        taken=frozenset(word for spec in own for word in (spec.name, *spec.flags))
    )
    require_unique(specs)
    return tuple(specs)


@functools.lru_cache(maxsize=1)
def specs_by_name() -> dict[str, OptionSpec]:
    """Returns every option by its name in the namespace."""
    return {spec.name: spec for spec in all_specs()}


def nearest_names(word: str, names: Iterable[str], *, count: int = 1) -> list[str]:
    """Returns the names most like `word`, the best first, judged without regard to case, dashes and
    underscores.
    """

    def plain(text: str) -> str:
        return text.lower().lstrip("-").replace("-", "_")

    by_plain: dict[str, str] = {}
    for name in names:
        by_plain.setdefault(plain(name), name)
    target = plain(word)
    if target in by_plain:
        return [by_plain[target]]
    close = difflib.get_close_matches(target, by_plain, n=max(count, 5), cutoff=0.6)
    # two letters that changed places: "gpro" is grpo
    close.sort(key=lambda match: sorted(match) != sorted(target))
    return [by_plain[match] for match in close[:count]]


def convert_text(spec: OptionSpec, text: str) -> Any:
    """Returns one value of `spec` from its text. Raises ValueError that says what is wrong and what
    would be right.
    """
    value = _convert_scalar(spec.kind, text)
    return require_choice(spec, value)


def require_choice(spec: OptionSpec, value: object) -> Any:
    """Returns `value` when it is among the choices of `spec`. Raises ValueError with the choices
    otherwise.
    """
    if spec.choices is not None and value is not None and value not in spec.choices:
        near = nearest_names(str(value), [str(choice) for choice in spec.choices])
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"{value!r} is not one of {', '.join(str(choice) for choice in spec.choices)}.{hint}"
        )
    return value


def _convert_scalar(kind: type, text: str) -> Any:
    if kind is int:
        return _convert_int(text)
    if kind is float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a number.") from None
        if math.isnan(value):
            raise ValueError("NaN is not a usable number.")
        return value
    if kind is bool:
        words = {
            "true": True,
            "yes": True,
            "on": True,
            "1": True,
            "false": False,
            "no": False,
            "off": False,
            "0": False,
        }
        if text.lower() not in words:
            raise ValueError(f"{text!r} is not true or false.")
        return words[text.lower()]
    if kind is dict:
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{text!r} is not JSON ({error.msg} at character {error.pos})."
            ) from None
        if not isinstance(value, dict):
            raise ValueError(f'{text!r} is not a JSON object; write it like {{"key": value}}.')
        return value
    return text


def _convert_int(text: str) -> int:
    if INT_TEXT.fullmatch(text):
        return int(text)
    try:
        as_float = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number.") from None
    hint = (
        f" Write {int(as_float)}." if math.isfinite(as_float) and as_float == int(as_float) else ""
    )
    raise ValueError(f"{text!r} is not a whole number.{hint}")
