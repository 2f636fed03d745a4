"""Judges each sample between sampling and training, with a reason; no torch, no HTTP.

`postprocess_output_data` is the whole of it; docs/gate.md says how to use it. Imports data and
files; knows nothing of engines or ranks. Names are imported on first use, so that
`slime.gate.config` stays free of numpy.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "postprocess_output_data": "judge",
    "check_responses": "judge",
    "apply_verdicts": "judge",
    "PostprocessResult": "judge",
    "GateConfig": "config",
    "InvalidReason": "config",
    "Policy": "config",
    "Level": "config",
    "Verdict": "config",
    "FormatSpec": "config",
    "TagPair": "config",
    "TaskRules": "config",
    "MissingLogProbs": "config",
    "GateStatistics": "statistics",
    "Gate": "gate",
    "gate_config_from_args": "gate",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
