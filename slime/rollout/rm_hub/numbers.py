"""Reads a number as it is written in an answer: its exact value, its form, and what stands behind
it.

    "1,234.5" "1 234,5" "1'234.5" "1.234,5" -> 1234.5 "2 1/2" "2 \\frac{1}{2}" -> 5/2 (mixed)
    "1.5e3" -> 1500
    "0.\\overline{3}" -> 1/3 (decimal)                       "5 million" -> 5000000 "6/4" -> 6 over
                                                             4

Texts are in the one spelling of `normal_form`.
"""

from __future__ import annotations

import dataclasses
import re
from fractions import Fraction

from slime.rollout.rm_hub.normal_form import MARKS

MAX_DIGITS = 1000
MAX_POWER_OF_TEN = 1000
_SCALES: dict[str, int | Fraction] = {
    "dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "lakh": 10**5, "crore": 10**7, "mn": 10**6,
    "bn": 10**9, "tausend": 10**3, "mio": 10**6, "mio.": 10**6, "millionen": 10**6, "mrd": 10**9, "mrd.": 10**9, "milliarden": 10**9, "milliard": 10**9,
    "millones": 10**6, "millón": 10**6, "milhões": 10**6, "milioni": 10**6, "万": 10**4, "萬": 10**4, "亿": 10**8, "億": 10**8,
    "halves": Fraction(1, 2), "thirds": Fraction(1, 3), "fifths": Fraction(1, 5), "sixths": Fraction(1, 6), "sevenths": Fraction(1, 7),
    "eighths": Fraction(1, 8), "ninths": Fraction(1, 9), "tenths": Fraction(1, 10), "hundredths": Fraction(1, 100), "thousandths": Fraction(1, 1000),
}  # fmt: skip
_SCALE_NAMES = "|".join(sorted(map(re.escape, _SCALES), key=len, reverse=True))

_GROUPED = (
    r"\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d,])",  # 1,234,567.8
    r"\d{1,2}(?:,\d{2})+,\d{3}(?:\.\d+)?(?![\d,])",  # 12,34,567
    r"\d{1,3}(?: \d{3})+(?:[.,]\d+)?(?![\d]| ?/| ?\\frac)",  # 1 234 567,8
    r"\d{1,3}(?:'\d{3})+(?:[.,]\d+)?(?!\d)",  # 1'234'567.8
    r"\d{1,3}(?:\.\d{3})+,\d+(?!\d)",  # 1.234.567,8
    r"\d{1,3}(?:\.\d{3}){2,}(?![\d.])",  # 1.234.567
)
_REPEATING = re.compile(
    r"(?P<whole>\d*)\.(?P<start>\d*?) "
    r"?(?:\\(?:overline|bar|dot)\s*\{?\s*(?P<period>\d+)\s*\}?|\((?P<in_parens>\d+)\)"
    r"|(?P<shown>\d)(?P=shown){2,}\s*(?:\.\.\.|\\ldots))"
)
_WRITTEN = re.compile("|".join(f"(?:{pattern})" for pattern in _GROUPED))
_PLAIN = re.compile(r"(?:\d+\.?\d*|\.\d+)(?:[eE](?P<power>[-+]?\d{1,5})(?![\d.]))?")
_TIMES_POWER = re.compile(
    r"\s*(?:\\times|\\cdot|\*|x)\s*10\s*(?:\^|\*\*)\s*(?:\{\s*(?P<braced>[-+]?\d{1,5})\s*\}|(?P<bare>[-+]?\d{1,5}))"
)
_INTEGER = r"[-+]?\s?\d+(?:\.0+)?"
_SLASH = re.compile(
    r"(?P<top>\d+(?:\.\d+)?|\(\s*-?\d+\s*\))\s*/\s*(?P<bottom>-?\d+(?:\.\d+)?|\(\s*-?\d+\s*\))(?![\d.]|\s*[\^/!])"
)
_FRACTION = re.compile(
    rf"\\frac\{{\s*(?P<top>{_INTEGER}|[-+]?\d*\.\d+)\s*\}}\{{\s*(?P<bottom>{_INTEGER}|[-+]?\d*\.\d+)\s*\}}"
)
_MIXED = re.compile(
    r"(?P<whole>\d+)(?: (?:and )?(?P<top>\d+)\s*/\s*(?P<bottom>\d+)(?![\d/])| "
    r"?\\frac\{\s*(?P<t>\d+)\s*\}\{\s*(?P<b>\d+)\s*\})"
)


