"""Makes the mixture-of-experts example's model: the addition example's data and tokenizer, a
Qwen3-MoE with four experts.

data/train.jsonl, eval.jsonl, sft.jsonl   as in examples/addition/prepare.py
data/model/                               a Hugging Face folder: 2 layers of Qwen3-MoE, random
                                          weights, two of four experts per token
"""

from __future__ import annotations

from pathlib import Path

from examples.addition.prepare import SEED, build_tokenizer, complete_model, make_once, write_data

DATA = Path(__file__).resolve().parent / "data"
NUM_EXPERTS, EXPERTS_PER_TOKEN = 4, 2


def build_model(tokenizer, seed: int = SEED):
    """Returns an untrained Qwen3MoeForCausalLM in float32: 2 layers, hidden 128, 4 heads, 4 experts
    of width 192, 0.8 M parameters.
    """
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        moe_intermediate_size=192,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(seed)
    return complete_model(Qwen3MoeForCausalLM(config), tokenizer, seed)


def prepare(folder: Path = DATA, seed: int = SEED) -> Path:
    """Writes data and model into `folder` when it is not complete yet, and returns it."""

    def make(folder: Path) -> None:
        write_data(folder, seed)
        tokenizer = build_tokenizer()
        tokenizer.save_pretrained(folder / "model")
        build_model(tokenizer, seed).save_pretrained(folder / "model", safe_serialization=True)

    return make_once(folder, {"seed": seed, "num_experts": NUM_EXPERTS, "format": 1}, make)
