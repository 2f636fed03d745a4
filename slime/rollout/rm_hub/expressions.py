"""Reads an arithmetic expression, plain or LaTeX, into a sympy value without evaluating text as code.

Grammar: sums of products of powers of numbers, one-letter symbols, \\pi, \\frac, \\sqrt, and factors side by side ("2x"). Anything
else is not read. Powers so large that they would fill the memory are not read either.
"""

from __future__ import annotations

import re
from typing import Any

MAX_EXPONENT = 1000
MAX_BITS = 100_000
MAX_DEPTH = 50
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+\.\d*|\.\d+|\d+)|(?P<command>\\[a-z]+)|(?P<word>[a-z]+)|(?P<mark>\*\*|[-+*/^(){}\[\]|]))"
)
_COMMANDS = {"\\cdot": "*", "\\times": "*", "\\div": "/", "\\left": "", "\\right": "", "\\infty": "oo", "\\pi": "pi"}
_WORDS = frozenset({"pi", "sqrt", "oo", "infty", "inf", "infinity"})


class NotReadable(ValueError):
    """The text is no expression of this grammar."""


def are_equal_values(left: str, right: str) -> bool:
    """Whether the difference of two expressions simplifies to zero. False where one of them cannot be read."""
    import sympy

    try:
        difference = parse_expression(left) - parse_expression(right)
    except NotReadable:
        return False
    return sympy.simplify(difference) == 0


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
            raise NotReadable(f"unexpected {text[position]!r} in {text[:80]!r}")
        position = match.end()
        token = match[match.lastgroup]
        if match.lastgroup == "word" and len(token) > 1 and token not in _WORDS:
            raise NotReadable(f"unknown word {token!r}")
        token = _COMMANDS.get(token, token)
        tokens.append("^" if token == "**" else token)
    return [token for token in tokens if token]


class _Parser:
    """Recursive descent over tokens; each method returns a sympy value and leaves `position` behind it."""

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
            raise NotReadable(f"nested deeper than {MAX_DEPTH}")
        value = self.product(depth)
        while self.peek() in ("+", "-"):
            value = value + self.product(depth) if self.take() == "+" else value - self.product(depth)
        return value

    def product(self, depth: int) -> Any:
        value = self.signed(depth)
        while (token := self.peek()) is not None and token not in ("+", "-", ")", "}", "]", "|"):
            if token == "/":
                self.take()
                value = self.divide(value, self.signed(depth))
            else:
                if token == "*":
                    self.take()
                value = value * self.signed(depth)
        return value

    def divide(self, value: Any, by: Any) -> Any:
        if by == 0:
            raise NotReadable("division by zero")
        return value / by

    def signed(self, depth: int) -> Any:
        sign = 1
        while self.peek() in ("+", "-"):
            sign = -sign if self.take() == "-" else sign
        return sign * self.power(depth)

    def power(self, depth: int) -> Any:
        base = self.atom(depth)
        if self.peek() != "^":
            return base
        self.take()
        sign = -1 if self.peek() == "-" and self.take() else 1
        if depth > MAX_DEPTH:
            raise NotReadable(f"nested deeper than {MAX_DEPTH}")
        exponent = sign * self.power(depth + 1)
        if exponent.is_number and not abs(exponent) <= MAX_EXPONENT:
            raise NotReadable(f"an exponent larger than {MAX_EXPONENT}")
        if base == 0 and exponent.is_negative:
            raise NotReadable("division by zero")
        if base.is_Rational and exponent.is_number:
            bits = max(base.p.bit_length(), base.q.bit_length()) * abs(float(exponent))
            if bits > MAX_BITS:
                raise NotReadable(f"a number of over {MAX_BITS} bits")
        return base**exponent

    def atom(self, depth: int) -> Any:
        token = self.take()
        if token[0].isdigit() or token[0] == ".":
            return self.sympy.Rational(token) if len(token) <= 1000 else self._refuse("a number of over 1000 digits")
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
        if token in ("\\sqrt", "sqrt"):
            return self.root(depth)
        if token == "pi":
            return self.sympy.pi
        if token in ("oo", "infty", "inf", "infinity"):
            return self.sympy.oo
        if len(token) == 1 and token.isalpha():
            return self.sympy.Symbol(token)
        return self._refuse(repr(token))

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
                raise NotReadable("a root of degree 0")
            return self.argument(depth) ** (1 / degree)
        return self.sympy.sqrt(self.argument(depth))

    def _refuse(self, what: str) -> Any:
        raise NotReadable(f"cannot read {what}")
