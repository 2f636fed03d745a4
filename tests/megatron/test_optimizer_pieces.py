"""Optimizer state is put together from pieces that other layouts wrote: the right elements of the
right shard, or an error."""

import types

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("megatron.core")

from slime.backends.megatron_utils.optimizer_state import _Reader  # noqa: E402
from slime.exceptions import ConfigError  # noqa: E402

NUM_GPUS = 0
# Two shards of 2 x 4 elements; shard 0 was written by two ranks. Element i of shard s is 100 s + i.
PIECES = [[0, 0, 3, "a.safetensors"], [0, 3, 8, "b.safetensors"], [1, 0, 8, "b.safetensors"]]


def reader_of(folder, pieces):
    tensors = {"a.safetensors": {}, "b.safetensors": {}}
    for shard, start, end, file in PIECES:
        tensors[file][f"exp_avg|w|{shard}|{start}"] = torch.arange(start, end) + 100.0 * shard
    for file, content in tensors.items():
        save_file(content, str(folder / file))
    return _Reader(
        folder, {"w": {"shape": [2, 4], "num_shards": 2, "dim": 0, "stride": 1, "pieces": pieces}}
    )


def slot_of(rank, start, end):
    local = types.SimpleNamespace(
        name="w", parameter=torch.empty(2, 4), parallel_size=2, parallel_rank=rank
    )
    return types.SimpleNamespace(local=local, start=start, end=end)


@pytest.mark.parametrize(
    ("rank", "start", "end", "expected"),
    [
        (0, 0, 8, range(8)),
        (0, 2, 6, range(2, 6)),
        (0, 4, 8, range(4, 8)),
        (0, 0, 3, range(3)),
        (1, 2, 6, range(102, 106)),
    ],
)
def test_a_range_is_cut_from_the_pieces_that_hold_it(tmp_path, rank, start, end, expected):
    """A range may begin inside one piece and end inside the next."""
    assert reader_of(tmp_path, PIECES).piece("exp_avg", slot_of(rank, start, end)).tolist() == list(
        expected
    )


def test_elements_that_no_file_holds_are_an_error(tmp_path):
    """A range with elements that no file holds is an error."""
    reader = reader_of(tmp_path, [PIECES[0], PIECES[2]])
    assert reader.piece("exp_avg", slot_of(0, 0, 3)).tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match="of w .* is not complete: element 3 of 6 is in no file"):
        reader.piece("exp_avg", slot_of(0, 2, 6))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
