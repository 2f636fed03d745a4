"""Weight sets in host memory, their checksum, and what is cut, sent and confirmed, on tensors of a
few numbers."""

import hashlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slime.backends.megatron_utils import local_params
from slime.backends.megatron_utils.sharding import shard
from slime.backends.megatron_utils.update_weight.disk import update_problem
from slime.backends.megatron_utils.update_weight.gather import _cut
from slime.backends.megatron_utils.weights_backup import WeightsBackup
from slime.files.checksum import combine_digests, tensor_digest, weights_checksum

NUM_GPUS = 0


def chunk(value):
    """A part of a model with a parameter and a buffer, both of this value."""
    module = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.constant_(module.weight, value)
    module.register_buffer("offset", torch.full((1,), float(value)))
    return module


def values_of(model):
    return [(part.weight[0, 0].item(), part.offset.item()) for part in model]


def fill(model, value):
    with torch.no_grad():
        for part in model:
            part.weight.fill_(value)
            part.offset.fill_(value)


def test_every_chunk_comes_back_with_its_own_parameters_and_buffers():
    """Two virtual pipeline stages with equal layer names get back their own parameters and
    buffers."""
    model = [chunk(1), chunk(2)]
    sets = WeightsBackup(model)
    sets.backup("actor")
    fill(model, 9)
    sets.restore("actor")
    assert values_of(model) == [(1, 1), (2, 2)]


@pytest.mark.parametrize("fails", [False, True])
def test_borrowed_weights_are_given_back_whatever_happens(fails):
    model = [chunk(1)]
    sets = WeightsBackup(model)
    sets.backup("ref")
    fill(model, 5)
    sets.backup("actor")
    try:
        with sets.borrowed("ref"):
            assert values_of(model) == [(1, 1)] and sets.active == "ref"
            if fails:
                raise KeyError("inside")
    except KeyError:
        assert fails
    assert values_of(model) == [(5, 5)] and sets.active == "actor"


def test_a_moved_set_leaves_its_place_to_the_one_it_replaces():
    """Moving a set exchanges the two sets' memory, so that none is allocated anew."""
    model = [chunk(1)]
    sets = WeightsBackup(model)
    sets.backup("old_actor")
    fill(model, 2)
    sets.backup("rollout_actor")
    sets.move("rollout_actor", to="old_actor")
    assert "rollout_actor" in sets
    sets.restore("old_actor")
    assert values_of(model) == [(2, 2)]
    sets.restore("rollout_actor")
    assert values_of(model) == [(1, 1)]


def test_weights_that_only_fell_have_changed():
    model = [chunk(1)]
    sets = WeightsBackup(model)
    sets.backup("actor")
    assert sets.largest_change("actor") == 0
    fill(model, 0.25)
    assert sets.largest_change("actor") == 0.75


def test_the_checksum_is_of_names_types_shapes_and_bytes_in_c_order():
    """The checksum is over names, types, shapes and bytes in C order, also for a transposed
    view."""

    def digest(name, dtype, shape, content):
        return hashlib.blake2b(
            f"{name}\0{dtype}\0{shape}\0".encode() + content, digest_size=16
        ).digest()

    values = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    assert tensor_digest("w", values) == digest("w", "float32", "2,3", values.numpy().tobytes())
    turned = values.t()
    assert tensor_digest("w", turned) == digest(
        "w", "float32", "3,2", np.ascontiguousarray(turned.numpy()).tobytes()
    )
    halves = np.array([1, 2], dtype=np.uint16)
    expected = hashlib.blake2b(
        b"b\0" + digest("b", "bfloat16", "2", halves.tobytes()), digest_size=16
    ).hexdigest()
    assert weights_checksum({"b": halves}, dtype_names={"b": "bfloat16"}) == expected
    one, two = bytes(16), bytes([1] * 16)
    assert (
        combine_digests({"a": one, "b": two})
        == combine_digests({"b": two, "a": one})
        != combine_digests({"a": one, "c": two})
    )


def test_a_parameter_is_cut_into_as_many_pieces_as_there_are_ranks_or_not_at_all():
    """Five rows for four ranks are refused; torch.chunk would make three pieces."""
    assert shard("x.weight", torch.arange(4.0), size=2, rank=1, dim=0).tolist() == [2, 3]
    with pytest.raises(ValueError, match="with 5 rows cannot be cut into 4 pieces"):
        shard("x.weight", torch.zeros(5, 1), size=4, rank=0, dim=0)


def test_an_experts_part_is_that_of_its_rank_among_the_experts_tensor_ranks(monkeypatch):
    """An expert is cut by its own tensor-parallel group, in which rank 1 for dense weights may be
    rank 0."""
    layer = torch.nn.Module()
    layer.experts, layer.dense = (
        torch.nn.Linear(2, 2, bias=False),
        torch.nn.Linear(2, 2, bias=False),
    )
    model = torch.nn.Module()
    model.mlp, model.config, model.vp_stage = layer, SimpleNamespace(num_moe_experts=None), None
    for parameter in model.parameters():
        parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = (
            True,
            0,
            1,
        )
    answers = {"expert_model_parallel_world_size": 1, "expert_model_parallel_rank": 0, "expert_tensor_parallel_world_size": 2,
               "expert_tensor_parallel_rank": 0, "tensor_model_parallel_world_size": 2, "tensor_model_parallel_rank": 1}  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(local_params.mpu, f"get_{name}", lambda answer=answer: answer)
    monkeypatch.setattr(local_params, "get_transformer_layer_offset", lambda config, vp_stage: 0)
    ranks = {local.name: local.parallel_rank for local in local_params.local_parameters([model])}
    assert ranks == {"mlp.experts.weight": 0, "mlp.dense.weight": 1}


def test_an_update_counts_only_when_the_server_says_so():
    """A reply without the word of success, as from a proxy or an older server, is a failed
    update."""
    assert update_problem({"success": True}, expected=None) is None
    for reply in ({}, {"success": None}, {"success": False}, "ok", None):
        assert "it answered" in update_problem(reply, expected=None)


class _Transfer:
    def __init__(self, num_bytes):
        self.num_bytes = num_bytes


@pytest.mark.parametrize(
    ("sizes", "expected"), [([4, 4, 4], [2, 1]), ([4], [1]), ([8, 8], [1, 1]), ([], [])]
)
def test_every_tensor_is_in_a_bucket_the_last_one_too(sizes, expected):
    """Every tensor is sent, also one alone in the last bucket of 8 bytes."""
    transfers = [_Transfer(size) for size in sizes]
    buckets = list(_cut(transfers, 8))
    assert [len(bucket) for bucket in buckets] == expected and [
        t for bucket in buckets for t in bucket
    ] == transfers


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
