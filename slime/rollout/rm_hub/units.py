"""Units of answers: which are the same, and how many of one make another. No unit, and "units", fit
every unit.
"""

from __future__ import annotations

import dataclasses
import re
from fractions import Fraction

from slime.rollout.rm_hub.normal_form import MARKS

# dimension -> {the names of one unit: how many of the first unit it makes}
_TABLE: dict[str, dict[str, Fraction | int | str]] = {
    "length": {
        "m meter metre": 1, "mm millimeter millimetre": "1/1000", "cm centimeter centimetre": "1/100", "dm decimeter decimetre": "1/10",
        "km kilometer kilometre": 1000, "in inch inches": "127/5000", "ft foot feet": "381/1250", "yd yard": "1143/1250", "mi mile": "201168/125",
    },
    "time": {
        "s sec second": 1, "ms millisecond": "1/1000", "min minute": 60, "h hr hour": 3600, "day": 86400, "week wk": 604800,
    },
    "months": {"month": 1, "yr year": 12},
    "mass": {"g gm gram gramme": 1, "mg milligram": "1/1000", "kg kilo kilogram": 1000, "ton tonne": 1000000},
    "pounds": {"oz ounce": 1, "lb pound": 16},
    "volume": {"l liter litre": 1, "ml milliliter millilitre": "1/1000", "cl centiliter": "1/100", "dl deciliter": "1/10"},
    "dollar": {"$ dollar usd buck": 1, "cent ¢": "1/100"},
    "euro": {"€ euro eur 欧元": 1},
    "sterling": {"£ gbp": 1, "pence": "1/100"},
    "yen": {"¥ yen jpy 円": 1},
    "rupee": {"₹ rupee rs inr": 1},
    "yuan": {"yuan rmb cny 元": 1},
    "angle": {"\\degree degree deg": 1},
    "radian": {"rad radian": 1},
    "temperature": {"\\degreec celsius": 1},
    "fahrenheit": {"\\degreef fahrenheit": 1},
    "speed": {"mph": 1},
    "energy": {"j joule": 1, "kj kilojoule": 1000},
    "power": {"w watt": 1, "kw kilowatt": 1000},
    "frequency": {"hz hertz": 1, "khz": 1000, "mhz": 1000000},
    "force": {"n newton": 1},
    "voltage": {"v volt": 1},
    "current": {"a amp ampere": 1},
    "resistance": {"ohm ω \\omega": 1},
}  # fmt: skip
_KNOWN = {
    name: (dimension, Fraction(factor))
    for dimension, units in _TABLE.items()
    for names, factor in units.items()
    for name in names.split()
}
_ANY = frozenset({"unit", "sq"})
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
# Words that are no units although they are long enough to be words.
_MATHEMATICAL = frozenset(
    "sqrt sin cos tan cot sec csc log exp ln pi and or mil mille mila".split()
)
MONTHS = {
    name: number
    for number, names in enumerate(
        ("jan january", "feb february", "mar march", "apr april", "may", "jun june", "jul july", "aug august", "sep sept september", "oct october",
         "nov november", "dec december"),
        start=1,
    )
    for name in names.split()
}  # fmt: skip
# They make another number of the one before them, or say how it is to be compared.
_OPERATIONS = frozenset(
    "squared cubed factorial times plus minus less more fewer than over choose modulo mod hundred "
    "hundreds thousand thousands million millions billion "
    "billions trillion millionth millionths billionth billionths млн млрд тыс тысяч тысячи миллион миллиона миллионов миллиард миллиардов x y z".split()
)
# They change the number by a factor that differs between countries or by what follows.
_SCALE_SIGNS = frozenset("千百十兆成折割倍半点")
_LETTERS = r"(?:\\degree\s?[CF]?|\\omega|\\Omega|(?:[^\W\d_]|[€£¥₹¢$])+\.?)"
# Digits only as a power: "cm^{2}", "cm2", "m/s^{2}"; words may follow each other.
_UNIT_TEXT = re.compile(
    rf"{_LETTERS}(?:\^\{{-?\d\}}|\d)?(?:(?:\s*[/·-]\s*|\s*\\cdot\s*|\s+){_LETTERS}(?:\^\{{-?\d\}}|\d)?)*[.\s]*"
)
# One letter is a unit only behind a space: "5 m", and 5m is a product.
_LETTER_UNITS = frozenset("mgslhLNVWJA")


