"""Micro-batches: the model gets exactly the samples, on every context-parallel layout, and padding
that belongs to no sample."""

import gc
import itertools
import pickle
import weakref
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core import mpu

from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp, slice_with_cp
from slime.backends.megatron_utils.data import (
    DataIterator,
    concatenate_media,
    get_batch,
    get_data_iterator,
    tensors_to_cpu,
    tensors_to_gpu,
    to_train_device,
)
from slime.data.batch import localize
from slime.data.columns import ColumnsConfig, build_train_columns, compute_rewards
from slime.data.sample import Sample
from slime.data.schedule import ScheduleConfig
from slime.data.split import SplitConfig, split_by_dp
from slime.exceptions import RolloutDataError

NUM_GPUS = 0


def parallel(*, cp_size=1, cp_rank=0, tp_size=1, vpp_size=None):
    return mock.patch.multiple(
        mpu,
        get_context_parallel_world_size=lambda: cp_size,
        get_context_parallel_rank=lambda: cp_rank,
        get_tensor_model_parallel_world_size=lambda: tp_size,
        get_virtual_pipeline_model_parallel_world_size=lambda: vpp_size,
    )


def make_samples(lengths):
    """Sample i: `lengths[i]` = (prompt, response); token ids 1000 * (i + 1) + position; log-probs
    -(i + 1) - position / 100.
    """
    return [
        Sample(
            index=i,
            group_index=i,
            tokens=[1000 * (i + 1) + t for t in range(prompt + response)],
            response_length=response,
            reward=float(i),
            loss_mask=[j % 3 != 2 for j in range(response)] if response else [],
            rollout_log_probs=[-(i + 1) - j / 100 for j in range(response)],
            multimodal_train_inputs={"pixels": torch.full((i + 1, 2), float(i))} if i % 2 else None,
            status=Sample.Status.COMPLETED,
        )
        for i, (prompt, response) in enumerate(lengths)
    ]


LENGTHS = [(4, 6), (3, 1), (7, 0), (1, 11), (9, 2), (2, 5)]


def shards_of(lengths, dp_size=1, *, cap=24, pad_to=8):
    samples = make_samples(lengths)
    settings = ColumnsConfig(group_baseline=False)
    columns = build_train_columns(samples, compute_rewards(samples, settings)[:2], settings)
    schedule = ScheduleConfig(dp_size=dp_size, align=dp_size, token_cap=cap, packing="balanced")
    config = SplitConfig(len(samples), len(samples), schedule, pad_to=pad_to)
    return [
        pickle.loads(pickle.dumps(shard, protocol=5))
        for shard in split_by_dp(columns, config).shards
    ]  # noqa: S301  our own bytes


def ready(shard, rank=0, *, cp_size=1, cp_rank=0):
    return to_train_device(localize(shard, rank), "cpu", cp_size=cp_size, cp_rank=cp_rank)


def walk(batch, keys=None, pad=8):
    iterator = DataIterator(batch, batch["micro_batch_indices"])
    return [get_batch(iterator, keys, pad) for _ in batch["micro_batch_indices"]]


