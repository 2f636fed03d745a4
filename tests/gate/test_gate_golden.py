"""The golden corpus: a fixed set of samples whose verdicts change only on purpose."""

import collections
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
from support.gate_golden import (
    GOLDEN_CONFIG,
    differences,
    expectation_of,
    load_corpus,
    load_tokenizer,
)

from slime.data.reasons import REASONS
from slime.gate import postprocess_output_data

NUM_GPUS = 0


def judge():
    samples, expected = load_corpus()
    result = postprocess_output_data(samples, GOLDEN_CONFIG, tokenizer=load_tokenizer())
    return (
        samples,
        expected,
        [expectation_of(s, v) for s, v in zip(result.samples, result.verdicts, strict=True)],
    )


def test_every_golden_sample_has_the_verdict_reason_and_fields_it_had():
    """Every golden sample has its recorded verdict. After an intended change of the gate run
    `python tests/golden/make_golden.py` and read the diff."""
    changed = differences(*judge())
    assert not changed, "the gate changed its word on these samples:\n" + "\n".join(changed)


def test_the_corpus_covers_every_reason_and_enough_valid_samples():
    """The corpus has at least eight samples of every reason and sixty valid ones."""
    _, expected = load_corpus()
    counts = collections.Counter(row["reason"] for row in expected)
    few = {reason.value: counts[reason.value] for reason in REASONS if counts[reason.value] < 8}
    assert not few and counts[None] >= 60, few


def test_a_difference_is_shown_for_every_sample_and_field():
    """The failure message names every sample that changed, with the field and both values."""
    samples, expected, actual = judge()
    actual[3] = {**actual[3], "valid": False, "reason": "too_long"}
    actual[7] = {**actual[7], "response": "changed"}
    lines = differences(samples, expected, actual)
    assert (
        len(lines) == 2
        and "sample 3" in lines[0]
        and "None -> 'too_long'" in lines[0]
        and "response" in lines[1]
    )


def test_golden_verdicts_do_not_depend_on_neighbours_or_order():
    """Each golden sample has the same verdict when the corpus is judged backwards."""
    samples, expected, _ = judge()
    backwards = postprocess_output_data(samples[::-1], GOLDEN_CONFIG, tokenizer=load_tokenizer())
    words = [
        expectation_of(s, v) for s, v in zip(backwards.samples, backwards.verdicts, strict=True)
    ][::-1]
    assert differences(samples, expected, words) == []


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
