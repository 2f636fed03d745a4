"""The contract and the columns: a field is declared once, and no value of a user's is dropped or
changed silently."""

import dataclasses
import json
import math
import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

from slime.data.batch import RolloutBatch, Stage, localize
from slime.data.columns import (
    ColumnsConfig,
    build_train_columns,
    compute_rewards,
    group_ids_of,
    rollout_ids_of,
)
from slime.data.fields import (
    CONTRACT,
    Extent,
    FieldSpec,
    Missing,
    Origin,
    Reduce,
    Rows,
    Scope,
    declare_field,
)
from slime.data.ragged import Ragged, as_array, smallest_int_dtype
from slime.data.sample import Sample
from slime.data.schedule import ScheduleConfig
from slime.data.split import SplitConfig, plan_row_padding, plan_split, split_by_dp
from slime.exceptions import RolloutDataError
from slime.metrics.contributions import merge_all
from slime.metrics.train_metrics import phase_contributions

NUM_GPUS = 0


def make_sample(i, **changes):
    """Sample i: 10 + i tokens, 4 + i of them response; reward 10 * prompt + generation."""
    fields = {
        "index": i,
        "group_index": i // 2,
        "tokens": list(range(100 * i, 100 * i + 10 + i)),
        "response_length": 4 + i,
        "reward": 10.0 * (i // 2) + i % 2,
        "loss_mask": [1] * (3 + i) + [0],
        "rollout_log_probs": [-0.1 * i] * (4 + i),
        "status": Sample.Status.COMPLETED,
    }
    return Sample(**{**fields, **changes})


def convert(samples, **config):
    settings = ColumnsConfig(**{"divide_by_std": False, **config})
    return build_train_columns(samples, compute_rewards(samples, settings)[:2], settings)


def split(data, dp_size=1, *, size=None, pad_to=0, expected=None, keep=False):
    count = len(data["tokens"])
    config = SplitConfig(
        global_batch_size=size or count,
        expected_rollouts=expected or count,
        schedule=ScheduleConfig(dp_size=dp_size, align=dp_size),
        keep_trailing=keep,
        pad_to=pad_to,
    )
    return split_by_dp(data, config)


@pytest.mark.parametrize("dp_size", (1, 2))
def test_a_field_that_only_the_rollout_side_declared_is_a_metric_on_the_training_ranks(
    declared, dp_size
):
    """A declaration made on the rollout side travels with the batch, because the ranks never import
    a rollout plug-in."""
    declared(
        "answer_length",
        source="metadata.answer_length",
        wire_dtype="int32",
        reduce=Reduce.SAMPLE_MEAN,
    )
    samples = [make_sample(i, metadata={"answer_length": i}) for i in range(4)]
    wire = [pickle.dumps(shard) for shard in split(convert(samples), dp_size).shards]
    CONTRACT.remove("answer_length")  # as in the process of a rank
    batches = [
        localize(pickle.loads(data), rank, dp_size=dp_size) for rank, data in enumerate(wire)
    ]
    assert merge_all([phase_contributions(batch) for batch in batches])["answer_length"] == 1.5
    CONTRACT.remove("answer_length")
    CONTRACT.add(FieldSpec("answer_length", Scope.SAMPLE, wire_dtype="float32"))
    with pytest.raises(RolloutDataError, match="already declared differently"):
        localize(pickle.loads(wire[0]), 0, dp_size=dp_size)


# --- declarations ---------------------------------------------------------------------------------


def test_every_field_says_its_scope_extent_and_length():
    """Every field of the contract states scope and extent, and per-token fields state their
    length."""
    for spec in CONTRACT:
        assert isinstance(spec.scope, Scope) and isinstance(spec.extent, Extent)
        assert (spec.scope is Scope.TOKEN) == (spec.rows is not None)
        assert not (spec.cp_sharded and spec.rows is not Rows.RESPONSE)
        assert spec.reduce is not Reduce.ROLLOUT_MEAN or spec.rows is Rows.RESPONSE
    whole = {spec.name for spec in CONTRACT if spec.extent is Extent.WHOLE}
    assert {"raw_reward", "valid"} <= whole and "rewards" not in whole


def test_identities_and_masks_are_never_metrics():
    """A field is a metric only if its declaration says so; tokens, masks, indices, ids, sums,
    sizes, sources and the partition do not."""
    metrics = {spec.name for spec in CONTRACT if spec.reduce is not Reduce.NONE}
    never = {
        "tokens",
        "loss_masks",
        "local_raw_reward",
        "sample_indices",
        "rollout_ids",
        "rollout_mask_sums",
        "partition",
    }
    never |= {
        "global_batch_sizes",
        "num_microbatches",
        "micro_batch_indices",
        "source_names",
        "group_ids",
        "metadata",
    }
    assert not metrics & never


def test_one_declaration_carries_a_new_field_from_sample_to_rank(declared):
    """One `declare_field` carries a plug-in's field from the samples to every rank, whole fields
    with their local view."""
    declared(
        "difficulty", source="metadata.difficulty", wire_dtype="float32", reduce=Reduce.SAMPLE_MEAN
    )
    declared(
        "prompt_cost",
        source="metadata.cost",
        wire_dtype="float64",
        extent=Extent.WHOLE,
        local_view="local_prompt_cost",
    )
    declared("local_prompt_cost", wire_dtype="float64", origin=Origin.ARRIVAL)
    declared(
        "uncertainty",
        scope=Scope.TOKEN,
        rows=Rows.RESPONSE,
        wire_dtype="float32",
        source="metadata.uncertainty",
    )
    samples = [
        make_sample(
            i, metadata={"difficulty": i / 8, "cost": 10.0 * i, "uncertainty": [i / 10] * (4 + i)}
        )
        for i in range(4)
    ]
    for rank, shard in enumerate(split(convert(samples), 2).shards):
        batch = localize(shard, rank)
        part = batch["partition"]
        assert batch["difficulty"] == [i / 8 for i in part]
        assert batch["prompt_cost"] == [0.0, 10.0, 20.0, 30.0] and batch["local_prompt_cost"] == [
            10.0 * i for i in part
        ]
        assert [entry.tolist() for entry in batch["uncertainty"]] == [
            [pytest.approx(i / 10)] * (4 + i) for i in part
        ]


def test_a_second_different_declaration_is_refused(declared):
    """A second declaration of a name with other properties is refused."""
    declared("difficulty", wire_dtype="float32")
    declare_field("difficulty", wire_dtype="float32")
    with pytest.raises(RolloutDataError, match="already declared differently"):
        declare_field("difficulty", wire_dtype="int32")
    with pytest.raises(RolloutDataError, match="slime's own contract"):
        declare_field("tokens", wire_dtype="int64")
    with pytest.raises(RolloutDataError, match="needs rows"):
        declare_field("x", scope=Scope.TOKEN, wire_dtype="float32")
    with pytest.raises(RolloutDataError, match="declare_field\\('nothing'"):
        CONTRACT["nothing"]


# --- conversion -----------------------------------------------------------------------------------


def test_conversion_reads_samples_and_changes_none():
    """Conversion changes no sample: a removed sample keeps its mask, and trains nothing."""
    samples = [make_sample(0), make_sample(1, remove_sample=True), make_sample(2, loss_mask=None)]
    before = json.dumps([sample.to_dict() for sample in samples], default=str)
    columns = convert(samples)
    assert json.dumps([sample.to_dict() for sample in samples], default=str) == before
    masks = [mask.tolist() for mask in columns["loss_masks"]]
    assert masks == [[1, 1, 1, 0], [0] * 5, [1] * 6]


def test_optional_fields_are_decided_over_all_samples():
    """An optional field that only some samples have is a named error, whichever sample comes
    first."""
    for lacking in (0, 1):
        samples = [make_sample(i) for i in range(2)]
        samples[lacking].rollout_log_probs = None
        with pytest.raises(
            RolloutDataError,
            match=rf"1 of 2 samples have no rollout_log_probs, for example positions \[{lacking}\]",
        ):
            convert(samples)
    assert "rollout_log_probs" not in convert(
        [make_sample(i, rollout_log_probs=None) for i in range(2)]
    )


def test_a_declared_fill_stands_in_for_what_some_samples_lack(declared):
    """A field that only some samples have is filled if its declaration gives a fill."""
    declared("turns", source="metadata.turns", wire_dtype="int32", missing=Missing.FILL, fill=1)
    columns = convert([make_sample(0, metadata={"turns": 7}), make_sample(1)])
    assert columns["turns"] == [7, 1]


def test_an_invalid_sample_may_lack_what_the_valid_ones_have():
    """An aborted sample without log-probs leaves the others theirs."""
    samples = [
        make_sample(0),
        make_sample(1, valid=False, invalid_reason="aborted", rollout_log_probs=None),
        make_sample(2),
    ]
    result = split(convert(samples))
    batch = localize(next(result.shards), 0)
    assert batch["partition"] == [0, 2] and result.plan.dropped == {"aborted": 1}
    assert [len(entry) for entry in batch["rollout_log_probs"]] == [4, 6]
    assert batch["raw_reward"] == [0.0, 1.0, 10.0], "pass@k still sees the whole batch"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"rollout_log_probs": [-0.1] * 3},
            r"rollout_log_probs\[0\] has 3 rows, expected 4 \(response tokens",
        ),
        ({"loss_mask": [1] * 5}, r"loss_masks\[0\] has 5 rows, expected 4"),
        ({"loss_mask": [1, 2, 1, 1]}, "position 0 has the value 2"),
        ({"loss_mask": [1, 0.5, 1, 1]}, "do not fit uint8"),
        ({"response_length": 40}, "response_length 40 but 10 tokens"),
        ({"tokens": [1, 2**40] + [0] * 8}, "do not fit int32"),
    ],
)
def test_a_length_or_value_that_does_not_fit_is_named(changes, said):
    """A field of a wrong length or with a value that does not fit is refused with its place: 5 ids
    with 4 log-probs are never padded."""
    with pytest.raises(RolloutDataError, match=said):
        convert([make_sample(0, **changes), make_sample(1)])