@dataclasses.dataclass(frozen=True)
class Unit:
    """A dimension (or the unit's own name where it is not in the table), its power, and how many
    base units one makes.
    """

    dimension: str = ""
    power: int = 1
    factor: Fraction = Fraction(1)


NO_UNIT = Unit()


def read_unit(text: str) -> Unit | None:
    """The unit that a text behind a number names. None where it cannot be one; NO_UNIT for "units"
    and for nothing.
    """
    if not text.strip():
        return NO_UNIT
    marked = any(mark in text for mark in MARKS)
    plain = " ".join(re.sub(rf"[{MARKS}]", " ", text).split()).replace(" ^", "^")
    if not plain:
        return NO_UNIT
    if not marked and not _looks_like_unit(text):
        return None
    words = plain.lower().replace(".", " ").split()
    if (
        not _UNIT_TEXT.fullmatch(plain)
        or words[0] in ("and", "or")
        or words[0] in _OPERATIONS
        or words[0] in MONTHS
    ):
        return None
    if len(words) > 1 and words[1] in _OPERATIONS - {"squared", "cubed"}:
        return None
    parts = [_one_unit(part) for part in re.split(r"\s*/\s*|\s+per\s+", plain)]
    if len(parts) == 1:
        return parts[0]
    name = "/".join(f"{unit.dimension}*{unit.factor}^{unit.power}" for unit in parts)
    return Unit({"length*201168/125^1/time*3600^1": "speed"}.get(name, name))


def are_same_dimension(one: Unit, other: Unit) -> bool:
    """Whether numbers in these units can be compared at all."""
    fits_all = not one.dimension or not other.dimension
    return fits_all or (one.dimension == other.dimension and one.power == other.power)


def factor_between(one: Unit, other: Unit) -> Fraction:
    """How many of `other` make one of `one`: 100 for metres and centimetres, 1 where one of them
    fits every unit.
    """
    if not one.dimension or not other.dimension:
        return Fraction(1)
    return (one.factor / other.factor) ** one.power


def _looks_like_unit(text: str) -> bool:
    """Whether unmarked text behind a number is a unit and not a variable."""
    word = re.match(r"\s*(\\degree|[€£¥₹¢$]|[^\W\d_]+)", text)
    if word is None:
        return False
    name = word[1]
    if name.lower() in _MATHEMATICAL or name[0] in _SCALE_SIGNS:
        return False
    if len(name) == 1 and name.isascii() and name.isalpha():
        return text.startswith(" ") and name in _LETTER_UNITS
    return (
        len(name) >= 4
        or _known(name) is not None
        or name.lower() in _POWERS
        or not name.isascii()
        or (text.startswith(" ") and len(name) > 2)
    )


def _known(name: str) -> tuple[str, Fraction] | None:
    name = name.lower().rstrip(".")
    for form in (name, name.removesuffix("s"), name.removesuffix("es")):
        if form in _KNOWN:
            return _KNOWN[form]
    return None


def _one_unit(text: str) -> Unit:
    power = 1
    match = re.search(r"\^\s*\{?\s*(\d)\s*\}?\s*$|\s+(squared|cubed)\s*$|(?<=[a-z])([23])$", text)
    if match is not None:
        power = int(match[1] or match[3] or (2 if match[2] == "squared" else 3))
        text = text[: match.start()]
    words = text.split()
    while words and words[0].lower().rstrip(".") in _POWERS and len(words) > 1:
        power, words = _POWERS[words[0].lower().rstrip(".")], words[1:]
    name = re.sub(r"\\degree ([CF])\b", r"\\degree\1", " ".join(words)).lower().strip(" .")
    if name in _ANY or name.removesuffix("s") in _ANY:
        return NO_UNIT
    known = _known(name)
    if known is not None:
        return Unit(known[0], power, known[1])
    return Unit(name.split()[-1].removesuffix("s"), power)  # "red apples" are apples
