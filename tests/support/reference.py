"""A second implementation of everything from logits to loss: plain torch in fp64, one sample and
one token after another, no parallelism.

Written from the papers and the interface, independently of slime's cores, none of which it imports.
Slow and obvious on purpose: what the layouts and the fast paths are compared with.
"""

from __future__ import annotations

import dataclasses
import math

import torch


@dataclasses.dataclass
class ReferenceSample:
    """One sample. Lists have one entry per response token; `reward` is the group-normalized one;
    `rollout_id` names the execution.
    """

    tokens: list[int]
    response_length: int
    loss_mask: list[int]
    reward: float
    rollout_id: int
    log_probs: list[float] | None = None  # of the old policy, recomputed by the trainer
    rollout_log_probs: list[float] | None = None
    ref_log_probs: list[float] | None = None
    teacher_log_probs: list[float] | None = None
    values: list[float] | None = None

    @property
    def prompt_length(self) -> int:
        return len(self.tokens) - self.response_length


@dataclasses.dataclass
class ReferenceOptions:
    """The options that change a number, under the names and defaults of the command line."""

    advantage_estimator: str = "grpo"
    rollout_temperature: float = 1.0
    kl_coef: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "k1"
    use_unbiased_kl: bool = False
    eps_clip: float = 0.2
    eps_clip_high: float = 0.2
    eps_clip_c: float | None = None
    value_clip: float = 0.2
    entropy_coef: float = 0.0
    gamma: float = 1.0
    lambd: float = 1.0
    normalize_advantages: bool = False
    use_rollout_logprobs: bool = False
    use_tis: bool = False
    tis_clip: float = 2.0
    tis_clip_low: float = 0.0
    use_opsm: bool = False
    opsm_delta: float = 1e-4
    use_opd: bool = False
    opd_kl_coef: float = 1.0
    calculate_per_token_loss: bool = False
    rollout_max_response_len: int = 16