def test_rewards_that_are_no_numbers_make_the_sample_invalid():
    """A reward that is None or NaN makes its sample invalid with a reason; it enters no mean, and
    the others train."""
    samples = [
        make_sample(0, reward=None),
        make_sample(1, reward=math.nan),
        make_sample(2, reward=1.0),
        make_sample(3, reward=0.0),
    ]
    columns = convert(samples)
    assert (
        columns["valid"] == [False, False, True, True]
        and columns["invalid_reason"][:2] == ["bad_reward"] * 2
    )
    plan = split(columns).plan
    assert plan.dropped == {"bad_reward": 2} and plan.num_trained_samples == 2


@pytest.mark.parametrize(
    "value",
    (
        3,
        True + 2,
        np.float16(3),
        torch.tensor([3.0]),
        torch.tensor(3.0, dtype=torch.bfloat16, requires_grad=True),
    ),
)
def test_a_custom_reward_function_may_return_any_number(value):
    """--custom-reward-post-process-path may return any kind of number; a value that is none is an
    error that names the sample."""
    batch = build_train_columns([make_sample(7)], ([value], [value]), ColumnsConfig())
    assert batch["raw_reward"] == batch["rewards"] == [3.0]
    for bad in ({"score": 3.0}, "3", [3.0], torch.tensor([1.0, 2.0]), 10**400):
        with pytest.raises(RolloutDataError, match="The reward of sample 7"):
            build_train_columns([make_sample(7)], ([value], [bad]), ColumnsConfig())


