"""One small function for each hook of a training run, given on the command line as
support.training_plugins.<name>.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch

LIKELY = -4.0  # nats


def note(args: Any, hook: str, **values: Any) -> None:
    """Appends what a hook saw to plugins.jsonl of the run folder."""
    with (Path(args.run_dir) / "plugins.jsonl").open("a") as file:
        file.write(json.dumps({"hook": hook, **values}) + "\n")


async def generate(args: Any, sample: Any, sampling_params: dict, evaluation: bool = False) -> Any:
    """Two samples of one rollout, as a conversation with a branch would give."""
    from slime.rollout.sglang_rollout import generate as default_generate

    first = await default_generate(args, sample, sampling_params)
    second = copy.deepcopy(first)
    first.rollout_id = second.rollout_id = first.index
    return [first, second]


async def group_reward(args: Any, samples: list, **kwargs: Any) -> list[dict]:
    """The share of even token ids, under a key."""
    return [
        {
            "score": sum(token % 2 == 0 for token in s.tokens[-s.response_length :])
            / s.response_length
        }
        for s in samples
    ]


def rewards_above_half(args: Any, samples: list) -> tuple[list[float], list[float]]:
    raw = [sample.get_reward_value(args) for sample in samples]
    return raw, [value - 0.5 for value in raw]


def sample_hook(
    args: Any, sample: Any, *, rollout_id: int | None = None, evaluation: bool = False
) -> Any:
    sample.metadata["seen_in"] = rollout_id
    return sample


def remove_first(args: Any, groups: list) -> None:
    """--rollout-sample-filter-path: the first rollout's two samples are kept from the loss."""
    for sample in groups[0][0]:
        sample.remove_sample = True


def all_groups(args: Any, groups: list, data_source: Any) -> None:
    note(args, "all_groups", num_groups=len(groups))


def rollout_log(
    rollout_id: int, args: Any, samples: list, extra_metrics: dict, rollout_time: float
) -> bool:
    note(
        args,
        "rollout_log",
        rollout_id=rollout_id,
        num_samples=len(samples),
        seen_in=sorted({s.metadata["seen_in"] for s in samples}),
    )
    return False


def advantages(args: Any, rollout_data: Any) -> None:
    """Every token of a response gets its reward."""
    columns = zip(rollout_data["loss_masks"], rollout_data["rewards"], strict=True)
    values = [torch.full((len(mask),), float(reward)) for mask, reward in columns]
    rollout_data["advantages"], rollout_data["returns"] = (
        values,
        [value.clone() for value in values],
    )


def train_data(args: Any, rollout_id: int, rollout_data: Any) -> None:
    note(
        args,
        "train_data",
        rollout_id=rollout_id,
        advantages=[float(values[0]) for values in rollout_data["advantages"]],
    )


def loss(
    args: Any, batch: dict, logits: torch.Tensor, sum_of_sample_mean: Any
) -> tuple[torch.Tensor, dict]:
    """The plain policy gradient, and a metric that is 1."""
    from slime.backends.megatron_utils.loss import get_log_probs_and_entropy

    lengths = {
        name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")
    }
    _, outputs = get_log_probs_and_entropy(logits, args=args, **lengths)
    log_probs = torch.cat(outputs["log_probs"])
    value = -sum_of_sample_mean(log_probs * torch.cat(list(batch["advantages"])))
    return value, {
        "loss": value.detach().clone(),
        "one": sum_of_sample_mean(torch.ones_like(log_probs)),
    }


def policy_loss_with_own_reductions(
    args: Any, batch: dict, logits: torch.Tensor, sum_of_sample_mean: Any
) -> tuple[torch.Tensor, dict]:
    """The policy loss, and a line for each reduction: the engine's log-prob of the trained tokens."""
    from slime.backends.megatron_utils.loss import ResponseTokens, policy_loss_function
    from slime.metrics import contributions

    value, metrics = policy_loss_function(args, batch, logits, sum_of_sample_mean)
    tokens = ResponseTokens.of(batch, logits.device)
    engine = tokens.trained(tokens.select(batch["rollout_log_probs"], "rollout_log_probs"))
    metrics["engine/max"] = contributions.maximum(engine)
    metrics["engine/min"] = contributions.minimum(engine)
    metrics["engine"] = contributions.quantiles(engine, contributions.QUARTILES)
    metrics["engine/token_mean"] = contributions.mean(engine, len(engine))
    metrics["engine/total"] = contributions.total(engine)
    if len(engine) and bool((engine > LIKELY).any()):  # no rank knows whether another has one
        metrics["engine/likely_max"] = contributions.maximum(engine[engine > LIKELY])
    return value, metrics


def converted(args: Any, samples: list) -> dict[str, list]:
    """Train data as a converter of one's own makes it: plain lists of Python's numbers."""
    rewards = [sample.get_reward_value(args) for sample in samples]
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "loss_masks": [[1] * sample.response_length for sample in samples],
        "raw_reward": rewards,
        "rewards": [reward - 0.5 for reward in rewards],
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
    }
