"""The range of a number is stated at its option; command line, --config, help, docs and errors have it from there."""

import argparse
import dataclasses
import math
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
from support.options import write_run_inputs

from slime.config.cli import format_option
from slime.config.option import LONGEST_WAIT, Range, flag_of, option
from slime.config.ranges import range_problem, range_problems
from slime.config.rules import broken_rules
from slime.config.rules.registry import nearest_divisors
from slime.config.specs import slime_specs, specs_by_name, specs_of_dataclass
from slime.exceptions import ConfigError
from slime.prompts.eval_config import EvalDatasetConfig
from slime.utils.arguments import parse_args, parse_megatron_role_args

NUM_GPUS = 0

NUMBERS = [spec for spec in slime_specs() if spec.kind in (int, float) and spec.choices is None]
FLOATS = [spec for spec in NUMBERS if spec.kind is float]
WHOLE = [spec for spec in NUMBERS if spec.kind is int]
HUGE = 10**30


@dataclasses.dataclass(frozen=True)
class Sample:
    """Numbers."""

    free: float = option(1.0, "Any.")
    count: int | None = option(None, "One or more.", minimum=1)
    share: float = option(0.5, "A share.", above=0, maximum=1, note="it is a share")
    margin: float | None = option(None, "Less than all.", minimum=0, below=1)
    clip: float | None = option(None, "A bound.", minimum=0, infinite=True)
    top: int = option(-1, "Of all.", minimum=1, also=(-1,))
    ids: list[int] | None = option(None, "Ids.", minimum=0)
    name: str = option("1", "No number.")


SPECS = {spec.name: spec for spec in specs_of_dataclass(Sample)}


@pytest.mark.parametrize(
    ("name", "words", "good", "bad"),
    [
        ("free", "", [-1e300, 0, 1e300], [math.inf, -math.inf, math.nan]),
        ("count", ">= 1", [1, 2**63 - 1, None, True], [0, -1, 2**63, HUGE]),
        ("share", "in (0, 1]", [1e-300, 1, 1.0], [0, -0.0, 1.0000001, math.nan, math.inf]),
        ("margin", "in [0, 1)", [0, 0.999, None], [1, -1e-9]),
        ("clip", ">= 0", [0.0, math.inf], [-math.inf, math.nan, -1.0]),
        ("top", ">= 1 or -1", [-1, 1], [0, -2]),
        ("ids", ">= 0", [[], [0, 5], None], [[3, -1]]),
        ("name", "", ["x", None], []),
    ],
)
def test_a_range_is_its_words(name, words, good, bad):
    """Ends that belong to it, ends that do not, values beside it; None and what is no number are not its business."""
    spec = SPECS[name]
    assert spec.range_words == words
    assert [value for value in good if range_problem(spec, value) is not None] == []
    assert [value for value in bad if range_problem(spec, value) is None] == []


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("count", 0, "must be >= 1, it is 0. Use 1."),
        ("share", 2.0, "must be in (0, 1], it is 2.0: it is a share. Use 0.5."),
        ("margin", 1.5, "must be in [0, 1), it is 1.5. Use 0.0."),
        ("margin", math.nan, "must be finite and in [0, 1), it is nan. Use 0.0."),
        ("free", math.inf, "must be finite, it is inf. Use 1.0."),
        ("top", 0, "must be >= 1 or -1, it is 0. Use -1."),
        ("ids", [1, -2], "must be >= 0, it is -2. Use 0."),
        ("count", HUGE, f"must be within 64 bits and >= 1, it is {HUGE}. Use 1."),
    ],
)
def test_an_error_says_range_value_and_one_that_works(name, value, sentence):
    """The default where there is one."""
    assert range_problem(SPECS[name], value) == sentence


def test_help_and_docs_show_the_range():
    """Both from the option."""
    assert format_option(SPECS["share"], 100)[0] == "  --share FLOAT  [default: 0.5, in (0, 1]]"
    assert format_option(SPECS["count"], 100)[0] == "  --count INT  [>= 1]"
    page = (Path(__file__).resolve().parents[2] / "docs" / "flags.md").read_text(encoding="utf-8")
    assert "| `--rollout-top-p` | FLOAT in (0, 1] | `1.0` |" in page
    assert "| `--rollout-top-k` | INT >= 1 or -1 | `-1` |" in page


def test_every_default_is_in_its_range_and_every_number_has_one():
    """A default out of range would refuse a command line that does not mention it."""
    assert len(NUMBERS) > 100
    for spec in NUMBERS:
        assert isinstance(spec.range, Range), spec.name
        assert range_problem(spec, spec.default) is None, spec.name
        assert not re.search(r"[(\[]\d, \d[)\]]|[<>]=? ?\d", spec.help), (
            f"{spec.name}: help says the range again"
        )


@pytest.mark.parametrize("value", [-1, 0, -HUGE, HUGE, math.nan, math.inf, -math.inf])
def test_the_value_that_an_error_names_works(value):
    """For every option and hostile value: advice that is refused in turn is none."""
    for spec in NUMBERS:
        hostile = value if spec.kind is int else float(value)
        if spec.kind is int and not isinstance(value, int):
            continue
        problem = range_problem(spec, hostile)
        if problem is not None and (advised := re.search(r"Use (\S+)\.$", problem)):
            assert range_problem(spec, spec.kind(advised[1])) is None, (spec.name, problem)
        if problem is not None and spec.range.words:
            assert advised, (spec.name, problem)


