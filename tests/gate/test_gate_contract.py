"""What the gate guarantees for any input: order, ids, tokens, one reason, a marked copy,
adapters."""

import copy
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pytest
from support.gate_golden import GOLDEN_CONFIG, load_corpus, load_tokenizer
from support.gate_samples import reasons_of, sound_sample

from slime.data.columns import ColumnsConfig, build_train_columns, compute_rewards
from slime.data.reasons import REASONS, reason_of_code
from slime.data.sample import Status
from slime.exceptions import ConfigError, RolloutDataError
from slime.gate import (
    GateConfig,
    InvalidReason,
    MissingLogProbs,
    Policy,
    apply_verdicts,
    check_responses,
    postprocess_output_data,
)
from slime.gate import judge as gate_module
from slime.gate.adapters import ADAPTERS
from slime.gate.config import FORMAT_PRESETS

NUM_GPUS = 0
DROP_ALL = {reason: Policy.DROP for reason in REASONS}


def dirty_batch():
    """20 samples of which 2 are defective, as in practice: one empty, one without its end."""
    batch = [sound_sample(i) for i in range(20)]
    batch[3] = sound_sample(3, length=0, response="", rollout_log_probs=[])
    batch[11] = sound_sample(11, status=Status.TRUNCATED, finish_reason="length")
    return batch


def test_kept_samples_carry_the_same_token_ids_and_the_input_is_not_edited():
    """The gate returns copies that share the token buffers; it changes no token, pads nothing and
    cuts nothing."""
    batch = dirty_batch()
    before = copy.deepcopy(batch)
    result = postprocess_output_data(batch, GateConfig())
    assert batch == before
    for sample, out in zip(batch, result.samples, strict=True):
        assert (
            out is not sample
            and out.tokens is sample.tokens
            and out.rollout_log_probs is sample.rollout_log_probs
        )
        assert out.response == sample.response and out.response_length == sample.response_length


def test_no_invalid_sample_becomes_valid_by_being_changed():
    """The gate does not repair: judged again by a gate that does not trust earlier verdicts, every
    defect of the golden corpus is still found, except the plug-in's own `rejected`, which no text
    shows."""
    broken = "<think>2 + 2</think><answer>4"
    config = GateConfig(format=FORMAT_PRESETS["think_answer"])
    out = postprocess_output_data([sound_sample(0, response=broken)], config).samples[0]
    assert (out.valid, out.invalid_reason, out.response) == (False, "bad_format", broken)
    corpus, expected = load_corpus()
    tokenizer = load_tokenizer()
    fresh = dataclasses.replace(GOLDEN_CONFIG, trust_earlier_verdicts=False)
    result = postprocess_output_data(corpus, GOLDEN_CONFIG, tokenizer=tokenizer)
    again = reasons_of(postprocess_output_data(result.samples, fresh, tokenizer=tokenizer))
    was = [row["reason"] for row in expected]
    assert {
        first
        for first, second in zip(was, again, strict=True)
        if first is not None and second is None
    } == {"rejected"}
    assert [second for first, second in zip(was, again, strict=True) if first is None] == [
        None
    ] * was.count(None)


def test_each_defect_of_a_usual_batch_is_classified_and_the_rest_passes():
    """Of 20 samples the empty and the cut one get their reasons, and the other 18 are valid."""
    result = postprocess_output_data(dirty_batch(), GateConfig())
    assert {i: r for i, r in enumerate(reasons_of(result)) if r} == {3: "empty", 11: "truncated"}
    assert [s.valid for s in result.samples] == [i not in (3, 11) for i in range(20)]


def test_mark_keeps_every_sample_in_order_and_drop_removes_exactly_the_invalid_ones():
    """`mark` returns all samples in order, `drop` returns the valid ones in order, and both report
    the same counts."""
    batch = dirty_batch()
    marked = postprocess_output_data(batch, GateConfig())
    dropped = postprocess_output_data(batch, GateConfig(policies=DROP_ALL))
    assert [s.index for s in marked.samples] == list(range(20)) and marked.raw_rows == list(
        range(20)
    )
    kept = [i for i in range(20) if i not in (3, 11)]
    assert [s.index for s in dropped.samples] == kept == dropped.raw_rows
    assert marked.statistics.dropped == dropped.statistics.dropped
    assert (
        marked.samples[3].invalid_reason == "empty"
        and marked.samples[11].invalid_reason == "truncated"
    )


