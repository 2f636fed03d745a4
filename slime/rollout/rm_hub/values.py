"""What an answer says: a number with its unit, an expression, a list, tuple, interval, set, matrix,
equation or words.

    "(1, 2]" -> Group("tuple", "(]", 1, 2) "x = 5" -> Named("x", 5) "1 < x < 2" -> Group("tuple",
    "()", 1, 2)
    "x = \\pm 2" -> Group("list", 2, -2)         "5 cm" -> Scalar(5, length)    "Tuesday" -> Words

`read_value` takes the one spelling of `normal_form`. What it cannot read is None, never a guess.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TypeAlias

from slime.rollout.rm_hub.normal_form import CLOSE, MARKS, OPEN, ROW_END, squeezed
from slime.rollout.rm_hub.numbers import Number, read_number
from slime.rollout.rm_hub.units import NO_UNIT, Unit, read_unit
from slime.rollout.rm_hub.written_forms import Form, read_form

MAX_LENGTH = 2000
MAX_NESTING = 20
MAX_ITEMS = 200


@dataclasses.dataclass(frozen=True)
class Scalar:
    """An expression without its unit; `number` where it is a number as written. A percentage keeps
    the number before its sign.
    """

    text: str
    number: Number | None = None
    unit: Unit = NO_UNIT
    is_percent: bool = False

    @property
    def expression(self) -> str:
        """The text that an expression is read from."""
        return self.text if self.number is None else f"({self.number.value})"


@dataclasses.dataclass(frozen=True)
class Group:
    """`kind`: tuple (ordered, with its brackets; intervals too), list or set (in any order). An
    interval that was written as an inequality is no pair of numbers.
    """

    kind: str
    items: tuple[Value | None, ...]
    brackets: str = ""
    is_inequality: bool = False


@dataclasses.dataclass(frozen=True)
class Named:
    """A value with the variable that it is the value of."""

    name: str
    value: Value


@dataclasses.dataclass(frozen=True)
class Relation:
    """An equation or inequality that gives no value to one variable."""

    operator: str
    left: str
    right: str


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Rows of values; a column or row vector is a matrix too. `is_determinant`: between bars."""

    rows: tuple[tuple[Value | None, ...], ...]
    is_determinant: bool = False


@dataclasses.dataclass(frozen=True)
class Based:
    """Digits to a base, as 1011_2."""

    digits: str
    base: int


@dataclasses.dataclass(frozen=True)
class Words:
    """Text that is no mathematics, squeezed."""

    text: str


