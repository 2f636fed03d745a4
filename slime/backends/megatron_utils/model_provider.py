"""Builds Megatron-core's GPTModel (and its config) from `args`."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import mpu, tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.accelerator import get_accelerator
from slime.backends.megatron_utils.layer_spec import build_block_spec
from slime.config.megatron import FIXED_ON_CPU
from slime.exceptions import ConfigError
from slime.models.rope import inverse_frequencies
from slime.models.shape import read_model_shape
from slime.utils.misc import load_function


def build_transformer_config(args: argparse.Namespace) -> TransformerConfig:
    """Returns the `TransformerConfig` of `args`: every field of its name that is not None, then
    what other options imply.

    Not given means Megatron-core's default, except: dropout 0, MoE dispatcher `alltoall` (the only
    one that takes rows of different lengths) and no MoE load-balancing loss.
    """
    given = vars(args)
    names = {field.name for field in dataclasses.fields(TransformerConfig) if field.init}
    fields = {name: given[name] for name in names if given.get(name) is not None}
    defaults = {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_layer_freq": 1,
    }
    fields = {**defaults, **fields, **_derived_fields(args, given)}
    if not given.get("group_query_attention") and given.get("num_query_groups") in (
        None,
        given.get("num_attention_heads"),
    ):
        fields.pop("num_query_groups", None)
    return TransformerConfig(**fields)


def virtual_pipeline_size(args: argparse.Namespace) -> int | None:
    """Model chunks per pipeline rank; None without an interleaved schedule."""
    per_stage = args.num_layers_per_virtual_pipeline_stage
    return (
        None
        if per_stage is None
        else args.num_layers // args.pipeline_model_parallel_size // per_stage
    )


def parallel_config(args: argparse.Namespace) -> dict[str, int]:
    """What the rollout side needs to split samples for these ranks."""
    group = args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size
    return {
        "dp_size": mpu.get_data_parallel_world_size(with_context_parallel=False),
        "cp_size": mpu.get_context_parallel_world_size(),
        "tp_size": mpu.get_tensor_model_parallel_world_size(),
        "vpp_size": virtual_pipeline_size(args) or 1,
        "microbatch_group_size_per_vp_stage": group,
    }


def params_dtype(args: argparse.Namespace) -> torch.dtype:
    """The dtype of the model's parameters: bfloat16, float16 or float32."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32


def padded_vocab_size(vocab_size: int, *, divisible_by: int, tp_size: int) -> int:
    """Rows of the embedding table: `vocab_size` rounded up to a multiple of `divisible_by *
    tp_size`.
    """
    multiple = divisible_by * tp_size
    return -(-vocab_size // multiple) * multiple


def build_model(
    args: argparse.Namespace,
    config: TransformerConfig,
    *,
    role: str = "actor",
    vp_stage: int | None = None,
) -> GPTModel:
    """Returns this rank's part of the model: one pipeline (and virtual pipeline) stage, weights
    zero until something is loaded.

    role: "critic" replaces the output layer by a linear layer to one value per token (float32 `[1,
    T, 1]`).
    """
    pre_process = mpu.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
    post_process = mpu.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
    if args.custom_model_provider_path is not None:
        provider = load_function(args.custom_model_provider_path)
        extra = (
            {"vp_stage": vp_stage} if "vp_stage" in inspect.signature(provider).parameters else {}
        )
        model = provider(pre_process=pre_process, post_process=post_process, **extra)
    else:
        model = _gpt_model(
            args,
            config,
            role=role,
            vp_stage=vp_stage,
            pre_process=pre_process,
            post_process=post_process,
        )
    if post_process and role == "critic":
        model.output_layer = ValueHead(config)
    elif post_process:
        _mask_padded_vocab(model.output_layer, args.vocab_size, dtype=config.params_dtype)
    freeze_model_params(model, args)
    return model


def _gpt_model(
    args: argparse.Namespace,
    config: TransformerConfig,
    *,
    role: str,
    vp_stage: int | None,
    pre_process: bool,
    post_process: bool,
) -> GPTModel:
    rope = read_model_shape(args.hf_checkpoint).rope
    tied = not args.untie_embeddings_and_output_weights and role != "critic"
    model = GPTModel(
        config=config,
        transformer_layer_spec=build_block_spec(
            config, vp_stage=vp_stage, use_transformer_engine=_use_transformer_engine(args)
        ),
        vocab_size=padded_vocab_size(
            args.vocab_size,
            divisible_by=args.make_vocab_size_divisible_by,
            tp_size=args.tensor_model_parallel_size,
        ),
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=tied,
        position_embedding_type=args.position_embedding_type or "rope",
        rotary_percent=1.0 if args.rotary_percent is None else args.rotary_percent,
        rotary_base=10000.0 if args.rotary_base is None else args.rotary_base,
        vp_stage=vp_stage,
    )
    if rope.rope_type != "default":
        # Megatron-core scales with fixed constants only.
        rotary = model.rotary_pos_emb
        rotary.inv_freq = inverse_frequencies(rope, config.kv_channels).to(rotary.inv_freq.device)
    return model


class ValueHead(torch.nn.Linear):
    """Hidden state -> one value per token. Same parameters on every tensor-parallel rank."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(
            config.hidden_size,
            1,
            bias=False,
            dtype=config.params_dtype,
            device=get_accelerator().device(),
        )
        self.sequence_parallel = config.sequence_parallel
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            self.weight.copy_(
                torch.empty(1, config.hidden_size).normal_(
                    0.0, config.init_method_std, generator=generator
                )
            )

    def forward(  # type: ignore[override]  # called as Megatron's output layer, not as Linear
        self, hidden: torch.Tensor, weight: object = None, runtime_gather_output: object = None
    ) -> tuple[torch.Tensor, None]:
        """`[T, 1, 1]` float32 and no bias, in the form of Megatron's output layer."""
        del weight, runtime_gather_output
        if self.sequence_parallel:
            # Every rank computes the whole loss from the gathered row, so gradients are not summed
            # again.
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False
            )
        return super().forward(hidden).float(), None


