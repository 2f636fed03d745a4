"""Each check alone: what it refuses, what it accepts, in which order, and at which cost."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pytest
from support.gate_reference import is_invisible
from support.gate_samples import reasons_of, sound_sample

from slime.data.sample import Status
from slime.exceptions import ConfigError
from slime.gate import (
    FormatSpec,
    GateConfig,
    InvalidReason,
    Level,
    Policy,
    TagPair,
    TaskRules,
    postprocess_output_data,
)
from slime.gate import judge as gate_module
from slime.gate.checks import CHECKS, Check
from slime.gate.config import FORMAT_PRESETS
from slime.gate.judge import judge
from slime.gate.text import answer_of, format_problem, is_blank
from slime.gate.token_columns import TokenRows

NUM_GPUS = 0
THINK_ANSWER = FORMAT_PRESETS["think_answer"]


def reason(config=None, **changes):
    """The reason against one sound sample with `changes`."""
    return reasons_of(
        postprocess_output_data([sound_sample(1, **changes)], config or GateConfig())
    )[0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\n\t ",
        "\u200b",
        "\ufeff\u00a0",
        "\u00ad\u2060",
        "\x00\x1f",
        "\ufe0f",
        "\U000e0041",
        "\u3164\u2800",
    ],
)
def test_text_of_invisible_characters_is_blank(text):
    """Zero-width, BOM, soft hyphen, control, selector and tag characters are blank, though
    `strip()` leaves them."""
    assert is_blank(text)
    if text:
        assert reason(response=text) == "empty"


@pytest.mark.parametrize("text", ["a", " . ", "\u200b0", "é", "漢", "😀", "\u0600", "\u0301"])
def test_one_visible_character_is_enough(text):
    """One visible character in any script is a response, because a classification answer may be a
    single sign."""
    assert not is_blank(text) and reason(response=text) is None


def test_blank_ranges_are_those_of_the_unicode_database():
    """The ranges of invisible characters in the code are those of this Python's Unicode
    database."""
    wrong = [
        hex(point) for point in range(0x110000) if is_invisible(chr(point)) != is_blank(chr(point))
    ]
    newer = {
        hex(point) for point in range(0x13430, 0x13456)
    }  # format controls that later Unicode versions added or changed
    assert set(wrong) <= newer


def test_no_response_token_is_empty_before_anything_else_is_looked_at():
    """A response of length 0 is `empty` whatever its text says, and no check reads the last token
    of nothing."""
    assert reason(length=0, rollout_log_probs=[], response="text of nothing") == "empty"


def test_length_thresholds_are_configured_per_task():
    """Minimum and maximum length are options and may differ per task: 1 token is a valid label and
    too short for an essay."""
    config = GateConfig(
        min_response_tokens=5,
        max_response_tokens=20,
        tasks={"label": TaskRules(min_response_tokens=1)},
    )
    assert reason(config, length=4) == "too_short"
    assert reason(config, length=5) is None
    assert reason(config, length=1, metadata={"source_name": "label"}) is None
    assert reason(config, length=21) == "too_long"
    assert reason(GateConfig(), length=1) is None


@pytest.mark.parametrize(
    ("prompt_length", "length", "expected"),
    [(30, 65, None), (30, 66, "too_long"), (60, 35, None), (60, 36, "too_long")],
)
def test_usable_length_is_context_minus_prompt_minus_margin(prompt_length, length, expected):
    """A response may be as long as the context minus its prompt minus 5 %: of 100 tokens a prompt
    of 30 leaves 65."""
    assert (
        reason(GateConfig(context_length=100), prompt_length=prompt_length, length=length)
        == expected
    )


def test_margin_is_configurable():
    """A margin of 10 % leaves 60 of 100 tokens after a prompt of 30; a margin of 1 is refused."""
    assert (
        reason(GateConfig(context_length=100, margin=0.1), prompt_length=30, length=61)
        == "too_long"
    )
    with pytest.raises(ConfigError, match="margin"):
        GateConfig(margin=1.0)


def test_truncation_is_seen_in_status_or_finish_reason():
    """A cut response is invalid by default, whether status or finish reason tells it; a task that
    needs only the prefix keeps it."""
    assert reason(finish_reason="length") == reason(status=Status.TRUNCATED) == "truncated"
    config = GateConfig(tasks={"prefix": TaskRules(keep_truncated=True)})
    cut = {"status": Status.TRUNCATED, "finish_reason": "length"}
    result = postprocess_output_data(
        [sound_sample(0, metadata={"source_name": "prefix"}, **cut), sound_sample(1, **cut)], config
    )
    assert [(s.valid, s.invalid_reason) for s in result.samples] == [
        (True, "truncated"),
        (False, "truncated"),
    ]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, "bad_logprob"),
        (math.inf, "bad_logprob"),
        (-math.inf, "bad_logprob"),
        (0.2, "bad_logprob"),
        (0.0, None),
        (5e-5, None),
    ],
)
def test_a_log_prob_is_finite_and_not_positive(value, expected):
    """NaN, infinities and positive log-probs are refused, because NaN times mask 0 is NaN; float32
    rounding up to 1e-4 above zero passes."""
    values = [-1.0] * 12
    values[7] = value
    assert (
        reason(rollout_log_probs=values)
        == reason(rollout_log_probs=np.array(values, dtype=np.float32))
        == expected
    )


@pytest.mark.parametrize("count", [0, 11, 13])
def test_one_log_prob_per_response_token(count):
    """A response whose log-probs are fewer or more than its ids is refused by the gate, and not by
    an index error in the loss."""
    assert reason(rollout_log_probs=[-1.0] * count) == "logprob_mismatch"


@pytest.mark.parametrize(
    ("token", "expected"),
    [(-1, "bad_token"), (1000, "bad_token"), (999, None), (2**31, "bad_token"), (1.5, "bad_token")],
)
def test_ids_lie_inside_the_vocabulary(token, expected):
    """An id outside the vocabulary is refused; it would be an out-of-bounds read in the
    embedding."""
    tokens = [*range(1, 15), token]
    assert reason(GateConfig(vocab_size=1000), tokens=tokens) == expected


@pytest.mark.parametrize(("length", "expected"), [(14, None), (15, None), (16, "misaligned")])
def test_a_response_is_no_longer_than_the_tokens(length, expected):
    """Of fifteen tokens the response may be all, without a prompt, and not sixteen."""
    sample = sound_sample(1, rollout_log_probs=[-0.5] * length)
    assert len(sample.tokens) == 15
    sample.response_length, sample.loss_mask = length, None
    assert reasons_of(postprocess_output_data([sample], GateConfig())) == [expected]


def test_a_phrase_repeated_to_the_end_is_a_loop():
    """A response is `repetitive` if it ends in a short phrase that repeats exactly, whatever its
    beginning."""

    def looped(period, config):
        return reason(
            config,
            length=400,
            tokens=[1, 2, 3, *range(100), *(i % period + 5 for i in range(300))],
            rollout_log_probs=[-1.0] * 400,
        )

    strict = GateConfig(repetition_window=200, repetition_max_period=40)
    lenient = GateConfig(repetition_window=200, repetition_max_period=40, level=Level.LENIENT)
    assert [looped(p, strict) for p in (1, 7, 40, 41)] == [
        "repetitive",
        "repetitive",
        "repetitive",
        None,
    ]
    assert [looped(p, lenient) for p in (1, 8, 9)] == ["repetitive", "repetitive", None]
    assert looped(1, GateConfig(repetition_window=0)) is None
    # a response of exactly one window is long enough, one token less is not
    found = [
        reason(
            GateConfig(repetition_window=16),
            length=n,
            tokens=[1, 2, 3, *[5] * n],
            rollout_log_probs=[-1.0] * n,
        )
        for n in (15, 16)
    ]
    assert found == [None, "repetitive"]
    assert (
        reason(strict, length=400, tokens=list(range(403)), rollout_log_probs=[-1.0] * 400) is None
    )
    # and a phrase that fits the window only twice is no loop yet
    twice = GateConfig(repetition_window=16, repetition_max_period=8)
    found = [
        reason(
            twice,
            length=16,
            tokens=[1, 2, 3, *(5 + i % period for i in range(16))],
            rollout_log_probs=[-1.0] * 16,
        )
        for period in (4, 8)
    ]
    assert found == ["repetitive", None]


def test_an_empty_row_has_no_neighbours_extremes():
    """Of rows (5), () and (-7) the empty one has no extremes of its neighbours."""
    lows, highs = TokenRows(np.array([5, -7]), np.array([0, 1, 1, 2])).row_extremes()
    assert (lows.tolist(), highs.tolist()) == ([5, 0, -7], [5, 0, -7])


def test_ids_that_are_floats_are_no_ids():
    """Float ids are refused, also whole ones: 1.5 would be 1 to the trainer."""
    assert reason(tokens=np.arange(15, dtype=np.float32)) == "bad_token"


@pytest.mark.parametrize(
    ("text", "lenient", "strict"),
    [
        ("<think>a</think><answer>b</answer>", True, True),
        ("<think>a</think><answer>b", False, False),
        ("<think>a</think>", False, False),
        ("<answer>b</answer><think>a</think>", True, False),
        ("<think>a<answer>b</answer></think>", True, False),
        ("<think>a</think><answer>b</answer><answer>c</answer>", True, False),
        ("<think>a</think><answer>b<|im_start|></answer>", True, False),
        ("</think>a<think><answer>b</answer>", True, False),
    ],
)
def test_markers_are_paired_under_lenient_and_also_in_place_under_strict(text, lenient, strict):
    """The lenient level wants markers in pairs; the strict level also wants their order, nesting
    and number."""
    assert (format_problem(text, THINK_ANSWER, Level.LENIENT) is None) is lenient
    assert (format_problem(text, THINK_ANSWER, Level.STRICT) is None) is strict
    assert reason(GateConfig(format=THINK_ANSWER), response=text) == (
        None if strict else "bad_format"
    )
    assert (
        reason(GateConfig(format=THINK_ANSWER, levels={"bad_format": Level.OFF}), response=text)
        is None
    )


def test_tasks_without_a_structure_skip_marker_checks():
    """A task without a format accepts prose with an unpaired tag."""
    config = GateConfig(tasks={"math": TaskRules(format=THINK_ANSWER)})
    assert reason(config, response="an unpaired <think>", metadata={"source_name": "chat"}) is None
    assert (
        reason(config, response="an unpaired <think>", metadata={"source_name": "math"})
        == "bad_format"
    )
    skip = GateConfig(format=THINK_ANSWER, tasks={"chat": TaskRules(skip_format=True)})
    assert reason(skip, response="prose", metadata={"source_name": "chat"}) is None


def test_a_call_drafted_inside_reasoning_is_text():
    """A call drafted inside the reasoning is text and not a second call; unclosed reasoning is
    refused."""
    spec = FORMAT_PRESETS["tool_call"]
    drafted = "<think>maybe <tool_call>A</tool_call></think><tool_call>A</tool_call>"
    assert format_problem(drafted, spec, Level.STRICT) is None
    assert format_problem("<think>maybe <tool_call>A</tool_call>", spec, Level.STRICT) is not None


def test_an_end_marker_is_required_at_the_end_and_does_not_cut_the_text_inside():
    """The text must end with the end marker, and the same marker inside the text is content."""
    spec = FormatSpec(end_marker="<end>")
    text = "say <end> twice <end>"
    result = postprocess_output_data([sound_sample(0, response=text)], GateConfig(format=spec))
    assert result.samples[0].valid and result.samples[0].response == text
    assert reason(GateConfig(format=spec), response="say <end> once") == "bad_format"


def test_the_scored_answer_stands_in_a_fixed_place_without_the_reasoning():
    """`metadata["answer_text"]` holds the content of the answer tags, without numbers from the
    reasoning."""
    text = "<think>is it 7?</think><answer> 8 </answer>"
    sample = sound_sample(0, response=text, metadata={"k": "v"})
    out = postprocess_output_data([sample], GateConfig(format=THINK_ANSWER)).samples[0]
    assert (
        out.metadata == {"k": "v", "answer_text": "8"}
        and sample.metadata == {"k": "v"}
        and out.response == text
    )
    assert answer_of("no tags", THINK_ANSWER) is None


def test_a_sample_with_damaged_markers_is_never_scored():
    """A sample with an unclosed tag is invalid before rewards; the reward function would raise on
    it."""
    sample = sound_sample(0, response="<answer>5", reward=None)
    result = postprocess_output_data([sample], GateConfig(format=THINK_ANSWER))
    assert not result.verdicts[0].valid


def test_tag_opened_by_the_prompt_is_closed_by_the_response():
    """A tag that the prompt opens, such as <think>, is closed by the response alone."""
    spec = FormatSpec(pairs=(TagPair("<think>", "</think>", required=True, opened_by_prompt=True),))
    assert format_problem("thoughts</think>answer", spec, Level.STRICT) is None
    assert format_problem("thoughts without end", spec, Level.STRICT) is not None


def test_format_specs_that_cannot_work_are_refused():
    """A format with equal markers, an unknown name or an unknown key is refused."""
    with pytest.raises(ConfigError, match="different"):
        FormatSpec(pairs=(TagPair("<a>", "<a>"),))
    with pytest.raises(ConfigError, match="<b>"):
        FormatSpec(pairs=(TagPair("<a>", "</a>"),), order=("<b>",))
    with pytest.raises(ConfigError, match="parirs"):
        FormatSpec.from_dict({"parirs": []})


@pytest.mark.parametrize("reward", [None, math.nan, math.inf, "1", [1.0], {"score": 1.0}])
def test_a_reward_is_one_finite_number(reward):
    """None, NaN, infinity, a text, a list, and a dict without a key are no rewards."""
    assert reason(GateConfig(rewards_expected=True), reward=reward) == "bad_reward"


@pytest.mark.parametrize("reward", [0, 1.5, True, np.float32(0.5), np.array(2.0)])
def test_numbers_of_any_kind_are_rewards(reward):
    """Bools, numpy scalars and arrays without dimensions are rewards."""
    assert reason(GateConfig(rewards_expected=True), reward=reward) is None


def test_a_reward_dictionary_is_read_by_its_key():
    """A dict reward is read by its key; without the key the detail names those that exist."""
    config = GateConfig(rewards_expected=True, reward_key="score")
    assert reason(config, reward={"score": 0.5}) is None
    result = postprocess_output_data([sound_sample(0, reward={"acc": 0.5})], config)
    assert "acc" in result.verdicts[0].detail and "score" in result.verdicts[0].detail


def test_checks_run_cheap_before_costly_and_stop_at_the_first_reason():
    """Checks run from cheap to costly, and no later check looks at a rejected sample: the call
    counters show it."""
    batch = [
        sound_sample(0, length=0, rollout_log_probs=[]),
        sound_sample(1, finish_reason="length"),
        sound_sample(2),
    ]
    batch.append(sound_sample(3, status=Status.ABORTED))
    counts = postprocess_output_data(batch, GateConfig()).statistics.counts
    order = (
        "no_response",
        "truncated",
        "log_prob_mismatch",
        "bad_token",
        "bad_log_prob",
        "misaligned",
        "bad_format",
    )
    assert [counts[f"checked_{name}"] for name in order] == [3, 2, 1, 1, 1, 1, 1]
    names = [check.name for check in CHECKS]
    assert [names.index(name) for name in order] == sorted(names.index(name) for name in order)


def test_a_sample_with_many_defects_has_the_first_as_its_one_reason():
    """A sample that is too short, cut, with a NaN and without a reward is `too_short`, every
    time."""
    sample = sound_sample(0, length=2, finish_reason="length", reward=None)
    sample.rollout_log_probs[0] = math.nan
    config = GateConfig(min_response_tokens=5, rewards_expected=True)
    assert {reasons_of(postprocess_output_data([sample], config))[0] for _ in range(3)} == {
        "too_short"
    }


def test_off_switches_quality_checks_and_never_integrity():
    """The level `off` skips quality checks only; a NaN is rejected and statistics exist at every
    level."""
    config = GateConfig(level=Level.OFF, min_response_tokens=5)
    assert (
        reason(config, length=2) is None and reason(config, finish_reason="length") == "truncated"
    )
    cut = postprocess_output_data([sound_sample(0, finish_reason="length")], config).samples[0]
    assert cut.valid and cut.invalid_reason == "truncated", (
        "a cut that trains is marked, whatever let it pass"
    )
    assert (
        reason(config, rollout_log_probs=[math.nan] * 12) == "bad_logprob"
        and reason(config, status=Status.FAILED) == "failed"
    )
    with pytest.raises(ConfigError, match="bad_logprob"):
        GateConfig(levels={"bad_logprob": Level.OFF})


def test_a_check_is_one_function_and_one_line(monkeypatch):
    """The guide's own check, one function and one line, works at the end of the list."""

    def find_shouting(chunk, rows):
        texts = chunk.text_of(rows)
        return np.array(
            [len(texts[row]) > 20 and texts[row].isupper() for row in rows.tolist()], dtype=bool
        )

    shouting = Check(
        InvalidReason.BAD_FORMAT, find_shouting, lambda chunk, row: "all capitals", "bad_format"
    )
    monkeypatch.setattr(gate_module, "CHECKS", (*CHECKS, shouting))
    loud = "LISTEN, ALL OF YOU, LISTEN"
    assert (
        reason(response=loud) == "bad_format"
        and reason(response="A") is None
        and reason(response=loud.lower()) is None
    )
    assert reason(GateConfig(level=Level.OFF), response=loud) is None