def test_output_samples_are_built_once_each_after_all_checks(monkeypatch):
    """Output samples are built after the checks of all chunks. Samples that `drop` removes are
    built once as well, when `judged` is read."""
    events = []
    judge, build = gate_module._judge_chunk, gate_module._marked
    monkeypatch.setattr(gate_module, "CHUNK_SAMPLES", 5)
    monkeypatch.setattr(
        gate_module, "_judge_chunk", lambda chunk: events.append("check") or judge(chunk)
    )
    monkeypatch.setattr(
        gate_module, "_marked", lambda *args: events.append("build") or build(*args)
    )
    result = postprocess_output_data(dirty_batch(), GateConfig(policies=DROP_ALL))
    assert events == ["check"] * 4 + ["build"] * 18
    assert [len(result.judged), len(result.judged)] == [20, 20]
    assert events == ["check"] * 4 + ["build"] * 20
    assert [
        len(result.samples),
        len(result.judged),
        sum(not sample.valid for sample in result.judged),
    ] == [18, 20, 2]


def test_group_ids_and_metadata_pass_through_untouched():
    """Group ids and metadata of kept samples are those of the input, so that a filtered batch can
    be normalized by group."""
    batch = [sound_sample(i, metadata={"source_name": "s", "nested": {"i": i}}) for i in range(8)]
    result = postprocess_output_data(batch, GateConfig(policies=DROP_ALL))
    assert [s.group_index for s in result.samples] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert all(out.metadata is raw.metadata for out, raw in zip(result.samples, batch, strict=True))


def test_each_sample_says_whether_it_needs_a_reward():
    """The check before rewards tells which samples need a reward, computes none, and leaves its
    input unmarked."""
    batch = [sound_sample(i, reward=None) for i in range(4)]
    batch[2].tokens, batch[2].response_length, batch[2].rollout_log_probs = [1, 2, 3], 0, []
    verdicts = check_responses(batch, GateConfig())
    scored = [
        sample.index for sample, verdict in zip(batch, verdicts, strict=True) if verdict.valid
    ]
    assert scored == [0, 1, 3]
    marked = apply_verdicts(batch, verdicts)
    assert [s.valid for s in marked] == [True, True, False, True] and all(
        s.reward is None for s in marked
    )
    assert [s.valid for s in batch] == [True] * 4


def test_rewards_are_pending_before_scoring_and_required_after_it():
    """A missing reward is accepted before the reward stage and is `bad_reward` after it."""
    batch = [sound_sample(0, reward=None), sound_sample(1, reward=float("nan")), sound_sample(2)]
    assert reasons_of(postprocess_output_data(batch, GateConfig())) == [None, None, None]
    assert reasons_of(postprocess_output_data(batch, GateConfig(rewards_expected=True))) == [
        "bad_reward",
        "bad_reward",
        None,
    ]


def test_unknown_finish_reason_is_counted_and_not_guessed():
    """A missing or unknown finish reason is counted as unknown; the gate does not assume "stop"."""
    batch = [
        sound_sample(0, finish_reason=None),
        sound_sample(1, finish_reason="weird"),
        sound_sample(2),
    ]
    result = postprocess_output_data(batch, GateConfig())
    assert all(s.valid for s in result.samples) and result.samples[0].finish_reason is None
    assert (
        result.statistics.counts["finish_unknown"] == 2
        and result.statistics.counts["finish_stop"] == 1
    )


def test_a_kept_truncated_sample_stays_visibly_truncated():
    """A cut response is kept only by an explicit policy, and its copy still says that it is cut."""
    batch = [sound_sample(0, status=Status.TRUNCATED, finish_reason="length")]
    assert postprocess_output_data(batch, GateConfig()).samples[0].valid is False
    out = postprocess_output_data(
        batch, GateConfig(policies={InvalidReason.TRUNCATED: Policy.KEEP})
    ).samples[0]
    assert (
        out.valid is True and out.invalid_reason == "truncated" and out.status is Status.TRUNCATED
    )


def test_the_trainer_sees_a_kept_cut_also_where_only_the_finish_reason_tells_it():
    """The trainer's `truncated` column is 1 for a kept cut also where a custom generate function
    left the status alone."""
    batch = [
        sound_sample(0, finish_reason="length"),
        sound_sample(1, status=Status.TRUNCATED, finish_reason=None),
        sound_sample(2),
    ]
    kept = postprocess_output_data(
        batch, GateConfig(policies={InvalidReason.TRUNCATED: Policy.KEEP})
    ).samples
    assert [sample.invalid_reason for sample in kept] == ["truncated", "truncated", None]
    columns = build_train_columns(kept, compute_rewards(kept, ColumnsConfig())[:2], ColumnsConfig())
    assert columns["valid"] == [True] * 3 and columns["truncated"] == [1, 1, 0]