_LEAD = re.compile(
    rf"^[{MARKS}\s]*(?:(?:so|thus|hence|therefore|then|and)\b,?[\s{MARKS}]*)?(?:the\s+)?(?:final\s+|correct\s+)?(?:answers?|solutions?|ans|result|value)"
    rf"(?:\s+(?:is|are|equals?)\b|\s*[:=])[\s{MARKS}:]*"
    rf"|^[{MARKS}\s]*(?:approximately|approx\.?|about|roughly|exactly|it is|is|equals)\s[\s{MARKS}]*|^\s*\\(?:approx|therefore|implies|to)\s+|^\s*[:=]\s*",
    re.IGNORECASE,
)
_LABELLED = re.compile(rf"^{OPEN}[^{MARKS}]*[:=]\s*{CLOSE}\s*(?=\S)")
_MATRIX = re.compile(
    r"^\\begin\s*\{(?P<kind>[pbBvV]?(?:small)?matrix\*?|array)\}(?:\s*(?:\{[clr|\s]*\}|\[[clr]\]))?(?P<body>.*)\\end\s*\{(?P=kind)\}$",
    re.DOTALL,
)
_AND_OR = re.compile(
    rf"\s+(?:and|or)\s+|\s*{OPEN}\s*,?\s*(?:and|or)\s*{CLOSE}\s*|\s*\\(?:vee)\s*|,\s*{OPEN}?\s*(?:and|or)\s*{CLOSE}?\s+",
    re.IGNORECASE,
)
_RELATION = re.compile(r"\\(?:le|ge|ne|in|approx|equiv)(?![a-z])|[<>=]=?")
_NAME = re.compile(
    r"\\?[A-Za-z]+(?:_\{\w+\})?(?:'+|\^\{-1\})?(?:\s*\(\s*[A-Za-z](?:\s*,\s*[A-Za-z])*\s*\))?|"
    + rf"{OPEN}[^{MARKS}]*{CLOSE}"
)
_NAMES = re.compile(r"\(\s*[A-Za-z](?:_\{\w+\})?(?:,\s*[A-Za-z](?:_\{\w+\})?)+\s*\)")
_ANGLE_FUNCTION = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_BASED = re.compile(r"([0-9A-Fa-f]+(?:\.[0-9A-Fa-f]+)?)\s*_\s*\{\s*(\d{1,2})\s*\}")
_CURRENCY = re.compile(
    r"^(-?)\s*(\\\$|\$|€|£|¥|₹|USD\s|EUR\s|Rs\.?\s)\s*(?=[\d.(\\-])", re.IGNORECASE
)
_PERCENT = re.compile(
    rf"[{MARKS}\s]*(?:%|per\s?cent|percent|percentage\spoints?)[{MARKS}\s]*", re.IGNORECASE
)
_MARKED_END = re.compile(
    rf"^(?P<value>.*[\w}})])\s*(?P<unit>{OPEN}[^{MARKS}]{{2,}}{CLOSE}.*|\\degree)$"
)
_UNMARKED_END = re.compile(
    r"^(?P<value>.*[\d})])\s*(?P<unit>(?:square |cubic |sq\.? )?[A-Za-z]{2,}(?:\^\{\d\})?)$"
)
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")  # \pmod and \pmb are other commands
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}|\d{4}/\d{1,2}/\d{1,2}|\d{1,2}/\d{1,2}/\d{4}")
# {x | x > 2}
_CONDITION = re.compile(r"[A-Za-z](?:\s*\\in\s*\\mathbb\{R\})?\s*[|:]\s*(?P<what>.+)")
_OPENERS, _CLOSERS = "([{", ")]}"


Value: TypeAlias = Scalar | Group | Named | Relation | Matrix | Based | Words | Form


def read_value(text: str, depth: int = 0) -> Value | None:
    """The value that a text in the one spelling says; None where it is not read."""
    if len(text) > MAX_LENGTH or depth > MAX_NESTING:
        return None
    text = _without_lead(text)
    if not text:
        return None
    for reader in (
        _read_date,
        _read_form,
        _read_based,
        _read_scalar_number,
        _read_set,
        _read_matrix,
    ):
        value = reader(text, depth)
        if value is not None:
            return value
    if text.startswith("]") and text.endswith("[") and "," in text:
        text = f"({text[1:-1]})"  # ]1, 2[ is how some countries write (1, 2)
    for reader in (_read_list, _read_bracketed, _read_relation, _read_plus_minus, _read_words):
        value = reader(text, depth)
        if value is not None:
            return value
    return _read_expression(text)


def _without_lead(text: str) -> str:
    text = text.strip()
    for pattern in (_LEAD, _LABELLED):
        match = pattern.match(text)
        if match is not None and match.end() < len(text):
            text = text[match.end() :].strip()
    if text.count(OPEN) != text.count(CLOSE):
        text = re.sub(rf"[{MARKS}]", " ", text).strip()
    return text.rstrip(".").strip() if not text.endswith("..") else text


def _read_date(text: str, depth: int) -> Value | None:
    """2024-01-05 is no difference and 1/5/2024 no quotient."""
    return Words(squeezed(text)) if _DATE.fullmatch(text) else None


def _read_form(text: str, depth: int) -> Form | None:
    return read_form(text)


def _read_based(text: str, depth: int) -> Based | None:
    match = _BASED.fullmatch(text)
    if match is None or not 2 <= int(match[2]) <= 36:
        return None
    base = int(match[2])
    return (
        Based(match[1].lower(), base)
        if all(int(digit, 36) < base for digit in match[1].replace(".", ""))
        else None
    )


