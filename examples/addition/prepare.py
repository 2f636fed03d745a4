"""Makes everything the addition example needs, from nothing and the same every time: problems,
tokenizer, untrained checkpoint.

data/train.jsonl   {"prompt": [{"role": "user", "content": "47+38="}], "label": "85"} for GRPO
                   data/eval.jsonl
the same form; none of its problems is in train.jsonl or sft.jsonl data/sft.jsonl {"messages":
[user, assistant]}
for the warm-up data/model/        a Hugging Face folder: 2-layer Qwen3, random weights, character
                                   tokenizer with a
chat template
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent / "data"
NUM_EVAL_PROBLEMS = 512
SEED = 1234
MAX_SUM = 99

PAD, END, USER, ASSISTANT, SYSTEM, TOOL, UNKNOWN = SPECIAL_TOKENS = (
    "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|unknown|>",
)  # fmt: skip

# Append-only: what a turn rendered to never changes when a later turn is added.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] -}}"
    "{%- if message['role'] == 'assistant' -%}{{- '<|end|>' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def make_problems(seed: int = SEED) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Returns (training, held-out) pairs of two-digit operands with a two-digit sum, disjoint, in a
    seeded order.

    Together they are all 3240 such pairs. a + b and b + a are different problems.
    """
    problems = [(a, b) for a in range(10, 100) for b in range(10, 100) if a + b <= MAX_SUM]
    random.Random(seed).shuffle(problems)
    return problems[NUM_EVAL_PROBLEMS:], problems[:NUM_EVAL_PROBLEMS]


def question(problem: tuple[int, int]) -> str:
    """Returns the user's message, for instance "47+38="."""
    return f"{problem[0]}+{problem[1]}="


def solution(problem: tuple[int, int]) -> str:
    """Returns the right response without its end token, for instance "85"."""
    return str(sum(problem))


def write_jsonl(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def write_data(folder: Path, seed: int = SEED) -> None:
    """Writes train.jsonl, eval.jsonl and sft.jsonl into `folder`."""
    train, held_out = make_problems(seed)
    for name, problems in (("train", train), ("eval", held_out)):
        records = [
            {"prompt": [{"role": "user", "content": question(problem)}], "label": solution(problem)}
            for problem in problems
        ]
        write_jsonl(folder / f"{name}.jsonl", records)
    conversations = [
        {
            "messages": [
                {"role": "user", "content": question(problem)},
                {"role": "assistant", "content": solution(problem)},
            ]
        }
        for problem in train
    ]
    write_jsonl(folder / "sft.jsonl", conversations)


def build_tokenizer():
    """Returns a Hugging Face fast tokenizer: one token per printable ASCII character or newline,
    seven special tokens, 104 ids with a spare.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {
        token: index for index, token in enumerate([*SPECIAL_TOKENS, *characters, "<|spare|>"])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[USER, ASSISTANT, SYSTEM, TOOL],
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(tokenizer, seed: int = SEED):
    """Returns an untrained Qwen3ForCausalLM in float32: 2 layers, hidden 128, 4 heads, about 0.4 M
    parameters.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        attention_bias=False,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(seed)
    return complete_model(Qwen3ForCausalLM(config), tokenizer, seed)


def complete_model(model, tokenizer, seed: int):
    """Returns `model` with a padding embedding like any other row, and with the tokenizer's end and
    padding tokens for generation.
    """
    import torch
    from transformers import GenerationConfig

    with torch.no_grad():
        # transformers leaves the padding row at zero, where RMSNorm's gradient is a thousand times
        # that of any other row: an untrained model that samples the padding token would be trained
        # on that token alone.
        padding = model.get_input_embeddings().weight[tokenizer.pad_token_id]
        padding.normal_(
            std=model.config.initializer_range, generator=torch.Generator().manual_seed(seed)
        )
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id],
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=1.0,
    )
    return model


def make_once(folder: Path, stamp: dict[str, Any], make: Callable[[Path], None]) -> Path:
    """Lets `make` fill `folder` unless a call with an equal `stamp` did so whole, and returns it.
    The last file written marks completeness.
    """
    marker = folder / "complete.json"
    if marker.exists() and json.loads(marker.read_text(encoding="utf-8")) == stamp:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    marker.unlink(missing_ok=True)
    make(folder)
    marker.write_text(json.dumps(stamp), encoding="utf-8")
    return folder


def save_untrained(folder: Path, seed: int) -> None:
    """Writes the tokenizer and the untrained model into `folder`."""
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    build_model(tokenizer, seed).save_pretrained(folder, safe_serialization=True)


def prepare(folder: Path = DATA, seed: int = SEED) -> Path:
    """Writes data and model into `folder` when it is not complete yet, and returns it."""

    def make(folder: Path) -> None:
        write_data(folder, seed)
        save_untrained(folder / "model", seed)

    return make_once(
        folder, {"seed": seed, "num_eval_problems": NUM_EVAL_PROBLEMS, "format": 2}, make
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Write the addition example's problems, tokenizer and untrained model."
    )
    parser.add_argument("--out", type=Path, default=DATA, help="Folder to write to.")
    parser.add_argument(
        "--seed", type=int, default=SEED, help="Seed of the split and of the weights."
    )
    options = parser.parse_args()
    print(prepare(options.out, options.seed))
