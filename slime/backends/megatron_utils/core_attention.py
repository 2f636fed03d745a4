"""Core attention for packed (THD) rows by torch's scaled_dot_product_attention, with and without
context parallelism.

Megatron-core's own local attention refuses packed rows and context parallelism; Transformer
Engine's runs on CUDA only. This is a layer-spec module, Megatron-core's extension point.
Differences to the kernels of Transformer Engine: exact fp32 on the CPU, K and V are gathered over
the context-parallel ranks instead of being sent around a ring.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule

from slime.data.packed_plan import Bucket, packed_plan

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig


class PackedAttention(MegatronModule):
    """Causal softmax attention inside each sequence of a packed row."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        del layer_number, attn_mask_type, attention_type, cp_comm_type
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self.cp_group = groups.cp
        self.softmax_scale = (
            softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        )
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """`[T, heads * d]` from query `[T, heads, d]`, key and value `[T, kv_heads, d]`;
        `packed_seq_params` is required.
        """
        del attention_mask, attn_mask_type
        if packed_seq_params is None or attention_bias is not None:
            raise ValueError(
                "PackedAttention takes packed rows (packed_seq_params) without an attention bias."
            )
        cp_size, cp_rank = self.cp_group.size(), self.cp_group.rank()
        plan = packed_plan(packed_seq_params.cu_seqlens_q, cp_size=cp_size, cp_rank=cp_rank)
        if query.shape[0] != plan.num_local_tokens:
            raise ValueError(
                f"The row has {query.shape[0]} tokens, its cu_seqlens cover "
                f"{plan.num_local_tokens}."
            )
        if cp_size > 1:
            both = gather_from_sequence_parallel_region(
                torch.cat((key, value), dim=-1),
                tensor_parallel_output_grad=True,
                group=self.cp_group,
            )
            key, value = both[..., : key.shape[-1]], both[..., key.shape[-1] :]
        outputs = [self._attend(query, key, value, bucket) for bucket in plan.buckets]
        flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return flat if plan.restore_T is None else flat.index_select(0, plan.restore_T)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bucket: Bucket
    ) -> torch.Tensor:
        """`[B * Lq, heads * d]`, padded, in the bucket's order."""
        key_rows = bucket.key_rows if bucket.key_rows is not None else bucket.query_rows
        q = _dense(query, bucket.query_rows, bucket.shape)
        k = _dense(key, key_rows, bucket.shape)
        v = _dense(value, key_rows, bucket.shape)
        dropout = self.dropout if self.training else 0.0
        arguments: dict[str, Any] = {
            "attn_mask": bucket.mask,
            "dropout_p": dropout,
            "is_causal": bucket.mask is None,
            "scale": self.softmax_scale,
            "enable_gqa": q.shape[1] != k.shape[1],
        }
        if dropout > 0.0:
            # Each tensor-parallel rank holds other heads, so it draws from its own stream.
            with get_cuda_rng_tracker().fork():
                out = F.scaled_dot_product_attention(q, k, v, **arguments)
        else:
            out = F.scaled_dot_product_attention(q, k, v, **arguments)
        return out.transpose(1, 2).reshape(bucket.shape[0] * bucket.shape[1], -1)


def _dense(tensor: torch.Tensor, rows: torch.Tensor | None, shape: tuple[int, int]) -> torch.Tensor:
    """`[B, heads, L, d]` of `tensor` `[T, heads, d]`."""
    if rows is None:
        return tensor.view(*shape, *tensor.shape[1:]).transpose(1, 2)
    return (
        tensor.index_select(0, rows.flatten()).view(*rows.shape, *tensor.shape[1:]).transpose(1, 2)
    )
