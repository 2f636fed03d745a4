"""Text from tokens on a real byte-level BPE: decoding by rule, comparing, causes of differences,
the cache."""

import dataclasses
import functools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pytest
from support.gate_golden import load_tokenizer
from support.gate_samples import reasons_of
from support.rollout_args import rollout_args

from slime.data.sample import Sample, Status
from slime.gate import GateConfig, Level, apply_verdicts, check_responses, postprocess_output_data
from slime.gate.alignment import Codec, classify_mismatch, codec_of
from slime.gate.config import FORMAT_PRESETS, MismatchCause
from slime.gate.gate import Gate, gate_config_from_args
from slime.rollout import scoring

NUM_GPUS = 0
COMPARE = GateConfig(text_source="engine", compare_text=True)


@functools.lru_cache(maxsize=1)
def tokenizer():
    return load_tokenizer()


def encoded(text, response=None, *, ids=None, eos=True, **fields):
    """A sample whose ids encode `text`, with `response` as the engine's text."""
    ids = (
        tokenizer().encode(text, add_special_tokens=False) + [tokenizer().eos_token_id] * eos
        if ids is None
        else ids
    )
    values = {
        "tokens": [5, 6, *ids],
        "response_length": len(ids),
        "response": text if response is None else response,
        "rollout_log_probs": [-1.0] * len(ids),
        "status": Status.COMPLETED,
        "finish_reason": "stop",
    }
    return Sample(**{**values, **fields})


def run(samples, config, **kwargs):
    return postprocess_output_data(samples, config, tokenizer=Codec(tokenizer()), **kwargs)


def test_text_is_decoded_from_the_tokens_by_default():
    """By default the response text is decoded from the trained tokens; `text_source="engine"` keeps
    the engine's text where there is one."""
    sample = encoded("the tokens say this", response="the engine says that")
    assert run([sample], GateConfig()).samples[0].response == "the tokens say this"
    kept = run([sample], GateConfig(text_source="engine"))
    assert kept.samples[0].response == "the engine says that" and kept.samples[0].valid
    assert (
        run([encoded("filled in", response="")], GateConfig(text_source="engine"))
        .samples[0]
        .response
        == "filled in"
    )


def test_an_id_outside_the_vocabulary_is_charged_to_its_own_sample():
    """An id outside the vocabulary rejects its own sample, also where an earlier check has taken
    another sample out."""
    samples = [encoded(f"answer {number}", rollout_log_probs=None) for number in range(3)]
    samples[0].status = Status.TRUNCATED
    samples[1].tokens[0] = 10**6
    assert reasons_of(run(samples, GateConfig(vocab_size=10**6))) == [
        "truncated",
        "bad_token",
        None,
    ]


@pytest.mark.parametrize("text_source", ("tokens", "engine"))
@pytest.mark.parametrize("hide", (True, False))
def test_special_tokens_alone_are_an_empty_response_whether_or_not_the_text_shows_them(
    hide, text_source
):
    """A response of end, padding and space tokens is `empty`, also where the text shows special
    tokens, unless the task names such a token."""
    end, pad = tokenizer().eos_token_id, tokenizer().pad_token_id
    (space,) = tokenizer().encode(" ", add_special_tokens=False)
    config = GateConfig(hide_special_tokens=hide, text_source=text_source)
    shown = tokenizer().convert_ids_to_tokens(end)
    samples = [
        encoded("", response=shown, ids=ids) for ids in ([end], [end, pad, pad], [space, end])
    ]
    results = [
        postprocess_output_data([sample], config, tokenizer=tokenizer()) for sample in samples
    ]
    assert [reasons_of(result) for result in results] == [["empty"]] * 3
    named = dataclasses.replace(config, keep_special_tokens=(shown,))
    assert postprocess_output_data(samples[:1], named, tokenizer=tokenizer()).samples[0].valid, (
        "what a task names is its answer"
    )


def test_end_and_padding_tokens_are_not_text_and_only_outer_whitespace_is_stripped():
    """End and padding tokens and outer whitespace are not in the text, and the ids stay as they
    were."""
    pads = [tokenizer().pad_token_id] * 3
    ids = (
        tokenizer().encode("<think>x</think><answer>4</answer>\n", add_special_tokens=False)
        + [tokenizer().eos_token_id]
        + pads
    )
    out = run([encoded("", ids=ids)], GateConfig(format=FORMAT_PRESETS["think_answer"])).samples[0]
    assert out.response == "<think>x</think><answer>4</answer>" and out.valid
    assert list(out.tokens) == [5, 6, *ids]