def freeze_model_params(model: torch.nn.Module, args: argparse.Namespace) -> None:
    """Sets `requires_grad`: only names matching `only_train_params_name_list` train; those matching
    `freeze_params_name_list` do not.

    Both are lists of regular expressions, searched in Megatron parameter names. Raises
    `ConfigError` where both are given.
    """
    given = vars(args)
    only, frozen = given.get("only_train_params_name_list"), given.get("freeze_params_name_list")
    if only and frozen:
        raise ConfigError(
            "--only-train-params-name-list and --freeze-params-name-list exclude each other. Give "
            "one."
        )
    for name, parameter in model.named_parameters():
        if only:
            parameter.requires_grad_(any(re.search(pattern, name) for pattern in only))
        elif frozen and any(re.search(pattern, name) for pattern in frozen):
            parameter.requires_grad_(False)


def _use_transformer_engine(args: argparse.Namespace) -> bool:
    return get_accelerator().name == "cuda" and vars(args).get("transformer_impl") != "local"


def _derived_fields(args: argparse.Namespace, given: dict[str, Any]) -> dict[str, Any]:
    dtype = params_dtype(args)
    virtual = virtual_pipeline_size(args)
    fields: dict[str, Any] = {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "virtual_pipeline_model_parallel_size": virtual,
        # With two ranks, batched messages of the interleaved schedule get mixed up and training is
        # silently wrong.
        "overlap_p2p_comm": virtual is not None,
        "batch_p2p_comm": virtual is None,
        # Rows of different micro-batches differ in length; the stages send each other the lengths.
        "variable_seq_lengths": args.pipeline_model_parallel_size > 1,
        # Every weight comes from a checkpoint; the loaders check that none is missing.
        "init_method": torch.nn.init.zeros_,
        "output_layer_init_method": torch.nn.init.zeros_,
        "embedding_init_method": torch.nn.init.zeros_,
    }
    if given.get("swiglu"):
        fields.update(gated_linear_unit=True, activation_func=F.silu)
    if given.get("disable_bias_linear") is not None:
        fields["add_bias_linear"] = not given["disable_bias_linear"]
    if get_accelerator().name == "cpu":
        fields.update(FIXED_ON_CPU, use_cpu_initialization=True)
    return fields


def _mask_padded_vocab(
    output_layer: torch.nn.Module, vocab_size: int, *, dtype: torch.dtype
) -> None:
    """Gives the table's padding rows no probability: a padding token that took part in the softmax
    would make the trainer's log-probs differ from the engine's, by an amount that depends on the
    tensor-parallel size.
    """
    local = output_layer.output_size_per_partition
    first_padded = vocab_size - mpu.get_tensor_model_parallel_rank() * local
    if first_padded >= local:
        return
    # Finite, so that probability * log-probability is 0 and not NaN.
    lowest = -1e30 if dtype != torch.float16 else -1e4

    def mask(
        module: torch.nn.Module, inputs: object, output: tuple[torch.Tensor, Any]
    ) -> tuple[torch.Tensor, Any]:
        logits, bias = output
        logits[..., max(first_padded, 0) :] = lowest
        return logits, bias

    output_layer.register_forward_hook(mask)
