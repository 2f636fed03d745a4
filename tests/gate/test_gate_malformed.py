"""What engines and plug-ins get wrong ends in a reason or an error message, and what stays in the
batch raises nowhere after the gate."""

import collections
import dataclasses
import functools
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pytest
from support.gate_golden import load_tokenizer
from support.gate_mutations import mutate
from support.gate_samples import reasons_of, sound_sample

from slime.data.columns import ColumnsConfig, build_train_columns, compute_rewards
from slime.data.number_list import number_list
from slime.data.reasons import REASONS
from slime.data.sample import Status
from slime.data.schedule import ScheduleConfig
from slime.data.split import SplitConfig, split_by_dp
from slime.exceptions import ConfigError, RolloutDataError
from slime.files.rollout_dump import read_rollout_dump, save_debug_rollout_data
from slime.gate import (
    FormatSpec,
    GateConfig,
    MissingLogProbs,
    Policy,
    TagPair,
    TaskRules,
    postprocess_output_data,
)
from slime.gate.config import FORMAT_PRESETS
from slime.gate.text import answer_of

NUM_GPUS = 0
SCORED = GateConfig(rewards_expected=True, repetition_window=8)


@functools.lru_cache(maxsize=1)
def tokenizer():
    return load_tokenizer()


def said(ids=None, **changes):
    """A sample whose response ids are text of the corpus's tokenizer."""
    ids = (
        list(ids)
        if ids is not None
        else tokenizer().encode("Hello world", add_special_tokens=False)
    )
    fields = {
        "tokens": [5, 6, *ids],
        "response_length": len(ids),
        "rollout_log_probs": [-1.0] * len(ids),
        "response": "",
    }
    return sound_sample(0, **{**fields, **changes})


def reasons(samples, config=None, **kwargs):
    return reasons_of(postprocess_output_data(samples, config or GateConfig(), **kwargs))


@pytest.mark.parametrize(
    "extra",
    [{}, {"format": FORMAT_PRESETS["roles"]}, {"compare_text": True, "text_source": "engine"}],
)
def test_an_id_between_the_tokenizers_size_and_the_models_padded_vocabulary_has_no_text(extra):
    """An id above the tokenizer's size and inside the padded vocabulary is valid without text.
    Qwen's model has 151,936 rows, its tokenizer 151,669 ids; an untrained model samples those
    between."""
    size = len(tokenizer())
    hello = tokenizer().encode("Hello world", add_special_tokens=False)
    config = GateConfig(vocab_size=size + 100, **extra)
    batch = [
        said([*hello, size + 5]),
        said([size, size + 1, size + 99]),
        said([*hello, size + 100]),
    ]
    result = postprocess_output_data(batch, config, tokenizer=tokenizer())
    assert (
        reasons_of(result) == [None, "empty", "bad_token"]
        and result.samples[0].response == "Hello world"
    )
    assert result.samples[0].tokens is batch[0].tokens


def test_unsigned_and_signed_ids_in_one_batch_stay_integers():
    """A batch with uint64 and int64 ids keeps integer ids, though numpy concatenates the two types
    to floats."""
    ids = said().tokens
    batch = [
        said(tokens=np.array(ids, dtype=kind))
        for kind in (np.uint64, np.int64, np.int32, np.uint16)
    ]
    assert reasons([*batch, said()], tokenizer=tokenizer()) == [None] * 5
    assert reasons([said(tokens=np.array([*ids[:-1], 2**63], dtype=np.uint64))]) == ["bad_token"]


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.int16, np.uint16])
def test_ids_narrower_than_the_vocabularys_size_are_ids(kind):
    """Ids of 8 and 16 bits are accepted, though numpy refuses to compare them with a vocabulary
    size of 151,936."""

    class LargeTokenizer:
        def __len__(self):
            return 151_936

        def decode(self, ids, **_):
            return "".join(chr(token_id) for token_id in ids)

    batch = [
        said(
            tokens=np.array([5, 6, 72, 105], dtype=kind),
            response_length=2,
            rollout_log_probs=[-1.0] * 2,
        )
    ]
    result = postprocess_output_data(batch, GateConfig(), tokenizer=LargeTokenizer())
    assert reasons_of(result) == [None] and result.samples[0].response == "Hi"


