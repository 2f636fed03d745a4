"""Runs as other frameworks write them, small and sound: what `slime audit` must stay silent on, and
what a test damages in one place.

Every sample says who it is: response "The sum of problem 3, attempt 1 ..." is of prompt 3,
generation 1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

GROUPS, SIZE = 6, 4
WORDS = (
    "first take apart carry digit units tens add both check again so total comes out careful "
    "write number column sum left right half twice nearly exactly count step result plain shorter"
).split()


def rewards_of(step: int) -> np.ndarray:
    """[GROUPS * SIZE] rewards of 0 and 1: every group has both, and groups differ in their means."""
    rng = np.random.default_rng(100 + step)
    rewards = np.zeros((GROUPS, SIZE))
    for group in range(GROUPS):
        rewards[group, : 1 + group % (SIZE - 1)] = 1.0
        rng.shuffle(rewards[group])
    return rewards.reshape(-1)


def grpo(rewards: np.ndarray, *, size: int = SIZE, epsilon: float = 1e-6) -> np.ndarray:
    """GRPO's advantages of consecutive groups."""
    groups = rewards.reshape(-1, size)
    centred = groups - groups.mean(axis=1, keepdims=True)
    return (centred / (groups.std(axis=1, ddof=1, keepdims=True) + epsilon)).reshape(-1)


def prompt_of(step: int, group: int) -> str:
    return f"Problem {step}.{group}: what is {10 + group} plus {20 + step}?"


def response_of(step: int, i: int) -> str:
    rng = np.random.default_rng(1000 * step + i)
    words = " ".join(rng.choice(WORDS, size=int(rng.integers(14, 40))))
    return f"Attempt {i % SIZE} at problem {step}.{i // SIZE}: {words}."


