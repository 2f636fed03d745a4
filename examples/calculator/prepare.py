"""Makes the calculator example's data, the same every time, with the addition example's tokenizer
and untrained model.

data/train.jsonl  {"prompt": [{"role": "user", "content": "47*38="}], "label": "1786"}    for GRPO
data/eval.jsonl   the same form, none of its problems in the other files
data/sft.jsonl    {"messages": [user "47*38=", assistant "[47*38]", tool "1786", assistant "1786"]}
                  for the warm-up
"""

from __future__ import annotations

import random
from pathlib import Path

from examples.addition.prepare import make_once, save_untrained, write_jsonl

DATA = Path(__file__).resolve().parent / "data"
NUM_EVAL_PROBLEMS = 128
SEED = 1234


def make_problems(seed: int = SEED) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Returns (training, held-out) pairs of two-digit factors, disjoint, together all 8100 of them,
    in a seeded order.
    """
    problems = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(problems)
    return problems[NUM_EVAL_PROBLEMS:], problems[:NUM_EVAL_PROBLEMS]


def conversation(problem: tuple[int, int]) -> list[dict]:
    """Returns the four messages of a right solution: question, call, the tool's result, answer."""
    a, b = problem
    texts = (
        ("user", f"{a}*{b}="),
        ("assistant", f"[{a}*{b}]"),
        ("tool", str(a * b)),
        ("assistant", str(a * b)),
    )
    return [{"role": role, "content": content} for role, content in texts]


def prepare(folder: Path = DATA, seed: int = SEED) -> Path:
    """Writes data and model into `folder` when it is not complete yet, and returns it."""

    def make(folder: Path) -> None:
        train, held_out = make_problems(seed)
        for name, problems in (("train", train), ("eval", held_out)):
            rows = [
                {"prompt": conversation(problem)[:1], "label": str(problem[0] * problem[1])}
                for problem in problems
            ]
            write_jsonl(folder / f"{name}.jsonl", rows)
        write_jsonl(
            folder / "sft.jsonl", [{"messages": conversation(problem)} for problem in train]
        )
        save_untrained(folder / "model", seed)

    return make_once(
        folder, {"seed": seed, "num_eval_problems": NUM_EVAL_PROBLEMS, "format": 1}, make
    )
