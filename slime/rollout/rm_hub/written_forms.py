"""Numbers that are written as something else than a number: times, days, ratios, ranges and
residues.

    "5 pm" "5:00 p.m." "17:00" -> a time "5 Jan" "January 5th" -> a day "3:4" "3 to 4" -> a ratio
    "20 - 25" "20--25" -> a range, no difference "5 mod 7" "12 \\pmod 7" -> a residue
"""

from __future__ import annotations

import dataclasses
import re
from fractions import Fraction
from math import gcd

from slime.rollout.rm_hub.normal_form import CLOSE, MARKS, OPEN
from slime.rollout.rm_hub.units import MONTHS, NO_UNIT, read_unit

MONTH = "(?:" + "|".join(sorted(MONTHS, key=len, reverse=True)) + ")"
_NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d{1,15})(?:\.\d{1,15})?"
_CURRENCY = r"(?:\\?\$|€|£|¥|₹)?\s*"
_TIME = re.compile(r"(\d{1,2})(?:[:.](\d{2}))?\s*([ap])\.?\s?m\.?", re.IGNORECASE)
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})")
_DAY = re.compile(
    rf"(?P<d>\d{{1,2}})(?:st|nd|rd|th)?(?: of)?\s+(?P<m>{MONTH})\b\.?(?:,?\s+(?P<y>\d{{4}}))?",
    re.IGNORECASE,
)
_MONTH_DAY = re.compile(
    rf"(?P<m>{MONTH})\b\.?\s+(?P<d>\d{{1,2}})(?:st|nd|rd|th)?(?:,?\s+(?P<y>\d{{4}}))?",
    re.IGNORECASE,
)
_RATIO = re.compile(r"\d{1,9}(?:\s*:\s*\d{1,9})+")
_RANGE = re.compile(
    rf"(?P<money>{_CURRENCY})(?P<low>{_NUMBER})\s*%?\s*(?P<sign>-{{1,3}}|to\b)\s*{_CURRENCY}(?P<high>{_NUMBER})(?P<rest>\D.*)?"
)
_RESIDUE = re.compile(
    r"(-?\d{1,15})\s*\(?\s*(?:\\[pb]?mod|mod|modulo)\s*[({]?\s*(\d{1,15})\s*[)}]?\s*\)?",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True)
class Form:
    """`value`: what two forms of a kind are compared by; `written`: the same before it is reduced.
    `number`: the plain number that an answer without the form's mark has, as 5 for 5 pm and for 5
    mod 7; None where there is none. `unit`: of a range.
    """

    kind: str
    value: tuple
    written: tuple
    number: Fraction | None = None
    unit: str = ""


def are_same_forms(one: Form, other: Form, *, strict: bool) -> bool:
    """ "3 to 4" is a ratio beside a ratio and a range beside a range. A missing unit fits every
    unit.
    """
    if one.unit and other.unit and one.unit != other.unit:
        return False
    if one.kind == other.kind:
        return one.written == other.written if strict else one.value == other.value
    return (
        "to" in (one.kind, other.kind)
        and {one.kind, other.kind} <= {"to", "ratio", "range"}
        and one.written == other.written
    )


def read_form(text: str) -> Form | None:
    """The form that a whole text in the one spelling is; None for any other text."""
    plain = " ".join(re.sub(rf"[{MARKS}~]", " ", text).split())
    for reader in (_read_time, _read_day, _read_ratio, _read_range, _read_residue):
        form = reader(plain)
        if form is not None:
            return form
    return None


def _same(kind: str, value: tuple, number: Fraction | None = None) -> Form:
    return Form(kind, value, value, number)


def _read_time(text: str) -> Form | None:
    match = _TIME.fullmatch(text)
    if match is not None:
        hour, minute = int(match[1]), int(match[2] or 0)
        if not 1 <= hour <= 12 or minute > 59:
            return None
        return _same(
            "time",
            (hour % 12 + 12 * (match[3].lower() == "p"), minute),
            None if minute else Fraction(hour),
        )
    match = _CLOCK.fullmatch(text)
    is_time = match is not None and int(match[1]) < 24 and int(match[2]) < 60
    return _same("time", (int(match[1]), int(match[2]))) if match is not None and is_time else None


def _read_day(text: str) -> Form | None:
    match = _DAY.fullmatch(text) or _MONTH_DAY.fullmatch(text)
    if match is None or not 1 <= int(match["d"]) <= 31:
        return None
    return _same("day", (MONTHS[match["m"].lower()], int(match["d"]), match["y"]))


def _read_ratio(text: str) -> Form | None:
    if _RATIO.fullmatch(text) is None:
        return None
    parts = tuple(int(part) for part in text.split(":"))
    divisor = gcd(*parts) or 1
    return Form("ratio", tuple(part // divisor for part in parts), parts)


def _read_range(text: str) -> Form | None:
    match = _RANGE.fullmatch(text)
    if match is None:
        return None
    low, high = (Fraction(match[name].replace(",", "")) for name in ("low", "high"))
    unit = _unit_of(match["rest"] or "", match["money"].strip())
    if unit is None or (match["sign"] != "to" and low >= high):  # 25 - 20 is a difference
        return None
    pair = (low, high)
    return Form("to" if match["sign"] == "to" else "range", pair, pair, unit=unit)


def _unit_of(rest: str, money: str) -> str | None:
    if rest.strip() == "%":
        return "%"
    if re.fullmatch(r"\s*[A-Za-z]", rest):  # 3 - 5 m is as well a difference with a letter
        return None
    unit = read_unit(rest)
    if unit == NO_UNIT and money:
        unit = read_unit(f" {OPEN}{money[-1]}{CLOSE}")
    if unit is None:
        return None
    return "" if unit == NO_UNIT else f"{unit.dimension} {unit.power} {unit.factor}"


def _read_residue(text: str) -> Form | None:
    match = _RESIDUE.fullmatch(text)
    if match is None or int(match[2]) == 0:
        return None
    value, modulus = int(match[1]), int(match[2])
    return Form("residue", (value % modulus, modulus), (value, modulus), Fraction(value % modulus))


# What may stand behind or before a number of a sentence so that the two are one answer.
BEFORE = rf"(?:\b{MONTH}\b\.?\s(?=\d{{1,2}}(?!\d)))?"
BEHIND = (
    r"(?::\d+)*(?:\s*[-–—]{1,3}\s*(?:\\?\$|€|£)?\d[\d,.]*)?(?:!(?!=))?(?:\s*[ap]\.?m\b\.?)?(?:\s*\(?\s*\\?p?mod\s*\{?\d+\}?\s*\)?)?"
    rf"(?:(?<!\d\d\d)(?<!\d\d\d )(?:st|nd|rd|th)?\s*(?:of\s+)?{MONTH}\b)?"
)