def test_raw_reward_before_shaping_wins_and_needs_its_key_too():
    """metadata["raw_reward"] takes precedence over the sample's reward, which is read by its
    key."""
    samples = [
        make_sample(0, reward={"a": 1.0}, metadata={"raw_reward": 0.25}),
        make_sample(1, reward={"a": 3.0}),
    ]
    assert convert(samples, reward_key="a")["raw_reward"] == [0.25, 3.0]


def test_missing_rollout_ids_take_the_smallest_unused_ones():
    """A sample without an id is its own rollout, and must not join one that has an id."""
    samples = [
        make_sample(0),
        make_sample(1, rollout_id=0),
        make_sample(2, rollout_id=2),
        make_sample(3),
    ]
    assert rollout_ids_of(samples) == [1, 0, 2, 3]


def test_a_sample_without_a_group_never_joins_one_that_has_an_id():
    """A sample without a group is alone, also where a data source numbers its groups from -1
    down."""
    groups = (None, -1, -1, None)
    samples = [
        Sample(index=i, group_index=group, reward=10.0 * i, status=Sample.Status.COMPLETED)
        for i, group in enumerate(groups)
    ]
    assert group_ids_of(samples) == [-2, -1, -1, -3]
    assert compute_rewards(samples, ColumnsConfig(divide_by_std=False))[1] == [0.0, -5.0, 5.0, 0.0]


