"""Which sampling parameters a response that trains may have: those whose log-probs the trainer can
compute again. Pure.

Truncation (top_p, top_k, min_p), stops and limits choose among the policy's tokens and leave its
log-probs alone. The temperature is the run's. What edits the logits themselves makes another
distribution, which depends on the response so far and is in no field of a sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.exceptions import ConfigError

# Parameters that edit logits, and the value that leaves them alone (null and an empty text, list or
# object do too).
LOGIT_EDITS: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "min_new_tokens": 0,
    "logit_bias": None,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
}


def check_trained_sampling(params: Mapping[str, Any], *, temperature: float) -> None:
    """ConfigError naming each parameter of a training request whose log-probs the trainer cannot
    compute again, and why.
    """
    problems = [
        f"{name} {params[name]!r} changes the logits that the engine draws from"
        for name, neutral in LOGIT_EDITS.items()
        if params.get(name) not in (None, "", [], {}, neutral)
    ]
    asked = params.get("temperature", 1.0)
    if asked != temperature:
        problems.append(
            f"temperature {asked!r} is not --rollout-temperature {temperature!r}, at which the "
            "trainer computes log-probs"
        )
    if problems:
        raise ConfigError(
            f"the sampling parameters of a response that trains: {'; '.join(problems)}. The "
            "trainer cannot compute these log-probs again, so "
            "importance ratios would be wrong from the first step on. Leave them to evaluation (--eval-...), or shape the text by the reward."
        )
