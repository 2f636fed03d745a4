"""Makes the sorting example's data, the same every time, with the addition example's tokenizer and
untrained model.

data/train.jsonl  {"prompt": [{"role": "user", "content": "sort 539152="}], "label": "123559"} for
                  GRPO
data/eval.jsonl   the same form, none of its rows in the other files
data/sft.jsonl    {"messages": [user "sort 539152=", assistant "123559"]}    for the warm-up
"""

from __future__ import annotations

import random
from pathlib import Path

from examples.addition.prepare import make_once, save_untrained, write_jsonl

DATA = Path(__file__).resolve().parent / "data"
NUM_TRAIN_ROWS, NUM_EVAL_ROWS = 4096, 512
SHORTEST, LONGEST = 6, 8
SEED = 1234


def make_rows(seed: int = SEED) -> tuple[list[str], list[str]]:
    """Returns (training, held-out) rows of digits, all different, every length equally often,
    digits may repeat.
    """
    rng = random.Random(seed)
    rows: dict[str, None] = {}
    while len(rows) < NUM_TRAIN_ROWS + NUM_EVAL_ROWS:
        rows["".join(rng.choices("0123456789", k=rng.randint(SHORTEST, LONGEST)))] = None
    return list(rows)[NUM_EVAL_ROWS:], list(rows)[:NUM_EVAL_ROWS]


def conversation(row: str) -> list[dict]:
    """Returns the question about `row` and its right answer."""
    return [
        {"role": "user", "content": f"sort {row}="},
        {"role": "assistant", "content": "".join(sorted(row))},
    ]


def prepare(folder: Path = DATA, seed: int = SEED) -> Path:
    """Writes data and model into `folder` when it is not complete yet, and returns it."""

    def make(folder: Path) -> None:
        train, held_out = make_rows(seed)
        for name, rows in (("train", train), ("eval", held_out)):
            turns = [conversation(row) for row in rows]
            write_jsonl(
                folder / f"{name}.jsonl",
                [{"prompt": [question], "label": answer["content"]} for question, answer in turns],
            )
        write_jsonl(folder / "sft.jsonl", [{"messages": conversation(row)} for row in train])
        save_untrained(folder / "model", seed)

    stamp = {
        "seed": seed,
        "rows": [NUM_TRAIN_ROWS, NUM_EVAL_ROWS],
        "lengths": [SHORTEST, LONGEST],
        "format": 1,
    }
    return make_once(folder, stamp, make)