def reference_row(tokens, cp_size, pad):
    """The row as the model of one rank reads it, sequence by sequence: upstream's recipe on
    `slice_with_cp`.
    """
    row = (
        torch.cat([slice_with_cp(t, 0) for t in tokens])
        if tokens
        else torch.zeros(0, dtype=torch.int64)
    )
    width = max(pad, -(-len(row) // pad) * pad)
    return torch.nn.functional.pad(row, (0, width - len(row))), len(row)


def full_mask(total, response, mask):
    """Loss mask at the position of the logit that predicts each response token."""
    full = torch.zeros(total, dtype=torch.int32)
    for j in range(response):
        full[total - response - 1 + j] = mask[j]
    return full


def test_rows_of_another_padding_than_the_split_made_are_laid_out_anew():
    """Rows for another padding than the split's are laid out again: 11, 11 and 14 tokens fill 16 +
    16 + 16 places by eights and 12 + 12 + 24 by twelves."""
    with parallel():
        batch = ready(shards_of([(5, 6), (4, 7), (6, 8)], cap=14, pad_to=8)[0])
        rows = walk(batch, pad=12)
        assert sorted(row["tokens"].shape[1] for row in rows) == [12, 12, 24]
        for row in rows:
            assert torch.equal(row["tokens"], reference_row(row["unconcat_tokens"], 1, 12)[0][None])


def test_what_a_step_writes_into_its_tensors_does_not_reach_the_batch_it_came_from():
    """A rank's tensors are its own, also where the dtype stays the same: the store's objects are
    read-only and shared by the ranks of a node."""
    shard = localize(shards_of(LENGTHS)[0], 0)
    before = {
        name: np.array(shard.column(name).values)
        for name in ("tokens", "rollout_log_probs", "loss_masks")
    }
    with parallel():
        moved = to_train_device(shard, "cpu", cp_size=1, cp_rank=0)
    for name in before:
        for row in moved[name]:
            row.fill_(77)
    assert all(np.array_equal(shard.column(name).values, values) for name, values in before.items())


@pytest.mark.parametrize(("cp_size", "tp_size"), [(1, 1), (1, 2), (2, 1), (4, 2)])
def test_rows_hold_the_samples_and_their_masks_on_every_layout(cp_size, tp_size):
    """Tokens, masks and bounds of the rows equal a per-sequence recipe on each context-parallel
    rank."""
    for cp_rank in range(cp_size):
        with parallel(cp_size=cp_size, cp_rank=cp_rank, tp_size=tp_size):
            batch = ready(shards_of(LENGTHS)[0], cp_size=cp_size, cp_rank=cp_rank)
            for micro_batch in walk(batch):
                tokens = micro_batch["unconcat_tokens"]
                row, used = reference_row(tokens, cp_size, 8 * tp_size)
                assert torch.equal(micro_batch["tokens"], row[None])
                masks = [
                    full_mask(total, response, mask)
                    for total, response, mask in zip(
                        micro_batch["total_lengths"],
                        micro_batch["response_lengths"],
                        micro_batch["loss_masks"],
                        strict=True,
                    )
                ]
                assert torch.equal(
                    micro_batch["full_loss_masks"],
                    reference_row(masks, cp_size, 8 * tp_size)[0][None],
                )
                lens = [
                    len(t) if cp_size == 1 else 2 * cp_size * -(-len(t) // (2 * cp_size))
                    for t in tokens
                ]
                pad = len(row) - used
                bounds = list(itertools.accumulate([0, *lens, *([pad * cp_size] if pad else [])]))
                params = micro_batch["packed_seq_params"]
                assert (
                    params.cu_seqlens_q.tolist() == bounds
                    and params.cu_seqlens_q.dtype == torch.int32
                )
                assert params.max_seqlen_q == max(np.diff(bounds)) and params.qkv_format == "thd"
                assert len(bounds) == 2 or params.max_seqlen_q < bounds[-1], (
                    "the row's length would let positions run on"
                )


@pytest.mark.parametrize("cp_size", [2, 4])
def test_log_probs_from_elsewhere_are_cut_like_the_layout_says(cp_size):
    """Per-token signals are sliced by one rule, and the ranks' parts sum to the whole, also where a
    rank owns no response token."""
    whole = [np.asarray(entry) for entry in localize(shards_of(LENGTHS)[0], 0)["rollout_log_probs"]]
    owned = 0
    for cp_rank in range(cp_size):
        with parallel(cp_size=cp_size, cp_rank=cp_rank):
            batch = ready(shards_of(LENGTHS)[0], cp_size=cp_size, cp_rank=cp_rank)
            for full, part, total, response in zip(
                whole,
                batch["rollout_log_probs"],
                batch["total_lengths"],
                batch["response_lengths"],
                strict=True,
            ):
                assert part.tolist() == slice_log_prob_with_cp(full.tolist(), total, response)
                owned += len(part)
    assert owned == sum(response for _, response in LENGTHS)


def test_the_examples_of_the_report_hold():
    """By hand: T=11, R=7, c=2 gives rank 0 one response token and rank 1 six; T=10, R=2 gives rank
    0 none; T=9, R=8 gives 3 and 5."""
    for (prompt, response), owned in {(4, 7): (1, 6), (8, 2): (0, 2), (1, 8): (3, 5)}.items():
        for cp_rank in range(2):
            with parallel(cp_size=2, cp_rank=cp_rank):
                batch = ready(shards_of([(prompt, response)])[0], cp_size=2, cp_rank=cp_rank)
            assert len(batch["rollout_log_probs"][0]) == owned[cp_rank]


def test_without_context_parallelism_a_micro_batch_is_a_view_of_the_arrived_buffer():
    """A row is a view of the received buffer: padding was laid out at the split."""
    with parallel():
        batch = ready(shards_of(LENGTHS)[0])
        storage = batch["tokens"][0].untyped_storage().data_ptr()
        for micro_batch in walk(batch):
            assert micro_batch["tokens"].untyped_storage().data_ptr() == storage
        # another padding unit than the split's is served all the same
        assert walk(batch, pad=16)[0]["tokens"].shape[1] % 16 == 0


def test_a_rank_without_samples_runs_rows_of_padding():
    """With 1 sample on 4 ranks three ranks run an empty micro-batch whose mask is all zero."""
    for cp_size in (1, 2):
        for rank, shard in enumerate(
            shards_of([(3, 4)], dp_size=4, pad_to=8 if cp_size == 1 else 0)
        ):
            with parallel(cp_size=cp_size):
                batch = ready(shard, rank, cp_size=cp_size)
                micro_batches = walk(batch)
            assert len(micro_batches) == 1
            micro_batch = micro_batches[0]
            if batch["partition"]:
                continue
            assert (
                micro_batch["tokens"].tolist() == [[0] * 8]
                and micro_batch["full_loss_masks"].sum() == 0
            )
            assert micro_batch["packed_seq_params"].cu_seqlens_q.tolist() == [0, 8 * cp_size]
            assert (
                micro_batch["unconcat_tokens"] == [] == micro_batch["loss_masks"]
                and len(micro_batch["rollout_mask_sums"]) == 0
            )


def test_values_follow_their_sample_through_any_packing():
    """Rewards, log-probs and tokens of a row belong to one sample, for dp 1, 2 and 3."""
    for dp_size in (1, 2, 3):
        seen = []
        for rank, shard in enumerate(shards_of(LENGTHS, dp_size)):
            with parallel():
                for micro_batch in walk(ready(shard, rank)):
                    for k, index in enumerate(micro_batch["partition"]):
                        seen.append(index)
                        assert micro_batch["unconcat_tokens"][k][0] == 1000 * (index + 1)
                        assert (
                            micro_batch["rewards"][k] == index == micro_batch["local_raw_reward"][k]
                        )
                        log_probs = micro_batch["rollout_log_probs"][k]
                        assert len(log_probs) == LENGTHS[index][1] and (log_probs < -index).all()
        assert sorted(seen) == list(range(len(LENGTHS)))


def test_dtypes_on_the_device_are_the_models():
    """Ids are int64 and masks int32 on the device: a uint8 mask would wrap in arithmetic, and an
    int32 id is no index for some kernels."""
    batch = ready(shards_of(LENGTHS)[0])
    kinds = {name: batch[name][0].dtype for name in ("tokens", "loss_masks", "rollout_log_probs")}
    assert kinds == {
        "tokens": torch.int64,
        "loss_masks": torch.int32,
        "rollout_log_probs": torch.float32,
    }
    assert batch["rollout_mask_sums"].dtype == torch.float32
    batch["loss_masks"][0].zero_()  # writable: nothing aliases the object store


def test_a_hooks_edits_reach_the_micro_batches():
    """A batch that --rollout-data-postprocess-path changed gives rows with the change; no cached
    row hides it."""
    with parallel():
        batch = ready(shards_of(LENGTHS)[0])
        walk(batch)
        batch["loss_masks"][0].zero_()
        batch["tokens"][1] = batch["tokens"][1] + 5
        first = walk(batch)[0]
        micro_batches = walk(batch)
    masks = torch.cat([micro_batch["full_loss_masks"].reshape(-1) for micro_batch in micro_batches])
    assert masks.sum() == sum(int(mask.sum()) for mask in batch["loss_masks"])
    rows = torch.cat([micro_batch["tokens"].reshape(-1) for micro_batch in micro_batches])
    assert sorted(rows[rows > 0].tolist()) == sorted(torch.cat(batch["tokens"]).tolist())
    assert first["tokens"].shape[0] == 1


def test_what_rows_were_laid_out_from_is_kept_so_that_nothing_else_gets_its_id():
    """The masks that rows came from stay alive: freed, their id could go to the next masks, and the
    old rows would train."""
    with parallel():
        batch = ready(shards_of(LENGTHS)[0])
        walk(batch, pad=16)  # not the split's padding: the rows are copies
        origin = weakref.ref(batch.column("loss_masks").values)
        batch["loss_masks"][:] = [torch.zeros_like(mask) for mask in batch["loss_masks"]]
        batch.column("loss_masks")
        gc.collect()
        assert origin() is not None and not any(
            row["full_loss_masks"].any() for row in walk(batch, pad=16)
        )


def test_a_hook_that_gives_a_tensor_other_memory_is_seen_too():
    """`mask.data = ...` in a hook changes rows and metrics as well as the loss, though the tensor
    in the list is the same."""
    with parallel():
        batch = ready(shards_of(LENGTHS)[0])
        walk(batch)
        for mask in batch["loss_masks"]:
            mask.data = torch.zeros_like(mask)
        assert all(not micro_batch["full_loss_masks"].any() for micro_batch in walk(batch))
    assert (
        not batch.column("loss_masks").values.any() and not batch.column("loss_masks").was_edited()
    )


def test_what_a_hook_adds_is_in_the_micro_batches_where_it_has_an_entry_per_sample():
    """A hook's new field is in the micro-batches if it has one entry per sample; asking for
    another, and a known field of a wrong length, are errors."""
    batch = ready(shards_of(LENGTHS)[0])
    batch["mine"] = [f"of {position}" for position in batch["partition"]]
    batch["scale"], batch["longer"], batch["beta"] = (
        3.0,
        [0] * (len(LENGTHS) + 1),
        torch.tensor(3.0),
    )
    with parallel():
        micro_batches = walk(batch)
        assert [entry for micro_batch in micro_batches for entry in micro_batch["mine"]] == batch[
            "mine"
        ]
        assert not {"scale", "longer", "beta"} & set(micro_batches[0])
        for name, said in (
            ("scale", "'scale' has 3.0"),
            ("beta", r"'beta' has tensor\(3.\)"),
            ("longer", "'longer' has 7 entries for the 6 samples"),
        ):
            with pytest.raises(RolloutDataError, match=said):
                walk(batch, ["tokens", name])
        batch["rollout_log_probs"].append(torch.zeros(3))
        with pytest.raises(
            RolloutDataError, match="'rollout_log_probs' has 7 entries for the 6 samples"
        ):
            walk(batch)


def test_a_hook_that_mixes_tensors_with_something_else_is_told_where():
    """A field that mixes tensors with lists is refused with the entry."""
    batch = ready(shards_of(LENGTHS)[0])
    batch["loss_masks"][2] = [0] * len(batch["loss_masks"][2])
    with pytest.raises(
        RolloutDataError, match=r"loss_masks\[2\] is a list where other entries are tensors"
    ):
        batch.column("loss_masks")
    with parallel(), pytest.raises(RolloutDataError, match=r"loss_masks\[2\] is a list"):
        walk(batch)


def test_plain_dicts_of_tensors_work_too():
    """A dict of lists with the same keys is accepted in place of a RolloutBatch."""
    batch = ready(shards_of(LENGTHS)[0])
    plain = {
        name: list(value) if isinstance(value, list) else value for name, value in batch.items()
    }
    keys = ["tokens", "loss_masks", "rollout_log_probs", "absent"]
    for cp_size in (1, 2):
        with parallel(cp_size=cp_size):
            for a, b in zip(walk(batch, keys), walk(plain, keys), strict=True):
                assert torch.equal(a["tokens"], b["tokens"]) and torch.equal(
                    a["full_loss_masks"], b["full_loss_masks"]
                )
                assert a["absent"] is None is b["absent"]


def test_iterators_stop_reset_and_share_rows_over_virtual_stages():
    """One iterator per virtual pipeline stage walks the same micro-batches."""
    with parallel(vpp_size=2):
        batch = ready(shards_of(LENGTHS)[0])
        first, second = get_data_iterator(batch)
        rows = [get_batch(iterator, ["tokens"], 8)["tokens"] for iterator in (first, second)]
        assert rows[0].data_ptr() == rows[1].data_ptr()
        for _ in batch["micro_batch_indices"][1:]:
            first.get_next(["tokens"])
        with pytest.raises(IndexError, match="reset"):
            first.get_next(["tokens"])
        first.reset()
        assert torch.equal(get_batch(first, ["tokens"], 8)["tokens"], rows[0])


def test_whole_batch_fields_have_no_part_in_a_micro_batch():
    """Asking for raw_reward per micro-batch is an error; its entries are not this rank's
    samples."""
    with parallel():
        batch = ready(shards_of(LENGTHS)[0])
        iterator = DataIterator(batch, batch["micro_batch_indices"])
        with pytest.raises(RolloutDataError, match="'raw_reward'"):
            iterator.get_next(["tokens", "raw_reward"])
        assert "raw_reward" not in walk(batch)[0]
        with pytest.raises(AssertionError, match="needs 'tokens'"):
            get_batch(iterator, ["rewards"])


def test_allgather_cp_cuts_the_stream_into_equal_pieces():
    """In the contiguous layout the pieces of all ranks, put together, are the padded stream."""
    pieces, masks = [], []
    for cp_rank in range(2):
        with parallel(cp_size=2, cp_rank=cp_rank):
            batch = ready(shards_of([(3, 4), (2, 6)], cap=64)[0], cp_size=2, cp_rank=cp_rank)
            iterator = DataIterator(batch, batch["micro_batch_indices"])
            micro_batch = get_batch(iterator, None, 8, allgather_cp=True)
            pieces.append(micro_batch["tokens"][0])
            masks.append(micro_batch["full_loss_masks"][0])
    stream = torch.cat(pieces)
    assert len(stream) == 16 and len(pieces[0]) == 8
    assert torch.equal(stream[:15], torch.cat(micro_batch["unconcat_tokens"])) and stream[15] == 0
    assert torch.cat(masks).sum() == sum(int(mask.sum()) for mask in batch["loss_masks"])
    assert micro_batch["packed_seq_params"].cu_seqlens_q.tolist() in (
        [0, 7, 15, 16],
        [0, 8, 15, 16],
    )


def test_media_of_a_micro_batch_are_concatenated_by_key():
    """Media are concatenated by key; samples without media add nothing, and none at all is None."""
    entries = [{"pixels": torch.ones(2, 3)}, None, {"pixels": torch.zeros(1, 3), "size": [4]}]
    merged = concatenate_media(entries)
    assert merged["pixels"].shape == (3, 3) and merged["size"] == [[4]]
    assert concatenate_media([None, None]) is None


def test_lists_of_tensors_move_and_none_passes():
    """Upstream's two helpers move lists of tensors to the device and pass None on."""
    assert tensors_to_cpu(None) is None and tensors_to_gpu(None) is None
    moved = tensors_to_gpu([[1, 2], None, torch.tensor([3])], "cpu")
    assert moved[0].dtype == torch.float32 and moved[1] is None and moved[2].tolist() == [3.0]
    assert tensors_to_cpu([torch.ones(1, requires_grad=True), None])[0].requires_grad is False


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
