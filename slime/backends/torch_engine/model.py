"""The decoder: Llama, Qwen2, Qwen3 and Qwen3-MoE in plain torch, with its keys and values in pages.

All token axes are flat: `[M]` is tokens of several prompts (prefill) or one token of each running
sequence (decode). In deterministic mode M is a multiple of SMALLEST_TILE and no row's result
depends on the others: matrix products run in proven tiles, attention sees only widths that follow
from the row's own length, everything else is elementwise or within one row.
"""

from __future__ import annotations

import dataclasses
from typing import cast

import torch
import torch.nn.functional as F

from slime.backends.torch_engine.kv_cache import PAGE_SIZE, KvCache
from slime.backends.torch_engine.rope import RotaryTable, apply_rotary
from slime.backends.torch_engine.row_tiles import prove_tile_sizes, tiled_linear
from slime.models.shape import ModelShape

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass
class LayerWeights:
    """Weights of one layer, fused where they multiply the same input; missing ones are None."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor | None
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor | None
    down_bias: torch.Tensor | None
    router: torch.Tensor | None
    expert_gate_up: torch.Tensor | None
    expert_down: torch.Tensor | None


@dataclasses.dataclass(frozen=True)
class DecodeGroup:
    """Rows [start, stop) of a decode batch whose page tables have the same width. `pages` [rows,
    width], `lengths` [rows].
    """

    start: int
    stop: int
    pages: torch.Tensor
    lengths: torch.Tensor


class Decoder:
    """Weights and forward passes. `weights` maps every Hugging Face name to a view into the fused
    tensors.
    """

    def __init__(self, config: ModelShape, *, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype
        self.weights: dict[str, torch.Tensor] = {}
        self._tile_sizes: tuple[int, ...] = ()
        self._rotary = RotaryTable(config.rope, config.head_dim, device=device, dtype=dtype)
        self._embedding = self._new(
            "model.embed_tokens.weight", config.vocab_size, config.hidden_size
        )
        self._layers = [self._new_layer(index) for index in range(config.num_layers)]
        self._final_norm = self._new("model.norm.weight", config.hidden_size)
        if config.tie_word_embeddings:
            self._head = self._embedding
        else:
            self._head = self._new("lm_head.weight", config.vocab_size, config.hidden_size)

    def _new(self, name: str, *shape: int) -> torch.Tensor:
        tensor = torch.empty(shape, device=self.device, dtype=self.dtype)
        self.weights[name] = tensor
        return tensor

    def _new_fused(self, names: list[str], sizes: list[int], *tail: int) -> torch.Tensor:
        fused = torch.empty((sum(sizes), *tail), device=self.device, dtype=self.dtype)
        self.weights.update(zip(names, fused.split(sizes), strict=True))
        return fused

    def _new_layer(self, index: int) -> LayerWeights:
        config, hidden = self.config, self.config.hidden_size
        prefix = f"model.layers.{index}."
        attention = prefix + "self_attn."
        qkv_sizes = [config.q_size, config.kv_size, config.kv_size]
        qkv_names = [attention + f"{part}_proj." for part in "qkv"]
        layer = LayerWeights(
            input_norm=self._new(prefix + "input_layernorm.weight", hidden),
            qkv=self._new_fused([name + "weight" for name in qkv_names], qkv_sizes, hidden),
            qkv_bias=self._new_fused([name + "bias" for name in qkv_names], qkv_sizes)
            if config.qkv_bias
            else None,
            q_norm=self._new(attention + "q_norm.weight", config.head_dim)
            if config.qk_norm
            else None,
            k_norm=self._new(attention + "k_norm.weight", config.head_dim)
            if config.qk_norm
            else None,
            o=self._new(attention + "o_proj.weight", hidden, config.q_size),
            o_bias=self._new(attention + "o_proj.bias", hidden) if config.linear_bias else None,
            post_norm=self._new(prefix + "post_attention_layernorm.weight", hidden),
            **dict.fromkeys(
                (
                    "gate_up",
                    "gate_up_bias",
                    "down",
                    "down_bias",
                    "router",
                    "expert_gate_up",
                    "expert_down",
                )
            ),
        )
        if index in config.sparse_layers:
            self._add_experts(layer, prefix + "mlp.")
        else:
            self._add_mlp(layer, prefix + "mlp.")
        return layer

    def _add_mlp(self, layer: LayerWeights, prefix: str) -> None:
        width, hidden = self.config.intermediate_size, self.config.hidden_size
        names = [prefix + "gate_proj.", prefix + "up_proj."]
        layer.gate_up = self._new_fused([name + "weight" for name in names], [width, width], hidden)
        layer.down = self._new(prefix + "down_proj.weight", hidden, width)
        if self.config.linear_bias:
            layer.gate_up_bias = self._new_fused([name + "bias" for name in names], [width, width])
            layer.down_bias = self._new(prefix + "down_proj.bias", hidden)

    def _add_experts(self, layer: LayerWeights, prefix: str) -> None:
        config, width, hidden = (
            self.config,
            self.config.moe_intermediate_size,
            self.config.hidden_size,
        )
        layer.router = self._new(prefix + "gate.weight", config.num_experts, hidden)
        layer.expert_gate_up = torch.empty(
            config.num_experts, 2 * width, hidden, device=self.device, dtype=self.dtype
        )
        layer.expert_down = torch.empty(
            config.num_experts, hidden, width, device=self.device, dtype=self.dtype
        )
        for index in range(config.num_experts):
            expert = f"{prefix}experts.{index}."
            self.weights[expert + "gate_proj.weight"] = layer.expert_gate_up[index, :width]
            self.weights[expert + "up_proj.weight"] = layer.expert_gate_up[index, width:]
            self.weights[expert + "down_proj.weight"] = layer.expert_down[index]

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(view.numel() * view.element_size() for view in self.weights.values())

    @property
    def is_deterministic(self) -> bool:
        """True after `make_deterministic`."""
        return bool(self._tile_sizes)

    @torch.inference_mode()
    def make_deterministic(self) -> None:
        """Proves tile sizes for every weight shape and uses them from now on. EngineError if the
        BLAS does not allow it.
        """
        matrices = [self._head]
        for layer in self._layers:
            matrices += [
                m
                for m in (layer.qkv, layer.o, layer.gate_up, layer.down, layer.router)
                if m is not None
            ]
            if layer.expert_gate_up is not None and layer.expert_down is not None:
                matrices += [layer.expert_gate_up[0], layer.expert_down[0]]
        self._tile_sizes = prove_tile_sizes(matrices)

    def _linear(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self._tile_sizes:
            return tiled_linear(rows, weight, bias, sizes=self._tile_sizes)
        return F.linear(rows, weight, bias)

    def _norm(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(rows, (rows.shape[-1],), weight, self.config.rms_norm_eps)

    def _project_qkv(
        self, layer: LayerWeights, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config = self.config
        fused = self._linear(self._norm(hidden, layer.input_norm), layer.qkv, layer.qkv_bias)
        fused = fused.view(fused.shape[0], -1, config.head_dim)
        queries_keys, values = fused.split(
            [config.num_heads + config.num_kv_heads, config.num_kv_heads], dim=1
        )
        if config.qk_norm:
            queries, keys = queries_keys.split([config.num_heads, config.num_kv_heads], dim=1)
            q_norm, k_norm = cast(Pair, (layer.q_norm, layer.k_norm))
            queries_keys = torch.cat((self._norm(queries, q_norm), self._norm(keys, k_norm)), dim=1)
        queries_keys = apply_rotary(queries_keys, cos, sin)
        queries, keys = queries_keys.split([config.num_heads, config.num_kv_heads], dim=1)
        return queries, keys, values

    def _finish_layer(
        self, layer: LayerWeights, hidden: torch.Tensor, attended: torch.Tensor
    ) -> torch.Tensor:
        hidden = hidden + self._linear(attended, layer.o, layer.o_bias)
        rows = self._norm(hidden, layer.post_norm)
        if layer.router is not None:
            return hidden + self._experts(layer, rows)
        gate_up, down = cast(Pair, (layer.gate_up, layer.down))
        gate, up = self._linear(rows, gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return hidden + self._linear(F.silu(gate).mul_(up), down, layer.down_bias)

    def _experts(self, layer: LayerWeights, rows: torch.Tensor) -> torch.Tensor:
        config = self.config
        gate_up, down = cast(Pair, (layer.expert_gate_up, layer.expert_down))
        router = cast(torch.Tensor, layer.router)
        probabilities = torch.softmax(self._linear(rows, router).float(), dim=-1)
        top, chosen = torch.topk(probabilities, config.num_experts_per_token, dim=-1)
        if config.norm_topk_prob:
            top = top / top.sum(dim=-1, keepdim=True)
        gates = torch.zeros_like(probabilities).scatter_(1, chosen, top).to(rows.dtype)
        output = torch.zeros_like(rows)
        for expert in range(config.num_experts):
            # The rows of one expert depend on the batch; deterministic mode computes all rows, with
            # weight 0 for the others.
            picked = None if self._tile_sizes else gates[:, expert].nonzero(as_tuple=True)[0]
            if picked is not None and picked.numel() == 0:
                continue
            inputs = rows if picked is None else rows[picked]
            gate, up = self._linear(inputs, gate_up[expert]).chunk(2, dim=-1)
            result = self._linear(F.silu(gate).mul_(up), down[expert])
            if picked is None:
                output += result * gates[:, expert : expert + 1]
            else:
                output.index_add_(0, picked, result * gates[picked, expert : expert + 1])
        return output

    def prefill(
        self,
        tokens: torch.Tensor,
        write_index: torch.Tensor,
        cache: KvCache,
        *,
        shape: tuple[int, int],
    ) -> torch.Tensor:
        """Returns hidden states [M, hidden] of `shape[0]` prompts padded on the right to `shape[1]`
        tokens, and stores keys and values.

        tokens, write_index: [M], M >= shape[0] * shape[1]; rows after that are padding to a whole
        tile. Padding has write_index in the trash page.
        """
        config = self.config
        count, width = shape
        used = count * width
        positions = torch.arange(tokens.shape[0], device=self.device) % width
        cos, sin = (
            table.unsqueeze(1) for table in self._rotary.lookup(positions, max_position=width)
        )
        hidden = F.embedding(tokens, self._embedding)
        repeat = config.num_heads // config.num_kv_heads
        for index, layer in enumerate(self._layers):
            queries, keys, values = self._project_qkv(layer, hidden, cos, sin)
            cache.write(index, write_index, keys, values)
            queries, keys, values = (
                part[:used].reshape(count, width, -1, config.head_dim).transpose(1, 2)
                for part in (queries, keys, values)
            )
            if repeat > 1:
                keys, values = (
                    keys.repeat_interleave(repeat, dim=1),
                    values.repeat_interleave(repeat, dim=1),
                )
            # Padding is on the right, so the causal mask alone keeps real tokens from seeing it.
            attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
            attended = attended.transpose(1, 2).reshape(used, config.q_size)
            if used < tokens.shape[0]:
                attended = torch.cat(
                    (attended, attended.new_zeros(tokens.shape[0] - used, config.q_size))
                )
            hidden = self._finish_layer(layer, hidden, attended)
        return hidden

    def decode(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        write_index: torch.Tensor,
        cache: KvCache,
        *,
        groups: list[DecodeGroup],
        max_position: int,
    ) -> torch.Tensor:
        """Returns hidden states [M, hidden] of one new token per sequence at `positions` [M];
        `groups` cover all M rows in order.
        """
        config = self.config
        repeat = config.num_heads // config.num_kv_heads
        cos, sin = (
            table.unsqueeze(1)
            for table in self._rotary.lookup(positions, max_position=max_position)
        )
        masks = [self._length_mask(group) for group in groups]
        hidden = F.embedding(tokens, self._embedding)
        for index, layer in enumerate(self._layers):
            queries, keys, values = self._project_qkv(layer, hidden, cos, sin)
            cache.write(index, write_index, keys, values)
            # Query heads that share keys become rows of one small attention problem per key head.
            queries = queries.reshape(-1, config.num_kv_heads, repeat, config.head_dim)
            parts = []
            for group, mask in zip(groups, masks, strict=True):
                group_keys, group_values = cache.gather(index, group.pages)
                part = F.scaled_dot_product_attention(
                    queries[group.start : group.stop], group_keys, group_values, attn_mask=mask
                )
                parts.append(part.reshape(group.stop - group.start, config.q_size))
            attended = parts[0] if len(parts) == 1 else torch.cat(parts)
            hidden = self._finish_layer(layer, hidden, attended)
        return hidden

    def _length_mask(self, group: DecodeGroup) -> torch.Tensor:
        columns = torch.arange(group.pages.shape[1] * PAGE_SIZE, device=self.device)
        beyond = columns[None, :] >= group.lengths[:, None]
        mask = torch.zeros(beyond.shape, device=self.device, dtype=self.dtype).masked_fill_(
            beyond, float("-inf")
        )
        return mask[:, None, None, :]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns float32 logits [M, vocab] of hidden states [M, hidden] (M a multiple of
        SMALLEST_TILE in deterministic mode).
        """
        return self._linear(self._norm(hidden, self._final_norm), self._head).float()
