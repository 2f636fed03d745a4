"""`--config FILE.yaml` and its inverse: reads option values with file and line in every error,
writes them back.

Each scalar is read by the *option's* type, not by YAML's guess: `lr: 1e-6` is a number, `name: off`
is text, `steps: "5"` is an error because it is quoted text. PyYAML is imported on first use.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import re
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.config.compat import FlagStatus, compat_flags
from slime.config.derive import VOLATILE
from slime.config.list_text import convert_list_text, is_list_text
from slime.config.option import OptionSpec, flag_of
from slime.config.ranges import range_problem
from slime.config.regular_files import read_regular
from slime.config.secrets import SECRET, is_masked, without_secrets
from slime.config.specs import all_specs, convert_text, nearest_names, require_choice, specs_by_name
from slime.config.synonyms import synonym_hint
from slime.exceptions import ConfigError
from slime.files import atomic

if TYPE_CHECKING:
    import yaml

DERIVED = "derived"
NULL_WORDS = ("", "~", "null", "Null", "NULL")


@dataclasses.dataclass(frozen=True)
class FileValues:
    """What a YAML file says: known options by name, other keys by name, every problem found, each
    with file and line, and the keys that are accepted without effect, each with the reason.
    `masked`: by name the problem of a value in which a key or password is missing.
    """

    known: dict[str, Any]
    other: dict[str, Any]
    problems: list[str]
    warnings: list[str] = dataclasses.field(default_factory=list)
    masked: dict[str, str] = dataclasses.field(default_factory=dict)


def read_option_file(
    path: str,
    specs: Mapping[str, OptionSpec],
    *,
    plugin_names: Iterable[str] = (),
    strict: bool = True,
) -> FileValues:
    """Returns the options in YAML file `path`, converted and checked by `specs`.

    Keys may use dashes or underscores. Keys in `plugin_names` (and, unless `strict`, all unknown
    keys) keep YAML's own value. Raises ConfigError when the file cannot be read or is not YAML;
    other problems are collected in the result.
    """
    import yaml

    try:
        text = read_regular(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read {path}: {error}.{_siblings_hint(path)}") from error
    try:
        root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else path
        raise ConfigError(
            f"{where}: not YAML: {getattr(error, 'problem', None) or error}."
        ) from error
    found = FileValues({}, {}, [])
    if root is None:
        return found
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(
            f"{path}:{root.start_mark.line + 1}: expected `option: value` lines, found a {root.id}."
        )
    reader = _Reader(path, yaml)
    seen: dict[str, int] = {}
    for key_node, value_node in root.value:
        line = key_node.start_mark.line + 1
        key = str(key_node.value).strip()
        name = key.replace("-", "_")
        if name in seen:
            found.problems.append(
                f"{path}:{line}: {key!r} is given twice (first on line {seen[name]})."
            )
            continue
        seen[name] = line
        if name == DERIVED:
            continue
        try:
            if name in specs:
                found.known[name] = reader.value(specs[name], value_node)
            elif name in plugin_names or not strict:
                found.other[name] = reader.plain(value_node)
            elif (
                flag := compat_flags().get("--" + name.replace("_", "-"))
            ) and flag.status is FlagStatus.IGNORED:
                found.warnings.append(f"{path}:{line}: {key} is ignored: {flag.reason}.")
            else:
                near = nearest_names(name, [*specs, *plugin_names])
                nearest = (
                    f"Did you mean {near[0]!r}?"
                    if near
                    else "`slime train --help` lists all options."
                )
                found.problems.append(
                    f"{path}:{line}: unknown key {key!r}. {synonym_hint(name) or nearest}"
                )
        except ValueError as error:
            found.problems.append(f"{path}:{line}: {key}: {error}")
            continue
        if is_masked(found.known.get(name, found.other.get(name))):
            found.masked[name] = (
                f"{path}:{line}: {key} has {SECRET} in place of a key or password, which is never "
                f"written down. Give the whole value with {flag_of(name)}."
            )
    return found


class _Reader:
    """Turns YAML nodes into option values; errors are ValueErrors without position, the caller
    knows the line.
    """

    def __init__(self, path: str, yaml_module: types.ModuleType) -> None:
        self.path = path
        self.yaml = yaml_module

    def plain(self, node: yaml.Node) -> Any:
        loader = self.yaml.SafeLoader("")
        try:
            return loader.construct_object(node, deep=True)
        except self.yaml.YAMLError as error:
            raise ValueError(str(error).splitlines()[0]) from error
        finally:
            loader.dispose()

    def value(self, spec: OptionSpec, node: yaml.Node) -> Any:
        yaml = self.yaml
        if isinstance(node, yaml.ScalarNode) and node.style is None and node.value in NULL_WORDS:
            if not spec.optional:
                raise ValueError(
                    f"has no value; it needs {spec.type_name}, the default is {spec.default!r}."
                )
            return None
        if isinstance(node, yaml.ScalarNode) and is_list_text(spec, node.value):
            return convert_list_text(spec, node.value)
        if spec.unwrap and isinstance(node, yaml.ScalarNode):
            return self.scalar(spec, node)
        if spec.many:
            if not isinstance(node, yaml.SequenceNode):
                raise ValueError(f"must be a list, for instance [{_example(spec)}].")
            return [self.scalar(spec, item) for item in node.value]
        return self.scalar(spec, node)

    def scalar(self, spec: OptionSpec, node: Any) -> Any:
        yaml = self.yaml
        if spec.kind is dict and isinstance(node, yaml.MappingNode):
            return self.plain(node)
        if not isinstance(node, yaml.ScalarNode):
            raise ValueError(f"must be one {spec.type_name}, not a {node.id}.")
        is_quoted = node.style is not None
        if spec.kind in (int, float, bool):
            if is_quoted:
                raise ValueError(f"must be {spec.type_name}, not quoted text {node.value!r}.")
            if spec.kind is float and node.value.lower() in (".inf", "+.inf", "-.inf"):
                return float(node.value.lower().replace(".", ""))
            if spec.kind is bool and node.value in ("0", "1"):
                raise ValueError(f"{node.value!r} is not true or false.")
        return require_choice(spec, convert_text(spec, node.value))


def _example(spec: OptionSpec) -> str:
    return {int: "1, 2", float: "0.5, 1.0", bool: "true, false", dict: "{}", str: "a, b"}[spec.kind]


def _siblings_hint(path: str) -> str:
    folder = Path(path).parent
    if not folder.is_dir():
        return f" There is no folder {folder}."
    near = nearest_names(Path(path).name, sorted(entry.name for entry in folder.iterdir()), count=3)
    return f" In {folder} there is: {', '.join(near)}." if near else ""


def resolved_values(args: argparse.Namespace, specs: Iterable[OptionSpec]) -> dict[str, Any]:
    """Returns what a resolved configuration records: every option of `args` except those that are
    None by default and still are.

    For derived values what was asked for: a flag beside the file must reach what follows from it
    (--eps-clip the upper bound, --dump-details the paths of the dumps, --hf-checkpoint the shape of
    the model).
    """
    requested = vars(args).get("as_requested", {})
    values = {}
    for spec in specs:
        value = requested.get(spec.name, getattr(args, spec.name))
        if value is None and spec.default is None:
            continue
        values[spec.name] = value
    return values


def derived_values(args: argparse.Namespace, specs: Iterable[OptionSpec]) -> dict[str, Any]:
    """Returns the options that follow from others, as they came out. Not those that follow from the
    disk or the clock, and no secrets.
    """
    requested = vars(args).get("as_requested", {})
    names = (
        spec.name
        for spec in specs
        if spec.name in requested and spec.name not in VOLATILE and not spec.is_secret
    )
    return {name: getattr(args, name) for name in names if getattr(args, name) != requested[name]}


def format_resolved(args: argparse.Namespace, specs: Iterable[OptionSpec]) -> str:
    """Returns the options of `args` as YAML under one comment per group. Read back with --config it
    gives the same options.

    Of an option that is a secret a comment says that a value was there. Keys and passwords inside
    of other values (URLs, environments) are replaced; such a value is refused when it is read.
    """
    specs = list(specs)
    values = resolved_values(args, specs)
    lines = [
        (
            "# Resolved options of slime. Use: slime train --config THIS_FILE (flags on the "
            "command "
            "line win)."
        )
    ]
    group = None
    for spec in specs:
        if spec.name not in values:
            continue
        if spec.group != group:
            group = spec.group
            lines += ["", f"# {group}"]
        value = values[spec.name]
        if spec.is_secret and value:
            lines.append(f"# {spec.name}: (a secret, not written)")
        else:
            lines.append(format_entry(spec, without_secrets(value)))
    derived = derived_values(args, specs)
    if derived:
        lines += [
            "",
            "# What followed from them. A run from this file does not read it: it follows anew.",
            f"{DERIVED}:",
        ]
        lines += [
            f"  {format_entry(spec, without_secrets(derived[spec.name]))}"
            for spec in specs
            if spec.name in derived
        ]
    return "\n".join(lines) + "\n"


def format_entry(spec: OptionSpec, value: object) -> str:
    """Returns one `name: value` line. Text is written as JSON where YAML would read
    something else.
    """
    return f"{spec.name}: {_format_value(spec, value)}"


def _format_value(spec: OptionSpec, value: object) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_format_value(spec, item) for item in value) + "]"
    if isinstance(value, str):
        is_simple = (
            re.fullmatch(r"[A-Za-z_/][\w./+-]*", value, re.ASCII) and value not in NULL_WORDS
        )
        return value if is_simple else _quoted(value)
    return _format_plain(value)


def _format_plain(value: object) -> str:
    """Returns a value in YAML that reads back as itself without knowing an option's type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        text = {float("inf"): ".inf", float("-inf"): "-.inf"}.get(value, repr(value))
        # YAML 1.1 reads 1e-06 as text: a float needs its point.
        return text if "." in text else text.replace("e", ".0e")
    if isinstance(value, int):
        return str(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_format_plain(item) for item in value) + "]"
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(
                f"{_quoted(str(key))}: {_format_plain(item)}" for key, item in value.items()
            )
            + "}"
        )
    return _quoted(str(value))