def samples_of(step: int) -> list[dict[str, Any]]:
    """One step of GROUPS groups of SIZE, with all that any framework records of a sample."""
    rng = np.random.default_rng(7 + step)
    rewards = rewards_of(step)
    advantages = grpo(rewards)
    samples = []
    for i in range(GROUPS * SIZE):
        response = response_of(step, i)
        length = len(response.split())
        prompt_ids = [1000 + i // SIZE, 2000 + step, 3]
        ids = rng.integers(10, 900, size=length).tolist()
        log_probs = -rng.exponential(0.8, size=length)
        samples.append(
            {
                "prompt": prompt_of(step, i // SIZE),
                "response": response,
                "label": str(30 + i // SIZE + step),
                "group": step * GROUPS + i // SIZE,
                "index": step * GROUPS * SIZE + i,
                "reward": float(rewards[i]),
                "advantage": float(advantages[i]),
                "prompt_ids": prompt_ids,
                "ids": ids,
                "mask": [1] * length,
                "rollout_log_probs": log_probs.tolist(),
                "log_probs": (log_probs + rng.normal(0, 0.004, size=length)).clip(max=0).tolist(),
            }
        )
    return samples


def slime_sample(one: dict[str, Any], step: int) -> dict[str, Any]:
    """A sample as `Sample.to_dict` has it."""
    return {
        "group_index": one["group"],
        "index": one["index"],
        "rollout_id": None,
        "prompt": one["prompt"],
        "tokens": [*one["prompt_ids"], *one["ids"]],
        "response": one["response"],
        "response_length": len(one["ids"]),
        "label": one["label"],
        "reward": one["reward"],
        "loss_mask": one["mask"],
        "weight_versions": [str(step)],
        "rollout_log_probs": one["rollout_log_probs"],
        "remove_sample": False,
        "status": one.get("status", "completed"),
        "metadata": {},
        "spec_info": {},
        "prefix_cache_info": {},
    }


def write_slime_rollout(folder: Path, step: int, samples: list[dict[str, Any]]) -> Path:
    """Upstream slime's and miles' rollout dump."""
    import torch

    path = folder / "rollout_data" / f"{step}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = [slime_sample(one, step) if "group_index" not in one else one for one in samples]
    torch.save({"rollout_id": step, "samples": content}, path)
    return path


def write_slime_train(folder: Path, step: int, samples: list[dict[str, Any]], ranks: int = 2):
    """Upstream's train dumps, a file per rank; samples are dealt to the ranks in turn."""
    import torch

    path = folder / "train_data"
    path.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        mine = samples[rank::ranks]

        def tensors(name: str, mine=mine) -> list:
            return [torch.tensor(one[name], dtype=torch.float32) for one in mine]

        data = {
            "tokens": [torch.tensor([*one["prompt_ids"], *one["ids"]]) for one in mine],
            "response_lengths": [len(one["ids"]) for one in mine],
            "loss_masks": [torch.tensor(one["mask"], dtype=torch.int32) for one in mine],
            "sample_indices": [one["index"] for one in mine],
            "raw_reward": [one["reward"] for one in samples],
            "rollout_log_probs": tensors("rollout_log_probs"),
            "log_probs": tensors("log_probs"),
            "advantages": [torch.full((len(one["ids"]),), one["advantage"]) for one in mine],
        }
        if "truncated" in samples[0]:
            data["truncated"] = [one["truncated"] for one in mine]
        if "normalized" in samples[0]:
            data["rewards"] = [one["normalized"] for one in mine]
        torch.save(
            {"rollout_id": step, "rank": rank, "rollout_data": data}, path / f"{step}_{rank}.pt"
        )


def write_lines(path: Path, records: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_verl(folder: Path, step: int, samples: list[dict[str, Any]]) -> Path:
    """verl's rollout_data_dir."""
    records = [
        {
            "input": one["prompt"],
            "output": one["response"],
            "gts": one["label"],
            "score": one["reward"],
            "step": step,
            "acc": one["reward"] > 0,
        }
        for one in samples
    ]
    return write_lines(folder / f"{step}.jsonl", records)


def write_nemo(folder: Path, step: int, samples: list[dict[str, Any]], *, batch: bool) -> Path:
    """NeMo-RL's train_data_step<N>.jsonl: all columns on one line, or an object per line."""
    width = max(len(one["prompt_ids"]) + len(one["ids"]) for one in samples)

    def padded(head: int, values: list, tail: float = 0) -> list:
        return [0] * head + values + [tail] * (width - head - len(values))

    columns: dict[str, list] = {
        "content": [f"user: {one['prompt']}\nassistant: {one['response']}" for one in samples],
        "rewards": [one["reward"] for one in samples],
        "input_lengths": [len(one["prompt_ids"]) + len(one["ids"]) for one in samples],
        "token_ids": [padded(0, [*one["prompt_ids"], *one["ids"]]) for one in samples],
        "token_loss_mask": [padded(3, one["mask"]) for one in samples],
        "sample_loss_mask": [1.0 for _ in samples],
        "advantages": [padded(3, [one["advantage"]] * len(one["ids"])) for one in samples],
        "generation_logprobs": [padded(3, one["rollout_log_probs"]) for one in samples],
        "prev_logprobs": [padded(3, one["log_probs"]) for one in samples],
    }
    path = folder / f"train_data_step{step}.jsonl"
    if batch:
        return write_lines(path, [columns])
    lines = [{name: [values[i]] for name, values in columns.items()} for i in range(len(samples))]
    return write_lines(path, lines)


def write_trl(folder: Path, step: int, samples: list[dict[str, Any]]) -> Path:
    """TRL's completions_<step>.parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / "completions" / f"completions_{step:05d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    table = {
        "step": [step] * len(samples),
        "prompt": [one["prompt"] for one in samples],
        "completion": [one["response"] for one in samples],
        "exact_sum": [one["reward"] for one in samples],
        "advantage": [one["advantage"] for one in samples],
    }
    pq.write_table(pa.table(table), path)
    return path


MAPPING = {
    "step": "iteration",
    "prompt": "question",
    "response": "text",
    "label": "meta.gold",
    "reward": "r",
    "group": "uid",
    "advantage": "adv",
    "response_tokens": "ids",
    "loss_mask": "mask",
    "rollout_log_probs": "old",
    "log_probs": "new",
    "weight_version": "version",
    "finish_reason": "finish",
}


def mapped_record(one: dict[str, Any], step: int) -> dict[str, Any]:
    """A record with keys of its own, for MAPPING."""
    return {
        "iteration": step,
        "question": one["prompt"],
        "text": one["response"],
        "meta": {"gold": one["label"]},
        "r": one["reward"],
        "uid": f"u{one['group']}",
        "adv": one["advantage"],
        "ids": one["ids"],
        "mask": one["mask"],
        "old": one["rollout_log_probs"],
        "new": one["log_probs"],
        "version": step,
        "finish": one.get("finish", "stop"),
    }


def write_mapped(
    folder: Path, samples_by_step: dict[int, list[dict[str, Any]]]
) -> tuple[Path, Path]:
    """(JSON lines of all steps, the mapping's file)."""
    records = [
        mapped_record(one, step) for step, samples in samples_by_step.items() for one in samples
    ]
    keys = folder / "keys.json.txt"
    data = write_lines(folder / "run.jsonl", records)
    keys.write_text(json.dumps(MAPPING), encoding="utf-8")
    return data, keys
