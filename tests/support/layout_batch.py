"""The recorded rollout batch of the layout matrix. `python tests/support/layout_batch.py` writes it
again; the file is committed.

Every value names its place: a response token is 20 + (7 * sample + 3 * place) % 80, a reward and a
mask stand in ROWS. The batch holds what breaks layouts: one-token responses, sequences shorter than
two chunks per context-parallel rank, lengths that nothing divides, groups of four, three, two and
one, rejected members with huge rewards, turns of an environment that are not trained, a rollout
whose tokens are all masked, and rollouts that are several samples.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "distributed" / "data"
TEMPLATE = str(FOLDER / "layout_batch_{rollout_id}.jsonl")
ROLLOUT_ID = 0
NUM_LAYERS = 4  # two pipeline stages of two virtual ones
POLICY_SEED, REFERENCE_SEED = 0, 5


@dataclasses.dataclass(frozen=True)
class Row:
    """One sample. `mask` is one character per response token: x is trained, . is not."""

    rollout: int
    group: int
    prompt: int
    mask: str
    reward: float
    invalid: str | None = None
    removed: bool = False
    rounds: int = 1

    @property
    def response(self) -> int:
        return len(self.mask)


# Six valid rollouts are a step; the last one is left over (or a third step, with
# --keep-trailing-rollouts).
ROWS = (
    Row(100, 0, 5, "xxxxxxx", 1.0),
    Row(101, 0, 5, "x", 0.0),
    Row(104, 1, 2, "xxxxxx", 0.75),  # rollout 104 is three samples
    Row(104, 1, 8, "xx.", 0.75),
    Row(104, 1, 3, "x", 0.75),
    Row(102, 0, 5, "xxxxxxxxxxxxx", 0.5),
    Row(106, 1, 2, "xxxxx", 900.0, invalid="too_short"),
    Row(103, 0, 5, "xxx...xxx", 0.0, rounds=2),
    Row(105, 1, 2, "xxxxxxxxxxx", 0.25),
    Row(107, 2, 17, "xx", 1.0),
    Row(108, 2, 17, "xxxx.....xxxx...xxx", 0.0, rounds=3),
    Row(109, 3, 1, "x", 0.25),  # two tokens in all
    Row(113, 5, 4, "xx", -900.0, invalid="aborted"),
    Row(110, 3, 1, "xx", 1.0),
    Row(111, 4, 3, "xxxx", 1.0, removed=True),
    Row(112, 4, 3, ".xxxxxxxx.", 0.25),
    Row(114, 2, 4, "xxxxxxxx", 0.5),
    Row(114, 2, 12, "xx.", 0.5),
)


def tokens_of(index: int) -> list[int]:
    """Token ids of sample `index`: the prompt says the group, the response the sample."""
    row = ROWS[index]
    prompt = [20 + (11 * row.group + 5 * place) % 80 for place in range(row.prompt)]
    return prompt + [20 + (7 * index + 3 * place) % 80 for place in range(row.response)]


def values_of(index: int) -> list[float]:
    """A critic's values of sample `index`, one per response token."""
    return [0.02 * index + 0.1 * ((3 * place) % 5) - 0.3 for place in range(ROWS[index].response)]


def teacher_log_probs_of(index: int) -> list[float]:
    """A teacher's log-probs of sample `index`, one per response token, in nats."""
    return [-4.0 - 0.25 * ((index + 2 * place) % 7) for place in range(ROWS[index].response)]


def engine_log_probs(policy_log_probs: list[float], index: int) -> list[float]:
    """The engine's log-probs: the policy's, off by up to a quarter of a nat; 0 where the
    environment wrote.
    """
    places = zip(policy_log_probs, ROWS[index].mask, range(len(policy_log_probs)), strict=True)
    return [
        round(value + 0.05 * ((index + 3 * place) % 9 - 4), 6) if kept == "x" else 0.0
        for value, kept, place in places
    ]


def make_folders(root: Path, families: tuple[str, ...]) -> dict[str, Path]:
    """{family, family-ref: folder}: the policy's and the reference's checkpoint of each family."""
    from support.tiny_models import make_tiny_checkpoint

    seeds = {"": POLICY_SEED, "-ref": REFERENCE_SEED}
    return {
        family + suffix: make_tiny_checkpoint(
            root / (family + suffix), family, num_hidden_layers=NUM_LAYERS, seed=seed
        )
        for family in families
        for suffix, seed in seeds.items()
    }


def make_samples(policy_log_probs: list[list[float]]) -> list[Any]:
    """The batch as slime's samples."""
    from slime.data.sample import Sample, Status

    return [
        Sample(
            group_index=row.group,
            index=index,
            rollout_id=row.rollout,
            tokens=tokens_of(index),
            response_length=row.response,
            label=str(index),
            reward=row.reward,
            loss_mask=[int(kept == "x") for kept in row.mask],
            rollout_log_probs=engine_log_probs(policy_log_probs[index], index),
            teacher_log_probs=teacher_log_probs_of(index),
            remove_sample=row.removed,
            status=Status.TRUNCATED if row.response == 13 else Status.COMPLETED,
            finish_reason="length" if row.response == 13 else "stop",
            valid=row.invalid is None,
            invalid_reason=row.invalid,
            metadata={
                "round_number": row.rounds,
                "source_name": "odd" if row.group % 2 else "even",
            },
        )
        for index, row in enumerate(ROWS)
    ]


def read_records() -> list[dict[str, Any]]:
    """The samples of the committed file as plain JSON objects."""
    lines = Path(TEMPLATE.format(rollout_id=ROLLOUT_ID)).read_text().splitlines()
    return [json.loads(line) for line in lines[1:]]


def write_rollouts(folder: Path) -> str:
    """Four rollouts from the recorded one: as it is, with every token masked, with every sample
    rejected, as it is. Returns the template.
    """
    header, *lines = Path(TEMPLATE.format(rollout_id=ROLLOUT_ID)).read_text().splitlines()
    for rollout_id, change in enumerate(("none", "masked", "rejected", "none")):
        records = [json.loads(line) for line in lines]
        for record in records:
            if change == "masked":
                record["loss_mask"] = [0] * record["response_length"]
            if change == "rejected":
                record |= {"valid": False, "invalid_reason": "too_short"}
        written = [{**json.loads(header), "rollout_id": rollout_id}, *records]
        (folder / f"rollout_{rollout_id}.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in written)
        )
    return str(folder / "rollout_{rollout_id}.jsonl")


def main() -> None:
    """Writes the file: log-probs come from a Hugging Face model in plain torch."""
    import tempfile

    from support.layout_reference import ReferenceModel
    from support.reference import ReferenceOptions, ReferenceSample

    from slime.files.rollout_dump import save_debug_rollout_data

    with tempfile.TemporaryDirectory() as root:
        model = ReferenceModel(make_folders(Path(root), ("qwen3",))["qwen3"])
        rows = [
            ReferenceSample(tokens_of(index), row.response, [1] * row.response, 0.0, row.rollout)
            for index, row in enumerate(ROWS)
        ]
        log_probs = [model.no_grad(row, ReferenceOptions())[0] for row in rows]
    print(
        save_debug_rollout_data(
            TEMPLATE, make_samples(log_probs), rollout_id=ROLLOUT_ID, evaluation=False
        )
    )


if __name__ == "__main__":
    sys.path[:0] = [str(FOLDER.parents[1]), str(FOLDER.parents[2])]
    main()
