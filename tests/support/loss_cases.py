"""Random samples as a reference sees them, and the same samples packed into micro-batches as one
rank of a layout sees them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from support.reference import ReferenceOptions, ReferenceSample, reference_log_probs

from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp, slice_with_cp

VOCABULARY = 13


def make_samples(
    shapes: Sequence[tuple[int, int]], seed: int, *, rollout_ids: Sequence[int] | None = None
) -> list[ReferenceSample]:
    """Returns samples of (prompt, response) lengths. Masks are random, rewards alternate in sign,
    log-probs are plausible ones with ratios from 0.2 to 4.
    """
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for index, (prompt, response) in enumerate(shapes):

        def draw(scale: float, center: float = -2.5, response: int = response) -> list[float]:
            return (center + scale * torch.randn(response, generator=generator)).tolist()

        old = draw(0.5)
        samples.append(
            ReferenceSample(
                tokens=torch.randint(
                    0, VOCABULARY, (prompt + response,), generator=generator
                ).tolist(),
                response_length=response,
                loss_mask=(torch.rand(response, generator=generator) < 0.75).int().tolist(),
                reward=(-1) ** index * (0.5 + float(torch.rand((), generator=generator))),
                rollout_id=index if rollout_ids is None else rollout_ids[index],
                log_probs=old,
                rollout_log_probs=[
                    value + 0.3 * noise for value, noise in zip(old, draw(1.0, 0.0), strict=True)
                ],
                ref_log_probs=draw(0.5),
                teacher_log_probs=draw(0.5),
                values=draw(1.0, 0.0),
            )
        )
    return samples


def make_logits(
    samples: Sequence[ReferenceSample], seed: int, *, width: int = VOCABULARY
) -> list[torch.Tensor]:
    """Returns per sample fp32 logits [T, width] that require a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(len(s.tokens), width, generator=generator).requires_grad_() for s in samples
    ]


def reference_of(
    samples: Sequence[ReferenceSample], logits: Sequence[torch.Tensor], options: ReferenceOptions
):
    """Returns ([log-probs], [entropies]) per sample."""
    pairs = [
        reference_log_probs(rows, sample, options)
        for rows, sample in zip(logits, samples, strict=True)
    ]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def pack(
    samples: Sequence[ReferenceSample],
    logits: Sequence[torch.Tensor],
    advantages: Sequence[Sequence[float]],
    mask_sums: Sequence[float],
    *,
    padding: int = 3,
    returns: Sequence[Sequence[float]] | None = None,
) -> tuple[dict, torch.Tensor]:
    """Returns (batch, packed logits [1, rows, V]) of one micro-batch on the context-parallel rank
    that `mpu` says we are, with junk in the padding rows. Per-token fields are cut like the
    training ranks' are.
    """

    def local(values: Sequence[Sequence[float]]) -> list[torch.Tensor]:
        return [
            slice_log_prob_with_cp(
                torch.tensor(v, dtype=torch.float32), len(s.tokens), s.response_length
            )
            for v, s in zip(values, samples, strict=True)
        ]

    width = logits[0].size(-1) if logits else VOCABULARY
    rows = [slice_with_cp(sample_logits, 0.0) for sample_logits in logits]
    packed = torch.cat([*rows, torch.full((padding, width), 7.0).requires_grad_()]).unsqueeze(0)
    batch = {
        "unconcat_tokens": [torch.tensor(s.tokens) for s in samples],
        "total_lengths": [len(s.tokens) for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "loss_masks": [torch.tensor(s.loss_mask, dtype=torch.uint8) for s in samples],
        "rollout_mask_sums": torch.tensor(mask_sums, dtype=torch.float32),
        "advantages": local(advantages),
        "returns": local(returns if returns is not None else advantages),
        "values": local([s.values for s in samples]),
        "ref_log_probs": local([s.ref_log_probs for s in samples]),
    }
    for name in ("log_probs", "rollout_log_probs"):
        if all(getattr(s, name) is not None for s in samples):
            batch[name] = local([getattr(s, name) for s in samples])
    return batch, packed


def mask_sums_of(samples: Sequence[ReferenceSample]) -> list[float]:
    """Returns per sample the trained tokens of its whole rollout."""
    return [
        float(sum(sum(o.loss_mask) for o in samples if o.rollout_id == s.rollout_id))
        for s in samples
    ]