@pytest.mark.parametrize("name", ("rollout_id", "group_index"))
@pytest.mark.parametrize("bad", ("session-7", 1.5))
def test_an_id_that_is_no_integer_is_said(name, bad):
    """A rollout or group id that is no integer is refused: 1.5 and 1.7 would become one rollout."""
    ids_of = rollout_ids_of if name == "rollout_id" else group_ids_of
    with pytest.raises(RolloutDataError, match=f"{name} must be an integer"):
        ids_of([Sample(**{name: bad})])
    assert ids_of([Sample(**{name: np.int64(7)}), Sample(**{name: torch.tensor(-7)})]) == [7, -7]


def test_nucleus_data_is_required_where_the_trainer_replays_it():
    """Nucleus replay without the nucleus data is refused; renormalized log-probs cannot be compared
    with full ones."""
    with pytest.raises(RolloutDataError, match="rollout_top_p_token_ids"):
        convert([make_sample(0), make_sample(1)], require_top_p_tokens=True)
    nucleus = {
        "rollout_top_p_token_ids": torch.arange(8, dtype=torch.int32),
        "rollout_top_p_token_offsets": [0, 2, 4, 6, 8],
    }
    columns = convert([make_sample(0, **nucleus)], require_top_p_tokens=True)
    assert columns["rollout_top_p_token_offsets"][0].tolist() == [0, 2, 4, 6, 8]


def test_engine_log_probs_of_another_distribution_than_the_replayed_one_are_refused_in_a_ratio():
    """Full-vocabulary engine log-probs are refused in a ratio with a replayed nucleus, where a
    token alone in its nucleus has log-prob 0 and not -0.3. As a metric they are accepted."""
    nucleus = {
        "rollout_top_p_token_ids": torch.arange(5, dtype=torch.int32),
        "rollout_top_p_token_offsets": [0, 1, 3, 4, 5],
    }
    whole = make_sample(0, **nucleus, rollout_log_probs=[0.0, -0.7, -0.3, 0.0])
    with pytest.raises(
        RolloutDataError, match=r"left alone the log-prob -0.3, not 0.*--use-rollout-logprobs"
    ):
        convert([whole], require_top_p_tokens=True, uses_engine_log_probs=True)
    convert([whole], require_top_p_tokens=True)
    kept = make_sample(0, **nucleus, rollout_log_probs=[0.0, -0.7, -0.003, 0.0])
    convert([kept], require_top_p_tokens=True, uses_engine_log_probs=True)


def test_expert_ids_travel_in_the_smallest_integers():
    """Ids of up to 128 experts travel in one byte; 4 bytes would quadruple the largest field of an
    MoE run."""
    experts = np.full((9, 2, 4), 127, dtype=np.int64)
    shard = next(split(convert([make_sample(0, rollout_routed_experts=experts)])).shards)
    assert shard.raw("rollout_routed_experts").values.dtype == np.uint8
    # one size for the whole batch: the sample with expert 300 needs two bytes, whoever comes first
    samples = [
        make_sample(i, rollout_routed_experts=np.full((9 + i, 2, 4), top))
        for i, top in enumerate((300, 3))
    ]
    assert (
        next(split(convert(samples)).shards).raw("rollout_routed_experts").values.dtype == np.int16
    )
    assert smallest_int_dtype(-1, 300) == "int16" and smallest_int_dtype(0, 2**40) == "int64"


