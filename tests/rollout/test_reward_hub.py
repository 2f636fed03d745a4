"""Built-in scorers by their pinned cases, and how one is chosen."""

import sys
import types
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`
from support.rollout_args import rollout_args

from slime.data.sample import Sample
from slime.exceptions import ConfigError
from slime.rollout.rm_hub import async_rm, batched_async_rm, is_immediate
from slime.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward
from slime.rollout.rm_hub.expressions import NotReadable, are_equal_values, parse_expression
from slime.rollout.rm_hub.f1 import f1_score, normalize_answer
from slime.rollout.rm_hub.gpqa import (
    DEFAULT_VALID_LETTERS,
    _extract_letter_from_response,
    compute_gpqa_reward,
)
from slime.rollout.rm_hub.math_dapo_utils import (
    compute_score,
    is_correct_minerva,
    is_correct_strict_box,
    normalize_final_answer,
)
from slime.rollout.rm_hub.math_dapo_utils import remove_boxed as dapo_remove_boxed
from slime.rollout.rm_hub.math_utils import (
    extract_answer,
    extract_boxed_answer,
    grade_answer_mathd,
    grade_answer_sympy,
    grade_answer_verl,
    last_boxed_only_string,
    mathd_normalize_answer,
    remove_boxed,
)
from slime.utils.async_utils import run

NUM_GPUS = 0


def test_f1_counts_words_without_articles_case_and_punctuation():
    """Words are compared after lower case, punctuation, articles and spaces, in this order:
    "An-apple" is one word, not "apple"."""
    assert (
        normalize_answer("The  Cat, a DOG!") == "cat dog"
        and normalize_answer("An-apple") == "anapple"
    )
    assert f1_score("the cat sat", "cat") == (pytest.approx(2 / 3), 0.5, 1.0)
    assert f1_score("cat", "dog") == f1_score(None, "a") == f1_score("yes", "no") == (0.0, 0.0, 0.0)
    assert f1_score("yes it is", "yes") == (0.0, 0.0, 0.0) and f1_score("Yes.", "yes") == (
        1.0,
        1.0,
        1.0,
    )


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("The answer is B.", "B"), ("Answer: (C)", "C"), ("final answer: option d", "D"), ("So A is the correct one", "A"),
        ("<think>answer is A</think> I choose E", "E"), ("I think it's B or C", None), ("", None), (None, None), ("none here", None),
        ("not B or D, I think it's C", "C"),
        ("The answer is Z. But B stands alone", "B"), ("answer: $\\boxed{B}$", "B"), ("choice is A... no, the answer is C", "C"),
    ],
)  # fmt: skip
def test_the_chosen_letter_is_the_last_explicit_one_after_the_reasoning(response, letter):
    """The chosen letter is the last explicit one after the reasoning; letters inside it, and words
    that begin with one, do not count."""
    assert _extract_letter_from_response(response, DEFAULT_VALID_LETTERS) == letter


def test_gpqa_labels_may_be_letters_indices_or_texts():
    """A label may be a letter, an index or the choice's text, and all mean the same choice."""
    metadata = {"choices": ["red", "green", "blue"]}
    for label in ("B", "b", 1, "Green"):
        assert compute_gpqa_reward("The answer is B", label, metadata) == 1.0
        assert compute_gpqa_reward("The answer is A", label, metadata) == 0.0
    assert compute_gpqa_reward("it is green", "green", metadata) == 1.0  # no letter: by text
    assert compute_gpqa_reward("Answer: C", None, {"correct_letter": "c"}) == 1.0
    assert compute_gpqa_reward(None, "A") == compute_gpqa_reward("Answer: A", None) == 0.0
    assert compute_gpqa_reward("Answer: D", "D", {"valid_letters": ["A", "B"]}) == 0.0


def test_boxes_are_found_with_their_nesting():
    """The last box counts, with nested braces inside; an unclosed one does not."""
    assert (
        last_boxed_only_string(r"\boxed{1} then \boxed{\frac{1}{2}} end") == r"\boxed{\frac{1}{2}}"
    )
    assert (
        last_boxed_only_string(r"\fbox{3}") == r"\fbox{3}"
        and last_boxed_only_string(r"\boxed{1") is None
    )
    assert (
        remove_boxed(r"\boxed{x}") == "x"
        and remove_boxed("x") is None
        and remove_boxed(None) is None
    )
    assert (
        extract_boxed_answer(r"a \boxed{4}") == "4"
        and extract_answer("4") is None
        and extract_answer(r"\boxed{4}") == "4"
    )


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        (r"\frac12", r"\frac{1}{2}"), ("0.5", r"\frac{1}{2}"), ("1/2", r"\frac{1}{2}"), (r"\text{ abc }", "abc"), ("x = 3", "3"),
        (r"\sqrt3", r"\sqrt{3}"), (r"10\%", "10"), (".25", "0.25"), (r"90^\circ", "90"), (r"\$5", "5"), (r"\dfrac{3}{4}", r"\frac{3}{4}"),
        (r"5\text{ meters}", "5"), (r"\left( 1,2 \right)", "(1,2)"), (None, None),
    ],
)  # fmt: skip
def test_the_math_benchmarks_normal_form(answer, normal):
    """Two spellings of one answer have one normal form."""
    assert mathd_normalize_answer(answer) == normal
    assert grade_answer_mathd(answer, normal)


@pytest.mark.parametrize(
    ("given", "truth", "right"),
    [
        ("2x+x", "3x", True), (r"\sqrt{8}", r"2\sqrt{2}", True), (r"\frac{\pi}{2}", r"0.5\pi", True), ("(1, 2)", "(1,2)", True),
        ("[1,2]", "(1,2)", False), ("(1,2,3)", "(1,2)", False), ("2/4", "1/2", False), ("4/2", "2", False), ("2.0", "2", True),
        ("1,000", "1000", True), ("x^2-1", "(x-1)(x+1)", True), ("-3", "3", False), ("7 3/4", r"\frac{31}{4}", True),
        ("5 meters", "5", True), ("12 degrees", "12", True), ("abc", "abd", False), ("", "1", False), (None, "1", False),
        ("__import__('os')", "1", False), ("2 million", "2000000", True), ("3^(1/2)", r"\sqrt{3}", True),
    ],
)  # fmt: skip
def test_answers_are_compared_by_value_with_strict_integers_and_fractions(given, truth, right):
    """Answers are equal when they simplify to the same value, but a fraction must be reduced and an
    integer written out."""
    pytest.importorskip("sympy")
    assert grade_answer_sympy(given, truth) is right


def test_expressions_are_read_by_a_grammar_and_huge_powers_are_not_read():
    """Model text is read by a grammar and never evaluated as code, and 5^(5^(5^5)) is not
    computed."""
    pytest.importorskip("sympy")
    assert parse_expression(r"\frac12+\sqrt[3]{8}") == parse_expression("2.5")
    assert (
        parse_expression("2^3^2") == 512
        and parse_expression("-2^2") == -4
        and parse_expression("|3-5|") == 2
    )
    for hostile in (
        "5^(5^(5^(5^5)))",
        "os.system('x')",
        "a.b",
        "lambda",
        "1/0",
        "(" * 200 + "1" + ")" * 200,
        "1 +",
        "((9^999)^999)^999",
        "0^(-1)",
    ):
        with pytest.raises(NotReadable):
            parse_expression(hostile)
    assert not are_equal_values("5^(5^(5^(5^5)))", "5")


def test_verl_grading_needs_a_truth_and_a_box():
    """Without a label or a box the score is 0."""
    assert grade_answer_verl(r"\boxed{\frac{1}{2}}", "0.5") and grade_answer_verl(
        r"\boxed{7}", r"so \boxed{7}"
    )
    assert not grade_answer_verl(r"\boxed{7}", "") and not grade_answer_verl("7", "7")


def test_dapo_scores_the_last_answer_line():
    """dapo scores 1 or -1 from the last answer line within the last 300 characters."""
    assert compute_score("blah\nAnswer: $1{,}234$", 1234) == {
        "score": 1.0,
        "acc": True,
        "pred": "1234",
    }
    assert compute_score("Answer: 5\nAnswer: 6", "5")["score"] == -1.0
    assert compute_score("Answer: 7" + "x" * 300, "7")["pred"] == "[INVALID]"
    assert is_correct_minerva("Answer: 4", r"\boxed{4}", gt_need_extract=True) == (True, "4")
    assert is_correct_strict_box(r"x \boxed{3}", "3") == (1, "3") and is_correct_strict_box(
        "3", "3"
    ) == (-1, None)
    assert (
        normalize_final_answer(r"x = 5 \text{m}") == "5"
        and normalize_final_answer("1,000") == "1000"
    )
    with pytest.raises(AssertionError, match="box error"):
        dapo_remove_boxed("3")


def test_deepscaler_looks_behind_the_reasoning():
    """deepscaler looks for the box behind the reasoning."""
    assert get_deepscaler_rule_based_reward(r"<think>\boxed{1}</think> \boxed{2}", 2) == 1
    assert get_deepscaler_rule_based_reward(r"<think>\boxed{2}</think> done", 2) == 0
    assert get_deepscaler_rule_based_reward(r"\boxed{2}", 2) == 0
    assert get_deepscaler_rule_based_reward(r"###Response \boxed{0.5}", 0.5) == 1
    assert get_deepscaler_rule_based_reward(r"###Response \boxed{0.5}", None) == 0


async def custom(args, sample, **kwargs):
    return 7.0


async def custom_batch(args, samples, **kwargs):
    return [sample.index for sample in samples]


def score(response, label, *, metadata=None, **args):
    return run(
        async_rm(
            rollout_args(**args), Sample(response=response, label=label, metadata=metadata or {})
        )
    )


def test_the_reward_type_of_a_row_goes_before_the_runs_and_a_custom_function_before_both():
    """A row's reward type precedes the run's, and a custom function precedes both."""
    assert score(" 85\n", 85) == 1 and score("86", "85") == 0
    assert score("85", "85", metadata={"rm_type": "f1"}) == 1.0
    assert (
        score(r"so \boxed{85}", "85", rm_type="boxed_exact_match") == 1
        and score("85", "85", rm_type="boxed_f1") == 0.0
    )
    assert score("x", "y", custom_rm_path=f"{__name__}.custom") == 7.0
    sample = Sample(custom_rm_path=f"{__name__}.custom")
    assert run(async_rm(rollout_args(custom_rm_path="nowhere.f"), sample)) == 7.0
    assert score("a", "b", rm_type="random") in (0, 1)
    samples = [Sample(index=3, response="1", label="1"), Sample(index=5, response="2", label="1")]
    assert run(batched_async_rm(rollout_args(), samples)) == [1, 0]
    assert run(
        batched_async_rm(rollout_args(custom_rm_path=f"{__name__}.custom_batch"), samples)
    ) == [3, 5]
    bare = types.SimpleNamespace(custom_rm_path=None, group_rm=False, rm_type="f1", reward_key=None)
    assert run(async_rm(bare, Sample(response="a b", label="b"))) == 1.0
    assert is_immediate(bare, Sample()) and not is_immediate(rollout_args(rm_type="math"), Sample())


@pytest.mark.parametrize(
    ("rm_type", "words"),
    [
        ("no_such", "no_such"),
        (None, "--rm-type"),
        ("remote_rm", "--rm-url"),
        ("ifbench", "IFBench"),
    ],
)
def test_what_cannot_be_scored_says_what_to_give(rm_type, words):
    """A sample that cannot be scored is an error with the option to give, and not a reward of 0."""
    with pytest.raises((NotImplementedError, ConfigError), match=words):
        score("a", "b", rm_type=rm_type)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
