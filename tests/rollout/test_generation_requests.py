"""Requests and replies without a network: what is sent, what is stored, and which replies are
refused as a whole."""

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`
from support.fake_engine import make_reply

from slime.data.sample import Sample
from slime.exceptions import RolloutDataError
from slime.files.wire_arrays import TOKEN_DTYPE, encode_array
from slime.rollout.generation import (
    apply_response,
    apply_segment,
    build_batch_request,
    build_request,
    continue_text,
    derive_seed,
    parse_batch_reply,
    reset_to_prompt,
    response_budget,
)

NUM_GPUS = 0


def test_the_prompt_is_sent_as_the_ids_that_will_be_trained():
    """The request has the prompt's ids, so that engine and trainer see the same prompt."""
    sample = Sample(prompt="Hi", tokens=[128000, 7])
    request = build_request(sample, {"max_new_tokens": 4}, rid="r1")
    assert request == {
        "input_ids": [128000, 7], "sampling_params": {"max_new_tokens": 4}, "return_logprob": True, "rid": "r1",
    }  # fmt: skip
    batch = build_batch_request([request, {**request, "rid": "r2", "input_ids": [1]}])
    assert (
        batch["input_ids"] == [[128000, 7], [1]]
        and batch["rid"] == ["r1", "r2"]
        and batch["return_logprob"] is True
    )
    with pytest.raises(RolloutDataError, match="1 replies to 2 requests"):
        parse_batch_reply([{}], num_requests=2)
    with pytest.raises(RolloutDataError, match="3 replies to 2 requests"):
        parse_batch_reply([{}] * 3, num_requests=2)


@pytest.mark.parametrize("arrays", [False, True])
def test_ids_log_probs_text_and_labels_of_a_reply_are_stored_as_sent(arrays):
    """A reply as JSON triples and one as base64 arrays make the same sample."""
    sample = Sample(tokens=[1, 2])
    reply = make_reply([7, 8, 9], "stop", text="seven", version="3", body={"return_arrays": arrays})
    apply_response(sample, reply)
    assert (
        sample.tokens == [1, 2, 7, 8, 9]
        and sample.response_length == 3
        and sample.response == "seven"
    )
    assert sample.rollout_log_probs == [-0.125, -0.25, -0.375] and sample.loss_mask == [1, 1, 1]
    assert (sample.status, sample.finish_reason, sample.weight_versions) == (
        Sample.Status.COMPLETED,
        "stop",
        ["3"],
    )


def broken(change):
    reply = make_reply([7, 8, 9, 10], "stop", text="t")
    change(reply)
    return reply


@pytest.mark.parametrize(
    ("change", "words"),
    [
        # ids that begin with the tail of the prompt: 6 ids, 4 log-probs
        (lambda r: r.update(output_ids=[1, 2, 7, 8, 9, 10]), "6 output_ids and 4 log-probs"),
        (lambda r: r.update(output_ids=[7, 8, 9, 11]), "differ"),
        (lambda r: r["meta_info"].update(completion_tokens=5), "completion_tokens is 5, but it has 4"),
        (lambda r: r["meta_info"].pop("output_token_logprobs"), "no output_token_logprobs"),
        (lambda r: r["meta_info"]["output_token_logprobs"][2].__setitem__(0, None), "1 of 4 log-probs are null"),
        (lambda r: r.pop("meta_info"), "no meta_info"),
        (lambda r: r["meta_info"]["output_token_logprobs"].__setitem__(2, None), r"no list of \[log-prob, id, text\]"),
        (lambda r: r["meta_info"].update(finish_reason={}), "finish_reason is {}"),
        (lambda r: r["meta_info"].update(cached_tokens="3"), "cached_tokens is '3', no whole number"),
        (lambda r: r["meta_info"].update(routed_experts="AAAA"), "does not fit sample"),
        (lambda r: r.update(text=["t"]), r"text is \['t'\], no string"),
        (lambda r: r.update(output_ids=7), "output_ids is 7, no list"),
        (lambda r: r["meta_info"].update(output_token_logprobs=[], completion_tokens=0, finish_reason=None), "inconsistent"),
    ],
)  # fmt: skip
def test_a_reply_whose_counts_or_types_disagree_is_refused_and_nothing_is_stored(change, words):
    """A reply whose counts or types disagree is refused, and nothing of it is stored."""
    sample = Sample(tokens=[1, 2])
    before = sample.to_dict()
    with pytest.raises(RolloutDataError, match=words):
        apply_response(sample, broken(change))
    assert sample.to_dict() == before


@pytest.mark.parametrize(
    ("reply", "length", "versions"),
    [
        ({"text": "", "meta_info": {"finish_reason": {"type": "abort"}}}, 0, []),
        ({"text": "", "output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}, "output_token_logprobs": []}}, 0, []),
        (make_reply([1, 2, 3, 4, 5], "abort", version="9"), 5, ["9"]),
        (broken(lambda r: (r["meta_info"].pop("weight_version"), r["meta_info"].update(finish_reason={"type": "abort"}))), 4, ["default"]),
    ],
)  # fmt: skip
def test_an_abort_is_a_valid_partial_whatever_it_lacks(reply, length, versions):
    """An abort before prefill is empty, and one after k tokens has k ids and log-probs, with one
    version per segment that has tokens."""
    sample = Sample(tokens=[1])
    apply_response(sample, reply)
    assert sample.status is Sample.Status.ABORTED and sample.response_length == length
    assert sample.weight_versions == versions and len(sample.tokens) == 1 + length


def test_segments_add_up_and_the_last_id_is_never_changed():
    """Two segments of a response add up with log-probs per new token, and a cut answer keeps its
    last sampled token."""
    sample = Sample(tokens=[1, 2, 3])
    apply_response(sample, make_reply([4, 5], "abort", version="3", text="ab"))
    apply_response(sample, make_reply([6, 7], "length", version="4", text="cd"))
    assert sample.tokens == [1, 2, 3, 4, 5, 6, 7] and sample.rollout_log_probs == [
        -0.125,
        -0.25,
        -0.125,
        -0.25,
    ]
    assert sample.weight_versions == ["3", "4"] and sample.response == "abcd"
    assert sample.status is Sample.Status.TRUNCATED and sample.loss_mask == [1, 1, 1, 1]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=8), min_size=1, max_size=4), st.booleans()
)
def test_stored_ids_equal_generated_ids_over_any_segments(segments, arrays):
    """Stored ids equal the generated ones for any segments; nothing goes through text, since ids ->
    text -> ids is not the identity."""
    sample = Sample(tokens=[1])
    for segment in segments:
        apply_response(
            sample, make_reply(segment, "abort", text="hello", body={"return_arrays": arrays})
        )
    flat = [token for segment in segments for token in segment]
    assert sample.tokens == [1, *flat] and sample.response_length == len(flat)
    assert len(sample.rollout_log_probs or []) == len(sample.loss_mask or []) == len(flat)


@pytest.mark.parametrize(
    ("response", "max_response", "max_context", "budget"),
    [(0, 8, None, 8), (3, 8, None, 5), (8, 8, None, 0), (0, 8, 12, 2), (2, 8, 12, 0), (0, None, 10, 0), (0, None, None, None)],
)  # fmt: skip
def test_the_budget_is_what_response_and_context_limit_leave(
    response, max_response, max_context, budget
):
    """The context limit holds while generating: a prompt of 10 with limit 12 leaves 2 tokens."""
    sample = Sample(response_length=response)
    limits = {"max_response_len": max_response, "max_context_len": max_context}
    assert response_budget(sample, **limits, prompt_length=10) == budget


def test_seeds_differ_by_member_prompt_rollout_and_segment_and_repeat_exactly():
    """Seeds differ by member, prompt, rollout and segment, and two runs have the same ones."""
    keys = [(m, i, r, s) for m in range(4) for i in range(20) for r in (None, 0, 1) for s in (0, 5)]
    seeds = [
        derive_seed(42, member=m, sample_index=i, rollout_id=r, segment=s) for m, i, r, s in keys
    ]
    assert len(set(seeds)) == len(keys) and all(0 <= seed < 2**31 for seed in seeds)
    assert seeds == [
        derive_seed(42, member=m, sample_index=i, rollout_id=r, segment=s) for m, i, r, s in keys
    ]
    assert derive_seed(42, member=1, sample_index=3, rollout_id=0) == derive_seed(
        43, member=0, sample_index=3, rollout_id=0
    )


def bytes_as_text(ids):
    """What a byte-level tokenizer makes of its ids: half a character is a replacement character."""
    return bytes(ids).decode("utf-8", errors="replace")


def words_as_text(ids):
    """What a tokenizer of whole words makes of its ids: the first word's space is left out."""
    return " ".join({1: "one", 2: "two", 3: "three"}[i] for i in ids)


@pytest.mark.parametrize(
    ("segments", "decode", "text"),
    [
        ([[0xE4, 0xBD], [0xA0]], bytes_as_text, "你"),
        ([[0x41, 0xE4], [0xBD], [0xA0, 0x42]], bytes_as_text, "A你B"),
        ([[1], [2, 3]], words_as_text, "one two three"),
        ([[1], [], [2]], words_as_text, "one two"),
        ([[0xE4], [0x41]], bytes_as_text, "\ufffdA"),
    ],
)
def test_the_text_of_a_continued_response_is_that_of_all_its_ids(segments, decode, text):
    """A response aborted after two of a character's three bytes has the text of all its ids, and
    not two replacement characters."""
    sample = Sample(index=0, tokens=[9])
    for number, ids in enumerate(segments):
        kind = "stop" if number == len(segments) - 1 else "abort"
        apply_segment(sample, make_reply(ids, kind, text=decode(ids)), decode=decode)
    assert sample.response == text == decode(sample.tokens[1:])


def test_what_was_written_in_place_of_earlier_ids_stays():
    """Text that a template wrote for earlier ids, such as end marks, stays; only the border between
    segments is decoded anew."""
    assert (
        continue_text("four<end> \ufffd", "four \ufffd", "four 你", appended="x") == "four<end> 你"
    )
    assert continue_text("four<end>", "four", "four more", appended="x") == "four<end> more"
    assert (
        continue_text("something else", "four\ufffd", "four你", appended="something else!")
        == "something else!"
    )


def test_ids_as_arrays_without_log_probs_are_refused():
    """A reply without log-probs, as from a server that ignores return_logprob, is refused."""
    reply = {
        "text": "",
        "meta_info": {
            "id": "r",
            "output_token_ids_b64": encode_array([7, 8], TOKEN_DTYPE),
            "completion_tokens": 2,
        },
    }
    with pytest.raises(RolloutDataError, match="token ids but no log-probs"):
        apply_response(Sample(prompt="p", tokens=[1]), reply)


def test_a_reset_sample_has_its_identity_and_nothing_generated():
    """A reset sample keeps its identity and nothing that was generated: old tokens would train
    under the wrong policy, an old answer would be scored again."""
    left = {"failure": "x", "answer_text": "41", "engine_text": "<answer>41</answer>"}
    identity = {"index": 5, "group_index": 2, "rollout_id": 9, "session_id": "s"}
    sample = Sample(**identity, prompt="p", label="l", metadata={"a": 1, **left}, tokens=[1])
    apply_response(sample, make_reply([7, 8], "abort"))
    sample.reward, sample.valid, sample.invalid_reason = 1.0, False, "failed"
    expected = Sample(**identity, prompt="p", label="l", metadata={"a": 1})
    assert reset_to_prompt(sample) == expected


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
