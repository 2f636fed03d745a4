"""The Hugging Face tensors of a model and their shapes, from its `ModelShape` and the rules of its
family. No torch.

Letters: V vocabulary, H hidden size, I width of an MLP, E experts, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator

from slime.models.families import Rule
from slime.models.shape import ModelShape

# More tensors than any model has; a table of them still fits the memory.
MAX_TENSORS = 1_000_000
TIED_HEAD = "lm_head.weight"


def count_tensors(shape: ModelShape) -> int:
    """An upper bound of the number of tensors, without listing them."""
    return sum(
        len(rule.hf)
        * (shape.num_layers if "{layer}" in rule.megatron else 1)
        * (max(1, shape.num_experts) if "{expert}" in rule.megatron else 1)
        for rule in shape.family.rules
    )


def expected_hf_names(shape: ModelShape) -> Iterator[str]:
    """Every tensor that a Hugging Face folder of this shape may hold; of tied embeddings,
    lm_head.weight may be missing.
    """
    return (name for name, _ in expected_tensors(shape))


def expected_tensors(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every such tensor; one that two rules name comes twice."""
    dense = [layer for layer in range(shape.num_layers) if layer not in set(shape.sparse_layers)]
    layers = {"all": range(shape.num_layers), "dense": dense, "sparse": shape.sparse_layers}
    for rule in shape.family.rules:
        if rule.feature is not None and not getattr(shape, rule.feature):
            continue
        sizes = [_tensor_shape(name, rule, shape) for name in rule.hf]
        for layer in layers[rule.layers] if "{layer}" in rule.megatron else (0,):
            for expert in range(shape.num_experts) if "{expert}" in rule.megatron else (0,):
                for name, size in zip(rule.hf, sizes, strict=True):
                    yield name.format(layer=layer, expert=expert), size


def _tensor_shape(name: str, rule: Rule, shape: ModelShape) -> tuple[int, ...]:
    hidden = shape.hidden_size
    width = shape.moe_intermediate_size if "{expert}" in name else shape.intermediate_size
    module, kind = name.split(".")[-2:]
    if rule.how == "vocab":
        return (shape.vocab_size, hidden)
    if module.endswith("norm"):
        return (shape.head_dim if module in ("q_norm", "k_norm") else hidden,)
    rows, columns = {
        "q_proj": (shape.q_size, hidden),
        "k_proj": (shape.kv_size, hidden),
        "v_proj": (shape.kv_size, hidden),
        "o_proj": (hidden, shape.q_size),
        "gate_proj": (width, hidden),
        "up_proj": (width, hidden),
        "down_proj": (hidden, width),
        "gate": (shape.num_experts, hidden),
    }[module]
    return (rows, columns) if kind == "weight" else (rows,)
