"""Columns and train dumps in Parquet hold the arrays of the run: same values, same dtypes, at every
layout of the ranks.
"""

import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`

from contract.test_train_dump import assert_same_dump, trained_batch

from slime.data.batch import RolloutBatch
from slime.data.fields import CONTRACT, Origin, Rows, Scope, declare_field
from slime.data.from_lists import batch_from_lists
from slime.data.ragged import Column, as_array
from slime.exceptions import RolloutDataError
from slime.files import tables
from slime.files.field_table import batch_of, field_table, fields_of_batch
from slime.files.train_dump import read_train_dump
from slime.files.train_dump_utils import Place, write_train_dump
from slime.recording.rollout_side import columns_table

NUM_GPUS = 0


@pytest.fixture
def plug_in():
    """Fields of a plug-in; one is named as a column of the table is."""
    declare_field("image_scores", scope=Scope.TOKEN, rows=Rows.FREE, wire_dtype="float64")
    declare_field("position", scope=Scope.SAMPLE, wire_dtype="int16")
    declare_field("raw_row", scope=Scope.TOKEN, rows=Rows.FREE, wire_dtype="int32")
    declare_field("notes", scope=Scope.SAMPLE)
    yield
    for name in ("image_scores", "position", "raw_row", "notes"):
        CONTRACT.remove(name)


def stored_and_read(batch: RolloutBatch, folder) -> RolloutBatch:
    path = Path(folder) / "columns.parquet"
    count = len(batch["tokens"])
    tables.write_table(path, columns_table(batch, range(count), list(range(count))))
    return batch_of(tables.read_table(path))


def arrays_of(batch: RolloutBatch, name: str) -> list[np.ndarray] | np.ndarray:
    value = batch.raw(name)
    if isinstance(value, Column) and CONTRACT[name].scope is Scope.TOKEN:
        column = batch.column(name)
        return [as_array(entry) for entry in column.as_list()]
    return batch.array(name)


def assert_same_batch(found: RolloutBatch, expected: RolloutBatch) -> None:
    for name in expected:
        spec, value = CONTRACT.find(name), expected.raw(name)
        if isinstance(value, Column):
            left, right = arrays_of(found, name), arrays_of(expected, name)
            assert len(left) == len(right), name
            for a, b in zip(left, right, strict=True):
                assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), name
        else:
            assert repr(found[name]) == repr(list(value)), (name, spec)


def whole_batch(draw, num: int) -> RolloutBatch:
    """Every field of the contract that a rollout brings, of `num` samples."""
    prompts = [draw(st.integers(1, 3)) for _ in range(num)]
    responses = [draw(st.integers(0, 4)) for _ in range(num)]
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    totals = [p + r for p, r in zip(prompts, responses, strict=True)]
    rows = {
        "prompt + response tokens": totals,
        "response tokens": responses,
        "response tokens + 1": [r + 1 for r in responses],
        "prompt + response tokens - 1": [t - 1 for t in totals],
        "any number": [int(rng.integers(0, 4)) for _ in range(num)],
    }
    largest = draw(st.sampled_from([1, 200, 300, 70000]))
    data: dict = {}
    for name in [spec.name for spec in CONTRACT]:
        spec = CONTRACT[name]
        if spec.origin is not Origin.ROLLOUT or not spec.per_sample:
            continue
        if spec.scope is Scope.TOKEN:
            lengths = rows[spec.rows.value]
            shape = (2, 3) if name == "rollout_routed_experts" else ()
            if spec.wire_dtype in (None, "float32", "float64"):
                data[name] = [
                    rng.normal(size=(n, *shape)).astype(spec.wire_dtype or "f4") for n in lengths
                ]
            else:
                top = 2 if name == "loss_masks" else largest
                data[name] = [rng.integers(0, top, size=(n, *shape)).astype("i4") for n in lengths]
        elif spec.wire_dtype is None:
            data[name] = [draw(st.none() | st.just({"x": np.float32(i)})) for i in range(num)]
        elif spec.wire_dtype == "bool":
            data[name] = [bool(i % 2) for i in range(num)]
        elif "float" in spec.wire_dtype:
            data[name] = [float(v) for v in rng.normal(size=num)]
        else:
            data[name] = [int(v) for v in rng.integers(0, 3, size=num)]
    data["total_lengths"], data["response_lengths"] = totals, responses
    data["rollout_top_p_token_offsets"] = [np.arange(r + 1, dtype=np.int32) for r in responses]
    data["rollout_top_p_token_ids"] = [np.arange(r, dtype=np.int32) for r in responses]
    for name in draw(st.lists(st.sampled_from(sorted(data)), unique=True, max_size=4)):
        if name not in ("tokens", "total_lengths", "response_lengths", "loss_masks", "valid"):
            del data[name]
    data["multimodal_train_inputs"] = [
        None if i % 2 else {"pixels": torch.full((2, i + 1), 0.5, dtype=torch.bfloat16)}
        for i in range(num)
    ]
    return batch_from_lists(data)


FEW = settings(
    max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_the_whole_batch_comes_back_with_its_arrays_and_dtypes(tmp_path_factory, plug_in, data):
    """Replay splits and trains these arrays; a wider dtype is another number to the loss."""
    batch = whole_batch(data.draw, data.draw(st.integers(1, 4)))
    assert_same_batch(stored_and_read(batch, tmp_path_factory.getbasetemp()), batch)


@FEW
@given(st.data())
def test_fields_of_a_plug_in_may_have_the_names_of_columns(tmp_path, plug_in, data):
    """`position` and `raw_row` are columns of the table too; both are kept, and joins use the
    table's."""
    batch = whole_batch(data.draw, 3)
    batch["position"] = [7, 8, 9]
    batch["raw_row"] = [np.arange(i, dtype=np.int32) for i in range(3)]
    path = tmp_path / "t.parquet"
    tables.write_table(path, columns_table(batch, [2, 1, 0], ["a", 5, 2**70]))
    table = tables.read_table(path)
    assert table["raw_row"].to_pylist() == [2, 1, 0] and table["position"].to_pylist() == [0, 1, 2]
    assert table["sample_index"].to_pylist() == [None, 5, None]
    back = batch_of(table)
    assert list(back["position"]) == [7, 8, 9]
    assert [list(one) for one in back["raw_row"]] == [[], [0], [0, 1]]


@FEW
@given(st.data())
def test_what_no_table_holds_is_named_in_the_table(tmp_path, plug_in, data):
    """An object of a plug-in becomes its description; a field without one entry per sample is left
    out with the reason."""
    batch = whole_batch(data.draw, 2)
    dict.__setitem__(batch, "notes", [object(), {"kept": 1}])
    dict.__setitem__(batch, "global_batch_sizes", [2, 2, 2])
    table = columns_table(batch, [0, 1], [0, 1])
    assert "global_batch_sizes" in tables.metadata_of(table)["slime_left_out"]
    assert batch_of(table)["notes"][1] == {"kept": 1}
    with pytest.raises(RolloutDataError, match="holds no fields of a rollout batch"):
        batch_of(field_table([], num_rows=0).replace_schema_metadata({}))
    assert fields_of_batch(batch)[1] == {
        "global_batch_sizes": "it does not have one entry per sample"
    }


# --- train dumps ----------------------------------------------------------------------------------


def dump_of(path: Path, *, dp_size: int, cp_size: int) -> Path:
    """The dump of `dp_size` x `cp_size` ranks, each in a thread of this process."""
    ranks = [(dp, cp) for dp in range(dp_size) for cp in range(cp_size)]
    values: list = [None] * len(ranks)
    barrier = threading.Barrier(len(ranks), timeout=30)
    written: list = [None] * len(ranks)

    def run(number: int) -> None:
        dp_rank, cp_rank = ranks[number]

        def share(value):
            values[number] = value
            barrier.wait()
            everyone = list(values)
            barrier.wait()
            return everyone

        written[number] = write_train_dump(
            path,
            trained_batch(dp_rank=dp_rank, dp_size=dp_size, cp_rank=cp_rank, cp_size=cp_size),
            header={"rollout_id": 7, "rank": 0, "cp_size": cp_size},
            place=Place(dp_rank, cp_rank, cp_size),
            gather=lambda value: share(value) if number == 0 else share(value) and None,
            share=share,
        )

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert written[0] is not None
    return written[0]


@pytest.mark.parametrize("dp_size,cp_size", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_the_train_table_is_the_train_dump(tmp_path, dp_size, cp_size):
    """--save-debug-train-data writes either; the recording's train part is the table."""
    layout = {"dp_size": dp_size, "cp_size": cp_size}
    table = read_train_dump(dump_of(tmp_path / "7.parquet", **layout))
    file = read_train_dump(dump_of(tmp_path / "7.safetensors", **layout))
    alone = read_train_dump(dump_of(tmp_path / "a.safetensors", dp_size=1, cp_size=1))
    assert_same_dump(table, file)
    assert_same_dump(table, alone)
    assert (table.rollout_id, table.num_whole, table.left_out) == (7, file.num_whole, file.left_out)
    assert table.dp_shards == file.dp_shards
    assert table.owner_ranks.tolist() == file.owner_ranks.tolist()
    for i in range(table.num_samples):
        assert str(sorted(table.sample(i).items())) == str(sorted(file.sample(i).items()))


def test_rows_of_the_train_table_say_who_trained_them(tmp_path):
    """Position 3 was rejected: no rank, no numbers."""
    table = tables.read_table(dump_of(tmp_path / "7.parquet", dp_size=2, cp_size=1)).to_pydict()
    assert table["position"] == list(range(8))
    assert table["dp_rank"][3] == table["step"][3] == table["micro_batch"][3] == -1
    assert table["log_probs"][3] is None and len(table["log_probs"][6]) == 12
    assert set(table["dp_rank"]) == {-1, 0, 1}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