def reference_log_probs(
    logits: torch.Tensor, sample: ReferenceSample, options: ReferenceOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (log-probs [R], entropies [R]) in fp64 from the logits [T, V] of this
    sample alone.
    """
    log_probs, entropies = [], []
    for token in range(sample.prompt_length, len(sample.tokens)):
        distribution = torch.log_softmax(
            logits[token - 1].double() / options.rollout_temperature, dim=-1
        )
        log_probs.append(distribution[sample.tokens[token]])
        entropies.append(-(distribution.exp() * distribution).sum())
    if not log_probs:
        return logits.new_zeros(0, dtype=torch.float64), logits.new_zeros(0, dtype=torch.float64)
    return torch.stack(log_probs), torch.stack(entropies)


def reference_kl(new, old, kind: str):
    """Returns one KL estimate of a token (float or 0-dim tensor)."""
    difference = new - old
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference * difference / 2
    exponential = (
        torch.exp(-difference) if isinstance(difference, torch.Tensor) else math.exp(-difference)
    )
    return exponential - 1 + difference


def _clamp(kl, kind: str):
    if kind != "low_var_kl":
        return kl
    return kl.clamp(-10, 10) if isinstance(kl, torch.Tensor) else min(max(kl, -10.0), 10.0)


def reference_advantages(
    samples: list[ReferenceSample], options: ReferenceOptions
) -> tuple[list[list[float]], list[list[float]], list[list[float]]]:
    """Returns (advantages, returns, raw KL), each per sample and response token."""
    advantages, returns, kls = [], [], []
    for sample in samples:
        student = sample.rollout_log_probs if options.use_rollout_logprobs else sample.log_probs
        kl = [0.0] * sample.response_length
        if options.kl_coef != 0 and student is not None:
            pairs = zip(student, sample.ref_log_probs, strict=True)
            kl = [
                _clamp(reference_kl(new, old, options.kl_loss_type), options.kl_loss_type)
                for new, old in pairs
            ]
        kls.append(kl)
        advantage, value_target = _one_sample_advantage(sample, kl, options)
        if options.use_opd:
            triples = zip(advantage, student, sample.teacher_log_probs, strict=True)
            advantage = [a - options.opd_kl_coef * (s - t) for a, s, t in triples]
        advantages.append(advantage)
        returns.append(value_target)
    if options.normalize_advantages:
        advantages = _whiten(advantages, samples)
    return advantages, returns, kls


def _one_sample_advantage(
    sample: ReferenceSample, kl: list[float], options: ReferenceOptions
) -> tuple[list[float], list[float]]:
    estimator, length = options.advantage_estimator, sample.response_length
    if estimator == "reinforce_plus_plus_baseline":
        result = [
            sample.reward - options.kl_coef * k * m
            for k, m in zip(kl, sample.loss_mask, strict=True)
        ]
        return result, result
    if estimator not in ("ppo", "reinforce_plus_plus"):
        return [sample.reward] * length, [sample.reward] * length
    trained = [index for index in range(length) if sample.loss_mask[index]]
    reward = [
        -options.kl_coef * kl[index] if sample.loss_mask[index] else 0.0 for index in range(length)
    ]
    if trained:
        reward[trained[-1]] += sample.reward
    if estimator == "reinforce_plus_plus":
        result, following = [0.0] * length, 0.0
        for index in reversed(range(length)):
            following = reward[index] + options.gamma * following
            result[index] = following
        return result, result
    advantage, value_target = [0.0] * length, [0.0] * length
    next_value = next_advantage = 0.0
    for index in reversed(trained):
        delta = reward[index] + options.gamma * next_value - sample.values[index]
        next_advantage = delta + options.gamma * options.lambd * next_advantage
        next_value = sample.values[index]
        advantage[index], value_target[index] = next_advantage, next_advantage + next_value
    return advantage, value_target


def _whiten(advantages: list[list[float]], samples: list[ReferenceSample]) -> list[list[float]]:
    trained = [
        a
        for row, sample in zip(advantages, samples, strict=True)
        for a, m in zip(row, sample.loss_mask, strict=True)
        if m
    ]
    mean = sum(trained) / len(trained)
    variance = sum((a - mean) ** 2 for a in trained) / max(len(trained) - 1, 1)
    return [[(a - mean) / math.sqrt(variance + 1e-8) for a in row] for row in advantages]


def _denominators(samples: list[ReferenceSample]) -> list[float]:
    per_rollout: dict[int, int] = {}
    for sample in samples:
        per_rollout[sample.rollout_id] = per_rollout.get(sample.rollout_id, 0) + sum(
            sample.loss_mask
        )
    return [max(per_rollout[sample.rollout_id], 1) for sample in samples]


def reference_policy_loss(
    samples: list[ReferenceSample],
    log_probs: list[torch.Tensor],
    entropies: list[torch.Tensor],
    advantages: list[list[float]],
    options: ReferenceOptions,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Returns (loss of the whole step, metrics): the mean over rollouts of token means, or over
    tokens with `calculate_per_token_loss`.
    """
    rollout_denominators = _denominators(samples)
    tokens = sum(sum(sample.loss_mask) for sample in samples)
    divisor = (
        max(tokens, 1)
        if options.calculate_per_token_loss
        else len({sample.rollout_id for sample in samples})
    )
    sums: dict[str, torch.Tensor] = {}

    def add(name: str, value, denominator: float) -> None:
        weight = 1.0 if options.calculate_per_token_loss else 1.0 / denominator
        sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64)) + value * weight

    for sample, new, entropy, advantage, denominator in zip(
        samples, log_probs, entropies, advantages, rollout_denominators, strict=True
    ):
        train = sample.log_probs if sample.log_probs is not None else new.detach().tolist()
        old = sample.rollout_log_probs if options.use_rollout_logprobs else train
        mask = sample.loss_mask
        log_ratio = [old[t] - new[t] for t in range(sample.response_length)]
        trained = [t for t in range(sample.response_length) if mask[t]]
        sequence_kl = sum(
            (log_ratio[t] for t in trained), torch.zeros((), dtype=torch.float64)
        ) / max(len(trained), 1)
        pg_denominator = (
            options.rollout_max_response_len
            if options.advantage_estimator == "dr_grpo"
            else denominator
        )
        for t in trained:
            ppo_kl = sequence_kl if options.advantage_estimator == "gspo" else log_ratio[t]
            pg, clipped = _one_token_loss(ppo_kl, new[t], advantage[t], options)
            if options.use_opsm:
                dropped = advantage[t] < 0 and float(sequence_kl) > options.opsm_delta
                add("opsm_clipfrac", float(dropped), denominator)
                pg = pg * 0.0 if dropped else pg
            if options.use_tis:
                ratio = math.exp(train[t] - sample.rollout_log_probs[t])
                weight = min(max(ratio, options.tis_clip_low), options.tis_clip)
                pg = pg * weight
                add("ois", torch.exp(-ppo_kl.detach()), denominator)
                add("tis", ratio, denominator)
                add("tis_clipfrac", float(weight != ratio), denominator)
                add("tis_abs", abs(ratio - 1), denominator)
            add("pg_loss", pg, pg_denominator)
            add("pg_clipfrac", float(clipped), denominator)
            add("ppo_kl", ppo_kl, denominator)
            add("entropy_loss", entropy[t], denominator)
            if options.use_kl_loss:
                kl = reference_kl(new[t], sample.ref_log_probs[t], options.kl_loss_type)
                if options.use_unbiased_kl:
                    kl = kl * torch.exp(new[t] - old[t])
                add("kl_loss", _clamp(kl, options.kl_loss_type), denominator)
            if sample.rollout_log_probs is not None:
                add(
                    "train_rollout_logprob_abs_diff",
                    abs(train[t] - sample.rollout_log_probs[t]),
                    denominator,
                )
    means = {name: value / divisor for name, value in sums.items()}
    zero = torch.zeros((), dtype=torch.float64)
    loss = means.get("pg_loss", zero) - options.entropy_coef * means.get("entropy_loss", zero)
    loss = loss + options.kl_loss_coef * means.get("kl_loss", zero)
    return loss, {"loss": float(loss), **{name: float(value) for name, value in means.items()}}


