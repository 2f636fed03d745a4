"""Which modules a transformer layer is made of: Megatron-core's local modules with our norm and
attention, or Transformer Engine's.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from slime.backends.megatron_utils.core_attention import PackedAttention

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig


class Norm(torch.nn.Module):
    """RMSNorm or LayerNorm over the last dimension, as `config.normalization` says.

    Its weights carry `sequence_parallel`, by which Megatron-core knows to sum their gradients over
    the tensor-parallel ranks; torch's own norms, which the local spec would use, do not and are
    refused with sequence parallelism.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object
    ) -> None:
        super().__init__()
        del unused
        if config.layernorm_zero_centered_gamma:
            raise ValueError("layernorm_zero_centered_gamma needs Transformer Engine's norm.")
        dtype = config.params_dtype
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype))
        has_bias = config.normalization == "LayerNorm"
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=dtype)) if has_bias else None
        for parameter in self.parameters():
            # Megatron's mark on a parameter
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is not None:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def build_block_spec(
    config: TransformerConfig, *, vp_stage: int | None = None, use_transformer_engine: bool = False
) -> Any:
    """The `TransformerBlockSubmodules` of this pipeline (and virtual pipeline) stage.

    use_transformer_engine: take the block as Megatron-core builds it for CUDA. That branch needs a
    GPU and is not run by this project's tests.
    """
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=use_transformer_engine,
        normalization=config.normalization,
        vp_stage=vp_stage,
    )
    if use_transformer_engine:
        return block
    return TransformerBlockSubmodules(
        layer_specs=[_with_own_modules(layer) for layer in block.layer_specs], layer_norm=Norm
    )


def _with_own_modules(layer: ModuleSpec) -> Any:
    layer = copy.deepcopy(layer)
    layer.submodules.input_layernorm = Norm
    layer.submodules.pre_mlp_layernorm = Norm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    for name in ("q_layernorm", "k_layernorm"):
        if getattr(attention, name) not in (None, IdentityOp):
            setattr(attention, name, Norm)
    return layer
