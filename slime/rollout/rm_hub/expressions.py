"""Reads an arithmetic expression, plain or LaTeX, into a sympy value without evaluating text as
code.

Grammar: sums of products of powers of numbers, letters (with an index), \\pi, e, i, \\frac,
\\binom, \\sqrt, |x|, n!, elementary functions, and factors side by side ("2x"). Anything else is
not read; neither are powers and factorials that would fill the memory.
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import sympy

MAX_EXPONENT = 1000
MAX_FACTORIAL = 1000
MAX_BITS = 100_000
MAX_DEPTH = 50
# Places at which two expressions with letters must agree: all letters positive, all negative, and
# mixed.
_NUM_PLACES = 4
_DIGITS, _TOLERANCE = 50, 40  # decimal digits computed, and those that must agree
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+\.\d*|\.\d+|\d+)|(?P<command>\\[a-z]+)|(?P<word>[a-z]+)|(?P<mark>\*\*|[-+*/^(){}\[\]|!_]))"
)
_COMMANDS = {
    "\\cdot": "*",
    "\\times": "*",
    "\\div": "/",
    "\\left": "",
    "\\right": "",
    "\\infty": "oo",
    "\\pi": "pi",
}
_DEGREE = "\\degree"
_FUNCTIONS = {
    name: (
        {"ln": "log", "lg": "log", "arcsin": "asin", "arccos": "acos", "arctan": "atan"}.get(
            name, name
        )
    )
    for name in (
        "sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan asin acos atan ln log lg exp"
    ).split()
}
_GREEK = frozenset("alpha beta gamma delta epsilon theta lambda mu rho sigma tau phi omega".split())
_WORDS = frozenset({"pi", "sqrt", "oo", "infty", "inf", "infinity"}) | frozenset(_FUNCTIONS)
_CLOSERS = frozenset({"+", "-", ")", "}", "]", "|", "!", "^", "_", "\\degree"})


class NotReadable(ValueError):
    """The text is no expression of this grammar."""


class NoValue(NotReadable):
    """The expression has no value, or one that would take too much time or memory."""


def are_equal_values(left: str, right: str) -> bool | None:
    """Whether two expressions have the same value, wherever both have one. None where one of them
    cannot be read; what has no value that can be computed equals nothing.
    """
    try:
        one, other = parse_expression(left), parse_expression(right)
    except NoValue:
        return False
    except NotReadable:
        return None
    return one == other or _agree(one, other)


def are_same_equations(left: str, right: str) -> bool | None:
    """Whether two expressions that are to be zero differ by a constant factor other than zero, as
    2x - 2y and y - x do.
    """
    try:
        one, other = parse_expression(left), parse_expression(right)
    except NotReadable:
        return None
    if not one.free_symbols or one.free_symbols != other.free_symbols:
        return False
    values = [(a, b) for a, b in _values_of(one, other) if a is not None and b is not None]
    if len(values) < 2 or any(abs(a) == 0 or abs(b) == 0 for a, b in values):
        return None
    (first, second), *rest = values
    return all(_are_close(a * second, b * first) for a, b in rest)


def _agree(one: sympy.Expr, other: sympy.Expr) -> bool:
    """Equality at 50 digits, at four places each where there are letters: as sure as a proof here,
    and its time is bounded.
    """
    defined = 0
    for a, b in _values_of(one, other):
        if (a is None) != (b is None):
            return False
        if a is not None:
            defined += 1
            if not _are_close(a, b):
                return False
    return defined > 0


def _values_of(one: sympy.Expr, other: sympy.Expr) -> list[tuple[Any, Any]]:
    import sympy

    letters = sorted(one.free_symbols | other.free_symbols, key=str)
    values = []
    for place in range(_NUM_PLACES if letters else 1):
        point = {
            letter: sympy.Float(_coordinate(place, number), _DIGITS)
            for number, letter in enumerate(letters)
        }
        values.append((_evaluated(one, point), _evaluated(other, point)))
    return values


def _coordinate(place: int, number: int) -> str:
    """The value of the letter of that number at a place: the same in every run, and in no simple
    ratio to any other.
    """
    chance = random.Random(1000 * place + number)
    size = f"{chance.uniform(0.3, 2.6):.12f}"
    return f"-{size}" if place == 1 or (place > 1 and chance.random() < 0.5) else size


def _evaluated(value: sympy.Expr, point: dict) -> Any:
    """The complex number at a point, None where there is none."""
    number = value.evalf(_DIGITS, subs=point) if point else value.evalf(_DIGITS)
    return number if number.is_number and number.is_finite else None


def _are_close(a: sympy.Expr, b: sympy.Expr) -> bool:
    import sympy

    difference = abs(a - b)
    return bool(difference <= sympy.Float(10, _DIGITS) ** -_TOLERANCE * (1 + abs(a)))


def parse_expression(text: str) -> Any:
    """The sympy value of an expression. NotReadable with what was found where it does not fit."""
    tokens = _tokenize(text.strip().lower())
    parser = _Parser(tokens)
    value = parser.sum(0)
    if parser.position != len(tokens):
        raise NotReadable(f"unexpected {tokens[parser.position]!r} in {text[:80]!r}")
    return value


def _tokenize(text: str) -> list[str]:
    for long, short in (
        ("\\dfrac", "\\frac"),
        ("\\tfrac", "\\frac"),
        ("\\left", ""),
        ("\\right", ""),
        ("−", "-"),
        ("π", "pi"),
    ):
        text = text.replace(long, short)
    tokens: list[str] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            if not text[position:].strip():
                break
            raise NotReadable(f"unexpected {text[position]!r} in {text[:80]!r}")
        position = match.end()
        token = match[cast(str, match.lastgroup)]
        if (
            match.lastgroup == "number"
            and tokens
            and tokens[-1][-1].isdigit()
            and tokens[-1][0] != "\\"
        ):
            raise NotReadable(f"two numbers side by side in {text[:80]!r}")
        if match.lastgroup == "word" and len(token) > 1 and token not in _WORDS:
            if len(token) > 3:
                raise NotReadable(f"unknown word {token!r}")
            tokens += list(token)  # "2xy"
            continue
        token = _COMMANDS.get(token, token)
        if token.startswith("\\") and (token[1:] in _FUNCTIONS or token[1:] in _GREEK):
            token = token[1:]
        tokens.append("^" if token == "**" else token)
    return [token for token in tokens if token]


class _Parser:
    """Recursive descent over tokens; each method returns a sympy value and leaves `position` behind
    it.
    """

    def __init__(self, tokens: list[str]) -> None:
        import sympy

        self.sympy, self.tokens, self.position = sympy, tokens, 0

    def peek(self) -> str | None:
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def take(self, *expected: str) -> str:
        token = self.peek()
        if token is None or (expected and token not in expected):
            raise NotReadable(f"expected {' or '.join(expected) or 'more'}, found {token!r}")
        self.position += 1
        return token

    def sum(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise NoValue(f"nested deeper than {MAX_DEPTH}")
        value = self.product(depth)
        while self.peek() in ("+", "-"):
            value = (
                value + self.product(depth) if self.take() == "+" else value - self.product(depth)
            )
        return value

    def product(self, depth: int) -> Any:
        value = self.signed(depth)
        while (token := self.peek()) is not None and token not in _CLOSERS:
            if token == "/":
                self.take()
                value = self.divide(value, self.signed(depth))
            else:
                if token == "*":
                    self.take()
                value = value * self.signed(depth)
        return value

    def divide(self, value: sympy.Expr, by: sympy.Expr) -> Any:
        if by == 0:
            raise NoValue("division by zero")
        return value / by

    def signed(self, depth: int) -> Any:
        sign = 1
        while self.peek() in ("+", "-"):
            sign = -sign if self.take() == "-" else sign
        return sign * self.power(depth)

    def power(self, depth: int) -> Any:
        base = self.atom(depth)
        while self.peek() == "!":
            self.take()
            base = self.factorial(base)
        if self.peek() == _DEGREE:
            self.take()
            return base * self.sympy.pi / 180
        if self.peek() != "^":
            return base
        self.take()
        return self.raised(base, self.exponent(depth))

    def exponent(self, depth: int) -> Any:
        sign = -1 if self.peek() == "-" and self.take() else 1
        if depth > MAX_DEPTH:
            raise NoValue(f"nested deeper than {MAX_DEPTH}")
        return sign * self.power(depth + 1)

    def raised(self, base: sympy.Expr, exponent: sympy.Expr) -> Any:
        if exponent.is_number and not (exponent.is_real and abs(exponent) <= MAX_EXPONENT):
            if not exponent.is_finite or exponent.is_real:
                raise NoValue(f"an exponent larger than {MAX_EXPONENT}")
        if base == 0 and exponent.is_negative:
            raise NoValue("division by zero")
        if base.is_Rational and exponent.is_real and exponent.is_number:
            bits = max(base.p.bit_length(), base.q.bit_length()) * abs(float(exponent))
            if bits > MAX_BITS:
                raise NoValue(f"a number of over {MAX_BITS} bits")
        return base**exponent

    def factorial(self, value: sympy.Expr) -> Any:
        if value.is_number and not (value.is_Integer and 0 <= value <= MAX_FACTORIAL):
            raise NoValue(f"a factorial of {value}; 0 to {MAX_FACTORIAL} are computed")
        return self.sympy.factorial(value)

    def atom(self, depth: int) -> Any:
        token = self.take()
        if token[0].isdigit() or token[0] == ".":
            return self.sympy.Rational(token) if len(token) <= 1000 else self._too_long(token)
        if token in ("(", "{", "["):
            value = self.sum(depth + 1)
            self.take({"(": ")", "{": "}", "[": "]"}[token])
            return value
        if token == "|":
            value = self.sum(depth + 1)
            self.take("|")
            return abs(value)
        if token == "\\frac":
            return self.divide(self.argument(depth), self.argument(depth))
        if token == "\\binom":
            return self.binomial(self.argument(depth), self.argument(depth))
        if token in ("\\sqrt", "sqrt"):
            return self.root(depth)
        if token == "pi":
            return self.sympy.pi
        if token in ("oo", "infty", "inf", "infinity"):
            return self.sympy.oo
        if token in _FUNCTIONS:
            return self.function(token, depth)
        if (len(token) == 1 and token.isalpha()) or token in _GREEK:
            return self.letter(token)
        return self._refuse(repr(token))

    def letter(self, token: str) -> Any:
        if self.peek() == "_":
            self.take()
            index = self.take()
            if index == "{":
                index = self.take()
                self.take("}")
            return self.sympy.Symbol(f"{token}_{index}")
        return {"e": self.sympy.E, "i": self.sympy.I}.get(token) or self.sympy.Symbol(token)

    def function(self, name: str, depth: int) -> Any:
        """sin^2 x, log_2 8, ln(x): the argument is a group, or the factors up to the next sign or
        function.
        """
        base = exponent = None
        if name == "log" and self.peek() == "_":
            self.take()
            base = self.argument(depth)
        if self.peek() == "^":
            self.take()
            exponent = self.exponent(depth)
        if self.peek() in ("(", "{", "["):
            value = self.atom(depth + 1)
        else:
            value = self.power(depth + 1)
            while (
                (token := self.peek()) is not None
                and token not in _CLOSERS
                and token not in ("*", "/")
            ):
                if token in _FUNCTIONS:
                    break
                value = value * self.power(depth + 1)
        if name == "lg":
            base = self.sympy.Integer(10)
        if name in ("log", "ln", "lg") and (value == 0 or base in (0, 1)):
            raise NoValue("a logarithm of 0, or to the base 0 or 1")
        arguments = (value,) if base is None else (value, base)
        result = getattr(self.sympy, _FUNCTIONS[name])(*arguments)
        return result if exponent is None else self.raised(result, exponent)

    def binomial(self, top: sympy.Expr, bottom: sympy.Expr) -> Any:
        if not all(value.is_Integer and 0 <= value <= MAX_FACTORIAL for value in (top, bottom)):
            raise NoValue(f"a binomial of {top} and {bottom}; 0 to {MAX_FACTORIAL} are computed")
        return self.sympy.binomial(top, bottom)

    def argument(self, depth: int) -> Any:
        """One argument of a LaTeX command: a group, or a single digit or letter."""
        if self.peek() in ("{", "("):
            return self.atom(depth)
        token = self.take()
        if token.isdigit() and len(token) > 1:  # \frac12: each digit is an argument of its own
            self.position -= 1
            self.tokens[self.position : self.position + 1] = [token[0], token[1:]]
            token = self.take()
        if not token.isalnum():
            raise NotReadable(f"expected an argument, found {token!r}")
        self.position -= 1
        return self.atom(depth)

    def root(self, depth: int) -> Any:
        if self.peek() == "[":
            self.take()
            degree = self.sum(depth + 1)
            self.take("]")
            if degree == 0 or not degree.is_number:
                raise NoValue("a root of degree 0")
            return self.argument(depth) ** (1 / degree)
        return self.sympy.sqrt(self.argument(depth))

    def _too_long(self, token: str) -> Any:
        raise NoValue(f"a number of {len(token)} digits; at most 1000 are read")

    def _refuse(self, what: str) -> Any:
        raise NotReadable(f"cannot read {what}")
