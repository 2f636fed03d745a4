"""What texts name exists: modules and functions of slime, and the options of rules and derivations.

A rule about a function that was renamed applies to nothing, and a rule about an option that does
not exist is skipped: both in silence.
"""

import ast
import importlib
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
from support.options import write_run_inputs

import slime
from slime.config.cli import parse_command_line
from slime.config.derive import STEPS
from slime.config.rules import RULES
from slime.exceptions import ConfigError
from slime.rollout.fully_async_rollout import generate_rollout_fully_async
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.arguments import parse_args

NUM_GPUS = 0

ROOT = Path(slime.__file__).parents[1]
DOTTED = re.compile(r"(?<![\w./@-])slime(?:\.[A-Za-z_]\w*)+(?![\w/]|\.\w)")


def names_of_texts():
    """(file, dotted name) of every string of slime's code and of every page of docs/."""
    for path in sorted((ROOT / "slime").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from ((path.relative_to(ROOT), name) for name in DOTTED.findall(node.value))
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        yield from (
            (path.relative_to(ROOT), name)
            for name in DOTTED.findall(path.read_text(encoding="utf-8"))
        )


def exists(dotted):
    """Whether `dotted` is a module, or an attribute of the longest part of it that is one."""
    words = dotted.split(".")
    for length in range(len(words), 0, -1):
        try:
            found = importlib.import_module(".".join(words[:length]))
        except ModuleNotFoundError:
            continue
        for word in words[length:]:
            if not hasattr(found, word):
                return False
            found = getattr(found, word)
        return True
    return False


def test_every_module_and_function_that_a_text_names_is_there():
    """Rules, defaults of options, tables of places, messages and docs name code by its
    dotted path.
    """
    named = {}
    for place, name in names_of_texts():
        named.setdefault(name, place)
    assert len(named) > 20
    assert {name: str(place) for name, place in named.items() if not exists(name)} == {}


def test_the_search_finds_what_is_missing():
    """A module, a function, a method."""
    assert exists("slime.config.rules.broken_rules") and exists("slime.utils.types.Sample.to_dict")
    assert not exists("slime.rollout.fully_async_rollout.generate_rollout") and not exists(
        "slime.no_module"
    )
    assert DOTTED.findall(
        "see slime.a.b, slime.c() and slime.d. Not myslime.e, slime/f.py or slime-g.h"
    ) == ["slime.a.b", "slime.c", "slime.d"]


def test_rules_and_derivations_read_options_that_exist():
    """One that reads another name is skipped wherever the name is missing: on every
    command line.
    """
    known, unknown = set(vars(parse_command_line([]).args)), {}
    for reads, function in STEPS:
        unknown[function.__name__] = reads - known
    for reads, function in RULES:
        unknown[function.__name__] = reads - known
    assert {name: sorted(missing) for name, missing in unknown.items() if missing} == {}


@pytest.mark.parametrize("function", [generate_rollout, generate_rollout_fully_async])
def test_the_needs_of_a_rollout_function_are_checked_under_the_name_that_it_has(tmp_path, function):
    """The functions themselves, so that a rule that spells another name fails:
    responses must end.
    """
    line = write_run_inputs(tmp_path)
    index = line.index("--rollout-max-response-len")
    without = [
        *line[:index],
        *line[index + 2 :],
        "--rollout-function-path",
        f"{function.__module__}.{function.__qualname__}",
    ]
    with pytest.raises(ConfigError, match="--rollout-max-response-len is missing"):
        parse_args(without)


def test_the_fully_async_rollout_function_refuses_an_order_that_it_cannot_keep(tmp_path):
    """Its batches are filled in the order of completion."""
    path = f"{generate_rollout_fully_async.__module__}.{generate_rollout_fully_async.__qualname__}"
    line = [*write_run_inputs(tmp_path), "--rollout-function-path", path]
    assert parse_args(line).rollout_batch_order == "completion"
    with pytest.raises(ConfigError, match="--rollout-batch-order"):
        parse_args([*line, "--rollout-batch-order", "submission"])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
