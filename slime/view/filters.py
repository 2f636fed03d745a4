"""Filter expressions over the columns of a rollout: `reward < 0.5 and status == "truncated"`.

The grammar is a part of Python's: names of columns, numbers, texts, comparisons, `and`, `or`,
`not`, `in`, `+ - * /` and abs(). It is interpreted over arrays; nothing is executed.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from slime.exceptions import ConfigError

LONGEST = 500  # characters
MOST_NODES = 80
MISSING = "none"  # a name: reward == none
_COMPARE: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_ARITHMETIC: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
HELP = 'for instance: reward < 0.5 and length > 100, status == "truncated", "format" in verdict'


def filter_rows(
    expression: str, column: Callable[[str], np.ndarray], names: Sequence[str], num_rows: int
) -> np.ndarray:
    """bool [num_rows]: of which rows the expression is true. `column(name)`: float64 or texts [N].
    ConfigError saying what is wrong with an expression.
    """
    if len(expression) > LONGEST:
        raise ConfigError(f"The filter has {len(expression)} characters, at most {LONGEST}.")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ConfigError(f"The filter cannot be read: {what}; {HELP}") from error
    if sum(1 for _ in ast.walk(tree)) > MOST_NODES:
        raise ConfigError(f"The filter has too many parts; {HELP}")
    reading = _Reading(column, names, num_rows)
    with np.errstate(all="ignore"):
        found = reading.value(tree.body)
    if not (isinstance(found, np.ndarray) and found.dtype == bool):
        raise ConfigError(f"The filter is no condition; {HELP}")
    return found


class _Reading:
    def __init__(
        self, column: Callable[[str], np.ndarray], names: Sequence[str], num_rows: int
    ) -> None:
        self.column, self.names, self.num_rows = column, names, num_rows

    def value(self, node: ast.expr) -> Any:
        """An array [N], a number or a text."""
        if isinstance(node, ast.BoolOp):
            parts = [self.condition(one) for one in node.values]
            join = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
            return join.reduce(parts)
        if isinstance(node, ast.UnaryOp):
            if isinstance(node.op, ast.Not):
                return ~self.condition(node.operand)
            if isinstance(node.op, ast.USub):
                return -self.number(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            return _ARITHMETIC[type(node.op)](self.number(node.left), self.number(node.right))
        if isinstance(node, ast.Compare):
            return self.comparison(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "abs" and len(node.args) == 1 and not node.keywords:
                return np.abs(self.number(node.args[0]))
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float | str):
            return float(node.value) if not isinstance(node.value, str) else node.value
        if isinstance(node, ast.Name):
            return self.named(node.id)
        raise ConfigError(f"The filter has {ast.unparse(node)[:60]!r}, which it cannot; {HELP}")

    def named(self, name: str) -> Any:
        if name.lower() in (MISSING, "nan"):
            return None
        if name not in self.names:
            raise ConfigError(
                f"There is no column {name[:40]!r}. Columns here: {', '.join(self.names)}."
            )
        return self.column(name)

    def condition(self, node: ast.expr) -> np.ndarray:
        found = self.value(node)
        if isinstance(found, np.ndarray) and found.dtype == bool:
            return found
        raise ConfigError(f"{ast.unparse(node)[:60]!r} is no condition; {HELP}")

    def number(self, node: ast.expr) -> Any:
        found = self.value(node)
        is_array = isinstance(found, np.ndarray) and found.dtype != object
        if is_array or isinstance(found, float):
            return found
        raise ConfigError(f"{ast.unparse(node)[:60]!r} is no number; {HELP}")

    def comparison(self, node: ast.Compare) -> np.ndarray:
        left, conditions = node.left, []
        for op, right in zip(node.ops, node.comparators, strict=True):
            conditions.append(self.compared(left, op, right))
            left = right
        return np.logical_and.reduce(conditions)

    def compared(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> np.ndarray:
        if isinstance(op, ast.In | ast.NotIn):
            found = self.contained(left, right)
            return ~found if isinstance(op, ast.NotIn) else found
        if type(op) not in _COMPARE:
            raise ConfigError(f"The filter compares with < <= > >= == != and in; {HELP}")
        a, b = self.value(left), self.value(right)
        if a is None or b is None:
            return self.missing(b if a is None else a, op)
        if _is_text(a) != _is_text(b):
            raise ConfigError(
                f"{ast.unparse(left)[:40]!r} and {ast.unparse(right)[:40]!r}: a text and a number "
                "cannot be compared."
            )
        if _is_text(a) and not isinstance(op, ast.Eq | ast.NotEq):
            raise ConfigError(f"Texts are compared with ==, != and in; {HELP}")
        return np.broadcast_to(_COMPARE[type(op)](a, b), self.num_rows).astype(bool)

    def missing(self, values: Any, op: ast.cmpop) -> np.ndarray:
        """Whether a column has no value: NaN, or an empty text."""
        if not isinstance(values, np.ndarray) or not isinstance(op, ast.Eq | ast.NotEq):
            raise ConfigError(f"Write {MISSING} as in: reward == {MISSING}.")
        lacking = values == "" if values.dtype == object else values != values
        lacking = np.asarray(lacking, dtype=bool)
        return lacking if isinstance(op, ast.Eq) else ~lacking

    def contained(self, left: ast.expr, right: ast.expr) -> np.ndarray:
        if isinstance(right, ast.List | ast.Tuple | ast.Set):
            found = [self.compared(left, ast.Eq(), one) for one in right.elts]
            return np.logical_or.reduce([np.zeros(self.num_rows, dtype=bool), *found])
        text, values = self.value(left), self.value(right)
        if not (isinstance(text, str) and isinstance(values, np.ndarray) and _is_text(values)):
            raise ConfigError('"in" looks for a text: "tool" in response, or status in ["a", "b"].')
        wanted = text.casefold()
        return np.fromiter(
            (wanted in one.casefold() for one in values), dtype=bool, count=self.num_rows
        )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, np.ndarray) and value.dtype == object)
