"""The command line: one argparse parser generated from all options, with the layers default < file
< flag kept apart.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from slime.config.compat import apply_compat, off_values
from slime.config.list_text import convert_list_text, is_list_text
from slime.config.megatron import megatron_fields
from slime.config.option import OptionSpec, flag_of
from slime.config.ranges import range_problems
from slime.config.specs import all_specs, convert_text, nearest_names, specs_by_name
from slime.config.synonyms import synonym_hint
from slime.config.yaml_file import read_option_file
from slime.exceptions import ConfigError
from slime.tested_versions import requirement

NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
COMMAND_FLAGS = ("--config", "--print-config", "--dry-run", "--help")


class _NotGiven:
    def __repr__(self) -> str:
        return "NOT_GIVEN"


NOT_GIVEN = _NotGiven()


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """A parsed command line. `args` holds every option; `given` says where a non-default one came
    from.
    """

    args: argparse.Namespace
    given: dict[str, str]
    warnings: tuple[str, ...]
    counts: dict[str, int]
    config: str | None
    print_config: bool
    dry_run: bool
    help_word: str | None


class OptionParser(argparse.ArgumentParser):
    """argparse without abbreviations; every error is a ConfigError that carries all of them.
    Plug-ins may add arguments to it.
    """

    def __init__(self) -> None:
        super().__init__(prog="slime train", allow_abbrev=False, add_help=False)
        self.value_problems: list[str] = []

    def error(self, message: str) -> Any:
        """Raises ConfigError in place of argparse's usage text and exit."""
        raise ConfigError(message[0].upper() + message[1:] + ".")

    def converter(self, spec: OptionSpec) -> Callable[[str], Any]:
        """Returns a text converter for `spec` that collects its errors, so that all of them are
        shown at once.
        """

        def convert(text: str) -> Any:
            try:
                return (
                    convert_list_text(spec, text)
                    if is_list_text(spec, text)
                    else convert_text(spec, text)
                )
            except ValueError as error:
                self.value_problems.append(f"{spec.flag}: {error}")
                return None

        return convert