def test_an_id_beyond_32_bits_is_no_id_in_a_list_and_in_an_array():
    """An id that does not fit the trainers' 32-bit integers is `bad_token`, in lists and in arrays,
    also without a known vocabulary size."""
    ids = [1, 2**31, 3]
    kinds = (
        ids,
        tuple(ids),
        np.array(ids),
        np.array(ids, dtype=np.uint64),
        number_list(np.array(ids)),
    )
    assert (
        reasons(
            [said(tokens=value, response_length=1, rollout_log_probs=[-1.0]) for value in kinds]
        )
        == ["bad_token"] * 5
    )
    assert reasons(
        [said(tokens=np.array([2**31 - 1] * 3), response_length=1, rollout_log_probs=[-1.0])]
    ) == [None]


@pytest.mark.parametrize(("kind", "tolerance"), [(np.float16, 1e-4), (np.float32, 0.1)])
def test_a_log_prob_at_the_tolerance_has_one_verdict_whatever_its_neighbours_are(kind, tolerance):
    """A log-prob at the tolerance has one verdict whatever the data type of its neighbours, though
    numpy compares a column in its widest precision."""
    config = GateConfig(log_prob_tolerance=tolerance)
    edge = sound_sample(0, rollout_log_probs=np.full(12, kind(tolerance)))
    assert float(kind(tolerance)) > tolerance
    assert reasons([edge], config) == ["bad_logprob"] and reasons(
        [edge, sound_sample(1)], config
    ) == ["bad_logprob", None]
    assert reasons([sound_sample(0, rollout_log_probs=[float(kind(tolerance))] * 12)], config) == [
        "bad_logprob"
    ]


@pytest.mark.parametrize("response", [5, b"x", ["a"], {"a": 1}, np.array(["a", "b"])])
def test_a_response_that_is_no_text_is_decoded_from_its_tokens_or_refused(response):
    """A response of another type than text is replaced by the decoded tokens, or refused where
    there is no tokenizer; it never reaches a reward function."""
    for extra in (
        {},
        {"text_source": "engine"},
        {"text_source": "engine", "compare_text": True},
        {"compare_text": True},
    ):
        result = postprocess_output_data(
            [said(response=response)], GateConfig(**extra), tokenizer=tokenizer()
        )
        assert reasons_of(result) == [None] and result.samples[0].response == "Hello world"
        result = postprocess_output_data([said(response=response)], GateConfig(**extra))
        assert (
            reasons_of(result) == ["misaligned"]
            and result.verdicts[0].detail == f"response is {type(response).__name__}, no text"
        )


def test_bfloat16_log_probs_are_log_probs():
    """Log-probs in bfloat16, which numpy lacks, are accepted."""
    import torch

    values = torch.full((12,), -1.0, dtype=torch.bfloat16)
    assert reasons([sound_sample(0, rollout_log_probs=values)]) == [None]
    values[3] = float("nan")
    assert reasons([sound_sample(0, rollout_log_probs=values)]) == ["bad_logprob"]


def test_numpy_integers_count_in_statistics():
    """A response length and a group index that are numpy integers count like Python's."""
    sample = sound_sample(0, response_length=np.int64(12), group_index=np.int64(3))
    statistics = postprocess_output_data([sample], GateConfig()).statistics
    assert statistics.length_summary()["mean"] == 12 and statistics.groups()["count"] == 1


@pytest.mark.parametrize(
    "mask", [["x"] * 12, [None] * 12, [2] * 12, [0.5] * 12, [-1] * 12, "x" * 12, [[1]] * 12]
)
def test_a_loss_mask_holds_zeros_and_ones(mask):
    """A mask with other values than 0 and 1 is refused: a 2 would double a token's gradient, and
    None raises after the gate."""
    for policy in (MissingLogProbs.ALLOW, MissingLogProbs.MASK):
        sample = sound_sample(0, loss_mask=mask, rollout_log_probs=None)
        assert reasons([sample], GateConfig(missing_log_probs=policy)) == ["misaligned"]
    good = ([1, 0] * 6, [True, False] * 6, [1.0, 0.0] * 6, np.ones(12), (1,) * 12)
    assert reasons([sound_sample(0, loss_mask=value) for value in good]) == [None] * 5


