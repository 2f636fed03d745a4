"""Are two answers the same? True, False, or None where one of them cannot be read.

Two measures. By value: 6/4, 1.5, 150 % and 1 1/2 are the same. Strict, as the MATH benchmark's
graders ask: an integer is to be written as one (not 4/2 or 2^3), a fraction reduced, and a percent
sign or unit changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction
from typing import cast

from slime.rollout.rm_hub.expressions import are_equal_values, are_same_equations
from slime.rollout.rm_hub.normal_form import MARKS, normal_form, squeezed
from slime.rollout.rm_hub.numbers import read_decimal_comma
from slime.rollout.rm_hub.units import NO_UNIT, are_same_dimension, factor_between
from slime.rollout.rm_hub.values import (
    MAX_LENGTH,
    Based,
    Group,
    Matrix,
    Named,
    Relation,
    Scalar,
    Value,
    Words,
    read_value,
)
from slime.rollout.rm_hub.written_forms import Form, are_same_forms

_OPTION = re.compile(rf"^[{MARKS}\s]*(?:option|choice)\s+(?=[\(\[]?[A-J])", re.IGNORECASE)
_CHOICE = re.compile(
    r"(?:⟪)?\s*[\(\[]?\s*([A-Ja-j])\s*[\)\]]\s*\S|(?:⟪)?\s*([A-J])\s*[.:]\s*⟫?\s*\S"
)
_ONE_CHOICE = re.compile(r"[(\[]?\s*([A-Ja-j])\s*[)\].:]?")


def is_same_answer(answer: str, truth: str, *, strict: bool) -> bool | None:
    """Whether an answer is the true one. Both are texts as they were written, LaTeX or not. Of
    longer ones only the text counts.
    """
    if max(len(answer), len(truth)) > MAX_LENGTH:
        return answer.strip() == truth.strip()
    given, wanted = normal_form(answer), normal_form(truth)
    if not given or not wanted:
        return False
    if squeezed(given) == squeezed(wanted):
        return True
    if (letters := _choices(given, wanted)) is not None:
        return letters[0] == letters[1]
    value = read_value(wanted)
    if value is None:
        return None
    verdicts = [
        _same(read_value(reading), value, strict)
        for reading in dict.fromkeys((given, read_decimal_comma(given)))
    ]
    return True if True in verdicts else None if None in verdicts else False


def _choices(given: str, wanted: str) -> tuple[str, str] | None:
    """(chosen letter, right letter) where the truth is the letter of a choice and the answer begins
    with one: "(B) 5".
    """
    right = _ONE_CHOICE.fullmatch(wanted.strip(MARKS + " "))
    if right is None:
        return None
    given = _OPTION.sub("", given)
    alone = _ONE_CHOICE.fullmatch(given.strip(MARKS + " "))
    chosen = alone or _CHOICE.match(given)
    if chosen is None:
        return None
    return next(group for group in chosen.groups() if group).upper(), right[1].upper()


def _same(answer: Value | None, truth: Value | None, strict: bool) -> bool | None:
    if answer is None or truth is None:
        return None
    answer, truth = _without_one_item(answer), _without_one_item(truth)
    if isinstance(answer, Named) or isinstance(truth, Named):
        return _same_named(answer, truth, strict)
    if isinstance(answer, Form) or isinstance(truth, Form):
        return _same_as_form(answer, truth, strict)
    if isinstance(answer, Scalar) and isinstance(truth, Scalar):
        return _same_scalars(answer, truth, strict)
    if isinstance(answer, Group) and isinstance(truth, Group):
        return _same_groups(answer, truth, strict)
    if isinstance(answer, Matrix) or isinstance(truth, Matrix):
        return _same_matrices(answer, truth, strict)
    if isinstance(answer, Relation) and isinstance(truth, Relation):
        return _same_relations(answer, truth)
    if isinstance(answer, Based | Words) and isinstance(truth, Based | Words):
        return answer == truth
    if (
        not strict
        and isinstance(answer, Relation)
        and answer.operator == "="
        and isinstance(truth, Scalar)
        and truth.number is not None
    ):
        return _same_sum(answer, truth)
    if Words in (type(answer), type(truth)) and Scalar in (type(answer), type(truth)):
        both = (answer, truth) if isinstance(answer, Scalar) else (truth, answer)
        scalar, words = cast("tuple[Scalar, Words]", both)
        return squeezed(scalar.text) == words.text
    return False


def _same_as_form(answer: Value | None, truth: Value | None, strict: bool) -> bool:
    """Two forms, or a form and the plain number that it has without its mark: 5 for 5 pm, as 5 for
    5 cm.
    """
    if isinstance(answer, Form) and isinstance(truth, Form):
        return are_same_forms(answer, truth, strict=strict)
    pair = (answer, truth) if isinstance(answer, Form) else (truth, answer)
    form, other = cast("tuple[Form, Value | None]", pair)
    if not isinstance(other, Scalar) or other.number is None:
        return False
    is_plain = other.unit == NO_UNIT and not other.is_percent
    return not strict and is_plain and form.number == other.number.value


def _same_sum(answer: Relation, truth: Scalar) -> bool | None:
    """m + n = 204 answers 204: what stands left names what is asked where it has several variables,
    and is an equation to solve with one.
    """
    names = set(re.findall(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])", answer.left))
    return _same(read_value(answer.right), truth, strict=False) if len(names) > 1 else False


def _without_one_item(value: Value) -> Value | None:
    """A set or list of one is that one; {5} and 5 name the same solution."""
    return value.items[0] if isinstance(value, Group) and len(value.items) == 1 else value


def _same_named(answer: Value | None, truth: Value | None, strict: bool) -> bool | None:
    if isinstance(answer, Relation) or isinstance(truth, Relation):
        return _same_relations(_as_relation(answer), _as_relation(truth))
    if isinstance(answer, Named) and isinstance(truth, Named) and answer.name != truth.name:
        return False
    given, wanted = (one.value if isinstance(one, Named) else one for one in (answer, truth))
    return _same(given, wanted, strict)


def _as_relation(value: Value | None) -> Value | None:
    if isinstance(value, Named) and isinstance(value.value, Scalar):
        return Relation("=", value.name, value.value.expression)
    return value


def _same_scalars(answer: Scalar, truth: Scalar, strict: bool) -> bool | None:
    if not are_same_dimension(answer.unit, truth.unit):
        return False
    if (answer.is_percent and truth.unit != NO_UNIT) or (
        truth.is_percent and answer.unit != NO_UNIT
    ):
        return False
    if answer.number is not None and truth.number is not None:
        return _same_numbers(answer, truth, strict)
    if strict and truth.number is not None and truth.number.form == "integer":
        return False
    scale = factor_between(answer.unit, truth.unit)
    given = answer.expression if scale == 1 else f"({answer.expression})*({scale})"
    if answer.is_percent != truth.is_percent and not strict:
        hundredth = f"({truth.expression})/100" if truth.is_percent else f"({truth.expression})*100"
        if are_equal_values(given, hundredth):
            return True
    return are_equal_values(given, truth.expression)


def _same_numbers(answer: Scalar, truth: Scalar, strict: bool) -> bool:
    given, wanted = answer.number, truth.number
    assert given is not None and wanted is not None, "the caller asked for numbers"
    if strict and given.form == "fraction" and given.value == wanted.value:
        if wanted.form == "fraction":
            return (given.top, given.bottom) == (wanted.top, wanted.bottom)
        if wanted.form == "integer":
            return False
    value = given.value * factor_between(answer.unit, truth.unit)
    if value == wanted.value:
        return True
    if strict or answer.is_percent == truth.is_percent:
        return False
    return value == (wanted.value * Fraction(1, 100) if truth.is_percent else wanted.value * 100)


def _same_groups(answer: Group, truth: Group, strict: bool) -> bool | None:
    if len(answer.items) != len(truth.items):
        return False
    if answer.kind == truth.kind == "tuple":
        return (
            _all(_same(a, t, strict) for a, t in zip(answer.items, truth.items, strict=True))
            if answer.brackets == truth.brackets
            else False
        )
    if "tuple" in (answer.kind, truth.kind):
        if answer.is_inequality or truth.is_inequality:
            return False
        is_bare_pair = {answer.kind, truth.kind} == {"tuple", "list"} and "()" in (
            answer.brackets,
            truth.brackets,
        )
        if strict or not is_bare_pair:
            return False
        return _all(_same(a, t, strict) for a, t in zip(answer.items, truth.items, strict=True))
    # "3, 2" for x = 3, y = 2
    if _names_each(truth) and not any(isinstance(item, Named) for item in answer.items):
        return _all(_same(a, t, strict) for a, t in zip(answer.items, truth.items, strict=True))
    return _same_in_any_order(answer.items, truth.items, strict)


def _names_each(group: Group) -> bool:
    names = [item.name for item in group.items if isinstance(item, Named)]
    return len(names) == len(group.items) == len(set(names))


def _same_in_any_order(answers: tuple, truths: tuple, strict: bool) -> bool | None:
    left, is_sure = list(answers), True
    for truth in truths:
        verdicts = [_same(answer, truth, strict) for answer in left]
        if True in verdicts:
            left.pop(verdicts.index(True))
        elif None in verdicts:
            is_sure = False
        else:
            return False
    return True if is_sure else None


def _same_matrices(answer: Value | None, truth: Value | None, strict: bool) -> bool | None:
    """Entry by entry. A row or column vector and a tuple in round brackets are the same vector."""
    if isinstance(answer, Matrix) and isinstance(truth, Matrix):
        shapes = [[len(row) for row in matrix.rows] for matrix in (answer, truth)]
        if shapes[0] != shapes[1] or answer.is_determinant != truth.is_determinant:
            return False
        return _all(
            _same(a, t, strict)
            for row, other in zip(answer.rows, truth.rows, strict=True)
            for a, t in zip(row, other, strict=True)
        )
    pair = (answer, truth) if isinstance(answer, Matrix) else (truth, answer)
    matrix, other = cast("tuple[Matrix, Value | None]", pair)
    if (
        isinstance(other, Group)
        and other.brackets == "()"
        and not other.is_inequality
        and (len(matrix.rows) == 1 or all(len(row) == 1 for row in matrix.rows))
    ):
        vector = Group("tuple", tuple(cell for row in matrix.rows for cell in row), "()")
        return _same_groups(*((vector, other) if matrix is answer else (other, vector)), strict)
    return False


def _same_relations(answer: Value | None, truth: Value | None) -> bool | None:
    if not isinstance(answer, Relation) or not isinstance(truth, Relation):
        return False
    if answer.operator == truth.operator == "=":
        return are_same_equations(*(f"({one.left})-({one.right})" for one in (answer, truth)))
    if answer.operator != truth.operator:
        mirrored = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}.get(answer.operator)
        if mirrored != truth.operator:
            return False
        answer = Relation(mirrored, answer.right, answer.left)
    return _all(
        are_equal_values(getattr(answer, side), getattr(truth, side)) for side in ("left", "right")
    )


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    found = list(verdicts)
    return False if False in found else None if None in found else True