@dataclasses.dataclass(frozen=True)
class Number:
    """An exact number as it was written. `form`: integer, decimal, fraction or mixed; a fraction
    keeps top and bottom as given.
    """

    value: Fraction
    form: str
    top: Fraction | None = None
    bottom: Fraction | None = None

    def negated(self) -> Number:
        """The number with the other sign."""
        return dataclasses.replace(
            self, value=-self.value, top=None if self.top is None else -self.top
        )


def read_number(text: str) -> tuple[Number, str] | None:
    """(the number that the text begins with, the rest of it), None where it begins with none."""
    text = text.lstrip()
    if text[:1] in ("-", "+"):
        found = _read_unsigned(text[1:].lstrip())
        if found is None:
            return None
        return (found[0].negated() if text[0] == "-" else found[0]), found[1]
    return _read_unsigned(text)


def _read_unsigned(text: str) -> tuple[Number, str] | None:
    if len(text) > 4 * MAX_DIGITS:
        return None
    for pattern, reader in ((_MIXED, _mixed), (_FRACTION, _fraction), (_SLASH, _fraction)):
        match = pattern.match(text)
        if match is not None:
            number = reader(match)
            return None if number is None else (number, text[match.end() :])
    match = _REPEATING.match(text)
    if match is not None:
        return _repeating(match), text[match.end() :]
    match = _WRITTEN.match(text)
    if match is not None:
        return _scaled(_decimal(_without_groups(match[0])), text[match.end() :])
    match = _PLAIN.match(text)
    if match is None or len(match[0]) > MAX_DIGITS:
        return None
    power = int(match["power"] or 0)
    if abs(power) > MAX_POWER_OF_TEN:
        return None
    return _scaled(_decimal(match[0].split("e")[0].split("E")[0], power), text[match.end() :])


def read_decimal_comma(text: str) -> str:
    """The text with a decimal point where a lone comma may be one ("3,14"); the text itself
    otherwise.
    """
    return re.sub(r"^(\s*[-+]?\d+),(\d{1,2}|\d{4,})(?![\d,.])", r"\1.\2", text)


def _scaled(number: Number, rest: str) -> tuple[Number, str] | None:
    """With a power of ten or a word like million behind it."""
    match = _TIMES_POWER.match(rest)
    if match is not None:
        power = int(match["braced"] or match["bare"])
        if abs(power) > MAX_POWER_OF_TEN:
            return None
        number, rest = _number(number.value * Fraction(10) ** power), rest[match.end() :]
    word = re.match(rf"\s*[{MARKS}\s]*({_SCALE_NAMES})s?(?![A-Za-z])", rest, re.IGNORECASE)
    if word is not None:
        tail = rest[word.end() :]
        number, rest = (
            _number(number.value * _SCALES[word[1].lower()]),
            tail if tail.strip(MARKS + " ") else "",
        )
    return number, rest


def _without_groups(text: str) -> str:
    """The digits with a decimal point, from any country's way of grouping them."""
    marks = [character for character in text if not character.isdigit()]
    if len(set(marks)) == 1 and (len(marks) > 1 or marks[0] != "."):
        return re.sub(r"\D", "", text)
    if marks[0] == marks[-1]:  # "1 234,567 8" is none of the forms
        return re.sub(r"\D", "", text)
    whole, _, decimals = text.rpartition(marks[-1])
    return re.sub(r"\D", "", whole) + "." + decimals


def _decimal(text: str, power: int = 0) -> Number:
    return _number(Fraction(text.rstrip(".") or "0") * Fraction(10) ** power)


def _number(value: Fraction) -> Number:
    return Number(value, "integer" if value.denominator == 1 else "decimal")


def _mixed(match: re.Match) -> Number | None:
    top, bottom = int(match["top"] or match["t"]), int(match["bottom"] or match["b"])
    return Number(int(match["whole"]) + Fraction(top, bottom), "mixed") if bottom else None


def _fraction(match: re.Match) -> Number | None:
    top, bottom = (Fraction(re.sub(r"[\s()]", "", match[name])) for name in ("top", "bottom"))
    if bottom < 0:
        top, bottom = -top, -bottom
    return Number(top / bottom, "fraction", top, bottom) if bottom else None


def _repeating(match: re.Match) -> Number:
    start, period = match["start"], match["period"] or match["in_parens"] or match["shown"]
    digits = 10 ** len(start)
    value = Fraction(int(match["whole"] or 0)) + Fraction(int(start or 0), digits)
    return Number(value + Fraction(int(period), digits * (10 ** len(period) - 1)), "decimal")