@pytest.mark.parametrize(
    "changes",
    [
        {"group_index": "g"},
        {"group_index": 2**70},
        {"index": [1]},
        {"rollout_id": 1.5},
        {"metadata": "text"},
    ],
)
def test_a_sample_that_nobody_can_place_is_refused_by_name(changes):
    """A group, index, rollout id or metadata of a wrong type is `failed`, and the detail names the
    field: a baseline needs to know a sample's siblings."""
    result = postprocess_output_data([sound_sample(0, **changes)], GateConfig())
    assert reasons_of(result) == ["failed"] and result.verdicts[0].detail.startswith(
        next(iter(changes))
    )


def train_side(samples, policy):
    """What reads samples after the gate: rewards, columns and the split over two ranks."""
    config = dataclasses.replace(SCORED, policies=dict.fromkeys(REASONS, policy))
    out = postprocess_output_data(samples, config).samples
    batch = build_train_columns(out, compute_rewards(out, ColumnsConfig())[:2], ColumnsConfig())
    schedule = ScheduleConfig(dp_size=2, align=1)
    split_by_dp(
        batch,
        SplitConfig(
            global_batch_size=4, expected_rollouts=4, schedule=schedule, keep_trailing=True
        ),
    )
    valid = np.array([sample.valid for sample in out], dtype=bool)
    return [(out[i].index, batch.array("rewards")[i].tobytes()) for i in np.flatnonzero(valid)]


def test_whatever_the_gate_marks_can_be_carried_by_what_follows():
    """Marking ends no run that dropping survives: 500 mutated samples go through columns and split
    both ways with equal results."""
    rng = random.Random(3)
    stopped = collections.Counter()
    for _ in range(500):
        samples = [*(sound_sample(i) for i in range(3)), mutate(rng, sound_sample(3))]
        try:
            dropped = train_side(samples, Policy.DROP)
        except RolloutDataError as error:
            stopped[str(error)[:40]] += 1
            continue
        assert train_side(samples, Policy.MARK) == dropped, samples[3]
    # what remains is about valid samples: log-probs that only some of them have, under the policy
    # that allows it
    assert sum(stopped.values()) < 20, stopped


def test_what_stood_in_an_unreadable_field_is_kept_in_words():
    """A field of a wrong type is replaced by a neutral value in a sample that stays invalid, and
    `metadata["unreadable"]` holds what was there."""
    sample = sound_sample(
        0, tokens=["a"] * 15, reward="excellent", status="done", metadata={"k": 1}
    )
    out = postprocess_output_data([sample], GateConfig(rewards_expected=True)).samples[0]
    assert (out.valid, out.tokens, out.response_length, out.reward, out.status) == (
        False,
        [],
        0,
        None,
        Status.FAILED,
    )
    assert out.metadata["k"] == 1 and set(out.metadata["unreadable"]) == {
        "tokens",
        "reward",
        "status",
    }
    assert out.metadata["unreadable"]["reward"] == "'excellent'" and sample.tokens == ["a"] * 15
    marked = postprocess_output_data(
        [sound_sample(1, finish_reason="length")], GateConfig()
    ).samples[0]
    assert marked.metadata == {} and marked.response_length == 12


def test_half_an_emoji_can_be_dumped_and_comes_back(tmp_path):
    """A text that was cut between the halves of an emoji, which JSON cannot express, can be dumped
    and read."""
    samples = [
        sound_sample(0, response="cut \ud83d", metadata={"tool": ["\udc00 x"]}),
        sound_sample(1, response="caf\u00e9 \U0001f600"),
    ]
    path = save_debug_rollout_data(
        str(tmp_path / "d_{rollout_id}.jsonl"), samples, rollout_id=0, evaluation=False
    )
    assert read_rollout_dump(path) == samples