def _read_scalar_number(text: str, depth: int) -> Scalar | None:
    """A number as written, with currency, percent or unit."""
    unit = NO_UNIT
    currency = _CURRENCY.match(text)
    if currency is not None:
        unit = read_unit(f" {OPEN}{currency[2].strip().removeprefix(chr(92))}{CLOSE}") or NO_UNIT
        text = currency[1] + text[currency.end() :]
    found = read_number(text)
    if found is None:
        return None
    number, rest = found
    if _PERCENT.fullmatch(rest):
        return Scalar(text, number, is_percent=True)
    behind = read_unit(rest)
    if behind is None:
        return None
    body = text[: len(text) - len(rest)].strip()
    return Scalar(body, number, unit if behind == NO_UNIT else behind)


def _read_set(text: str, depth: int) -> Value | None:
    if text in ("\\emptyset", "\\{\\}", "\\{ \\}"):
        return Words("\\emptyset")
    if not (text.startswith("\\{") and text.endswith("\\}")) or text.find("\\}") != len(text) - 2:
        return None
    inner = text[2:-2].strip()
    if not inner:
        return Words("\\emptyset")
    if "|" in inner or ":" in inner:
        condition = _CONDITION.fullmatch(inner)
        return None if condition is None else read_value(condition["what"], depth + 1)
    return _group("set", _split(inner), depth)


def _read_matrix(text: str, depth: int) -> Matrix | None:
    match = _MATRIX.match(text)
    if match is None:
        return None
    rows = []
    for row in re.split(rf"{ROW_END}(?:\[[^\]]*\])?|\\cr(?![a-z])", match["body"].strip()):
        if row.strip():
            cells = tuple(read_value(cell.strip(), depth + 1) for cell in row.split("&"))
            if any(cell is None for cell in cells):
                return None
            rows.append(cells)
    return Matrix(tuple(rows), match["kind"].startswith(("v", "V"))) if rows else None


def _read_list(text: str, depth: int) -> Group | None:
    """Parts at the outer commas, semicolons, unions and words "and", "or"."""
    for separator in (r"\\cup(?![a-z])|(?<=[\])}])\s*U\s*(?=[(\[{\\])", None, ";", ", ", ","):
        parts = _split_outside(text, _AND_OR if separator is None else re.compile(separator))
        if separator is None and len(parts) > 1:
            parts = [piece for part in parts for piece in _split(part)]
        if len(parts) > 1:
            parts = [part for part in parts if part]
            return _group("list", parts, depth)
    return None


def _read_bracketed(text: str, depth: int) -> Value | None:
    if text[0] not in "([" or text[-1] not in ")]" or _closing(text) != len(text) - 1:
        return None
    parts = _split(text[1:-1].strip())
    if len(parts) == 1:
        return read_value(parts[0], depth + 1)
    return _group("tuple", parts, depth, brackets=text[0] + text[-1])


def _group(kind: str, parts: list[str], depth: int, *, brackets: str = "") -> Group | None:
    if len(parts) > MAX_ITEMS:
        return None
    items = tuple(read_value(part, depth + 1) for part in parts)
    if any(item is None for item in items):
        return None
    if kind != "tuple":  # a list of lists in any order is one list
        items = tuple(
            one
            for item in items
            for one in (item.items if isinstance(item, Group) and item.kind == "list" else (item,))
        )
    return Group(kind, items, brackets)


def _read_relation(text: str, depth: int) -> Value | None:
    found = _outer_matches(text, _RELATION)
    if not found:
        return None
    operators = [match[0] for match in found]
    starts = [0, *(match.end() for match in found)]
    ends = [*(match.start() for match in found), len(text)]
    sides = [text[start:end].strip() for start, end in zip(starts, ends, strict=True)]
    if operators[0] == "\\in" and len(operators) == 1:
        return read_value(sides[1], depth + 1)
    if not sides[0] and operators[0] not in ("=", "==", "\\approx", "\\equiv"):
        sides[0] = "x"  # ">= 5" leaves out the variable, and is no 5
    if not sides[0] or not sides[-1]:
        return None
    if set(operators) <= {"=", "==", "\\approx", "\\equiv"}:
        return _read_equation(sides, depth)
    return _read_inequality(sides, operators, depth)


