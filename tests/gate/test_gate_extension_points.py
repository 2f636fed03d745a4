"""No function of a user's, and no other path to the trainer, trains a sample that the gate
rejected; the ledger shows it."""

import dataclasses
import functools
import sys
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pytest
import torch
from support.gate_samples import sound_sample
from support.manager import dirty_rollout, manager_of
from support.rollout_args import fresh_rollout_state, rollout_args, tokenizer_folder

from slime.data.attribution import attribute_rows, marks_of
from slime.data.columns import ColumnsConfig, build_train_columns
from slime.data.sample import Status
from slime.exceptions import RolloutDataError
from slime.files.rollout_dump import save_debug_rollout_data
from slime.gate.config import Verdict
from slime.rollout import fully_async_rollout, sglang_rollout
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.utils.misc import load_function

NUM_GPUS = 0
REJECTED = {1: "bad_logprob", 4: "bad_token", 6: "bad_reward", 11: "empty", 14: "truncated"}
PASSED = [i for i in range(16) if i not in REJECTED]
kept_aside = []  # what a function of the user's remembers of an earlier stage


def as_dict(samples, **changes):
    """The dict that a converter written for upstream makes: it does not know of `valid`."""
    data = {
        "tokens": [list(s.tokens) for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "rewards": [s.reward if isinstance(s.reward, float) else 0.0 for s in samples],
        "raw_reward": [s.reward if isinstance(s.reward, float) else 0.0 for s in samples],
        "truncated": [int(s.status is Status.TRUNCATED) for s in samples],
        "sample_indices": [s.index for s in samples],
        "loss_masks": [[1] * s.response_length for s in samples],
        "rollout_ids": list(range(len(samples))),
    }
    data.update(changes)
    return {name: value for name, value in data.items() if value is not None}


def unmark(samples):
    for sample in samples:
        sample.valid, sample.invalid_reason = True, None


def readable(samples):
    """Those that hold anything a trainer could read."""
    return [sample for sample in samples if sample.response_length]


def shuffled(samples):
    return [samples[i] for i in np.random.default_rng(0).permutation(len(samples))]


def columns_with_every_row_valid(args, samples):
    unmark(samples)
    for sample in samples:
        sample.reward = sample.reward if isinstance(sample.reward, float) else 1.0
    batch = build_train_columns(samples, ([1.0] * len(samples),) * 2, ColumnsConfig())
    batch["valid"] = [True] * len(samples)
    return batch


def without_indices(samples):
    return as_dict(samples, sample_indices=None)


def with_rows_counted(args, samples):
    """`sample_indices` counts the rows that are left, so that it names other samples."""
    return as_dict(readable(samples)[1:], sample_indices=list(range(len(readable(samples)) - 1)))


def in_place_of_another(samples):
    """Writes the tokens of a sample that was cut into one that passed."""
    by_index = {sample.index: sample for sample in samples}
    if {13, 14} <= set(by_index):
        for name in ("tokens", "response_length", "rollout_log_probs", "loss_mask"):
            setattr(by_index[13], name, getattr(by_index[14], name))
        by_index[13].index, by_index[14].index = 14, 13


def moved_and_trimmed(args, samples):
    moved = shuffled(samples)
    return as_dict(moved, tokens=[list(s.tokens)[1:] for s in moved], sample_indices=None)


def reordered(samples, *, rows=None, **changes):
    """The samples in another order, each without its first response token: no row has the tokens or
    the response of a sample.
    """
    moved = shuffled(samples)[:rows]
    cut = [s.response_length > 1 for s in moved]
    starts = [len(s.tokens) - s.response_length for s in moved]
    tokens = [
        [*s.tokens[:start], *s.tokens[start + 1 :]] if is_cut else list(s.tokens)
        for s, start, is_cut in zip(moved, starts, cut, strict=True)
    ]
    lengths = [s.response_length - is_cut for s, is_cut in zip(moved, cut, strict=True)]
    return as_dict(
        moved,
        tokens=tokens,
        response_lengths=lengths,
        loss_masks=[[1] * n for n in lengths],
        **changes,
    )


CONVERTERS = {
    "upstream's dict": lambda args, samples: as_dict(samples),
    "no sample_indices": lambda args, samples: without_indices(samples),
    "says that all are valid": lambda args, samples: as_dict(samples, valid=[True] * len(samples)),
    "unmarks the samples": lambda args, samples: unmark(samples) or as_dict(samples),
    "another order": lambda args, samples: as_dict(shuffled(samples)),
    "another order, no sample_indices": lambda args, samples: without_indices(shuffled(samples)),
    "some left out": lambda args, samples: without_indices(readable(samples)[1:]),
    "tensors": lambda args, samples: as_dict(
        readable(samples),
        tokens=[torch.tensor(s.tokens) for s in readable(samples)],
        sample_indices=torch.tensor([s.index for s in readable(samples)]),
    ),
    "every sample twice": lambda args, samples: without_indices(
        [s for s in readable(samples) for _ in range(2)]
    ),
    "a prompt token removed": lambda args, samples: as_dict(
        samples, tokens=[list(s.tokens)[1:] for s in samples], sample_indices=None
    ),
    "a prompt token removed, some left out": lambda args, samples: as_dict(
        readable(samples)[2:], tokens=[list(s.tokens)[1:] for s in readable(samples)[2:]]
    ),
    "what was kept aside": lambda args, samples: without_indices(readable(kept_aside)),
    "columns": columns_with_every_row_valid,
    "sample_indices of the rows that are left": with_rows_counted,
    "another order, a prompt token removed": moved_and_trimmed,
    "tokens of one sample in another": lambda args, samples: (
        in_place_of_another(samples) or as_dict(samples)
    ),
    "another order, responses changed": lambda args, samples: reordered(samples),
}
LEAVES_OUT = {
    "some left out",
    "a prompt token removed, some left out",
    "sample_indices of the rows that are left",
    "tokens of one sample in another",
}


def plug_in(monkeypatch, **functions):
    """A module of that name for one test; functions are remembered by their path."""
    load_function.cache_clear()
    monkeypatch.setitem(sys.modules, "user_plug_in", types.SimpleNamespace(**functions))


def judged(manager, rollout_id=0):
    """(sample indices or first response ids that the shards hold, the ledger) of one rollout."""
    shards = [box.inner for box in manager.generate(rollout_id)]
    # a sound sample's response ids are 100 * index + 0, 1, ...
    trained = sorted(int(tokens[-1]) // 100 for shard in shards for tokens in shard["tokens"])
    names = {
        name: count for name, count in manager.logged.items() if name.startswith("rollout/ledger/")
    }
    manager.gate.close()
    return trained, {
        name.removeprefix("rollout/ledger/").removeprefix("dropped/"): count
        for name, count in names.items()
    }


@pytest.mark.parametrize("policy", ["mark", "drop", "penalize"])
@pytest.mark.parametrize("kind", CONVERTERS)
def test_no_converter_trains_a_rejected_sample(kind, policy, tmp_path, monkeypatch):
    """A rejected sample does not train, and keeps its reason in the ledger, whatever dict a
    converter makes."""
    kept_aside[:] = dirty_rollout()
    plug_in(monkeypatch, convert=CONVERTERS[kind])
    manager = manager_of(
        dirty_rollout(),
        tmp_path,
        monkeypatch,
        gate_policy=policy,
        custom_convert_samples_to_train_data_path="user_plug_in.convert",
    )
    trained, ledger = judged(manager)
    # a penalized sample trains, with the reward of a failure
    passed = sorted([*PASSED, 14]) if policy == "penalize" else PASSED
    assert set(trained) <= set(passed)
    if ledger.get("trailing", 0) == 0 and kind not in LEAVES_OUT:
        assert sorted(set(trained)) == passed, "and every sample that passed does train"
    assert ledger["planned"] == len(trained)
    copies = 2 if kind == "every sample twice" else 1
    for index, reason in REJECTED.items():
        if index in passed or (index == 14 and kind == "tokens of one sample in another"):
            continue
        # an empty response, or one with an unreadable id, has no rows to copy
        assert ledger[reason] in {1, copies if policy != "drop" and index != 11 else 1}, reason
    assert (
        ledger["sampled"] + ledger.get("copies", 0) == ledger["planned"] + ledger["dropped"]
        and ledger["sampled"] == 16
    )
    assert (ledger.get("copies", 0) > 0) == (
        kind == "every sample twice"
        or (kind == "tokens of one sample in another" and policy != "drop")
    )


def test_what_a_converter_leaves_out_of_its_rows_origin_is_filled_in(tmp_path, monkeypatch):
    """Rollout ids and weight versions that a converter leaves out are filled in: eight executions
    of two samples in steps of four are two steps."""
    samples = [
        sound_sample(
            i, length=4, reward=float(i % 3), rollout_id=i // 2, weight_versions=[str(3 + i // 8)]
        )
        for i in range(16)
    ]
    plug_in(
        monkeypatch,
        convert=lambda args, samples: as_dict(
            shuffled(samples), rollout_ids=None, sample_indices=None
        ),
    )
    options = {"custom_convert_samples_to_train_data_path": "user_plug_in.convert"}
    manager = manager_of(samples, tmp_path, monkeypatch, **options)
    manager.args.rollout_batch_size, manager.args.global_batch_size = 2, 4
    shards = [box.inner for box in manager.generate(0)]
    manager.gate.close()
    assert [len(shard["num_microbatches"]) for shard in shards] == [2, 2]
    for shard in shards:
        numbers = [int(tokens[-1]) // 100 for tokens in shard["tokens"]]
        assert [int(value) for value in shard["rollout_ids"]] == [number // 2 for number in numbers]
        assert [float(value) for value in shard["rollout_mask_sums"]] == [8.0] * len(numbers)
        assert [int(value) for value in shard["oldest_weight_version"]] == [
            3 + number // 8 for number in numbers
        ]


def test_a_converters_row_of_no_known_sample_ends_the_run(tmp_path, monkeypatch):
    """A row that belongs to no known sample ends the run with what to add to the dict."""
    foreign = lambda args, samples: without_indices([*samples, sound_sample(99)])  # noqa: E731
    plug_in(monkeypatch, convert=foreign)
    manager = manager_of(
        dirty_rollout(),
        tmp_path,
        monkeypatch,
        custom_convert_samples_to_train_data_path="user_plug_in.convert",
    )
    with pytest.raises(
        RolloutDataError,
        match=r"Row 16 of the 17 .* tokens of none of the 16 samples.*sample_indices",
    ):
        manager.generate(0)
    manager.gate.close()


@pytest.mark.parametrize("policy", ["mark", "drop"])
def test_rows_that_nothing_ties_to_a_sample_are_refused_and_not_attributed_by_place(
    policy, tmp_path, monkeypatch
):
    """Rows in another order, with changed responses and without ids, are refused, because any of
    them may be of a rejected sample."""
    plug_in(monkeypatch, convert=lambda args, samples: reordered(samples, sample_indices=None))
    manager = manager_of(
        dirty_rollout(),
        tmp_path,
        monkeypatch,
        gate_policy=policy,
        custom_convert_samples_to_train_data_path="user_plug_in.convert",
    )
    with pytest.raises(
        RolloutDataError,
        match=(
            r"has the tokens of none of the 16 samples.*Add 'sample_indices', the Sample.index "
            r"of each row's sample"
        ),
    ):
        manager.generate(0)
    manager.gate.close()


def attribution_of(samples, verdicts, given=None):
    marks = marks_of(samples, [Verdict(valid) for valid in verdicts])
    return functools.partial(
        attribute_rows,
        marks=marks,
        batch_rows=list(range(len(samples))) if given is None else given,
    )


def test_rows_with_the_tokens_of_several_samples_are_of_the_named_one_or_of_that_at_their_place():
    """Where samples 0 and 1 have the same ids and 0 is rejected, rows in order belong to the
    samples at their places, and in another order an index is needed."""
    samples = [sound_sample(0), sound_sample(0), sound_sample(1)]
    samples[1].index = 7
    attribute = attribution_of(samples, [False, True, True])
    a, b, c = (sample.tokens for sample in samples)
    assert attribute([a, b, c]) == [0, 1, 2]
    assert attribute([c, b, a], sample_indices=[1, 7, 0]) == [2, 1, 0]
    assert attribute([a, b, c], sample_indices=[7, 0, 1]) == [1, 0, 2], (
        "in order as well: the index counts for more than the place"
    )
    for rows in ([a], [c, a, b], [a, b, b, c]):
        with pytest.raises(
            RolloutDataError,
            match=(
                r"Row \d of the \d .*tokens of 2 samples, some of which the gate "
                r"rejected.*'sample_indices'"
            ),
        ):
            attribute(rows)
    assert attribution_of(samples, [False, True, True], given=[1, 2])([c, b]) == [2, 1], (
        "of the one that the converter was given"
    )
    assert sorted(attribution_of(samples, [True] * 3)([c, a, b])) == [0, 1, 2], (
        "one verdict: it does not matter which"
    )
    assert attribution_of(samples, [True] * 3)([a, a, a]) == [0, 1, 0], "a third one is a copy"


def test_a_copy_that_names_another_sample_is_rejected_where_either_was():
    """A row with the tokens of sample 0 that names sample 1 is rejected if one of the two was."""
    samples = [sound_sample(0), sound_sample(1)]
    rows = [samples[0].tokens, samples[0].tokens]
    assert attribution_of(samples, [False, True])(rows, sample_indices=[0, 1]) == [0, 0]
    assert attribution_of(samples, [True, False])(rows, sample_indices=[0, 1]) == [0, 1]


def test_an_index_and_a_response_that_contradict_each_other_are_refused():
    """A row whose index is of sample 0 and whose response is of the rejected sample 1 is
    refused."""
    samples = [sound_sample(0), sound_sample(1)]
    row, length = [9, *samples[1].tokens[1:]], [samples[1].response_length]
    with pytest.raises(
        RolloutDataError,
        match=(
            "Row 0 .*sample_indices 0, .*response is that of the sample with the index 1: .*not "
            "the row's number"
        ),
    ):
        attribution_of(samples, [True, False])([row], sample_indices=[0], response_lengths=length)
    assert attribution_of(samples, [True, True])(
        [row], sample_indices=[0], response_lengths=length
    ) == [1], "both passed"
    assert attribution_of(samples, [True, False])(
        [row], sample_indices=[1], response_lengths=length
    ) == [1]


def test_an_index_of_several_samples_tells_nothing_where_their_verdicts_differ():
    """An index shared by two samples of one execution with different verdicts identifies no row."""
    samples = [sound_sample(5), sound_sample(5, length=9)]
    with pytest.raises(
        RolloutDataError, match="Row 0 .*sample_indices 5, and 2 samples have this Sample.index"
    ):
        attribution_of(samples, [True, False])([[1, 2, 3]], sample_indices=[5])
    assert attribution_of(samples, [False, False])([[1, 2, 3]], sample_indices=[5]) == [0]


FLIPS = {
    "custom_reward_post_process_path": lambda args, samples: (
        unmark(samples) or ([1.0] * len(samples), [float(i) for i in range(len(samples))])
    ),
    "custom_rollout_log_function_path": lambda rollout_id, args, samples, *rest: unmark(samples),
}


@pytest.mark.parametrize("converter", [None, "user_plug_in.convert"])
def test_a_log_function_that_moves_tokens_between_samples_trains_no_rejected_one(
    converter, tmp_path, monkeypatch
):
    """A sample is what it was when the gate judged it: one into which a log function wrote the
    tokens of a cut sample does not train."""
    plug_in(
        monkeypatch,
        convert=lambda args, samples: as_dict(samples),
        log=lambda rollout_id, args, samples, *rest: in_place_of_another(samples),
    )
    paths = {
        "custom_rollout_log_function_path": "user_plug_in.log",
        "custom_convert_samples_to_train_data_path": converter,
    }
    trained, ledger = judged(
        manager_of(dirty_rollout(), tmp_path, monkeypatch, gate_policy="mark", **paths)
    )
    assert trained == [i for i in PASSED if i != 13]
    # two rows are of sample 14, and none of sample 13
    assert (ledger["planned"], ledger["truncated"], ledger["left_out_by_converter"]) == (10, 2, 1)
    assert (ledger["sampled"], ledger["copies"], ledger["dropped"]) == (16, 1, 7), (
        "16 samples; one has two rows"
    )


@pytest.mark.parametrize("given", ["ones", "none", "shorter"])
def test_a_converters_loss_mask_trains_no_token_without_a_log_prob(given, tmp_path, monkeypatch):
    """With --gate-missing-log-probs mask a token without a log-prob stays masked, whatever mask a
    converter sets."""
    samples = dirty_rollout()
    samples[0].rollout_log_probs[1] = None
    masks = {
        "ones": lambda s: [1] * s.response_length,
        "shorter": lambda s: [1] * (s.response_length - 1),
    }.get(given)
    plug_in(
        monkeypatch,
        convert=lambda args, found: as_dict(found, loss_masks=masks and [masks(s) for s in found]),
    )
    options = {
        "gate_missing_log_probs": "mask",
        "custom_convert_samples_to_train_data_path": "user_plug_in.convert",
    }
    manager = manager_of(samples, tmp_path, monkeypatch, **options)
    if given == "shorter":
        with pytest.raises(
            RolloutDataError,
            match=(
                r"Row 0 has a loss mask of 5 entries.*response of 6 "
                r"tokens.*--gate-missing-log-probs mark"
            ),
        ):
            manager.generate(0)
    else:
        shards = [box.inner for box in manager.generate(0)]
        found = {
            int(i): np.asarray(mask).tolist()
            for shard in shards
            for i, mask in zip(shard["sample_indices"], shard["loss_masks"], strict=True)
        }
        assert found[0] == [1, 0, 1, 1, 1, 1] and found[2] == [1] * 8
    manager.gate.close()


def test_sample_indices_that_are_no_numbers_are_named(tmp_path, monkeypatch):
    """sample_indices that are no numbers are refused with what was given."""
    plug_in(
        monkeypatch,
        convert=lambda args, samples: as_dict(
            samples, sample_indices=[f"s{s.index}" for s in samples]
        ),
    )
    manager = manager_of(
        dirty_rollout(),
        tmp_path,
        monkeypatch,
        custom_convert_samples_to_train_data_path="user_plug_in.convert",
    )
    with pytest.raises(
        RolloutDataError,
        match=(
            r"'sample_indices' must hold the Sample.index of each row's sample, a whole number; "
            r"it holds \['s0'"
        ),
    ):
        manager.generate(0)
    manager.gate.close()


@pytest.mark.parametrize("policy", ["mark", "drop"])
@pytest.mark.parametrize("option", FLIPS)
def test_no_function_behind_the_gate_takes_a_verdict_back(option, policy, tmp_path, monkeypatch):
    """A function behind the gate that sets valid=True, or makes rewards, changes no verdict."""
    plug_in(monkeypatch, f=FLIPS[option])
    manager = manager_of(
        dirty_rollout(), tmp_path, monkeypatch, gate_policy=policy, **{option: "user_plug_in.f"}
    )
    trained, ledger = judged(manager)
    # the sample whose reward is a word is judged by what the function makes of it
    expected = sorted([*PASSED, 6]) if option == "custom_reward_post_process_path" else PASSED
    assert trained == expected and ledger["planned"] == len(expected)
    assert ledger["sampled"] == 16 == ledger["planned"] + ledger["dropped"]


@pytest.mark.parametrize("policy", ["mark", "drop"])
def test_a_dump_whose_verdicts_were_edited_is_judged_again(policy, tmp_path, monkeypatch):
    """A replayed dump is judged again, whatever verdicts it holds."""
    template = str(tmp_path / "dump_{rollout_id}.jsonl")
    samples = dirty_rollout()
    unmark(samples)
    save_debug_rollout_data(template, samples, rollout_id=0, evaluation=False)
    manager = manager_of(
        samples, tmp_path, monkeypatch, gate_policy=policy, load_debug_rollout_data=template
    )
    trained, ledger = judged(manager)
    assert trained == PASSED and {
        reason: ledger[reason] for reason in REJECTED.values()
    } == dict.fromkeys(REJECTED.values(), 1)


@pytest.mark.parametrize("policy", ["mark", "drop"])
def test_a_rejected_row_of_an_execution_that_emitted_several_does_not_train(
    policy, tmp_path, monkeypatch
):
    """Each row of an execution has its own verdict, also in nested lists of a user's rollout
    function."""
    samples = dirty_rollout()
    for sample in samples:
        sample.rollout_id = sample.index // 2
    nested = [[samples[i : i + 2], samples[i + 2 : i + 4]] for i in range(0, 16, 4)]
    manager = manager_of(samples, tmp_path, monkeypatch, gate_policy=policy)
    manager.generate_rollout = lambda *args, **kwargs: RolloutFnTrainOutput(
        samples=nested, dropped={"stale": 3}
    )
    trained, ledger = judged(manager)
    assert trained == PASSED and ledger["sampled"] == 19 and ledger["stale"] == 3


async def generate(args, sample, sampling_params):
    """Members 0 and 2 of a group end, member 1 is cut, member 3 emits two rows, one of which is
    empty. All say that they are valid.
    """
    fields = {
        "response_length": 2,
        "response": "12",
        "reward": 1.0,
        "status": Status.COMPLETED,
        "finish_reason": "stop",
        "valid": True,
    }
    made = dataclasses.replace(
        sample, tokens=[5, 6, 7, 8], rollout_log_probs=[-0.5, -0.5], **fields
    )
    made.metadata = dict(sample.metadata)
    member = sample.index % 4
    if member == 1:
        made.status, made.finish_reason = Status.TRUNCATED, "length"
    if member != 3:
        return made
    made.rollout_id = 1000 + sample.index
    empty = dataclasses.replace(
        made, tokens=[5, 6], response_length=0, response="", rollout_log_probs=[]
    )
    return [made, empty]


class Prompts:
    """A data source without end."""

    def __init__(self):
        self.count = 0

    def get_samples(self, number):
        first, self.count = self.count, self.count + number
        return [
            [
                sound_sample(4 * g + m, length=0, prompt="12", tokens=[], response="", reward=None, rollout_log_probs=None,
                             status=Status.PENDING, finish_reason=None)
                for m in range(4)
            ]
            for g in range(first, first + number)
        ]  # fmt: skip

    def add_samples(self, groups):
        pass


@pytest.mark.parametrize("policy", ["mark", "drop"])
@pytest.mark.parametrize(
    "rollout_function",
    [sglang_rollout.generate_rollout, fully_async_rollout.generate_rollout_fully_async],
)
def test_no_hook_inside_the_rollout_trains_a_rejected_sample(
    rollout_function, policy, tmp_path, monkeypatch
):
    """Generate function, sample hook, sample and dynamic filter, all-samples function and converter
    that set valid=True train no rejected sample, in both rollout functions and also where the next
    rollout was generated before."""

    def hook(args, sample):
        unmark([sample])

    def flat(groups):
        return [
            s
            for group in groups
            for item in group
            for s in (item if isinstance(item, list) else [item])
        ]

    def dynamic(args, group, **kwargs):
        unmark(flat([group]))
        return True

    plug_in(
        monkeypatch,
        generate=generate,
        hook=hook,
        dynamic=dynamic,
        sample_filter=lambda args, groups: unmark(flat(groups)),
        all_samples=lambda args, groups, source: unmark(flat(groups)),
        convert=lambda args, samples: (
            unmark(samples) or as_dict(samples, valid=[True] * len(samples))
        ),
    )
    paths = {
        "custom_generate_function_path": "user_plug_in.generate",
        "rollout_sample_hook_path": ["user_plug_in.hook"],
        "dynamic_sampling_filter_path": "user_plug_in.dynamic",
        "rollout_sample_filter_path": "user_plug_in.sample_filter",
        "rollout_all_samples_process_path": "user_plug_in.all_samples",
    }
    convert = {"custom_convert_samples_to_train_data_path": "user_plug_in.convert"}
    manager = manager_of(dirty_rollout(), tmp_path, monkeypatch, gate_policy=policy, **convert)
    args = rollout_args(
        rollout_batch_size=4,
        n_samples_per_prompt=4,
        hf_checkpoint=tokenizer_folder(tmp_path),
        gate_policy=policy,
        **paths,
    )
    source = Prompts()
    manager.generate_rollout = lambda _, rollout_id, __, evaluation: rollout_function(
        args, rollout_id, source
    )
    seen = []
    with fresh_rollout_state("http://127.0.0.1:1"):
        try:
            for rollout_id in (0, 1):
                shards = [box.inner for box in manager.generate(rollout_id)]
                trained = sorted(
                    int(index) for shard in shards for index in shard["sample_indices"]
                )
                groups = {index // 4 for index in trained}
                assert len(groups) == 4 and trained == [
                    i for g in sorted(groups) for i in range(4 * g, 4 * g + 4) if i % 4 != 1
                ]
                seen += groups
                ledger = {
                    name.split("/")[-1]: count
                    for name, count in manager.logged.items()
                    if name.startswith("rollout/ledger/")
                }
                assert ledger == {
                    "sampled": 20,
                    "planned": 12,
                    "dropped": 8,
                    "truncated": 4,
                    "empty": 4,
                }
        finally:
            fully_async_rollout.stop_global_worker()
            manager.gate.close()
    assert len(set(seen)) == 8, "each rollout has groups of its own"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
