"""Lists written as one word, as Megatron's scripts write them: `'[0]*1+[1]*27'`,
`'([1]*2+[0]*2)*3'`, `"['aux_loss','seq_aux_loss']"`.

Megatron gives such a word to Python's eval. Here it is parsed, and only lists of plain values, `+`
and `* count` are known.
"""

from __future__ import annotations

import ast
from typing import Any

from slime.config.option import OptionSpec
from slime.config.specs import require_choice

MAX_ITEMS = 10_000


def is_list_text(spec: OptionSpec, text: str) -> bool:
    """Whether `text` writes a whole list for an option that takes several numbers, or several words
    of Megatron's.
    """
    takes_lists = (
        spec.many and not spec.repeat and (spec.kind in (int, float) or spec.source == "megatron")
    )
    return takes_lists and ("[" in text or text.lstrip().startswith("("))


def convert_list_text(spec: OptionSpec, text: str) -> list[Any]:
    """Returns the items of a list expression, each checked against the option's type and choices.
    Raises ValueError that says what is wrong.
    """
    try:
        items = _value_of(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ValueError(
            f"{text!r} is no list ({reason}). Write [0, 1, 1] or '[0]*1+[1]*27'."
        ) from None
    if not isinstance(items, list):
        raise ValueError(f"{text!r} is one value, not a list. Write [0, 1, 1] or '[0]*1+[1]*27'.")
    return [require_choice(spec, _item(spec, item)) for item in items]


def _item(spec: OptionSpec, item: object) -> Any:
    if spec.kind is float and type(item) is int:
        return float(item)
    if type(item) is not spec.kind:
        raise ValueError(f"{item!r} in the list is not {spec.type_name}.")
    return item


def _value_of(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float, str):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _value_of(node.operand)
        if type(value) in (int, float):
            return -value
    if isinstance(node, ast.List | ast.Tuple):
        return _bounded([_value_of(item) for item in node.elts])
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        return _combined(node.op, _value_of(node.left), _value_of(node.right))
    raise ValueError(
        f"{ast.unparse(node)!r} is neither a list, nor lists joined by +, nor a list * count"
    )


def _combined(operator: ast.operator, left: object, right: object) -> list:
    if isinstance(operator, ast.Add) and isinstance(left, list) and isinstance(right, list):
        return _bounded(left + right)
    if isinstance(operator, ast.Mult):
        items, count = (left, right) if isinstance(left, list) else (right, left)
        if isinstance(items, list) and type(count) is int:
            if count * len(items) > MAX_ITEMS:
                raise ValueError(f"more than {MAX_ITEMS} items")
            return items * count
    raise ValueError(
        "only lists can be joined by +, and only a list can be multiplied by a whole number"
    )


def _bounded(items: list) -> list:
    if len(items) > MAX_ITEMS:
        raise ValueError(f"more than {MAX_ITEMS} items")
    return items