def _read_equation(sides: list[str], depth: int) -> Value | None:
    if _NAMES.fullmatch(sides[0]):
        return read_value(sides[-1], depth + 1)
    if _NAME.fullmatch(sides[0]):
        value = read_value(sides[-1], depth + 1)
        return None if value is None else _named(sides[0], value)
    if len(sides) == 2 and _NAME.fullmatch(sides[1]) and read_number(sides[0]):
        value = read_value(sides[0], depth + 1)
        return None if value is None else _named(sides[1], value)
    if not re.search(r"(?<!\\)(?<![A-Za-z])[A-Za-z](?![A-Za-z])", "".join(sides)):  # 8 * 9 = 72
        return read_value(sides[-1], depth + 1)
    return Relation("=", sides[0], sides[-1]) if len(sides) == 2 else None


def _named(name: str, value: Value) -> Value:
    """A name that is a word ("Area = 5") says what is asked, and is no part of the answer."""
    plain = re.sub(rf"[{MARKS}\s\\]", "", name).lower()
    return (
        Named(plain, value)
        if re.fullmatch(r"[a-z](_\{\w+\})?('+|\^\{-1\})?(\([a-z,]+\))?", plain)
        else value
    )


def _read_inequality(sides: list[str], operators: list[str], depth: int) -> Value | None:
    """An interval where one variable stands between or beside values; a Relation otherwise."""
    if "\\ne" in operators or not set(operators) <= {"<", ">", "\\le", "\\ge", "<=", ">="}:
        return Relation(operators[0], sides[0], sides[1]) if len(operators) == 1 else None
    signs = [{"<=": "\\le", ">=": "\\ge"}.get(operator, operator) for operator in operators]
    if len(signs) == 1:
        left, right = sides
        if _is_variable(right) and not _is_variable(left):
            left, right, signs = (
                right,
                left,
                [{"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}[signs[0]]],
            )
        if not _is_variable(left):
            return Relation(signs[0], left, right)
        low, high = ("-\\infty", right) if signs[0] in ("<", "\\le") else (right, "\\infty")
        brackets = {"<": "()", ">": "()", "\\le": "(]", "\\ge": "[)"}[signs[0]]
        return _interval([low, high], depth, brackets)
    if len(signs) != 2 or not _is_variable(sides[1]):
        return None
    if set(signs) <= {">", "\\ge"}:
        sides, signs = sides[::-1], [{">": "<", "\\ge": "\\le"}[sign] for sign in reversed(signs)]
    if not set(signs) <= {"<", "\\le"}:
        return None
    brackets = ("[" if signs[0] == "\\le" else "(") + ("]" if signs[1] == "\\le" else ")")
    return _interval([sides[0], sides[2]], depth, brackets)


def _interval(ends: list[str], depth: int, brackets: str) -> Group | None:
    group = _group("tuple", ends, depth, brackets=brackets)
    return None if group is None else dataclasses.replace(group, is_inequality=True)


def _is_variable(text: str) -> bool:
    return (
        re.fullmatch(rf"[{MARKS}]?(?:[A-Za-z]|\\(?:theta|alpha|beta|lambda))[{MARKS}]?", text)
        is not None
    )


def _read_plus_minus(text: str, depth: int) -> Group | None:
    if not _PLUS_MINUS.search(text):
        return None
    upper = _PLUS_MINUS.sub(lambda match: "+" if match[0] == "\\pm" else "-", text)
    lower = _PLUS_MINUS.sub(lambda match: "-" if match[0] == "\\pm" else "+", text)
    return _group("list", [upper.strip(), lower.strip()], depth)


def _read_words(text: str, depth: int) -> Value | None:
    if re.fullmatch(r"\\mathbb\{[A-Z]\}", text):
        return Words(squeezed(text))
    plain = re.sub(rf"[{MARKS}\"']", "", text).strip()
    if (
        text.startswith(OPEN)
        and text.endswith(CLOSE)
        and text.count(OPEN) == 1
        and text.strip(MARKS) != text
    ):
        inner = text.strip(MARKS).strip()
        if inner[:1].isdigit() or inner[:1] in "([\\$-.+":
            return read_value(inner, depth + 1)
        return Words(squeezed(inner))
    if re.fullmatch(
        r"[^\W\d_]{2,}(?:[\s,.!?&:/-]+[^\W\d_]+)*[.!?]?", plain
    ) and not _is_mathematical_word(plain):
        return Words(squeezed(plain))
    # 3:30, 1 2, 12.5.2020
    if re.fullmatch(r"[\d\s.,:'-]*[\d:]", plain) and re.search(r"\d[ :,.]+\d", plain):
        return Words(squeezed(plain))
    return None


def _is_mathematical_word(text: str) -> bool:
    return (
        text.lower() in ("pi", "oo", "inf", "infinity", "infty")
        or re.fullmatch(r"[a-z]{2}", text) is not None
        and text not in ("no", "up", "on", "in")
    )


def _read_expression(text: str) -> Scalar | None:
    """An expression, without the unit at its end."""
    unit = NO_UNIT
    for pattern in (_MARKED_END, _UNMARKED_END):
        match = pattern.match(text)
        if match is not None and match["value"].strip() and not _ANGLE_FUNCTION.search(text):
            read = read_unit(" " + match["unit"])
            if read is not None:
                text, unit = match["value"].strip(), read
                break
    percent = re.fullmatch(r"(?P<value>.+?)\s*%", text)
    if percent is not None:
        return Scalar(_expression_text(percent["value"]), is_percent=True)
    if re.search(rf"{OPEN}[^{MARKS}]{{2,}}{CLOSE}", text):
        return None
    return Scalar(_expression_text(text), unit=unit)


def _expression_text(text: str) -> str:
    text = re.sub(rf"[{MARKS}]", "", text)
    text = re.sub(
        r"(?<![\d,.])(\d{1,3}(?:,\d{3})+)(?![\d,])", lambda match: match[1].replace(",", ""), text
    )
    return (
        re.sub(r"(?<=\d) (\\frac\{\d+\}\{\d+\})", r"+\1", text)
        if re.fullmatch(r"[^+*/^-]*", text)
        else text
    )


def _split(text: str) -> list[str]:
    """The parts between outer commas or semicolons; commas within a number stay where ", "
    separates.
    """
    for separator in (";", ", ", ","):
        parts = _split_outside(text, re.compile(separator))
        if len(parts) > 1:
            return [part for part in parts if part]
    return [text]


def _split_outside(text: str, separator: re.Pattern) -> list[str]:
    parts, start = [], 0
    for match in _outer_matches(text, separator):
        parts.append(text[start : match.start()].strip())
        start = match.end()
    return [*parts, text[start:].strip()]


def _outer_matches(text: str, pattern: re.Pattern) -> list[re.Match]:
    """The matches that stand inside no bracket. Brackets close each other whatever their kind: (1,
    2] is a pair.
    """
    depths, depth, escaped = [], 0, False
    for character in text:
        if not escaped and character in _CLOSERS:
            depth -= 1
        depths.append(depth)
        if not escaped and character in _OPENERS:
            depth += 1
        escaped = character == "\\" and not escaped
    pieces = text.split("|")
    if len(pieces) == 3 and pieces[1].count(",") == text.count(","):
        return []  # the commas stand between bars
    return [
        match
        for match in pattern.finditer(text)
        if depths[match.start()] == 0 and match.end() > match.start()
    ]


def _closing(text: str) -> int | None:
    """The position at which the bracket that the text begins with is closed."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character in _OPENERS) - (character in _CLOSERS)
        if depth == 0:
            return position
    return None
