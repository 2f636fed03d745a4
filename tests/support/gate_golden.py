"""The golden corpus of the gate: where it lies, under which config it is judged, how a difference
is shown.
"""

from __future__ import annotations

import json
from pathlib import Path

from slime.data.sample import Sample
from slime.gate import GateConfig, InvalidReason, MissingLogProbs, Policy, TaskRules
from slime.gate.config import FORMAT_PRESETS, FormatSpec, TagPair

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
TOKENIZER_PATH = GOLDEN / "tokenizer.json"
SAMPLES_PATH = GOLDEN / "samples.jsonl"
GOLDEN_CONFIG = GateConfig(
    min_response_tokens=2,
    max_response_tokens=150,
    context_length=200,
    text_source="tokens",
    compare_text=True,
    stop_strings=("\nUser:",),
    repetition_window=64,
    repetition_max_period=16,
    missing_log_probs=MissingLogProbs.MARK,
    rewards_expected=True,
    policies={InvalidReason.EMPTY: Policy.MARK},
    tasks={
        "math": TaskRules(format=FORMAT_PRESETS["think_answer"]),
        "tools": TaskRules(
            format=FormatSpec(
                pairs=(
                    TagPair("<think>", "</think>", opaque=True),
                    TagPair("<tool_call>", "</tool_call>", max_count=None),
                ),
                forbidden=("<|im_start|>",),
            )
        ),
        "labels": TaskRules(min_response_tokens=1),
    },
)


def load_tokenizer():
    """The corpus's byte-level BPE as a fast tokenizer."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_file=str(TOKENIZER_PATH),
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
    )


def load_corpus() -> tuple[list[Sample], list[dict]]:
    """(samples, expectations) in file order."""
    rows = [json.loads(line) for line in SAMPLES_PATH.read_text(encoding="utf-8").splitlines()]
    return [Sample.from_dict(row["sample"]) for row in rows], [row["expected"] for row in rows]


def expectation_of(sample: Sample, verdict) -> dict:
    """What the corpus pins of one judged sample."""
    return {
        "valid": sample.valid,
        "reason": verdict.reason.value if verdict.reason else None,
        "detail": verdict.detail,
        "response": sample.response,
        "num_tokens": len(sample.tokens),
        "loss_mask": sample.loss_mask,
    }


def differences(samples: list[Sample], expected: list[dict], actual: list[dict]) -> list[str]:
    """One line per sample whose verdict, reason or fields changed: index, field,
    before -> after.
    """
    lines = []
    for sample, before, after in zip(samples, expected, actual, strict=True):
        changed = [
            f"{key}: {before.get(key)!r} -> {after[key]!r}"
            for key in after
            if before.get(key) != after[key]
        ]
        if changed:
            lines.append(
                f"sample {sample.index} ({str(sample.response)[:40]!r}): " + "; ".join(changed)
            )
    return lines