def _quoted(text: str) -> str:
    # JSON's escapes are YAML's, except for surrogate pairs: characters beyond 16 bits stay as they
    # are.
    return (
        '"' + "".join(char if ord(char) > 0xFFFF else json.dumps(char)[1:-1] for char in text) + '"'
    )


def write_resolved_config(args: argparse.Namespace, path: str | os.PathLike) -> None:
    """Writes `format_resolved(args)` to `path` at once: a reader sees the whole file or none."""
    # only the owner may read it: an option's value can be private
    atomic.write_text(path, format_resolved(args, all_specs()), mode=0o600)


def parse_megatron_role_args(args: argparse.Namespace, path: str, role: str) -> argparse.Namespace:
    """Returns a copy of `args` with the overrides that YAML file `path` has for `role`: `megatron:
    [{role: ..., overrides: {...}}]`.

    Raises ConfigError for a file of another form, an unknown option, or a value of a wrong type,
    each with its place.
    """
    import yaml

    try:
        content = yaml.safe_load(read_regular(path))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from error
    entries = content.get("megatron") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: expected `megatron:` with a list of {{role, overrides}}.")
    result = copy.copy(args)
    for entry in entries:
        if not isinstance(entry, dict) or set(entry) - {"role", "overrides"} or "role" not in entry:
            raise ConfigError(
                f"{path}: an entry of `megatron` must have the keys role and overrides, got "
                f"{entry!r}."
            )
        if entry["role"] == role:
            for name, value in (entry.get("overrides") or {}).items():
                setattr(result, name, _role_value(path, role, name, value))
    return result


def _role_value(path: str, role: str, name: str, value: object) -> Any:
    specs = specs_by_name()
    if name not in specs:
        near = nearest_names(name, specs)
        raise ConfigError(
            f"{path}: role {role}: unknown option {name!r}."
            + (f" Did you mean {near[0]!r}?" if near else "")
        )
    spec = specs[name]
    # YAML reads 1e-6 as text, and 1 where 1.0 is meant.
    if spec.kind is float and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            value = float(value)
        except ValueError:
            pass
    items = value if spec.many and isinstance(value, list) else [value]
    if not (value is None and spec.optional) and not all(type(item) is spec.kind for item in items):
        raise ConfigError(
            f"{path}: role {role}: {flag_of(name)} is {value!r}, must be {spec.type_name}."
        )
    try:
        for item in items:
            require_choice(spec, item)
    except ValueError as error:
        raise ConfigError(f"{path}: role {role}: {flag_of(name)}: {error}") from error
    if (problem := range_problem(spec, value)) is not None:
        raise ConfigError(f"{path}: role {role}: {flag_of(name)} {problem}")
    return value