@pytest.mark.parametrize(
    "line",
    [
        b"[1]",
        b"3",
        b'{"tokens": [1]}',
        b'{"status": "zzz"}',
        b'{"status": "completed", "spec_info": 3}',
    ],
)
def test_a_line_that_is_no_sample_is_named_with_its_file(tmp_path, line):
    """A line of a dump that is no sample is refused with file and line."""
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"format": "slime-rollout-1", "num_samples": 1}\n' + line + b"\n")
    with pytest.raises(RolloutDataError, match="d.jsonl, line 2: not a sample"):
        read_rollout_dump(path)


@pytest.mark.parametrize(
    ("adapter", "raw"),
    [
        ("openai", {"request": {"prompt_token_ids": [1]}, "response": {"choices": []}}),
        (
            "sglang",
            {
                "request": {"input_ids": [1]},
                "response": {"meta_info": {"output_token_logprobs": [[-0.5]]}},
            },
        ),
    ],
)
def test_replies_with_missing_entries_name_the_input(adapter, raw):
    """An engine's answer with too few entries is an error that names the input."""
    with pytest.raises(RolloutDataError, match="input 0.*IndexError"):
        postprocess_output_data([raw], GateConfig(adapter=adapter))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda: GateConfig(min_response_tokens=50, max_response_tokens=20),
            "minimum 50 exceeds maximum 20",
        ),
        (
            lambda: GateConfig(
                max_response_tokens=20, tasks={"a": TaskRules(min_response_tokens=30)}
            ),
            "task 'a'.*30",
        ),
        (
            lambda: GateConfig(context_length=10, min_response_tokens=50),
            "context of 10 .* leaves 9",
        ),
        (lambda: GateConfig(context_length=-5), "context of -5"),
        (lambda: GateConfig(repetition_window=-1), "window -1"),
        (lambda: TaskRules(min_response_tokens="5"), "'5', not a whole number"),
        (lambda: TaskRules(keep_truncated="no"), "'no', not true or false"),
        (lambda: FormatSpec.from_dict({"pairs": [{"open": 1, "close": 2}]}), "pairs.*strings"),
        (lambda: FormatSpec.from_dict({"forbidden": "<|x|>"}), "forbidden.*strings"),
        (lambda: FormatSpec.from_dict({"end_marker": 5}), "end_marker.*strings"),
    ],
)
def test_thresholds_that_contradict_each_other_are_refused_at_the_start(build, words):
    """Thresholds under which no response can be valid are refused at the start."""
    with pytest.raises(ConfigError, match=words):
        build()


def test_missing_log_probs_do_not_stop_an_evaluation():
    """Missing log-probs do not end an evaluation, because nothing of it trains."""
    config = GateConfig(missing_log_probs=MissingLogProbs.ERROR, evaluation=True)
    assert reasons([sound_sample(0, rollout_log_probs=None)], config) == [None]


def test_a_reward_beyond_the_floats_is_no_reward():
    """An integer too large for a float is `bad_reward`, though math.isfinite raises on it."""
    assert reasons([sound_sample(0, reward=2**2000)], SCORED) == ["bad_reward"]


def test_an_answer_quoted_in_the_reasoning_is_not_the_answer():
    """The scored answer is never read out of the reasoning, wherever that stands."""
    spec = FormatSpec(
        pairs=(TagPair("<think>", "</think>", opaque=True), TagPair("<answer>", "</answer>")),
        answer="<answer>",
    )
    assert answer_of("<answer>8</answer><think><answer>7</answer></think>", spec) == "8"
    assert answer_of("<answer>1<answer>2</answer></answer>", spec) == "2"
    opened = FormatSpec(
        pairs=(TagPair("<answer>", "</answer>", opened_by_prompt=True),), answer="<answer>"
    )
    assert answer_of("4</answer>", opened) == "4"


def test_siblings_whose_prompt_holds_an_object_share_it():
    """Prompts that hold an object, such as an image, compare without the address in its `repr`:
    copies of one prompt are one prompt."""
    samples = [sound_sample(i, prompt=[{"role": "user", "content": object()}]) for i in range(4)]
    samples.append(sound_sample(4, group_index=0, prompt=[{"role": "user", "content": "other"}]))
    assert postprocess_output_data(samples[:4], GateConfig()).statistics.groups()["mixed"] == []
    assert postprocess_output_data(samples, GateConfig()).statistics.groups()["mixed"] == [0]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