class _AppendOnce(argparse.Action):
    """Collects the values of a repeatable flag, without adding to a default."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ):
        collected = getattr(namespace, self.dest, None)
        collected = list(collected) if isinstance(collected, list) else []
        setattr(
            namespace, self.dest, [*collected, *(values if isinstance(values, list) else [values])]
        )


def build_parser(specs: Iterable[OptionSpec]) -> OptionParser:
    """Returns a parser with every option in its group; `--config`, `--print-config`, `--dry-run`
    and `--help` stand first.
    """
    parser = OptionParser()
    control = parser.add_argument_group("Command")
    control.add_argument(
        "--config",
        metavar="FILE.yaml",
        help="Read options from a YAML file; flags on the command line win.",
    )
    control.add_argument(
        "--print-config", action="store_true", help="Print the resolved options as YAML and stop."
    )
    control.add_argument(
        "--dry-run",
        action="store_true",
        help="Check and show what would run, then stop before any process starts.",
    )
    control.add_argument(
        "-h",
        "--help",
        nargs="?",
        const="",
        metavar="WORD",
        help="Show the options, or those that match WORD.",
    )
    groups: dict[str, Any] = {}
    for spec in specs:
        group = groups.get(spec.group)
        if group is None:
            group = groups[spec.group] = parser.add_argument_group(spec.group)
        _add_option(group, parser, spec)
    return parser


def _add_option(group: argparse._ArgumentGroup, parser: OptionParser, spec: OptionSpec) -> None:
    common = {
        "dest": spec.name,
        "default": spec.default,
        "help": help_text(spec).replace("%", "%%"),
    }
    if spec.kind is bool and not spec.many:
        if spec.flag:
            group.add_argument(spec.flag, *spec.aliases, action="store_true", **common)
        if spec.off_flag:
            group.add_argument(spec.off_flag, action="store_false", **common)
        return
    common["type"] = parser.converter(spec)
    common["metavar"] = spec.type_name.replace("%", "%%")
    flag = cast(str, spec.flag)  # only a switch may have none
    if spec.repeat:
        group.add_argument(flag, *spec.aliases, action=_AppendOnce, **common)
    elif spec.many:
        group.add_argument(flag, *spec.aliases, nargs="+", **common)
    else:
        group.add_argument(flag, *spec.aliases, **common)


def reset_arg(parser: argparse.ArgumentParser, name: str, **kwargs: Any) -> None:
    """Changes the default of the existing flag `name`, or adds it: upstream's helper for
    `add_custom_arguments`.
    """
    for action in parser._actions:
        if name in action.option_strings:
            if "default" in kwargs:
                # A plug-in's default is a layer below files and flags; actions that share a dest
                # must agree.
                parser.set_defaults(**{action.dest: kwargs["default"]})
            return
    parser.add_argument(name, **kwargs)


def parse_command_line(
    argv: Sequence[str] | None = None, add_custom_arguments: Callable | None = None
) -> CommandLine:
    """Returns the parsed options: defaults, overridden by `--config`, overridden by flags,
    overridden by `--custom-config-path`.

    `add_custom_arguments(parser)` may add plug-in options; a parser it returns is used. Raises
    ConfigError with all unknown flags and keys (each with the nearest known one), all values of a
    wrong type, and all flags that are refused.
    """
    specs = all_specs()
    parser = build_parser(specs)
    if add_custom_arguments is not None:
        parser = add_custom_arguments(parser) or parser
    own_names = {spec.name for spec in specs}
    declared = [flag for action in parser._actions for flag in action.option_strings]
    outcome = apply_compat(_join_negative_numbers(sys.argv[1:] if argv is None else argv), declared)
    problems = [f"{line}" for line in outcome.refused]

    given = argparse.Namespace(**dict.fromkeys(own_names, NOT_GIVEN))
    given, unknown = parser.parse_known_args(list(outcome.words), given)
    problems += parser.value_problems + describe_unknown(unknown, declared)
    plugin = {name: value for name, value in vars(given).items() if name not in own_names}
    control = {flag: plugin.pop(flag[2:].replace("-", "_")) for flag in COMMAND_FLAGS}

    values = {
        **off_values(own_names),
        **{spec.name: parser.get_default(spec.name) for spec in specs},
    }
    sources: dict[str, str] = {}
    flag_values = {
        name: value
        for name, value in vars(given).items()
        if name in own_names and value is not NOT_GIVEN
    }
    flag_values = {
        name: _unwrapped(specs_by_name()[name], value) for name, value in flag_values.items()
    }
    file_other: dict[str, Any] = {}
    warnings = [*outcome.warnings]
    if control["--config"]:
        file = read_option_file(control["--config"], specs_by_name(), plugin_names=plugin)
        problems += file.problems
        problems += [text for name, text in file.masked.items() if name not in flag_values]
        warnings += file.warnings
        values.update(file.known)
        sources.update(dict.fromkeys(file.known, control["--config"]))
        file_other = {
            name: value
            for name, value in file.other.items()
            if plugin[name] == parser.get_default(name)
        }
    values.update(flag_values)
    sources.update(dict.fromkeys(flag_values, "command line"))
    values.update({**plugin, **file_other})
    if values.get("custom_config_path"):
        file = read_option_file(values["custom_config_path"], specs_by_name(), strict=False)
        problems += [*file.problems, *file.masked.values()]
        warnings += file.warnings
        values.update({**file.known, **file.other})
        sources.update(dict.fromkeys([*file.known, *file.other], values["custom_config_path"]))
    if problems and control["--help"] is None:
        problems += range_problems(argparse.Namespace(**values)).values()
        raise ConfigError(join_problems(problems))
    return CommandLine(
        args=argparse.Namespace(**{name: _copied(value) for name, value in values.items()}),
        given=sources,
        warnings=tuple(warnings),
        counts={
            "honoured": len(sources) - len(outcome.mapped),
            "mapped": len(outcome.mapped),
            "ignored": len(outcome.ignored),
        },
        config=control["--config"],
        print_config=control["--print-config"],
        dry_run=control["--dry-run"],
        help_word=control["--help"],
    )


def join_problems(problems: Sequence[str]) -> str:
    """Returns one message: the problem itself when there is one, a numbered list when there are
    several.
    """
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} problems:\n" + "\n".join(
        f"  {number}. {problem}" for number, problem in enumerate(problems, start=1)
    )


def _unwrapped(spec: OptionSpec, value: list[Any]) -> Any:
    """The value of a flag's words: one word is one value where the option takes that, and a list
    written as one word is its items.
    """
    if spec.unwrap and len(value) == 1:
        return value[0]
    if spec.many and not spec.repeat and value is not None:
        return [item for word in value for item in (word if isinstance(word, list) else [word])]
    return value


def _copied(value: object) -> Any:
    return type(value)(value) if isinstance(value, list | dict) else value


def _join_negative_numbers(words: Sequence[str]) -> list[str]:
    """`--x -1e-3` becomes `--x=-1e-3`: argparse would take the number for a flag."""
    joined: list[str] = []
    for word in words:
        if (
            joined
            and NUMBER.fullmatch(word)
            and joined[-1].startswith("--")
            and "=" not in joined[-1]
        ):
            joined[-1] += "=" + word
        else:
            joined.append(word)
    return joined


def describe_unknown(words: Sequence[str], declared: Sequence[str]) -> list[str]:
    """A sentence for each of the words that no option took, with the nearest declared flag."""
    problems, after_flag = [], False
    for word in words:
        if not word.startswith("-") or NUMBER.fullmatch(word):
            if not after_flag:
                problems.append(f"Unexpected word {word!r}: it belongs to no flag.")
            continue
        after_flag = True
        flag = word.split("=")[0]
        near = nearest_names(flag, declared)
        nearest = f"Did you mean {near[0]}?" if near else "`slime train --help` lists all flags."
        problems.append(f"Unknown flag {flag}. {synonym_hint(flag) or nearest}")
    if problems and not megatron_fields():
        problems.append(
            "megatron-core is not installed, so none of its flags is known. pip install "
            f"'{requirement('megatron-core')}'"
        )
    return problems


def help_text(spec: OptionSpec) -> str:
    """Returns the help of one option with its default."""
    return (
        spec.help
        if spec.default is None or spec.kind is bool
        else f"{spec.help} (default: {spec.default})"
    )


def format_help(specs: Iterable[OptionSpec], word: str = "", *, usage: str | None = None) -> str:
    """Returns the help page. Without `word`: all of slime's options, megatron-core's fields only
    counted. With it: what matches. `usage`: the line of another command that takes some of them;
    None: training, with its own switches.
    """
    specs = list(specs)
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    lines = [f"usage: {usage or 'slime train [--config FILE.yaml] [--FLAG VALUE ...]'}", ""]
    if not word and usage is None:
        lines += [
            (
                "Train a language model with reinforcement learning: prompts -> engine -> reward "
                "-> "
                "update."
            ),
            "",
            (
                "  --config FILE.yaml   read options from a file (keys are the flags' names); "
                "flags "
                "win"
            ),
            "  --print-config       print the resolved options as YAML and stop",
            (
                "  --dry-run            check everything, show sizes, layout, prompts and reward, "
                "and "
                "stop"
            ),
            (
                "  --help WORD          only the options that match WORD, e.g. --help kl, --help "
                "megatron"
            ),
        ]
    needle = word.lower().lstrip("-").replace("-", "_")
    chosen = [
        spec
        for spec in specs
        if (
            needle
            and (needle in spec.name or needle in spec.group.lower() or needle in spec.help.lower())
        )
        or (not needle and spec.source == "slime")
    ]
    if not chosen:
        near = nearest_names(needle, [spec.name for spec in specs], count=3)
        lines += [
            f"No option matches {word!r}."
            + (f" Near: {', '.join(flag_of(name) for name in near)}." if near else "")
        ]
    group = None
    for spec in chosen:
        if spec.group != group:
            group = spec.group
            lines += ["", group, "-" * len(group)]
        lines += format_option(spec, width)
    hidden = len(specs) - len(chosen)
    if not word and hidden:
        lines += [
            "",
            (
                f"{hidden} more options are fields of megatron-core's configs: slime train --help "
                "megatron"
            ),
        ]
    return "\n".join(lines) + "\n"


def format_option(spec: OptionSpec, width: int) -> list[str]:
    """Returns the help lines of one option: its flags, type and default, then its sentence."""
    flags = ", ".join(spec.flags)
    if spec.kind is bool and not spec.many:
        state = {True: "default: on", False: "", None: ""}[spec.default]
    else:
        several = " ..." if spec.many and not spec.repeat else ""
        default = (
            "" if spec.default is None or spec.default in ([], {}) else f"default: {spec.default}"
        )
        state = ", ".join(
            filter(None, ["required" if spec.required else default, spec.range_words])
        )
        flags = f"{flags} {spec.type_name}{several}"
        if spec.repeat:
            state = f"{state}, repeatable".lstrip(", ")
    head = f"  {flags}" + (f"  [{state}]" if state else "")
    return [
        head,
        *textwrap.wrap(spec.help, width, initial_indent="      ", subsequent_indent="      "),
    ]
