"""A sample that goes into a table comes out equal, whatever its fields hold: replay trains on it."""

import dataclasses
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`

from slime.data.number_list import number_list
from slime.data.sample import PrefixCacheInfo, Sample, SpecInfo
from slime.exceptions import RolloutDataError
from slime.files import tables
from slime.files.json_values import NOT_STORED, decode_json, encode_each, encode_json
from slime.files.rollout_dump import read_rollout_dump, save_debug_rollout_data
from slime.files.sample_table import LISTS, changed_fields, sample_table, samples_of, with_changes

NUM_GPUS = 0
NUMPY_DTYPES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 "
    "complex128 >i4 >f8 <U5 S3 datetime64[s] timedelta64[ms]"
).split()
TORCH_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
)


def same(a, b) -> bool:
    """Equal in value and type at every depth; NaN equals NaN, -0.0 is not 0.0. A list and a
    `NumberList` are one type.
    """
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and encode_json(a) == encode_json(b)
        )
    if isinstance(a, np.ndarray | np.generic):
        if type(a) is not type(b) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        if a.dtype == object:
            return all(map(same, np.ravel(a).tolist(), np.ravel(b).tolist()))
        return a.tobytes() == b.tobytes()
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, j) and same(v, w) for (k, v), (j, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (
            a == b and math.copysign(1, a) == math.copysign(1, b)
        )
    return bool(a == b)


def through_a_table(samples, folder, name="t.parquet"):
    path = Path(folder) / name
    tables.write_table(path, sample_table(samples))
    return samples_of(tables.read_table(path))


def differences(sample: Sample, other: Sample) -> list[str]:
    names = {**sample.__dict__, **other.__dict__}
    return [
        f"{name}: {getattr(sample, name, '(none)')!r} != {getattr(other, name, '(none)')!r}"
        for name in names
        if not same(sample.__dict__.get(name, ...), other.__dict__.get(name, ...))
    ]


TEXTS = st.text(st.characters(codec=None), max_size=6) | st.sampled_from(
    ["\ud83d", "a\udc00b", "😀", "__array__", "__dict__", "__float__", "nan"]
)
NUMBERS = (
    st.integers()
    | st.sampled_from([2**63, -(2**63), 2**64, 10**301, -(10**400), 2**31])
    | st.floats(allow_nan=True)
    | st.sampled_from([-0.0, float("inf")])
)


@st.composite
def arrays(draw):
    """Arrays, numpy scalars and tensors of any dtype, with random bits, up to three dimensions."""
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    count = math.prod(shape)
    bits = np.random.default_rng(draw(st.integers(0, 99))).bytes((count + 1) * 48)
    if draw(st.booleans()):
        dtype = draw(st.sampled_from(TORCH_DTYPES))
        if dtype == torch.bool:
            return torch.tensor(list(bits[:count])).reshape(shape) > 127
        return torch.frombuffer(bytearray(bits), dtype=dtype)[:count].clone().reshape(shape)
    dtype = np.dtype(draw(st.sampled_from(NUMPY_DTYPES)))
    if dtype.kind in "USb":
        array = (np.frombuffer(bits, np.uint8)[:count] % 2).astype(dtype).reshape(shape)
    else:
        whole = bits[: len(bits) // dtype.itemsize * dtype.itemsize]
        array = np.frombuffer(whole, dtype=dtype)[:count].reshape(shape)
    return array[()] if shape == () and draw(st.booleans()) else np.array(array)


VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS | st.binary(max_size=4) | arrays(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(TEXTS | st.integers(-9, 9) | st.none(), inner, max_size=3)
    ),
    max_leaves=6,
)
INTS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5)
FLOATS = st.lists(st.floats(allow_nan=True), max_size=5)
# a list field as engines, plug-ins and mistakes fill it
LIST_FIELDS = (
    INTS
    | FLOATS
    | st.lists(st.booleans() | st.integers(0, 1), max_size=4)
    | st.lists(st.booleans(), min_size=1, max_size=4)
    | INTS.map(lambda v: number_list(np.array(v, dtype=np.int32)))
    | INTS.map(lambda v: number_list(np.array(v, dtype=np.int64)))
    | FLOATS.map(lambda v: number_list(np.array(v, dtype=np.float32)))
    | st.lists(st.integers(0, 1), max_size=4).map(lambda v: number_list(np.array(v, np.uint8)))
    | st.lists(NUMBERS | st.none() | TEXTS, max_size=4)
    | arrays()
    | VALUES
)
COUNTERS = st.builds(SpecInfo, st.integers(0, 9), st.integers(0, 9))


@st.composite
def samples(draw):
    found = Sample()
    for field in dataclasses.fields(Sample):
        if not draw(st.booleans()):
            continue
        if field.name in LISTS:
            value = draw(st.none() | LIST_FIELDS)
        elif field.name == "status":
            value = draw(st.sampled_from(Sample.Status))
        elif field.name == "spec_info":
            value = draw(COUNTERS)
        elif field.name == "prefix_cache_info":
            value = draw(st.builds(PrefixCacheInfo, st.integers(0, 9)))
        else:
            value = draw(VALUES)
        setattr(found, field.name, value)
    for name in draw(st.lists(st.sampled_from(["trace", "mine", "kinds", "rest"]), unique=True)):
        setattr(found, name, draw(VALUES))
    return found


@settings(
    max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(st.lists(samples(), min_size=1, max_size=3))
def test_every_field_comes_back_with_its_value_and_type(tmp_path_factory, found):
    """A column that widens a float or turns a bool into a 1 would make replay compute with other
    numbers than the run."""
    back = through_a_table(found, tmp_path_factory.getbasetemp())
    assert [differences(a, b) for a, b in zip(found, back, strict=True)] == [[]] * len(found)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(samples())
def test_a_dump_of_lines_keeps_the_same_values(tmp_path_factory, sample):
    """Both formats of --save-debug-rollout-data go through one encoding of values."""
    template = str(tmp_path_factory.getbasetemp() / "x_{rollout_id}.jsonl")
    path = save_debug_rollout_data(template, [sample], rollout_id=1, evaluation=False)
    (back,) = read_rollout_dump(path)
    assert differences(sample, back) == []


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(VALUES, max_size=3))
def test_many_values_have_the_texts_that_each_has_alone(values):
    """A column whose values are plain is written at once: one tuple, NaN or half an emoji among
    them, and each is written by itself."""
    for some in (values, [["a", 1, None], {"k": [True, 0.5]}, *values]):
        assert encode_each(some) == [encode_json(value) for value in some]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(VALUES)
def test_a_value_comes_back_from_its_json_text(value):
    """Labels, rewards and metadata of users are stored this way."""
    assert same(decode_json(encode_json(value)), value)


@pytest.mark.parametrize(
    "value",
    [
        [1, float("nan"), 2],
        [1, {"a": float("inf")}, 2],
        [1, np.arange(3), 2],
        [1, "\ud83d", 2],
        {"__array__": "AAAA", "dtype": "int8", "shape": [3]},
        {"__float__": "nan"},
        {"__dict__": []},
        {1: "a", "1": "b", None: "c", (1, 2): "d"},
        {1, 2, 3},
        np.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", ">f8")]),
        np.array([None, "x", 3], dtype=object),
        np.float32(0.1),
        torch.tensor(3, dtype=torch.bfloat16),
        b"\xff\x00",
    ],
    ids=str,
)
def test_what_json_lacks_is_kept_wherever_it_stands(value):
    """A list was taken for plain ints where its first and last entries were; a NaN between them
    became null."""
    back = decode_json(encode_json(value))
    assert same(back, value) or (isinstance(value, set) and back == value)


def test_number_columns_hold_numbers_and_not_json(tmp_path):
    """Other programs read tokens, masks and log-probs as lists of numbers; a uint8 mask of an
    engine is one too."""
    samples = [
        Sample(
            index=i,
            tokens=number_list(np.arange(4, dtype=np.int32)),
            loss_mask=number_list(np.array([0, 1], dtype=np.uint8)) if i else [1, 0, 1],
            rollout_log_probs=np.array([-0.5, -1.0], dtype=np.float32),
            reward=np.float32(0.5),
            rollout_top_p_token_ids=torch.tensor([1, 2], dtype=torch.int32),
        )
        for i in range(2)
    ]
    table = sample_table(samples)
    assert table["loss_mask"].to_pylist() == [[1, 0, 1], [0, 1]]
    assert table["rollout_top_p_token_ids"].to_pylist() == [[1, 2]] * 2
    assert table["reward"].to_pylist() == ["0.5", "0.5"]
    assert not [
        differences(a, b)
        for a, b in zip(samples, samples_of(table), strict=True)
        if differences(a, b)
    ]


class Broken:
    def __repr__(self):
        raise OSError("no")


@pytest.mark.parametrize("value", [object(), Broken(), open, [{"a": [object()]}], {1: Broken()}])
def test_a_value_without_a_text_is_an_error_or_its_description(value):
    """A dump that lacks a field silently is worse than none; a recording must not end the run, and
    keeps what stands beside the object."""
    sample = Sample(index=3, metadata={"kept": [1, 2], "odd": value})
    with pytest.raises(RolloutDataError, match="Sample 3 cannot be stored: A sample holds a "):
        sample_table([sample])
    (back,) = samples_of(sample_table([sample], describe=True))
    assert back.metadata["kept"] == [1, 2] and NOT_STORED in str(back.metadata["odd"])


def test_values_without_end_are_described_or_refused():
    """A structure that contains itself has no text, and must not exhaust the stack of the run."""
    assert decode_json(encode_json([-(10**5000)])) == [
        -(10**5000)
    ]  # of more digits than str() takes
    loop: dict = {"a": 1}
    loop["self"] = [loop]
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    for value in (loop, deep):
        with pytest.raises(RolloutDataError):
            encode_json(value)
        assert NOT_STORED in decode_json(encode_json(value, describe=True))
    # how deep a text may be depends on Python's version: it is read, or refused as what it is
    text = b"[" * 900 + b'[{"a": [[1.5], {}]}]' + b"]" * 900
    try:
        assert encode_json(decode_json(text)) == text.replace(b" ", b"")
    except ValueError as error:  # also where what could be read is too deep to be written
        assert re.search("(?i)deep|recursion|JSON", str(error))
    with pytest.raises(ValueError):
        decode_json(b"[" * 100_000)


def test_a_change_of_the_gate_is_found_and_applied():
    """The recording holds the sample before the gate and what the gate changed."""
    before = Sample(
        index=1, loss_mask=[1, 1], metadata={"array": np.arange(2)}, reward=float("nan")
    )
    after = with_changes(before, {"status": "aborted", "loss_mask": [0, 0], "mine": 2})
    changes = changed_fields(before, after)
    assert changes == {"status": "aborted", "loss_mask": [0, 0], "mine": 2}
    assert not differences(with_changes(before, decode_json(encode_json(changes))), after)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
