"""The layout matrix's expectation: the recorded batch through a Hugging Face model, one unpacked
sequence after another, in plain torch.

Rewards, steps, log-probs, advantages, losses, AdamW and metrics are written here and in
reference.py from the interface, in fp64 where the model allows it; nothing of slime is imported.
Samples are named by their position in the batch.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
from support.reference import (
    ReferenceOptions,
    ReferenceSample,
    reference_advantages,
    reference_log_probs,
    reference_policy_loss,
    reference_value_loss,
)

BETAS, ADAM_EPS, WEIGHT_DECAY, CLIP_GRAD = (0.9, 0.999), 1e-2, 0.1, 1.0
CENTERED = {
    "grpo": True,
    "gspo": True,
    "cispo": True,
    "reinforce_plus_plus_baseline": False,
    "dr_grpo": False,
    "rloo": False,
}


@dataclasses.dataclass
class Expected:
    """fields: {name: {position: [response tokens] or a number}}; steps: `train/` metrics per
    optimizer step; gradients: {name: tensor} per step, before clipping; phase: `rollout/` metrics;
    weights: {name: tensor} after the last step.
    """

    fields: dict[str, dict[int, Any]]
    steps: list[dict[str, float]]
    gradients: list[dict[str, torch.Tensor]]
    phase: dict[str, float]
    weights: dict[str, torch.Tensor]


class ReferenceModel:
    """A Hugging Face causal model in fp64 (its norms compute in fp32)."""

    def __init__(self, folder: str | Path) -> None:
        from transformers import AutoModelForCausalLM

        # the other implementations of experts have no fp64
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **eager)

    def log_probs(
        self, sample: ReferenceSample, options: ReferenceOptions
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs [R], entropies [R]) with gradient."""
        return reference_log_probs(
            self.model(torch.tensor([sample.tokens])).logits[0], sample, options
        )

    def no_grad(
        self, sample: ReferenceSample, options: ReferenceOptions
    ) -> tuple[list[float], list[float]]:
        """The same without gradient, as lists."""
        with torch.no_grad():
            log_probs, entropies = self.log_probs(sample, options)
        return log_probs.tolist(), entropies.tolist()

    def tensors(self, *, gradients: bool = False) -> dict[str, torch.Tensor]:
        """Copies of the weights, or of their gradients, under the names on disk: fused experts are
        taken apart.
        """
        result = {}
        for name, parameter in self.model.named_parameters():
            tensor = (parameter.grad if gradients else parameter).detach().clone()
            if tensor.dim() != 3:
                result[name] = tensor
                continue
            base, kind = name.rsplit(".", 1)
            for expert, matrix in enumerate(tensor):
                parts = {
                    "gate_proj": matrix[: len(matrix) // 2],
                    "up_proj": matrix[len(matrix) // 2 :],
                }
                parts = parts if kind == "gate_up_proj" else {"down_proj": matrix}
                result.update(
                    {f"{base}.{expert}.{part}.weight": piece for part, piece in parts.items()}
                )
        return result

    def optimizer(self, lr: float) -> torch.optim.Optimizer:
        """AdamW: matrices decay, norms and biases do not."""
        groups = [
            [p for p in self.model.parameters() if (p.dim() > 1) == matrix]
            for matrix in (True, False)
        ]
        decays = [WEIGHT_DECAY, 0.0]
        settings = [
            {"params": group, "weight_decay": decay}
            for group, decay in zip(groups, decays, strict=True)
        ]
        return torch.optim.AdamW(settings, lr=lr, betas=BETAS, eps=ADAM_EPS)


def normalized_rewards(records: list[dict], options: dict[str, Any]) -> list[float]:
    """Rewards minus the mean of their group's valid executions; the samples of one rollout are one
    execution.
    """
    estimator = options.get("advantage_estimator", "grpo")
    if estimator not in CENTERED:
        return [float(record["reward"]) for record in records]
    groups: dict[int, dict[int, list[float]]] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    for record in records:
        if record["valid"] and not record["remove_sample"]:
            groups[record["group_index"]][record["rollout_id"]].append(float(record["reward"]))
    result = []
    for record in records:
        members = [
            sum(rewards) / len(rewards) for rewards in groups[record["group_index"]].values()
        ]
        counts = (
            record["valid"]
            and not record["remove_sample"]
            and len(members) > 1
            and max(members) > min(members)
        )
        if not counts:
            result.append(0.0)
            continue
        mean = sum(members) / len(members)
        reward = float(record["reward"]) - mean
        if CENTERED[estimator] and options.get("grpo_std_normalization", True):
            reward /= math.sqrt(sum((m - mean) ** 2 for m in members) / (len(members) - 1)) + 1e-6
        if estimator == "rloo":
            reward *= len(members) / (len(members) - 1)
        result.append(reward)
    return result


def step_positions(records: list[dict], batch_size: int, *, keep_trailing: bool) -> list[list[int]]:
    """Positions of the samples of each optimizer step: valid rollouts in order of appearance,
    `batch_size` a step.
    """
    rollouts = list(dict.fromkeys(record["rollout_id"] for record in records if record["valid"]))
    starts = range(
        0, len(rollouts) if keep_trailing else len(rollouts) // batch_size * batch_size, batch_size
    )
    return [
        [
            i
            for i, r in enumerate(records)
            if r["valid"] and r["rollout_id"] in rollouts[start : start + batch_size]
        ]
        for start in starts
    ]


def reference_of(
    records: list[dict], models: dict[str, Path], options: dict[str, Any], values: list[list[float]]
) -> Expected:
    """What every layout must give. `models`: the folders "policy" and "ref"; `options`:
    command-line names; `values`: the critic's.
    """
    known = {field.name for field in dataclasses.fields(ReferenceOptions)}
    settings = ReferenceOptions(**{name: value for name, value in options.items() if name in known})
    policy, ref = ReferenceModel(models["policy"]), ReferenceModel(models["ref"])
    steps = step_positions(
        records,
        options["global_batch_size"],
        keep_trailing=options.get("keep_trailing_rollouts", False),
    )
    rewards = normalized_rewards(records, options)
    samples, entropies = {}, {}
    for i in (i for step in steps for i in step):
        record = records[i]
        mask = [0] * record["response_length"] if record["remove_sample"] else record["loss_mask"]
        sample = samples[i] = ReferenceSample(
            record["tokens"], record["response_length"], mask, rewards[i], record["rollout_id"],
            rollout_log_probs=record["rollout_log_probs"], teacher_log_probs=record["teacher_log_probs"], values=values[i],
        )  # fmt: skip
        sample.log_probs, entropies[i] = policy.no_grad(sample, settings)
        sample.ref_log_probs = ref.no_grad(sample, settings)[0]
        if options.get("opd_type") == "megatron":
            sample.teacher_log_probs = sample.ref_log_probs
    advantages, returns, kl = reference_advantages(list(samples.values()), settings)
    fields = _fields(samples, entropies, options, (advantages, returns, kl))
    optimizer = policy.optimizer(options["lr"])
    metrics, gradients = [], []
    for positions in steps:
        chosen = {i: samples[i] for i in positions}
        trained_rollouts = {s.rollout_id for s in chosen.values() if any(s.loss_mask)}
        chosen = {i: s for i, s in chosen.items() if s.rollout_id in trained_rollouts}
        optimizer.zero_grad()
        outputs = [policy.log_probs(sample, settings) for sample in chosen.values()]
        loss, named = reference_policy_loss(
            list(chosen.values()), [o[0] for o in outputs], [o[1] for o in outputs],
            [fields["advantages"][i] for i in chosen], settings,
        )  # fmt: skip
        if options.get("use_opd"):
            named["opd_reverse_kl"] = _mean_over(
                chosen, fields["opd_reverse_kl"], by_token=settings.calculate_per_token_loss
            )
        loss.backward()
        for parameter in policy.model.parameters():
            parameter.grad = (
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
        gradients.append(policy.tensors(gradients=True))
        named["grad_norm"] = float(
            torch.nn.utils.clip_grad_norm_(policy.model.parameters(), CLIP_GRAD)
        )
        named["global_batch_size"] = float(len(trained_rollouts))
        metrics.append(named)
        optimizer.step()
    phase = phase_metrics(records, samples, fields)
    return Expected(fields, metrics, gradients, phase, policy.tensors())


def critic_reference_of(records: list[dict], folder: Path, options: dict[str, Any]) -> Expected:
    """What a critic must give on every layout: the policy's layers below a linear head, drawn with
    seed 0 and deviation 0.02.
    """
    known = {field.name for field in dataclasses.fields(ReferenceOptions)}
    settings = ReferenceOptions(**{name: value for name, value in options.items() if name in known})
    critic = ReferenceModel(folder)
    size = critic.model.config.hidden_size
    head = (
        torch.empty(1, size).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(0)).double()
    )
    critic.model.value_head = torch.nn.Linear(size, 1, bias=False)
    critic.model.value_head.weight = torch.nn.Parameter(head)
    del critic.model.lm_head

    def values_of(sample: ReferenceSample) -> torch.Tensor:
        hidden = critic.model.model(torch.tensor([sample.tokens])).last_hidden_state[0]
        return critic.model.value_head(hidden[sample.prompt_length - 1 : -1])[:, 0]

    steps = step_positions(
        records,
        options["global_batch_size"],
        keep_trailing=options.get("keep_trailing_rollouts", False),
    )
    samples = {}
    for i in (i for step in steps for i in step):
        record = records[i]
        mask = [0] * record["response_length"] if record["remove_sample"] else record["loss_mask"]
        sample = ReferenceSample(
            record["tokens"],
            record["response_length"],
            mask,
            float(record["reward"]),
            record["rollout_id"],
        )
        with torch.no_grad():
            sample.values = values_of(sample).tolist()
        samples[i] = sample
    advantages, returns, _ = reference_advantages(list(samples.values()), settings)
    fields = {
        name: dict(zip(samples, rows, strict=True))
        for name, rows in (("advantages", advantages), ("returns", returns))
    }
    fields["values"] = {i: s.values for i, s in samples.items()}
    optimizer, metrics, gradients = critic.optimizer(options["lr"]), [], []
    for positions in steps:
        rollouts = {samples[i].rollout_id for i in positions if any(samples[i].loss_mask)}
        chosen = {i: samples[i] for i in positions if samples[i].rollout_id in rollouts}
        optimizer.zero_grad()
        values = {i: values_of(sample) for i, sample in chosen.items()}
        loss = reference_value_loss(
            list(chosen.values()),
            list(values.values()),
            [fields["returns"][i] for i in chosen],
            settings,
        )
        loss.backward()
        gradients.append(critic.tensors(gradients=True))
        clipped = {
            i: _clipped_values(sample, values[i].detach(), fields["returns"][i], settings)
            for i, sample in chosen.items()
        }
        norm = float(torch.nn.utils.clip_grad_norm_(critic.model.parameters(), CLIP_GRAD))
        named = {
            "value_loss": float(loss.detach()),
            "value_clipfrac": _mean_over(chosen, clipped),
            "grad_norm": norm,
        }
        metrics.append(
            {
                f"critic-{name}": value
                for name, value in (named | {"global_batch_size": float(len(rollouts))}).items()
            }
        )
        optimizer.step()
    return Expected(fields, metrics, gradients, {}, critic.tensors())


def _clipped_values(
    sample: ReferenceSample, new: torch.Tensor, targets: list[float], settings: ReferenceOptions
) -> list[float]:
    """1.0 where the bound on the value's move makes the loss larger, per response token."""
    old, target = (
        torch.tensor(sample.values, dtype=torch.float64),
        torch.tensor(targets, dtype=torch.float64),
    )
    bounded = old + (new - old).clamp(-settings.value_clip, settings.value_clip)
    return ((bounded - target).abs() > (new - target).abs()).double().tolist()


def _fields(
    samples: dict[int, ReferenceSample],
    entropies: dict[int, list],
    options: dict[str, Any],
    computed: tuple,
) -> dict[str, dict]:
    names = dict(zip(("advantages", "returns", "kl"), computed, strict=True))
    fields = {name: dict(zip(samples, rows, strict=True)) for name, rows in names.items()}
    fields["log_probs"] = {i: s.log_probs for i, s in samples.items()}
    fields["rollout_log_probs"] = {i: s.rollout_log_probs for i, s in samples.items()}
    fields["teacher_log_probs"] = {i: s.teacher_log_probs for i, s in samples.items()}
    fields["loss_masks"] = {i: s.loss_mask for i, s in samples.items()}
    fields["rewards"] = {i: s.reward for i, s in samples.items()}
    fields["total_lengths"] = {i: len(s.tokens) for i, s in samples.items()}
    fields["response_lengths"] = {i: s.response_length for i, s in samples.items()}
    if options.get("kl_coef") or options.get("use_kl_loss"):
        fields["ref_log_probs"] = {i: s.ref_log_probs for i, s in samples.items()}
    if options.get("use_rollout_entropy"):
        fields["entropy"] = entropies
    if options.get("advantage_estimator") == "ppo":
        fields["values"] = {i: s.values for i, s in samples.items()}
    if options.get("use_opd"):
        student = {
            i: s.rollout_log_probs if options.get("use_rollout_logprobs") else s.log_probs
            for i, s in samples.items()
        }
        fields["opd_reverse_kl"] = {
            i: [a - b for a, b in zip(student[i], s.teacher_log_probs, strict=True)]
            for i, s in samples.items()
        }
    return fields


def _mean_over(
    samples: dict[int, ReferenceSample], rows: dict[int, list[float]], *, by_token: bool = False
) -> float:
    """Mean over rollouts of the mean over their trained tokens, or over all trained tokens."""
    by_rollout: dict[int, list[float]] = collections.defaultdict(list)
    for i, sample in samples.items():
        trained = [value for value, kept in zip(rows[i], sample.loss_mask, strict=True) if kept]
        by_rollout[0 if by_token else sample.rollout_id] += trained
    means = [sum(values) / len(values) for values in by_rollout.values() if values]
    return sum(means) / len(means)


def _vote_per_rollout(values: dict[int, float], rollout_ids: dict[int, int]) -> float:
    by_rollout: dict[int, list[float]] = collections.defaultdict(list)
    for i, value in values.items():
        by_rollout[rollout_ids[i]].append(value)
    return sum(sum(votes) / len(votes) for votes in by_rollout.values()) / len(by_rollout)


def phase_metrics(
    records: list[dict], samples: dict[int, ReferenceSample], fields: dict[str, dict]
) -> dict[str, float]:
    """The `rollout/` metrics of the batch: what is per token over trained tokens, what is per
    sample with one vote per rollout.
    """
    rollout_ids = {i: sample.rollout_id for i, sample in samples.items()}
    metrics = {}
    for name, rows in fields.items():
        if name in ("rewards", "total_lengths", "response_lengths"):
            metrics[name] = _vote_per_rollout(rows, rollout_ids)
        elif name != "loss_masks":
            metrics[name] = _mean_over(samples, rows)
    # of everything sampled: a response that the model got wrong has reward 0, one that was lost has
    # no vote
    judged = {
        i: r
        for i, r in enumerate(records)
        if r["valid"] or r["invalid_reason"] in ("too_short", "empty", "truncated")
    }
    metrics["raw_reward"] = _vote_per_rollout(
        {i: r["reward"] if r["valid"] else 0.0 for i, r in judged.items()},
        {i: r["rollout_id"] for i, r in judged.items()},
    )
    metrics["round_number"] = _vote_per_rollout(
        {i: records[i]["metadata"]["round_number"] for i in samples}, rollout_ids
    )
    trained = {sample.rollout_id for sample in samples.values() if any(sample.loss_mask)}
    metrics["num_samples"] = sum(sample.rollout_id in trained for sample in samples.values())
    metrics["num_rollouts"] = len(trained)
    gaps = [
        (a - b, 4 * place // sample.response_length, records[i]["metadata"]["source_name"])
        for i, sample in samples.items()
        for place, (a, b, kept) in enumerate(
            zip(sample.log_probs, sample.rollout_log_probs, sample.loss_mask, strict=True)
        )
        if kept
    ]
    metrics["logprob_abs_diff/mean"] = sum(abs(gap) for gap, *_ in gaps) / len(gaps)
    metrics["logprob_abs_diff/max"] = max(abs(gap) for gap, *_ in gaps)
    metrics["logprob_kl/k1"] = sum(-gap for gap, *_ in gaps) / len(gaps)
    metrics["logprob_kl/k3"] = sum(math.exp(gap) - 1 - gap for gap, *_ in gaps) / len(gaps)
    ordered = sorted(abs(gap) for gap, *_ in gaps)
    for percent in (50, 90, 99):
        place = (len(ordered) - 1) * percent / 100
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        metrics[f"logprob_abs_diff/p{percent}"] = ordered[low] + (ordered[high] - ordered[low]) * (
            place - low
        )
    for kind, column in (("position", 1), ("source", 2)):
        for label in {gap[column] for gap in gaps}:
            part = [abs(gap[0]) for gap in gaps if gap[column] == label]
            metrics[f"logprob_abs_diff/{kind}/{f'q{label + 1}' if column == 1 else label}"] = sum(
                part
            ) / len(part)
    return metrics
