"""Typed reading of the keys of a config.json. Every error names the file, the key, its value and
what is supported; a bool is no number, a float no count, and text neither.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from slime.exceptions import ConfigError

# Above every model there is; below what makes a table of layers or weights exhaust the memory.
MAX_COUNT = 2**24
MAX_VALUE_SHOWN = 100


@dataclasses.dataclass(frozen=True)
class ConfigFields:
    """Keys and values of one JSON object in `source`. A null is a missing key.

    prefix: what stands before a key in messages ("rope_scaling." for a nested object).
    """

    values: Mapping[str, Any]
    source: str
    prefix: str = ""

    def get(self, key: str, missing: object = None) -> Any:
        """Returns the unchecked value, `missing` where there is no such key."""
        return self.values.get(key, missing)

    def section(self, key: str) -> ConfigFields:
        """Returns the nested object `key` without its nulls, empty where it is missing."""
        value = self.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.unsupported(key, "an object or null")
        given = {name: item for name, item in value.items() if item is not None}
        return ConfigFields(given, self.source, f"{self.prefix}{key}.")

    def with_defaults(self, values: Mapping[str, Any]) -> ConfigFields:
        """Returns these fields and those of `values` that are missing here."""
        return dataclasses.replace(self, values={**values, **self.values})

    def count(
        self, key: str, *, default: int | None = None, minimum: int = 1, maximum: int = MAX_COUNT
    ) -> int:
        """Returns a whole number in [minimum, maximum]; without a default the key is required."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not minimum <= value <= maximum:
            raise self.unsupported(key, f"a whole number from {minimum} to {maximum}")
        return value

    def positive(self, key: str, *, default: float | None = None) -> float:
        """Returns a finite number above 0; without a default the key is required."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not _is_number(value) or not 0 < value:
            raise self.unsupported(key, "a number above 0")
        return float(value)

    def share(self, key: str) -> float:
        """Returns a number in [0, 1), 0 where it is missing."""
        value = self.get(key)
        if value is None:
            return 0.0
        if not _is_number(value) or not 0 <= value < 1:
            raise self.unsupported(key, "a number from 0 to below 1")
        return float(value)

    def flag(self, key: str) -> bool:
        """Returns true or false, false where it is missing."""
        value = self.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.unsupported(key, "true or false")
        return value

    def layer_numbers(self, key: str) -> frozenset[int]:
        """Returns a list of layer numbers, empty where it is missing."""
        value = self.get(key)
        if value is None:
            return frozenset()
        if not isinstance(value, list) or any(type(n) is not int or n < 0 for n in value):
            raise self.unsupported(key, "a list of layer numbers")
        return frozenset(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Returns one token id or a list of them, empty where it is missing."""
        value = self.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(type(token) is not int or token < 0 for token in ids):
            raise self.unsupported(key, "a token id or a list of them")
        return tuple(ids)

    def unsupported(self, key: str, supported: str) -> ConfigError:
        """Returns the error for the value of `key`."""
        if key not in self.values:
            return self.error(f"{key} is missing; supported: {supported}.")
        shown = repr(self.values[key])
        if len(shown) > MAX_VALUE_SHOWN:
            shown = shown[:MAX_VALUE_SHOWN] + "..."
        return self.error(f"{key} {shown} is not supported; supported: {supported}.")

    def error(self, sentence: str) -> ConfigError:
        """Returns the error with the file and, for a nested object, its key before `sentence`."""
        return ConfigError(f"{self.source}: {self.prefix}{sentence}")


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        return False