def test_a_sample_kept_in_spite_of_one_finding_is_still_refused_for_a_worse_one():
    """After a finding that the policy keeps, the other checks still run: a cut response with a NaN
    log-prob is rejected."""
    sample = sound_sample(0, status=Status.TRUNCATED)
    sample.rollout_log_probs[4] = float("nan")
    config = GateConfig(policies={InvalidReason.TRUNCATED: Policy.KEEP})
    assert reasons_of(postprocess_output_data([sample], config)) == ["bad_logprob"]
    sample = sound_sample(0, status=Status.TRUNCATED)
    config = GateConfig(
        min_response_tokens=99,
        policies=dict.fromkeys((InvalidReason.TRUNCATED, InvalidReason.TOO_SHORT), Policy.KEEP),
    )
    (kept,) = postprocess_output_data([sample], config).samples
    assert kept.valid and kept.invalid_reason == "too_short", (
        "of two findings that are kept, the first is named"
    )


@pytest.mark.parametrize("reason", ["empty", "bad_logprob", "bad_token", "bad_reward", "failed"])
def test_what_cannot_be_trained_cannot_be_kept(reason):
    """The policy `keep` is refused for reasons that must never train, such as an empty response."""
    with pytest.raises(ConfigError, match=reason):
        GateConfig(policies={InvalidReason(reason): Policy.KEEP})


def test_evaluation_reports_and_marks_nothing():
    """In an evaluation the gate marks no sample, so that its means stay, and records its
    findings."""
    result = postprocess_output_data(dirty_batch(), GateConfig(evaluation=True, policies=DROP_ALL))
    assert len(result.samples) == 20 and all(
        s.valid and s.invalid_reason is None for s in result.samples
    )
    assert result.statistics.kept == 18


def test_prompt_as_text_or_ids_and_other_engines_shapes_come_in_through_an_adapter():
    """Each adapter turns its engine's answer into the same sample: ids, log-probs, text, finish
    reason and group."""
    token_pairs = [[-0.5, 11, None], [-0.25, 12, None]]
    raws = {
        "trajectory": {
            "prompt": [5, 6],
            "response": "hi",
            "response_tokens": [11, 12],
            "logprobs": [-0.5, -0.25],
            "finish_reason": "stop",
            "metadata": {"k": 1},
            "group_id": 9,
        },
        "sglang": {
            "request": {"input_ids": [5, 6], "group_id": 9},
            "response": {
                "text": "hi",
                "meta_info": {
                    "finish_reason": {"type": "stop"},
                    "output_token_logprobs": token_pairs,
                    "completion_tokens": 2,
                },
            },
        },
        "openai": {
            "request": {
                "prompt_token_ids": [5, 6],
                "messages": [{"role": "user", "content": "q"}],
                "group_id": 9,
            },
            "response": {
                "choices": [
                    {
                        "message": {"content": "hi"},
                        "finish_reason": "stop",
                        "logprobs": {
                            "content": [
                                {"token": "token_id:11", "logprob": -0.5},
                                {"token": "token_id:12", "logprob": -0.25},
                            ]
                        },
                    }
                ]
            },
        },
    }
    assert set(raws) == set(ADAPTERS)
    for name, raw in raws.items():
        out = postprocess_output_data([raw], GateConfig(adapter=name)).samples[0]
        assert (out.tokens, out.response_length, out.rollout_log_probs) == (
            [5, 6, 11, 12],
            2,
            [-0.5, -0.25],
        ), name
        assert (out.response, out.finish_reason, out.group_index, out.valid) == (
            "hi",
            "stop",
            9,
            True,
        ), name


def test_prompt_tail_among_the_output_ids_is_refused_on_receipt():
    """Output ids that begin with the prompt's tail are refused; they would train as the model's
    own."""
    raw = {
        "request": {"input_ids": [8, 9]},
        "response": {"output_ids": [8, 9, 1, 2, 3, 4], "meta_info": {"completion_tokens": 4}},
    }
    with pytest.raises(RolloutDataError, match="input 0.*completion_tokens is 4 but 6"):
        postprocess_output_data([raw], GateConfig(adapter="sglang"))


@pytest.mark.parametrize(
    "response",
    [
        {"meta_info": {"finish_reason": {"type": "abort"}}},
        {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}},
    ],
)
def test_an_abort_before_prefill_is_a_valid_empty_partial(response):
    """An abort before prefill, without log-probs, ids or version, is `aborted` and no exception."""
    raw = {"request": {"input_ids": [1]}, "response": response}
    result = postprocess_output_data([raw], GateConfig(adapter="sglang"))
    assert reasons_of(result) == ["aborted"] and result.samples[0].response_length == 0


