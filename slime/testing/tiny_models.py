"""Tiny Hugging Face folders (config, safetensors, fast tokenizer with chat template, generation
config) for tests, made in under a second.

    folder = make_tiny_checkpoint(tmp_path / "m", family="qwen3", num_hidden_layers=2,
    hidden_size=32)

The tokenizer is character level: one id per character of `chars` plus the special tokens below, so
that a test can read ids from text and back. Weights are random but seeded, wide enough that the
next-token distribution is far from uniform.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ("<|pad|>", "<|unk|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
DEFAULT_CHARS = string.digits + string.ascii_letters + string.punctuation + " \n"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] "
    "}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")


def make_char_tokenizer(chars: str = DEFAULT_CHARS, *, chat_template: str = CHAT_TEMPLATE):
    """Returns a `PreTrainedTokenizerFast` with one token per character; ids 0..4 are
    `SPECIAL_TOKENS`, then `chars` in order.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *dict.fromkeys(chars)))}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<|unk|>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|endoftext|>", "<|im_start|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=100_000,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def tiny_config(family: str, **overrides: Any):
    """Returns a transformers config of `family` (see FAMILIES) with small sizes; every keyword
    replaces one of its fields.
    """
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

    fields = dict(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        rms_norm_eps=1e-6,
        initializer_range=0.2,
        tie_word_embeddings=False,
        attention_dropout=0.0,
    )
    classes = {
        "llama": LlamaConfig,
        "qwen2": Qwen2Config,
        "qwen3": Qwen3Config,
        "qwen3_moe": Qwen3MoeConfig,
    }
    if family not in classes:
        raise ValueError(f"family {family!r} is not one of {FAMILIES}")
    if family == "qwen2":
        del fields["head_dim"]
    if family == "qwen3_moe":
        fields.update(
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
        )
    fields.update(overrides)
    return classes[family](**fields)


def make_tiny_checkpoint(
    folder: str | Path,
    family: str = "qwen3",
    *,
    vocab_size: int | None = None,
    chars: str = DEFAULT_CHARS,
    seed: int = 0,
    eos_token_ids: tuple[int, ...] = (4, 2),
    **overrides: Any,
) -> Path:
    """Returns `folder`, now holding a loadable checkpoint: model and tokenizer, float32
    safetensors, generation config.

    vocab_size: rows of the embedding; None means as many as the tokenizer has tokens, rounded up to
    a multiple of 8. eos_token_ids: what generation_config.json lists (4 is <|im_end|>, 2 is
    <|endoftext|>). overrides: fields of the transformers config (num_hidden_layers=...,
    tie_word_embeddings=True, ...).
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    folder = Path(folder)
    tokenizer = make_char_tokenizer(chars)
    if vocab_size is None:
        vocab_size = -(-len(tokenizer) // 8) * 8
    config = tiny_config(
        family,
        vocab_size=vocab_size,
        pad_token_id=0,
        eos_token_id=eos_token_ids[0],
        bos_token_id=None,
        **overrides,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Biases and norms start as zeros and ones; a converter that loses or swaps one must not go
    # unnoticed.
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.generation_config = GenerationConfig(eos_token_id=list(eos_token_ids), pad_token_id=0)
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
    return folder
