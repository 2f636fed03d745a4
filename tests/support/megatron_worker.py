"""One training rank for layout tests: a tiny model from a Hugging Face folder, a fixed batch, real
log-prob passes and optimizer steps.

`reference_run` is the same thing in plain torch on the Hugging Face model: one sequence at a time,
eager attention, AdamW.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# (prompt tokens, response tokens): nothing divides by anything, one-token prompts and responses,
# two optimizer steps of four.
LENGTHS = ((3, 5), (7, 1), (1, 11), (4, 9), (2, 2), (13, 6), (1, 1), (5, 17))
STEPS = 2
LR = 1e-2
# Large, so that an element with a gradient near zero does not turn rounding into a whole step.
ADAM_EPS = 1e-2


def fixed_tokens(vocab_size: int) -> list[list[int]]:
    """Token ids of the eight samples; sample i starts with token 10 + i."""
    return [
        [
            (10 + index if position == 0 else (7 * index + 3 * position * position) % vocab_size)
            for position in range(sum(lengths))
        ]
        for index, lengths in enumerate(LENGTHS)
    ]


def training_args(folder: str | Path, **overrides: Any) -> Any:
    """Options of the layout tests: SFT loss, AdamW with weight decay and clipping."""
    import dataclasses

    from support.megatron_args import megatron_args

    from slime.config.algorithm import AlgorithmOptions
    from slime.config.debug import DebugOptions
    from slime.config.observability import ObservabilityOptions

    values: dict[str, Any] = {}
    for cls in (AlgorithmOptions, DebugOptions, ObservabilityOptions):
        values.update(dataclasses.asdict(cls()))
    values.update(
        loss_type="sft_loss", lr=LR, adam_eps=ADAM_EPS, weight_decay=0.1, clip_grad=1.0, data_pad_size_multiplier=8, rollout_temperature=1.0,
        rollout_top_p=1.0, global_batch_size=len(LENGTHS) // STEPS, moe_aux_loss_coeff=0.0, log_probs_chunk_size=-1,
    )  # fmt: skip
    values.update(overrides)
    return megatron_args(folder, **values)


@contextlib.contextmanager
def built(
    folder: str | Path, *, load_dir: str | None = None, **overrides: Any
) -> Iterator[tuple[Any, list, Any, Any]]:
    """(args, model, optimizer, scheduler) of this rank, loaded from `load_dir` or `folder`;
    model-parallel groups live inside only.
    """
    from megatron.core import mpu

    from slime.backends.megatron_utils.checkpoint import load_checkpoint
    from slime.backends.megatron_utils.initialize import init
    from slime.backends.megatron_utils.optimizer import setup_model_and_optimizer

    args = training_args(folder, **overrides)
    init(args)
    try:
        model, optimizer, scheduler = setup_model_and_optimizer(args)
        load_checkpoint(args, model, optimizer, scheduler, load_dir=load_dir)
        yield args, model, optimizer, scheduler
    finally:
        mpu.destroy_model_parallel()


def local_batch(args: Any) -> tuple[dict[str, Any], list[int]]:
    """(this data-parallel rank's rollout data, positions of its samples in LENGTHS): two
    micro-batches per step.
    """
    import torch
    from megatron.core import mpu

    dp_size, dp_rank = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
    mine = list(range(dp_rank, len(LENGTHS), dp_size))
    per_micro = len(mine) // (2 * STEPS)
    tokens = fixed_tokens(args.vocab_size)
    data = {
        "tokens": [torch.tensor(tokens[index]) for index in mine],
        "response_lengths": [LENGTHS[index][1] for index in mine],
        "total_lengths": [sum(LENGTHS[index]) for index in mine],
        "loss_masks": [torch.ones(LENGTHS[index][1], dtype=torch.int32) for index in mine],
        "rollout_mask_sums": torch.tensor([float(LENGTHS[index][1]) for index in mine]),
        "global_batch_sizes": [len(LENGTHS) // STEPS] * STEPS,
        "num_microbatches": [2] * STEPS,
        "micro_batch_indices": [
            list(range(low, low + per_micro)) for low in range(0, len(mine), per_micro)
        ],
    }
    return data, mine


def log_probs_of(args: Any, model: list, data: dict[str, Any], mine: list[int]) -> dict[int, Any]:
    """{sample position: full response log-probs} of this rank's samples, on the last pipeline
    stage.
    """
    from slime.backends.megatron_utils.cp_utils import all_gather_with_cp
    from slime.backends.megatron_utils.data import get_data_iterator
    from slime.backends.megatron_utils.loss import get_log_probs_and_entropy
    from slime.backends.megatron_utils.model import forward_only

    result = forward_only(
        get_log_probs_and_entropy, args, model, get_data_iterator(data), data["num_microbatches"]
    )
    return {
        position: all_gather_with_cp(local, sum(LENGTHS[position]), LENGTHS[position][1]).detach()
        for position, local in zip(mine, result.get("log_probs", [None] * len(mine)), strict=True)
        if local is not None
    }


def exported(args: Any, model: list) -> dict[str, Any]:
    """Hugging Face tensors of the model on the main rank, {} elsewhere."""
    from slime.backends.megatron_utils.update_weight import iter_hf_weight_buckets
    from slime.models.shape import read_model_shape

    shape = read_model_shape(args.hf_checkpoint)
    return {
        name: tensor
        for bucket in iter_hf_weight_buckets(args, model, shape, buffer_size=4096)
        for name, tensor in bucket
    }


def train_steps(
    args: Any, state: tuple, data: dict[str, Any], rollout_id: int = 0
) -> list[dict[str, float]]:
    """The metrics of both steps."""
    from slime.backends.megatron_utils.data import get_data_iterator
    from slime.backends.megatron_utils.model import train

    model, optimizer, scheduler = state
    return train(args, rollout_id, model, optimizer, scheduler, get_data_iterator(data))


def run_layout(folder: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Everything a layout test compares: log-probs before, metrics, weights before and after two
    steps.
    """
    with built(folder, **overrides) as (args, model, *rest):
        data, mine = local_batch(args)
        before = exported(args, model)
        log_probs = log_probs_of(args, model, data, mine)
        metrics = train_steps(args, (model, *rest), data)
        return {
            "log_probs": log_probs,
            "metrics": metrics,
            "before": before,
            "after": exported(args, model),
        }


def run_layouts(
    rank: int, world_size: int, cases: dict[str, tuple[str, dict[str, Any]]]
) -> dict[str, Any]:
    """{name: `run_layout`} one after the other in the same processes: importing Megatron costs more
    than a layout.
    """
    results = {}
    for name, (folder, overrides) in cases.items():
        try:
            results[name] = run_layout(folder, overrides)
        except Exception as error:
            raise RuntimeError(f"layout {name}: {error}") from error
    return results


def reference_run(folder: str | Path) -> dict[str, Any]:
    """What `run_layout` must give, from the Hugging Face model and torch's AdamW alone."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    plain = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=LR,
        betas=(0.9, 0.999),
        eps=ADAM_EPS,
    )
    tokens = [torch.tensor(ids) for ids in fixed_tokens(model.config.vocab_size)]

    def log_probs(index: int) -> torch.Tensor:
        prompt, response = LENGTHS[index]
        logits = model(tokens[index][None]).logits[0, prompt - 1 : prompt + response - 1]
        return logits.log_softmax(-1).gather(-1, tokens[index][prompt:, None])[:, 0]

    with torch.no_grad():
        before = {index: log_probs(index) for index in range(len(LENGTHS))}
    losses, norms, gradients = [], [], []
    per_step = len(LENGTHS) // STEPS
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = (
            torch.stack([-log_probs(index).mean() for index in _samples_of_step(step)]).sum()
            / per_step
        )
        loss.backward()
        gradients.append(
            {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        )
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return {
        "log_probs": before,
        "losses": losses,
        "grad_norms": norms,
        "gradients": gradients,
        "after": saved_tensors(model),
    }


def saved_tensors(model: Any) -> dict[str, Any]:
    """The tensors of a Hugging Face model under their names on disk (experts are fused only in
    memory).
    """
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return folder_tensors(folder)


def folder_tensors(folder: str | Path) -> dict[str, Any]:
    """All tensors of a Hugging Face folder, read by safetensors itself."""
    from safetensors.torch import load_file

    return {
        name: tensor
        for path in Path(folder).glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def _samples_of_step(step: int) -> range:
    per_step = len(LENGTHS) // STEPS
    return range(step * per_step, (step + 1) * per_step)
