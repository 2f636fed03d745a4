"""Every built-in reward type against its table of (response, label, verdict),
tests/rollout/rewards/<type>.jsonl.

A row's `verdict` is what the type says. Where that is not what a mathematician would say, the row
has `right` and `why`.
"""

import json
import sys
from fractions import Fraction
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`
from support.rollout_args import rollout_args

from slime.data.sample import Sample
from slime.rollout.rm_hub import RM_TYPES, async_rm, graded_text
from slime.rollout.rm_hub.end_tokens import without_end_tokens
from slime.rollout.rm_hub.equality import is_same_answer
from slime.rollout.rm_hub.exact_match import compute_exact_match
from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.rm_hub.gpqa import compute_gpqa_reward
from slime.rollout.rm_hub.grader_worker import GRADERS
from slime.rollout.rm_hub.labels import label_answers, label_texts
from slime.rollout.rm_hub.math_dapo_utils import is_correct_minerva, normalize_final_answer
from slime.rollout.rm_hub.math_utils import grade_answer_sympy, grade_answer_verl
from slime.utils.async_utils import run

NUM_GPUS = 0
FOLDER = Path(__file__).parent / "rewards"
# What has no fixed verdict: chance, a server, and checkers that are not part of this repository.
WITHOUT_TABLE = {"random", "remote_rm", "ifbench"}
LEAST_ROWS = 150


def rows_of(rm_type):
    return [
        json.loads(line)
        for line in (FOLDER / f"{rm_type}.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def verdict_of(rm_type, row):
    """1 or 0 as the type grades the row; F1 as a number."""
    response, label = row["response"], row["label"]
    if rm_type == "exact_match":
        return compute_exact_match(response, label)
    if rm_type == "f1":
        return f1_score(response, label)[0]
    if rm_type == "gpqa":
        return int(compute_gpqa_reward(response, label, row.get("metadata")))
    value = GRADERS[rm_type](response, label)
    return int(value["acc"]) if isinstance(value, dict) else value


@pytest.mark.parametrize("rm_type", sorted(path.stem for path in FOLDER.glob("*.jsonl")))
def test_a_reward_type_says_of_every_row_what_its_table_says(rm_type):
    """Each type gives every row of its table the recorded verdict."""
    if rm_type in GRADERS:
        pytest.importorskip("math_verify" if rm_type in ("math_verify", "math_value") else "sympy")
    rows = rows_of(rm_type)
    wanted = [
        float(Fraction(*row["verdict"])) if isinstance(row["verdict"], list) else row["verdict"]
        for row in rows
    ]
    wrong = [
        (row, got)
        for row, want in zip(rows, wanted, strict=True)
        if (got := verdict_of(rm_type, row)) != pytest.approx(want)
    ]
    assert not wrong, f"{len(wrong)} of {len(rows)}: {wrong[:5]}"


def test_every_reward_type_has_a_table_of_150_different_rows_and_says_why_where_it_is_not_right():
    """Every type has a table of at least 150 different rows, with a reason where its verdict is not
    right."""
    assert {path.stem for path in FOLDER.glob("*.jsonl")} == RM_TYPES - WITHOUT_TABLE
    for rm_type in RM_TYPES - WITHOUT_TABLE:
        rows = rows_of(rm_type)
        assert len({json.dumps(row, sort_keys=True) for row in rows}) == len(rows) >= LEAST_ROWS, (
            rm_type
        )
        unexplained = [
            row
            for row in rows
            if row.get("right", row["verdict"]) != row["verdict"] and not row.get("why")
        ]
        assert not unexplained, unexplained
        assert {row["verdict"] for row in rows if not isinstance(row["verdict"], list)} in (
            {0, 1},
            set(),
        ), rm_type


def test_math_value_is_wrong_less_often_than_math_verify_and_calls_nothing_right_that_is_wrong():
    """On math_verify's table math_value is wrong at most a tenth as often, and on its own it
    accepts no wrong answer."""
    pytest.importorskip("math_verify")
    verify = rows_of("math_verify")
    ours = sum(verdict_of("math_value", row) != row.get("right", row["verdict"]) for row in verify)
    theirs = sum(row.get("right", row["verdict"]) != row["verdict"] for row in verify)
    assert ours * 10 <= theirs, (ours, theirs)
    own = rows_of("math_value")
    assert [row for row in own if row["verdict"] and not row.get("right", 1)] == []
    assert sum("why" in row for row in own) <= len(own) // 100


def test_the_guide_states_the_numbers_of_the_tables():
    """docs/rewards.md states the numbers of the tables."""
    guide = (Path(__file__).resolve().parents[2] / "docs" / "rewards.md").read_text(
        encoding="utf-8"
    )
    for rm_type in ("math_value", "math", "math_verify"):
        rows = rows_of(rm_type)
        assert f"`{rm_type}` {sum('why' in row for row in rows)} of {len(rows)}" in guide, rm_type
    boxless = sum(row.get("why") == "math reads boxes only" for row in rows_of("math"))
    assert (
        f"of which {sum('why' in row for row in rows_of('math')) - boxless} are its strictness and "
        f"{boxless} answers without a box" in guide
    )


@pytest.mark.parametrize(
    ("label", "answers"),
    [
        ("He has 8 * 9 = 72.\n#### 72", ["72"]), ("#### 1,200", ["1,200"]), (r"so \boxed{\frac{1}{2}}", [r"\frac{1}{2}"]), ("$72$", ["72"]), ("$$x$$", ["x"]),
        ("$1$ and $2$", ["$1$ and $2$"]), (72, ["72"]), (0, ["0"]), (72.0, ["72"]), (0.5, ["0.5"]), (["7", "seven"], ["7", "seven"]), (None, []), ("", []),
        ([], []), ("$5", ["$5"]), (123456789012345678901, ["123456789012345678901"]),
    ],
)  # fmt: skip
def test_labels_are_known_in_the_forms_in_which_data_sets_publish_them(label, answers):
    """Labels are read in the forms in which data sets publish them, such as GSM8K's whole
    solutions."""
    assert label_answers(label) == answers
    assert not answers or set(answers) <= set(label_texts(label))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("85<|im_end|>", "85"), ("85<|im_end|>\n", "85"), ("85</s></s>", "85"), ("85 <|eot_id|> <|endoftext|>", "85 "), ("85", "85"), ("85 \n", "85 \n"),
        ("<|im_end|>85", "<|im_end|>85"), ("<|im_end|>", ""), (r"\boxed{5}", r"\boxed{5}"), ("85###", "85"), ("85\n\n", "85"), ("a</s>b", "a</s>b"), ("", ""),
    ],
)  # fmt: skip
def test_end_tokens_and_stop_strings_behind_a_response_are_not_graded(text, kept):
    """End tokens and stop strings behind a response are not graded, though they are in the text by
    default."""
    assert without_end_tokens(text, ["###", "\n\n", "}"]) == kept  # "}" closes a box, and is no end


@pytest.mark.parametrize(
    ("rm_type", "response", "right"),
    [
        ("exact_match", "85", 1), ("f1", "85", 1.0), ("gpqa", "The answer is B", 1.0), ("boxed_exact_match", r"so \boxed{85}", 1),
        ("boxed_f1", r"\boxed{85}", 1.0), ("boxed_gpqa", r"\boxed{B}", 1.0),
    ],
)  # fmt: skip
def test_the_door_to_the_graders_strips_the_turns_end(rm_type, response, right):
    """Graders get the text without the turn's end; the sample keeps it, because it belongs to
    trained tokens."""
    args = rollout_args(rm_type=rm_type, rollout_stop=["###"])
    label = "B" if "gpqa" in rm_type else "85"
    for end in ("", "<|im_end|>", "###", "\n###<|endoftext|>"):
        sample = Sample(response=response + end, label=label)
        assert run(async_rm(args, sample)) == right, end
        assert sample.response == response + end and graded_text(args, sample).rstrip() == response


@pytest.mark.parametrize(
    "rm_type", ["boxed_math", "boxed_math_value", "boxed_deepscaler", "boxed_dapo"]
)
def test_a_boxed_type_grades_what_the_box_holds(rm_type):
    """A boxed_ type grades the content of the box."""
    pytest.importorskip("sympy")
    from slime.rollout.rm_hub import split_rm_type

    args = rollout_args(rm_type=rm_type)
    for response, acc in (
        (r"so \boxed{\frac12}", 1),
        (r"so \boxed{\frac13}", 0),
        ("0.5", 0),
        (r"so \fbox{0.5}<|im_end|>", 1),
    ):
        name, text = split_rm_type(args, Sample(response=response))
        assert verdict_of(name, {"response": text, "label": "1/2"}) == acc, (response, text)


def test_pinned_verdicts_of_upstreams_functions():
    """Verdicts of upstream's functions stay upstream's: fractions reduced, integers written out, 0
    a label like another."""
    assert not grade_answer_sympy(r"\frac{2}{4}", r"\frac{1}{2}") and not grade_answer_sympy(
        "4/2", "2"
    )
    assert (
        grade_answer_sympy("0.5", r"\frac{1}{2}")
        and grade_answer_verl(r"\boxed{0}", 0)
        and not grade_answer_verl(r"\boxed{1}", 0)
    )
    assert not grade_answer_verl(r"\boxed{}", "") and not grade_answer_verl(r"\boxed{1}", None)
    assert normalize_final_answer("42<|im_end|>") == normalize_final_answer("42</s>") == "42"
    for truth, right, wrong in (
        ("3.7", "3.7", "3"),
        ("1/2", r"\frac{1}{2}", "2"),
        ("1,000", "1000", "1"),
        ("$42$", "42", "41"),
        ("x=12", "12", "1"),
    ):
        assert (
            is_correct_minerva(f"Answer: {right}", truth)[0]
            and not is_correct_minerva(f"Answer: {wrong}", truth)[0]
        )
    big = 123456789012345678901
    assert (
        is_correct_minerva(f"Answer: {big}", big)[0]
        and not is_correct_minerva(f"Answer: {big + 1}", big)[0]
    )


@pytest.mark.parametrize(
    "text",
    [
        "1" * 10**6,
        "(" * 10**6,
        "\\boxed{" * 10**5,
        "9^" * 10**5 + "9",
        "$" * 10**6,
        "\\frac{" * 10**5,
        "a " * 10**6,
        "1,000" * 10**5,
        "5 \\pmod 7",
        "\\pm" * 100,
    ],
)
def test_a_megabyte_of_anything_is_graded_and_not_computed(text):
    """A megabyte of any text ends in a verdict: the reader bounds length, nesting, digits and
    powers by itself."""
    pytest.importorskip("sympy")
    assert is_same_answer(text, "1", strict=False) is not True
    for response in (text, f"\\boxed{{{text}}}", f"Answer: {text}"):
        assert GRADERS["math_value"](response, "2") == GRADERS["math"](response, "2") == 0
        assert GRADERS["dapo"](response, "2")["acc"] is False


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
