"""Options and prompts for tests of the rollout side, on what slime.testing gives to everybody's
tests.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from slime.testing import engines_at as fresh_rollout_state  # noqa: F401 - by this name the tests know them
from slime.testing import make_args
from slime.testing import make_tiny_tokenizer as tokenizer_folder  # noqa: F401


def rollout_args(**overrides: Any) -> argparse.Namespace:
    """`make_args`, scored by exact_match."""
    return make_args(
        **{"rm_type": "exact_match", "label_key": "label", "run_dir": None, **overrides}
    )


def write_prompts(path: Path, count: int, **extra: Any) -> str:
    """`count` rows {"input": "p<i>=", "label": "<i>"}: a prompt's text names its number."""
    rows = [{"input": f"p{number}=", "label": str(number), **extra} for number in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