def test_special_tokens_that_the_format_needs_stay_visible():
    """Special tokens that the format names, such as role markers, stay in the text, so that its
    check sees them."""
    sample = encoded("<answer>4</answer><|im_start|>user")
    config = GateConfig(format=FORMAT_PRESETS["answer"])
    assert reasons_of(postprocess_output_data([sample], config, tokenizer=tokenizer())) == [
        "bad_format"
    ]
    kept = GateConfig(keep_special_tokens=("<|im_end|>",))
    out = postprocess_output_data(
        [encoded("a<|im_end|>b<|eos|>")], kept, tokenizer=tokenizer()
    ).samples[0]
    assert out.response == "a<|im_end|>b"


CASES = {
    "outer whitespace": ("a b\n", "a b", None),
    "trimmed stop string": ("answer\nUser:", "answer", None),
    "special token in the text": ("a b", "a b<|im_end|>", MismatchCause.SPECIAL_TOKENS),
    "character lost at the end": ("结果是好", "结果是", MismatchCause.MULTIBYTE_CUT),
    "character replaced": ("a 🎉 b", "a \ufffd\ufffd b", MismatchCause.MULTIBYTE_CUT),
    "spaces merged": ("a    b", "a b", MismatchCause.WHITESPACE),
    "newline lost": ("a\nb", "a b", MismatchCause.WHITESPACE),
    "another text": ("the cat", "a dog", MismatchCause.SHIFTED_IDS),
    "text continues": ("the cat", "the cat sat down", MismatchCause.SHIFTED_IDS),
    "other script with a broken character": ("好\ufffd的", "坏\ufffd人", MismatchCause.SHIFTED_IDS),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mismatch_has_one_of_four_causes(name):
    """A difference between text and tokens is classified as one of four causes, each with a remedy
    of its own, or as none."""
    decoded, text, cause = CASES[name]
    found = classify_mismatch(
        decoded, text, special_strings=("<|im_end|>",), stop_strings=("\nUser:",)
    )
    assert found is cause


def test_a_mismatch_is_misaligned_its_rate_is_measured_and_lenient_refuses_only_shifted_ids():
    """A mismatch rejects its sample as `misaligned` and counts in the failure rate; the lenient
    level rejects shifted ids only."""
    samples = [
        encoded("good"),
        encoded("a  b", response="a b"),
        encoded("the cat", response="a dog"),
        encoded("fine"),
    ]
    result = run(samples, COMPARE)
    assert reasons_of(result) == [None, "misaligned", "misaligned", None]
    assert result.statistics.alignment_failure_rate == 0.5
    metrics = result.statistics.to_metrics()
    assert metrics["gate/alignment/whitespace"] == metrics["gate/alignment/shifted_ids"] == 1
    lenient = GateConfig(
        text_source="engine", compare_text=True, levels={"misaligned": Level.LENIENT}
    )
    assert reasons_of(run(samples, lenient)) == [None, None, "misaligned", None]


def test_a_mismatch_can_be_corrected_from_the_token_side():
    """With `correct_text` a mismatch replaces the text by the decoded tokens and leaves the tokens
    as they are."""
    sample = encoded("a  b", response="a b")
    result = run([sample], GateConfig(text_source="engine", compare_text=True, correct_text=True))
    assert (
        result.samples[0].valid
        and result.samples[0].response == "a  b"
        and result.samples[0].tokens is sample.tokens
    )
    assert result.statistics.alignment_failure_rate == 1.0


def test_comparing_is_a_switch():
    """Without `compare_text` nothing is compared and no sample is rejected for its text."""
    result = run([encoded("x", response="y")], GateConfig(text_source="engine"))
    assert reasons_of(result) == [None] and result.statistics.counts.get("compared", 0) == 0


def test_retried_samples_come_from_the_cache_with_identical_results():
    """A sample that is judged again costs a cache look-up instead of a decode and has the same
    verdict."""
    codec = Codec(tokenizer())
    samples = [
        encoded("good"),
        encoded("a  b", response="a b"),
        encoded("the cat", response="a dog"),
    ]
    first = postprocess_output_data(samples, COMPARE, tokenizer=codec)
    second = postprocess_output_data(samples, COMPARE, tokenizer=codec)
    assert (
        first.statistics.counts["cache_misses"] == 3 and second.statistics.counts["cache_hits"] == 3
    )
    assert second.statistics.counts.get("decoded", 0) == 0
    assert (
        reasons_of(first) == reasons_of(second)
        and first.statistics.dropped == second.statistics.dropped
    )
    assert [s.response for s in first.samples] == [s.response for s in second.samples]
    other = encoded("good", response="bad")
    assert postprocess_output_data([other], COMPARE, tokenizer=codec).verdicts[0].reason is not None


def test_the_check_before_rewards_spares_the_check_after_them_the_decoding():
    """The check after rewards finds the texts that the check before rewards decoded in the
    cache."""
    codec, config = Codec(tokenizer()), GateConfig(format=FORMAT_PRESETS["answer"])
    samples = [
        encoded(f"<answer>{i}</answer>", response=f"<answer>{i}</answer> ") for i in range(4)
    ]
    checked = apply_verdicts(samples, check_responses(samples, config, tokenizer=codec))
    assert [s.response for s in checked] == [f"<answer>{i}</answer>" for i in range(4)]
    counts = postprocess_output_data(checked, config, tokenizer=codec).statistics.counts
    assert counts["cache_hits"] == 4 and counts.get("decoded", 0) == 0


def test_blank_responses_are_found_from_tokens_and_cheaply():
    """A blank response is found from its tokens, and only rows without a visible token among the
    first few are decoded."""
    samples = [
        encoded("\u200b \ufeff"),
        encoded("   \n" * 9 + "end"),
        encoded("<|im_end|>"),
        encoded("🎉"),
    ]
    config = GateConfig(text_source="engine")
    result = run(samples, config)
    assert reasons_of(result) == ["empty", None, "empty", None]
    assert result.statistics.counts["decoded"] <= 3


def test_finish_reason_is_checked_against_the_last_token():
    """The gate counts `stop` without an end token, `length` with one, and unknown finish reasons,
    also where a check stops before the tokens are read."""
    samples = [
        encoded("a"),
        encoded("b", eos=False),
        encoded("c", finish_reason="length"),
        encoded("d", finish_reason=None),
        # as it should be: cut, without an end token
        encoded("e", eos=False, finish_reason="length"),
    ]
    # a check that stops a truncated response before its tokens are read does not end the series
    for level in Level:
        counts = run(samples, GateConfig(level=level)).statistics.counts
        assert (
            counts["stop_without_eos"] == 1
            and counts["length_with_eos"] == 1
            and counts["finish_unknown"] == 1
        )
    unread = [
        encoded("e", eos=False),
        encoded("f", finish_reason="length"),
        encoded("g", finish_reason="length", tokens=["h"]),
    ]
    as_arrays = [dataclasses.replace(sample, tokens=np.array(sample.tokens)) for sample in unread]
    for batch in (unread, as_arrays):
        counts = run(batch, GateConfig(min_response_tokens=99)).statistics.counts
        assert (
            counts["stop_without_eos"] == 1
            and counts["length_with_eos"] == 1
            and "decoded" not in counts
        )


@pytest.fixture
def sampled(tmp_path):
    """The default gate of a run of 64 samples a rollout, past its first two rollouts: every eighth
    text is compared.
    """
    args = rollout_args(
        rollout_batch_size=16, n_samples_per_prompt=4, run_dir=None, gate_compare_text="auto"
    )
    return Gate.from_args(args, tokenizer())


def rollout_of(count=64, **wrong):
    """Texts "answer 0", "answer 1", ...; those numbered in `wrong` have the ids of another text."""
    return [
        encoded(wrong.get(f"at_{i}", f"answer {i}"), response=f"answer {i}", index=i, reward=1.0)
        for i in range(count)
    ]


def test_a_text_of_other_ids_is_found_by_default(sampled):
    """By default a text of other ids ("90" with the ids of "46") is rejected in the first two
    rollouts and in every evaluation, where all texts are compared."""
    samples = [
        encoded("46", response="90", index=1, reward=1.0),
        encoded("46", response="46", index=2, reward=1.0),
    ]
    assert reasons_of(sampled.run(samples, 0)) == ["misaligned", None]
    sampled.tally.started(0)
    assert reasons_of(sampled.run(samples, 7, evaluation=True)) == ["misaligned", None]
    early = check_responses(
        samples, sampled.config, tokenizer=Codec(tokenizer()), tally=sampled.tally
    )
    assert [verdict.valid for verdict in early] == [False, True]


def test_a_few_texts_of_a_later_rollout_are_compared_and_all_once_one_is_of_other_ids(sampled):
    """Later 8 of 64 texts are compared; with ids shifted by one sample these show it, and all texts
    of this and later rollouts are compared."""
    result = sampled.run(rollout_of(), 5)
    assert result.statistics.counts["compared"] == 8 and result.statistics.kept == 64
    shifted = rollout_of(**{f"at_{i}": f"answer {i + 1}" for i in range(64)})
    result = sampled.run(shifted, 6)
    assert result.statistics.counts["compared"] == 64 and result.statistics.kept == 0
    assert sampled.run(rollout_of(), 7).statistics.counts["compared"] == 64, "and from then on"


def test_the_check_before_rewards_tells_the_whole_rollout(sampled):
    """One wrong text in a group makes the pass after rewards compare all of the engine's texts,
    which the pass before had replaced."""
    sampled.tally.reached(5, None)
    codec = Codec(tokenizer())
    samples = rollout_of(**{f"at_{i}": f"answer {i + 1}" for i in (1, 2, 8)})
    gate = scoring.ResponseGate(
        lambda group: check_responses(group, sampled.config, tokenizer=codec, tally=sampled.tally),
        apply_verdicts,
    )
    for first in range(0, 64, 4):
        gate.mark(samples[first : first + 4])
    assert [sample.index for sample in samples if not sample.valid] == [8] and samples[
        1
    ].response == "answer 2"
    result = sampled.run(samples, 5)
    assert [i for i, reason in enumerate(reasons_of(result)) if reason] == [1, 2, 8]


def test_small_differences_that_nobody_asked_about_are_counted_and_reject_nothing(sampled):
    """By default an extra space in the engine's text is counted and rejects nothing; the decoded
    text is scored and trained."""
    samples = rollout_of()
    for sample in samples:
        sample.response = sample.response.replace(" ", "  ")
    statistics = sampled.run(samples, 5).statistics
    assert (
        statistics.kept,
        statistics.counts["mismatched"],
        statistics.counts["cause_whitespace"],
    ) == (64, 8, 8)


def test_every_end_id_of_the_checkpoint_ends_a_response(tmp_path):
    """A response that stops at any of the checkpoint's four end ids, or at a stop id of the
    options, counts as ended."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6, 7, 8]}))
    config = gate_config_from_args(
        rollout_args(hf_checkpoint=str(tmp_path), rollout_stop_token_ids=[9])
    )
    assert config.eos_token_ids == {5, 6, 7, 8, 9}
    ends = [5, 6, 7, 8, 9, 10]
    samples = [encoded("a", ids=[11, end]) for end in ends]
    counts = run(
        samples, dataclasses.replace(config, text_source="engine", context_length=None)
    ).statistics.counts
    assert counts["stop_without_eos"] == 1, "only the one that ends with 10"
    own = encoded("a")
    assert run([own], config).statistics.counts.get("stop_without_eos", 0) == 0, (
        "the tokenizer's end token beside them"
    )


def test_ids_beyond_the_tokenizer_are_refused_before_decoding():
    """An id outside the vocabulary is refused before the decoder sees it."""
    sample = encoded("x", ids=[len(tokenizer()) + 3, 7])
    assert reasons_of(run([sample], GateConfig())) == ["bad_token"]


def test_decoding_by_rule_equals_the_tokenizers_own_skipping():
    """Hiding special ids before decoding gives the same text as `skip_special_tokens`."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, len(tokenizer()), size=50) for _ in range(50)]
    expected = [tokenizer().decode(row.tolist(), skip_special_tokens=True) for row in rows]
    assert Codec(tokenizer()).decode(rows) == expected
    assert Codec(tokenizer(), hide_special_tokens=False).decode(rows) == [
        tokenizer().decode(row.tolist()) for row in rows
    ]


def test_one_codec_per_tokenizer_and_rule():
    """Tables and cache are made once per tokenizer and rule, and not per group of a rollout."""
    assert codec_of(tokenizer(), GateConfig()) is codec_of(
        tokenizer(), GateConfig(compare_text=True)
    )
    assert codec_of(tokenizer(), GateConfig()) is not codec_of(
        tokenizer(), GateConfig(hide_special_tokens=False)
    )


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