def _one_token_loss(ppo_kl, log_prob, advantage: float, options: ReferenceOptions):
    """Returns (loss, clipped) of one token."""
    ratio = torch.exp(-ppo_kl)
    low, high = 1 - options.eps_clip, 1 + options.eps_clip_high
    if options.advantage_estimator == "cispo":
        weight = min(max(float(ratio), low), high)
        return -weight * advantage * log_prob, weight != float(ratio)
    clamped = ratio.clamp(low, high)
    clipped = float(-clamped * advantage) > float(-ratio * advantage)
    loss = -clamped * advantage if clipped else -ratio * advantage
    if (
        options.eps_clip_c is not None
        and advantage < 0
        and float(loss) > -options.eps_clip_c * advantage
    ):
        loss = ratio * 0.0 - options.eps_clip_c * advantage
    return loss, clipped


def reference_value_loss(
    samples: list[ReferenceSample],
    values: list[torch.Tensor],
    returns: list[list[float]],
    options: ReferenceOptions,
) -> torch.Tensor:
    """Returns the critic's loss of the whole step from its new values [R] per sample; the old ones
    are in the samples.
    """
    total = torch.zeros((), dtype=torch.float64)
    for sample, new, target, denominator in zip(
        samples, values, returns, _denominators(samples), strict=True
    ):
        for t in range(sample.response_length):
            if sample.loss_mask[t]:
                old = sample.values[t]
                clipped = old + (new[t] - old).clamp(-options.value_clip, options.value_clip)
                total = (
                    total
                    + torch.maximum((new[t] - target[t]) ** 2, (clipped - target[t]) ** 2)
                    / denominator
                )
    return total / len({sample.rollout_id for sample in samples})


def reference_sft_loss(
    samples: list[ReferenceSample], log_probs: list[torch.Tensor]
) -> torch.Tensor:
    """Returns minus the mean over rollouts of the mean log-prob of trained tokens."""
    total = torch.zeros((), dtype=torch.float64)
    for sample, new, denominator in zip(samples, log_probs, _denominators(samples), strict=True):
        for t in range(sample.response_length):
            if sample.loss_mask[t]:
                total = total - new[t] / denominator
    return total / len({sample.rollout_id for sample in samples})