def test_something_that_is_no_sample_is_an_error_with_its_position():
    """An input of an unknown shape raises an error that names its position and the missing key."""
    with pytest.raises(RolloutDataError, match="input 1 is dict, not a Sample"):
        postprocess_output_data([sound_sample(), {"tokens": []}], GateConfig())
    with pytest.raises(RolloutDataError, match="input 0.*response_tokens"):
        postprocess_output_data([{"prompt": [1]}], GateConfig(adapter="trajectory"))
    with pytest.raises(ConfigError, match="no_such"):
        postprocess_output_data([{}], GateConfig(adapter="no_such"))


def test_missing_log_probs_follow_the_stated_policy_and_are_never_filled_silently():
    """Missing log-probs are rejected, allowed, masked or an error by policy; a silent 0.0 would
    mean probability 1."""
    none, holes = sound_sample(0, rollout_log_probs=None), sound_sample(1)
    holes.rollout_log_probs[3] = None

    def run(policy):
        return postprocess_output_data(
            [none, holes, sound_sample(2)], GateConfig(missing_log_probs=policy)
        )

    assert reasons_of(run(MissingLogProbs.MARK)) == ["logprob_mismatch", "bad_logprob", None]
    assert reasons_of(run(MissingLogProbs.ALLOW)) == [None, "bad_logprob", None]
    assert run(MissingLogProbs.ALLOW).samples[0].rollout_log_probs is None
    with pytest.raises(RolloutDataError, match="index 0.*rollout_log_probs"):
        run(MissingLogProbs.ERROR)
    masked = run(MissingLogProbs.MASK)
    assert reasons_of(masked) == [None, None, None]
    assert masked.samples[0].loss_mask == [0] * 12
    assert (
        masked.samples[1].loss_mask == [1, 1, 1, 0] + [1] * 8
        and masked.samples[1].rollout_log_probs[3] == 0.0
    )
    assert holes.rollout_log_probs[3] is None and holes.loss_mask is None
    # what does not train stays so: tokens 1 and 3 are a tool's, 3 and 5 have no log-prob
    tool = sound_sample(3, loss_mask=[1, 0, 1, 0] + [1] * 8)
    tool.rollout_log_probs[3] = tool.rollout_log_probs[5] = None
    (repaired,) = postprocess_output_data(
        [tool], GateConfig(missing_log_probs=MissingLogProbs.MASK)
    ).samples
    assert repaired.loss_mask == [1, 0, 1, 0, 1, 0] + [1] * 6
    tool.rollout_log_probs[7] = float("nan")  # a mask for what is absent is none for what is wrong
    assert reasons_of(
        postprocess_output_data([tool], GateConfig(missing_log_probs=MissingLogProbs.MASK))
    ) == ["bad_logprob"]


def test_tokens_may_be_lists_arrays_or_tensors_with_the_same_verdicts():
    """Lists, arrays and tensors of ids get the same verdicts."""
    import torch

    kinds = (
        list,
        lambda v: np.array(v, dtype=np.int32),
        lambda v: np.array(v),
        lambda v: torch.tensor(v),
        tuple,
    )
    for kind in kinds:
        good, bad = sound_sample(1), sound_sample(2)
        good.tokens, bad.tokens = kind(good.tokens), kind([*bad.tokens[:-1], -5])
        assert reasons_of(postprocess_output_data([good, bad], GateConfig(vocab_size=1000))) == [
            None,
            "bad_token",
        ]


def test_codes_on_the_wire_name_one_reason_each():
    """Each reason has a code of its own on the wire and is found by it."""
    assert [reason_of_code(reason.code) for reason in InvalidReason] == list(InvalidReason)
    assert reason_of_code(0) is None and len({reason.code for reason in InvalidReason}) == len(
        InvalidReason
    )


def test_an_earlier_verdict_stands():
    """The reason of an earlier check stands, so that a sample has one reason before and after
    rewards."""
    earlier = sound_sample(0, valid=False, invalid_reason="too_short")
    foreign = sound_sample(1, valid=False, invalid_reason="toxic", reward=None)
    result = postprocess_output_data([earlier, foreign], GateConfig(rewards_expected=True))
    assert reasons_of(result) == ["too_short", "rejected"] and "toxic" in result.verdicts[1].detail
    fresh = postprocess_output_data([earlier], GateConfig(trust_earlier_verdicts=False))
    assert reasons_of(fresh) == [None] and fresh.samples[0].valid is True


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
