"""The checks of a very large batch as Ray tasks. A task returns verdict columns, not samples; the
result equals the serial one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slime.data.sample import Sample
from slime.gate.alignment import codec_of
from slime.gate.chunk import TASK_NAME_KEYS
from slime.gate.config import GateConfig
from slime.gate.judge import Outcome, judge
from slime.typing import Tokenizer

if TYPE_CHECKING:
    from slime.gate.alignment import Codec

PART_SAMPLES = 8192
# A part takes seconds; where all cores are reserved, its task never starts.
TASKS_TIMEOUT_S = 300.0
logger = logging.getLogger(__name__)
# What the checks read. The rest is left behind: it need not be copied to the workers, and may be
# what cannot be.
_READ = (
    "group_index", "index", "rollout_id", "tokens", "response", "response_length", "loss_mask", "rollout_log_probs", "reward", "status",
    "finish_reason", "valid", "invalid_reason", "metadata",
)  # fmt: skip


def judge_in_parallel(
    samples: Sequence[Sample],
    config: GateConfig,
    tokenizer: Tokenizer | Codec | None,
    *,
    part_samples: int = PART_SAMPLES,
) -> Outcome:
    """The outcome of `judge`, computed by Ray tasks over consecutive parts. Serial where Ray is not
    running, or its tasks do not end within `TASKS_TIMEOUT_S`.
    """
    import ray

    if not ray.is_initialized():
        return judge(samples, config, codec_of(tokenizer, config))
    task = ray.remote(num_cpus=1)(_judge_part)
    shared = ray.put((config, tokenizer))
    parts = [
        [_light(sample) for sample in samples[low : low + part_samples]]
        for low in range(0, len(samples), part_samples)
    ]
    refs = [task.remote(part, low * part_samples, shared) for low, part in enumerate(parts)]
    try:
        return Outcome.concatenate(ray.get(refs, timeout=TASKS_TIMEOUT_S))
    except ray.exceptions.GetTimeoutError:
        logger.warning(
            "the gate's %d Ray tasks did not end within %.0f s: this process checks %d samples "
            "alone",
            len(refs),
            TASKS_TIMEOUT_S,
            len(samples),
        )
    for ref in refs:
        ray.cancel(ref)
    return judge(samples, config, codec_of(tokenizer, config))


def _judge_part(
    samples: list[Sample], first_position: int, shared: tuple[GateConfig, Any]
) -> Outcome:
    config, tokenizer = shared
    return judge(samples, config, codec_of(tokenizer, config), first_position=first_position)


def _light(sample: object) -> Any:
    if not isinstance(sample, Sample):
        return sample  # the checks refuse it and say where it stands
    light = Sample(**{name: getattr(sample, name) for name in _READ})
    if isinstance(sample.metadata, dict):
        light.metadata = {
            name: sample.metadata[name] for name in TASK_NAME_KEYS if name in sample.metadata
        }
    return light
