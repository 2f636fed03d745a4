"""`NumberList`: a Python list in every respect, whose array always holds its numbers."""

import copy
import dataclasses
import json
import pickle
import random
import sys
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from slime.data import number_list as number_list_module
from slime.data.number_list import NumberList, joined, known_array, number_list, packed
from slime.data.ragged import as_array
from slime.data.sample import Sample
from slime.gate.token_columns import log_prob_array, mask_array, token_array

NUM_GPUS = 0

CHANGES = {
    "append": lambda x: x.append(9),
    "extend": lambda x: x.extend([9]),
    "insert": lambda x: x.insert(0, 9),
    "pop": lambda x: x.pop(),
    "remove": lambda x: x.remove(2),
    "clear": lambda x: x.clear(),
    "reverse": lambda x: x.reverse(),
    "sort": lambda x: x.sort(reverse=True),
    "set": lambda x: x.__setitem__(0, 9),
    "slice": lambda x: x.__setitem__(slice(0, 2), [8, 9]),
    "delete": lambda x: x.__delitem__(0),
    "iadd": lambda x: x.__iadd__([9]),
    "imul": lambda x: x.__imul__(2),
    "shuffle": lambda x: random.Random(0).shuffle(x),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_forgets_the_array(change):
    """Every change of the list drops the array; one that outlived it would train tokens that the
    sample does not have."""
    values, plain = number_list(np.arange(5, dtype=np.int32)), list(range(5))
    CHANGES[change](values), CHANGES[change](plain)
    assert values == plain and known_array(values) is None
    assert token_array(values).tolist() == plain, "and it is packed anew"


def test_no_method_of_list_that_changes_it_is_forgotten():
    """Every list method that changes a list is overridden, also one that a later Python adds."""
    reading = {"copy", "count", "index"}
    public = {name for name in dir(list) if not name.startswith("_")}
    assert public - reading <= set(vars(NumberList)), "each of them forgets the array"
    dunder = {name for name in ("__setitem__", "__delitem__", "__iadd__", "__imul__")}
    assert dunder <= set(vars(NumberList))


def test_it_is_a_list_wherever_a_list_is_asked_for():
    """It compares, slices, adds, copies, serializes and indexes like a list."""
    values = number_list(np.arange(3, dtype=np.int32))
    assert values == [0, 1, 2] and isinstance(values, list) and repr(values) == "[0, 1, 2]"
    assert (
        type(values[1:]) is list and values + [7] == [0, 1, 2, 7] and [7] + values == [7, 0, 1, 2]
    )
    assert all(type(value) is int for value in values) and all(
        type(v) is float for v in number_list(np.ones(2, "f4"))
    )
    assert json.dumps(values) == "[0, 1, 2]" and orjson.dumps(values) == b"[0,1,2]"
    assert torch.tensor(values).tolist() == np.array(values).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "copied", (copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)))
)
def test_copies_are_independent_lists_with_the_same_numbers(copied):
    """Copies are independent lists; between processes the array travels in place of the numbers."""
    values = number_list(np.array([0.1, -2.5], dtype=np.float32))
    other = copied(values)
    assert type(other) is NumberList and other == values and known_array(other).tolist() == values
    assert not known_array(other).flags.writeable
    other[0] = 7.0
    assert values[0] == float(np.float32(0.1)) and known_array(values) is not None
    plain = copied(NumberList([1, None]))
    assert plain == [1, None] and known_array(plain) is None


def test_the_array_is_not_the_callers_memory():
    """The array is a copy, because an engine client may reuse its buffer."""
    for buffer in (np.arange(3), torch.arange(3)):
        values = number_list(buffer)
        buffer[0] = 9
        assert values == [0, 1, 2] and known_array(values).tolist() == [0, 1, 2]
    for remembered in (values, joined(values, values), NumberList([1])):
        packed(remembered, "i")
        with pytest.raises(ValueError, match="read-only"):
            known_array(remembered)[0] = 1


def test_a_list_that_was_changed_behind_its_back_is_packed_anew():
    """A list changed by `list.append(x, ...)`, which no method sees, is packed again: its length
    differs."""
    values = number_list(np.arange(3, dtype=np.int32))
    list.append(values, 7)
    assert known_array(values) is None and packed(values, "i").tolist() == [0, 1, 2, 7]