def refused(words):
    """{flag: sentence} of all problems of a command line that begin with a flag."""
    with pytest.raises(ConfigError) as caught:
        parse_args(words)
    lines = re.sub(r"(?m)^ *\d+\. ", "", str(caught.value)).splitlines()
    return {
        match[1]: line
        for line in lines
        if (match := re.match(r"(?:\S+:\d+: )?(?:--)?([a-z][a-z0-9_-]*):? ", line))
    }


def given_in(way, folder, specs, text):
    """A command line that gives every one of `specs` the value `text`: as flags, or in a file."""
    words = write_run_inputs(folder)
    names = {flag_of(spec.name) for spec in specs}
    words = [
        word
        for index, word in enumerate(words)
        if word not in names and (index == 0 or words[index - 1] not in names)
    ]
    if way == "flags":
        return [*words, *(f"{flag_of(spec.name)}={text}" for spec in specs)]
    lines = (f"{spec.name}: {f'[{text}]' if spec.many else text}\n" for spec in specs)
    (folder / "own.yaml").write_text("".join(lines))
    return [*words, "--config", str(folder / "own.yaml")]


@pytest.mark.parametrize("way", ["flags", "file"])
@pytest.mark.parametrize(
    ("text", "specs", "is_wrong"),
    [
        ("nan", NUMBERS, lambda spec: True),
        ("true", NUMBERS, lambda spec: True),
        ("inf", FLOATS, lambda spec: not spec.range.infinite),
        ("1e999", FLOATS, lambda spec: not spec.range.infinite),
        ("-1", NUMBERS, lambda spec: not spec.range.holds(-1)),
        ("-1e300", FLOATS, lambda spec: not spec.range.holds(-1e300)),
        (str(-HUGE), WHOLE, lambda spec: True),
        (str(HUGE), WHOLE, lambda spec: True),
        ("0.5", WHOLE, lambda spec: True),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hostile_numbers_are_refused_all_at_once(tmp_path, way, text, specs, is_wrong):
    """Every option gets the value at the same time; each that it does not suit is named, before anything computes with it."""
    found = refused(given_in(way, tmp_path, specs, text))
    named = {name.replace("-", "_") for name in found}
    expected = {spec.name for spec in specs if is_wrong(spec)}
    assert expected - named == set()


def test_a_number_out_of_range_hides_no_other_problem(tmp_path):
    """Files, rules of other options and the model's layout are still checked, and no rule computes with the number."""
    words = [
        *write_run_inputs(tmp_path),
        "--rollout-batch-size",
        "-4",
        "--lr",
        "inf",
        "--sglang-port",
        "70000",
    ]
    words += [
        "--tensor-model-parallel-size",
        "0",
        "--kl-coef",
        "1",
        "--kl-loss-coef",
        "1",
        "--ref-load",
        str(tmp_path / "gone"),
    ]
    found = refused(words)
    assert found["rollout-batch-size"].endswith("must be >= 1, it is -4. Use 1.")
    assert found["lr"].endswith("must be finite and >= 0, it is inf. Use 1e-06.")
    assert found["sglang-port"].endswith("must be in [1, 65535], it is 70000. Use 65535.")
    assert found["tensor-model-parallel-size"].endswith("must be >= 1, it is 0. Use 1.")
    assert {"kl-coef", "ref-load"} <= set(found) and len(found) == 6


def test_a_word_that_is_no_number_hides_no_number_out_of_range(tmp_path):
    """Both are wrong values of options, and are corrected in one go."""
    found = refused([*write_run_inputs(tmp_path), "--gamma", "nan", "--lr", "-1", "--no-such-flag"])
    assert found["gamma"] == "--gamma: NaN is not a usable number."
    assert found["lr"] == "--lr must be >= 0, it is -1.0. Use 1e-06."


def test_the_longest_wait_can_be_waited_for():
    """A time limit beyond it overflows in the thread that waits."""
    import threading

    assert LONGEST_WAIT <= threading.TIMEOUT_MAX
    assert range_problem(specs_by_name()["step_timeout"], LONGEST_WAIT) is None


def test_short_namespaces_are_checked_too():
    """Upstream's callers hand over a few options."""
    args = argparse.Namespace(lr=-1.0, eps_clip=math.nan, rollout_top_k=True)
    assert list(range_problems(args)) == ["eps_clip", "lr"]
    assert broken_rules(args) == list(range_problems(args).values())


def test_a_roles_file_and_an_evaluation_dataset_have_the_same_ranges(tmp_path):
    """They give values to options, or in place of options."""
    path = tmp_path / "roles.yaml"
    path.write_text("megatron: [{role: critic, overrides: {lr: -1.0}}]")
    with pytest.raises(ConfigError, match="role critic: --lr must be >= 0, it is -1.0"):
        parse_megatron_role_args(parse_args(write_run_inputs(tmp_path)), str(path), "critic")
    for field, value, words in (
        ("top_p", 1.5, "in (0, 1]"),
        ("temperature", -0.5, ">= 0"),
        ("n_samples_per_eval_prompt", 0, ">= 1"),
    ):
        with pytest.raises(
            ConfigError, match=re.escape(f"evaluation 'x': {field} must be {words}, it is {value}")
        ):
            EvalDatasetConfig(name="x", path="x.jsonl", **{field: value})


def test_the_divisors_of_a_huge_product_are_found_at_once():
    """--rollout-batch-size 10**12 had every number up to it tried."""
    assert (
        nearest_divisors(12, 5) == [4, 6]
        and nearest_divisors(0, 3) == []
        and nearest_divisors(7, 9) == [7]
    )
    assert nearest_divisors(10**12, 3 * 10**5) == [256000, 312500]
    assert nearest_divisors(2**60, 3)[0] == 2


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