# --- plain dicts from custom converters -----------------------------------------------------------


def test_a_converters_undeclared_field_is_carried_with_one_warning():
    """An undeclared field of a converter travels with its samples and is warned about once."""
    data = {
        "tokens": [[1, 2, 3], [4, 5, 6, 7]],
        "response_lengths": [1, 2],
        "rewards": [0.5, -0.5],
        "notes": ["a", "b"],
    }
    with pytest.warns(UserWarning, match=r"\['notes'\]") as caught:
        shards = list(split(data, 2).shards)
    assert len(caught) == 1
    assert [localize(shard, rank)["notes"] for rank, shard in enumerate(shards)] == [["a"], ["b"]]


def test_an_undeclared_field_of_another_length_is_an_error():
    """An undeclared field with another number of entries than samples is an error."""
    with pytest.raises(RolloutDataError, match="'phase_config' has .* declare 'phase_config'"):
        split({"tokens": [[1, 2], [3, 4]], "phase_config": {"a": 1}})


def test_rollout_ids_and_masks_may_be_left_out_by_a_converter():
    """Without `rollout_ids` each sample is its own rollout, and without masks it is fully
    trained."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = localize(
            next(
                split(
                    {
                        "tokens": [[1, 2, 3], [4, 5, 6]],
                        "response_lengths": [1, 2],
                        "rewards": [1.0, 2.0],
                    }
                ).shards
            ),
            0,
        )
    assert batch["rollout_ids"] == [0, 1] and batch["rollout_mask_sums"] == [1.0, 2.0]
    assert [mask.tolist() for mask in batch["loss_masks"]] == [[1], [1, 1]]


def test_train_metadata_reaches_the_trainer():
    """`metadata` travels with its sample, also where only some samples have it."""
    samples = [make_sample(0, train_metadata={"a": 1}), make_sample(1)]
    assert localize(next(split(convert(samples)).shards), 0)["metadata"] == [{"a": 1}, None]


# --- the split ------------------------------------------------------------------------------------


def test_denominators_are_of_the_whole_rollout_over_trained_siblings():
    """Siblings on different ranks share the rollout's denominator, and a rejected sibling adds no
    tokens to it."""
    samples = [
        make_sample(0, rollout_id=5),
        make_sample(1, rollout_id=5),
        make_sample(2, rollout_id=5, valid=False, invalid_reason="empty"),
        make_sample(3, rollout_id=6),
    ]
    sums, counts = {}, {}
    for rank, shard in enumerate(split(convert(samples), 2, size=2).shards):
        batch = localize(shard, rank)
        sums.update(zip(batch["partition"], batch["rollout_mask_sums"], strict=True))
        counts.update(zip(batch["partition"], batch["rollout_sample_counts"], strict=True))
    assert sums == {0: 3 + 4, 1: 3 + 4, 3: 6} and counts == {0: 2, 1: 2, 3: 1}


def test_marking_and_dropping_ship_the_same_training_data():
    """The policies `mark` and `drop` send the same tokens, rewards, steps and denominators to every
    rank."""
    samples = [make_sample(i) for i in range(8)]
    for i in (2, 5):
        samples[i] = dataclasses.replace(
            samples[i], valid=False, invalid_reason="truncated", reward=None
        )
    marked = [
        localize(shard, rank)
        for rank, shard in enumerate(split(convert(samples), 2, size=4, expected=8).shards)
    ]
    kept = [sample for sample in samples if sample.valid]
    dropped = [
        localize(shard, rank)
        for rank, shard in enumerate(split(convert(kept), 2, size=4, expected=8).shards)
    ]
    for a, b in zip(marked, dropped, strict=True):
        assert a["sample_indices"] == b["sample_indices"] and a["global_batch_sizes"] == b[
            "global_batch_sizes"
        ] == [
            3,
            3,
        ]
        assert a["rewards"] == b["rewards"] and a["rollout_mask_sums"] == b["rollout_mask_sums"]
        assert all(np.array_equal(x, y) for x, y in zip(a["tokens"], b["tokens"], strict=True))


def test_every_sample_is_trained_or_counted_with_a_reason():
    """Sampled samples are the trained ones plus the dropped ones by reason; a fully masked rollout
    trains nothing and is not in the denominator."""
    samples = [make_sample(i) for i in range(10)]
    samples[0].valid, samples[0].invalid_reason = False, "empty"
    samples[1].remove_sample = True
    plan = split(convert(samples), 2, size=4, expected=8).plan
    assert plan.dropped == {"empty": 1, "fully_masked": 1, "trailing": 1}
    assert plan.num_trained_samples + sum(plan.dropped.values()) == 10
    assert plan.global_batch_sizes == [3, 4]


def test_a_step_that_is_masked_whole_trains_no_rollout():
    """A fully masked step has the denominator 1, so that its loss is 0 and not NaN, and counts as
    no trained rollout in schedule and metrics."""
    result = split(convert([make_sample(i, remove_sample=i < 2) for i in range(4)]), size=2)
    assert (
        result.plan.global_batch_sizes == [1, 2]
        and result.plan.metrics()["schedule/trained_rollouts"] == 2
    )
    found = merge_all(
        [phase_contributions(localize(shard, rank)) for rank, shard in enumerate(result.shards)]
    )
    assert found["num_samples"] == found["num_rollouts"] == result.plan.num_trained_samples == 2
    assert found["response_lengths"] == (4 + 5 + 6 + 7) / 4, (
        "what they are is known, whether they train or not"
    )


def test_a_batch_without_a_valid_sample_has_no_step():
    """A batch in which every sample is rejected has no step."""
    samples = [make_sample(i, valid=False, invalid_reason="empty") for i in range(4)]
    result = split(convert(samples), 2)
    batches = [localize(shard, rank) for rank, shard in enumerate(result.shards)]
    assert [batch["num_microbatches"] for batch in batches] == [[], []]
    assert all(batch["partition"] == [] and batch["tokens"] == [] for batch in batches)
    assert result.plan.dropped == {"empty": 4}


def test_rows_are_padded_where_their_micro_batch_ends():
    """Padding follows the last sample of each micro-batch, and a rank's empty micro-batch is a row
    of padding."""
    padding, lead = plan_row_padding(np.array([5, 6, 9]), [[], [0, 1], [], [2]], pad_to=8)
    assert (padding.tolist(), lead) == ([0, 5 + 8, 7], 8)


def test_added_memory_of_split_and_wire_is_the_bytes_shipped():
    """A shard takes little more than 5 bytes per token and 4 per response token."""
    samples = [
        make_sample(
            0,
            tokens=np.arange(3000, dtype=np.int32),
            response_length=2000,
            loss_mask=None,
            rollout_log_probs=np.zeros(2000, dtype=np.float32),
            index=i,
            group_index=i,
        )
        for i in range(64)
    ]
    result = split(convert(samples), 8, pad_to=128)
    shipped = sum(shard.num_bytes() for shard in result.shards)
    assert shipped < 1.05 * 64 * (3000 * (4 + 1) + 2000 * 4)


# --- RolloutBatch ---------------------------------------------------------------------------------


def local_batch(count=4, **kw):
    return localize(next(split(convert([make_sample(i) for i in range(count)], **kw)).shards), 0)


def test_a_rollout_batch_behaves_as_a_dict_of_lists():
    """A RolloutBatch behaves as the `dict[str, list]` that plug-ins and upstream's functions
    expect."""
    batch = local_batch()
    assert (
        isinstance(batch, dict)
        and isinstance(batch["tokens"], list)
        and isinstance(batch["rewards"], list)
    )
    assert batch.get("nothing") is None and "tokens" in batch and len(dict(batch)) == len(batch)
    assert all(isinstance(value, list) for value in {**batch}.values())
    assert {name for name, _ in batch.items()} == set(batch) == set(batch.keys())
    batch["extra"] = [1, 2, 3, 4]
    assert batch.pop("extra") == [1, 2, 3, 4] and batch.pop("extra", 7) == 7
    batch.update(other=[0])
    assert batch.setdefault("other", [9]) == [0]
    assert batch["tokens"] is batch["tokens"]


def test_edits_through_the_lists_are_seen_by_the_columns():
    """A hook's edit of a list entry, or inside an entry's array, changes what trains."""
    batch = local_batch()
    batch["rewards"][1] = 99.0
    assert batch.array("rewards").tolist()[1] == 99.0
    tokens = batch["tokens"]
    tokens[0] = np.array([7, 7, 7], dtype=np.int32)
    assert as_array(batch.column("tokens").as_list()[0]).tolist() == [7, 7, 7]
    assert batch["tokens"] is tokens
    again = pickle.loads(pickle.dumps(batch))  # noqa: S301  our own bytes
    assert again["rewards"][1] == 99.0 and again["tokens"][0].tolist() == [7, 7, 7]


def test_the_wrong_extent_is_an_error_and_never_a_shorter_list():
    """`local()` of a whole field and `whole()` of a local one are errors, and never a list of
    another extent."""
    batch = local_batch()
    assert (
        batch.whole("raw_reward") == [0.0, 1.0, 10.0, 11.0]
        and batch.local("local_raw_reward") == batch["raw_reward"]
    )
    with pytest.raises(RolloutDataError, match="only this rank's 4 samples"):
        batch.whole("rewards")
    with pytest.raises(RolloutDataError, match="whole rollout batch"):
        batch.local("raw_reward")
    assert convert([make_sample(0)]).whole("rewards") == [0.0]


def test_a_shard_of_another_format_is_refused():
    """A shard of another format version is refused."""
    from slime.data.batch import _from_wire

    with pytest.raises(RolloutDataError, match="written as 'slime-columns-0'"):
        _from_wire("slime-columns-0", "shard", {}, {})


def test_ragged_entries_are_views_also_around_padding():
    """Entries are views of the flat array, also with padding between them."""
    column = Ragged(np.arange(10), np.array([2, 5, 10]), np.array([2, 3]))
    assert [entry.tolist() for entry in column.as_list()] == [[2, 3], [5, 6, 7]]
    assert column.dense_values().tolist() == [2, 3, 5, 6, 7] and not column.is_dense
    tensors = Ragged(torch.arange(5), np.array([0, 2, 5])).as_list()
    assert [t.tolist() for t in tensors] == [[0, 1], [2, 3, 4]]
    tensors[0][0] = 9
    assert tensors[0].storage_offset() == 0


def test_the_stage_of_a_batch_is_explicit():
    """A batch knows its stage: whole before the split, a shard on the wire, local on the rank."""
    columns = convert([make_sample(0), make_sample(1)])
    shard = next(split(columns).shards)
    assert (columns.stage, shard.stage, localize(shard, 0).stage) == (
        Stage.WHOLE,
        Stage.SHARD,
        Stage.LOCAL,
    )
    assert isinstance(plan_split(columns, SplitConfig(2, 2, ScheduleConfig(1, 1)))[0], RolloutBatch)


def test_the_rollout_side_needs_no_torch():
    """Importing conversion and split is quick and loads neither torch nor megatron nor ray."""
    code = (
        "import sys, slime.data.columns, slime.data.split, slime.files.rollout_dump, "
        "slime.metrics.rollout_metrics; "
        "print([m for m in ('torch', 'megatron', 'ray', 'wandb', 'sglang') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=_root(), check=True
    )
    assert out.stdout.strip() == "[]"


def _root():
    from pathlib import Path

    return Path(__file__).resolve().parents[2]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