@pytest.mark.parametrize("when", ("while it is packed", "before it is remembered"))
def test_an_array_that_was_packed_around_a_change_is_not_remembered(when, monkeypatch):
    """An array packed while another thread changes the list is returned and not kept."""
    values = NumberList([1, 2, 3])
    where, real = (
        (number_list_module.struct, "pack") if when == "while it is packed" else (np, "frombuffer")
    )
    original = getattr(where, real)

    def change_too(*args, **kw):
        made = original(*args, **kw)
        values[0] = 9
        return made

    monkeypatch.setattr(where, real, change_too)
    assert packed(values, "i").tolist() == [1, 2, 3], (
        "what the list was when the other thread looked"
    )
    monkeypatch.undo()
    assert known_array(values) is None and packed(values, "i").tolist() == values == [9, 2, 3]


numbers = st.lists(
    st.one_of(
        st.integers(-(2**31), 2**31 - 1), st.floats(width=32, allow_nan=False), st.booleans()
    ),
    max_size=6,
)


@settings(max_examples=200, deadline=None)
@given(first=numbers, second=numbers, known=st.tuples(st.booleans(), st.booleans()))
def test_a_sum_is_the_sum_of_the_lists_and_its_array_says_the_same(first, second, known):
    """The sum of two lists has the right array, whichever of the parts have one."""
    parts = [
        number_list(np.array(v)) if k and v else NumberList(v)
        for v, k in zip((first, second), known, strict=True)
    ]
    total = joined(*parts)
    assert total == list(parts[0]) + list(parts[1])
    if known_array(total) is not None:
        assert known_array(total).tolist() == total


@pytest.mark.parametrize("values", ([1, 2.5], [1, None], ["a"], [2**40], [[1], [2]]))
def test_what_is_no_token_id_is_said_with_its_place(values):
    """A value that is no token id is refused with the message, and the position, that a plain list
    gives."""
    assert token_array(NumberList(values)) == token_array(values) and isinstance(
        token_array(values), str
    )
    assert packed(values, "i") is None


def test_readers_take_the_array_that_is_there():
    """Gate and columns read the same packed memory; a float array is not taken for token ids."""
    tokens = NumberList([3, 1, 2])
    first = token_array(tokens)
    assert token_array(tokens) is known_array(tokens) and as_array(tokens, "int32") is known_array(
        tokens
    )
    assert first.dtype == np.int32 and first.tolist() == [3, 1, 2]
    mask = NumberList([1, 0])
    assert mask_array(mask) is as_array(mask, "uint8") and mask_array(mask).tolist() == [1, 0]
    assert "entry 1 of the loss mask is 2" in mask_array(NumberList([1, 2]))
    assert log_prob_array(number_list(np.array([-1.0], np.float32))).dtype == np.float32
    assert "flat sequence of integers" in token_array(number_list(np.array([1.0])))


@pytest.mark.parametrize("dtype", ("int32", "int64", "float32", "float64", "uint8"))
@pytest.mark.parametrize(
    "values",
    (
        [],
        [1, 0, 1],
        [True, False],
        [0.5, 1.25],
        [1e-46, 3e38],
        [-1, 255],
        [2**31],
        [None],
        [float("nan")],
    ),
)
def test_a_packed_list_is_the_array_that_numpy_would_make(values, dtype):
    """A packed list has the numbers of numpy's array and is refused where numpy refuses."""

    def read(value):
        try:
            array = as_array(value, dtype)
        except Exception as error:  # noqa: BLE001
            return type(error).__name__
        return array.dtype.name if len(array) else None, array.tobytes()

    assert read(values) == read(tuple(values))


def test_a_sample_that_the_client_filled_knows_its_arrays():
    """Tokens, log-probs and mask of a sample filled with arrays stay lists with known arrays; none
    is packed number by number."""
    sample = Sample(tokens=[5, 6])
    for ids, log_probs in (([7, 8], [-0.5, -1.5]), ([9], [-2.5])):
        sample.append_response_tokens(
            tokens=np.array(ids, "i4"), log_probs=np.array(log_probs, "f4")
        )
    assert sample.tokens == [5, 6, 7, 8, 9] and known_array(sample.tokens).tolist() == sample.tokens
    assert (
        known_array(sample.rollout_log_probs).tolist()
        == sample.rollout_log_probs
        == [-0.5, -1.5, -2.5]
    )
    assert sample.loss_mask == [1, 1, 1] and dataclasses.asdict(sample)["tokens"] == sample.tokens


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
