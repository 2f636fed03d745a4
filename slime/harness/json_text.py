"""JSON for other programs: NaN and infinities, which JSON lacks, are the texts "nan", "inf" and
"-inf".
"""

from __future__ import annotations

import json
import math
from typing import Any


def json_text(value: Any) -> str:
    """One line of strict JSON; what has no JSON form is shown as its text."""
    return json.dumps(_strict(value), ensure_ascii=True, allow_nan=False, default=str)


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, dict):
        return {key: _strict(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(entry) for entry in value]
    return value