def test_lengths_that_do_not_fit_are_refused_even_where_misaligned_text_is_kept():
    """A response length or a mask that does not fit the tokens is refused, also where the policy
    keeps misaligned texts."""
    config = GateConfig(policies={InvalidReason.MISALIGNED: Policy.KEEP})
    assert (
        postprocess_output_data([sound_sample(0, response_length=99)], config).samples[0].valid
        is False
    )
    assert (
        postprocess_output_data([sound_sample(0, loss_mask=[1])], config).samples[0].valid is False
    )


def test_the_worked_example_of_the_judge_is_true():
    """Three samples get the codes, counts and verdicts that the head of judge.py names."""
    samples = [
        sound_sample(0, length=3),
        sound_sample(1, length=0),
        sound_sample(2, length=3, status=Status.TRUNCATED),
    ]
    config = GateConfig(min_response_tokens=1)
    outcome = judge(samples, config, None)
    assert outcome.codes.tolist() == [0, 3, 6]
    assert [
        outcome.counts[f"checked_{name}"] for name in ("no_response", "too_short", "bad_token")
    ] == [3, 2, 1]
    verdicts = postprocess_output_data(samples, config).verdicts
    assert [verdict.reason and verdict.reason.value for verdict in verdicts] == [
        None,
        "empty",
        "truncated",
    ]


