"""The gate between sampling and training. `postprocess_output_data` is the whole of it; docs/gate.md says how to use it.

Names are imported on first use, so that `slime.rollout.postprocess.contract` stays free of numpy.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "postprocess_output_data": "gate",
    "check_responses": "gate",
    "apply_verdicts": "gate",
    "PostprocessResult": "gate",
    "GateConfig": "contract",
    "InvalidReason": "contract",
    "Policy": "contract",
    "Level": "contract",
    "Verdict": "contract",
    "FormatSpec": "contract",
    "TagPair": "contract",
    "TaskRules": "contract",
    "MissingLogProbs": "contract",
    "GateStatistics": "statistics",
    "Gate": "shell",
    "gate_config_from_args": "shell",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
