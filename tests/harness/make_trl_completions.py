"""Runs TRL's GRPOTrainer on the CPU for a few steps on the addition example's model and prompts, and
keeps the completions that it logged: `python tests/harness/make_trl_completions.py OUT`.

The file in tests/harness/data is of TRL 1.16.0 with transformers 5.24.0 and torch 2.13.0, in a
virtual environment of its own: `pip install trl torch==2.13.0`. Nothing of slime is imported.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

STEPS, GROUPS, SIZE = 4, 8, 4


def digits(completions: list[str], **columns: list) -> list[float]:
    """The share of a completion's characters that are digits: an untrained model gets some."""
    texts = [text.replace("<|end|>", "") for text in completions]
    return [sum(map(str.isdigit, text)) / max(1, len(text)) for text in texts]


def run(folder: Path, *, steps: int = STEPS) -> Path:
    """Trains below `folder` and returns the folder of the logged completions."""
    import datasets
    import torch
    from trl import GRPOConfig, GRPOTrainer

    from examples.addition.prepare import build_model, build_tokenizer, make_problems, question

    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    rows = [{"prompt": question(problem)} for problem in make_problems()[0][:256]]
    config = GRPOConfig(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=GROUPS * SIZE,
        num_generations=SIZE,
        max_completion_length=8,
        learning_rate=1e-3,
        logging_steps=1,
        log_completions=True,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        seed=1,
    )
    trainer = GRPOTrainer(
        model=build_model(tokenizer),
        reward_funcs=digits,
        args=config,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    return folder / "completions"


def main() -> int:
    """Runs, and copies the files to OUT."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="Folder that the parquet files are copied to.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder))
        shutil.copytree(found, options.out, dirs_exist_ok=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