# In a process of its own: Python 3.11 may loop for ever in a profiled call while an exception for
# another thread is pending, which tests before this one may have left.
COUNT_CALLS = """
import collections, json, sys
from slime.gate import GateConfig, postprocess_output_data
from support.gate_samples import sound_sample
calls = collections.Counter()

def note(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_name.startswith("find_") and code.co_filename.endswith("checks.py"):
        calls[code.co_name] += 1

samples = [sound_sample(i, length=5 + i % 9) for i in range(int(sys.argv[1]))]
sys.setprofile(note)
postprocess_output_data(samples, GateConfig())
sys.setprofile(None)
print(json.dumps(calls))
"""


@pytest.mark.parametrize("count", (100, 1000))
def test_each_check_looks_at_a_whole_batch_at_once(count):
    """Each check is called once per batch and compares arrays: ten times the samples are not ten
    times the calls."""
    tests = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", COUNT_CALLS, str(count)],
        env={**os.environ, "PYTHONPATH": f"{tests.parent}{os.pathsep}{tests}"},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    calls = json.loads(done.stdout.splitlines()[-1])
    assert {
        "find_too_short",
        "find_too_long",
        "find_truncated",
        "find_blank",
        "find_bad_token",
        "find_bad_log_prob",
    } <= set(calls)
    assert set(calls.values()) == {1}


def test_a_long_text_costs_linear_time():
    """A 10 MB response of markers or blanks is checked in linear time."""
    import time

    start = time.perf_counter()
    for text in (" " * 10_000_000, "<answer>" * 1_000_000):
        assert reason(GateConfig(format=THINK_ANSWER), response=text) in ("empty", "bad_format")
    assert time.perf_counter() - start < 5


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
