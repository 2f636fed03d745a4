"""Declaring and logging a field of one's own: how long each response's final answer is, and how
unsure the policy was of each token.

    python examples/data_contract/declare_field.py

Two declarations carry the fields from samples, over two data-parallel ranks, to metrics. Nothing
else names them.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from slime.data.batch import localize  # noqa: E402
from slime.data.columns import ColumnsConfig, build_train_columns, compute_rewards  # noqa: E402
from slime.data.fields import Reduce, Rows, Scope, declare_field  # noqa: E402
from slime.data.split import SplitConfig, split_by_dp  # noqa: E402
from slime.metrics.contributions import merge_all  # noqa: E402
from slime.observability.train_metric_utils import phase_contributions  # noqa: E402
from slime.utils.dp_schedule import ScheduleConfig  # noqa: E402
from slime.utils.types import Sample  # noqa: E402

# A number per sample, read from Sample.metadata["answer_length"], logged as rollout/answer_length.
declare_field(
    "answer_length", source="metadata.answer_length", wire_dtype="int32", reduce=Reduce.SAMPLE_MEAN
)

# A number per response token, logged as rollout/surprise: its masked mean within a rollout, then
# the mean over rollouts.
declare_field(
    "surprise",
    scope=Scope.TOKEN,
    rows=Rows.RESPONSE,
    source="metadata.surprise",
    wire_dtype="float32",
    to_device=True,
    cp_sharded=True,
    reduce=Reduce.ROLLOUT_MEAN,
)


def make_samples() -> list[Sample]:
    """Four prompts with two responses each; sample i has i + 1 response tokens, an answer of i
    tokens and a surprise of i at each token.
    """
    return [
        Sample(
            index=i,
            group_index=i // 2,
            tokens=list(range(5 + i + 1)),
            response_length=i + 1,
            reward=float(i % 2),
            metadata={"answer_length": i, "surprise": [float(i)] * (i + 1)},
            status=Sample.Status.COMPLETED,
        )
        for i in range(8)
    ]


def run(dp_size: int) -> dict[str, float]:
    """The metrics of the samples, through columns, split, wire and arrival on `dp_size` ranks."""
    samples, config = make_samples(), ColumnsConfig()
    raw_rewards, rewards, _ = compute_rewards(samples, config)
    columns = build_train_columns(samples, (raw_rewards, rewards), config)
    schedule = ScheduleConfig(dp_size=dp_size, align=dp_size, token_cap=32, packing="balanced")
    split = split_by_dp(
        columns, SplitConfig(global_batch_size=8, expected_rollouts=8, schedule=schedule)
    )
    # a run puts each shard into Ray's object store here, and each training rank takes its own out
    return merge_all(
        [phase_contributions(localize(shard, rank)) for rank, shard in enumerate(split.shards)]
    )


def main() -> None:
    for dp_size in (1, 2):
        metrics = run(dp_size)
        print(
            f"dp {dp_size}: "
            + ", ".join(
                f"rollout/{name} = {metrics[name]:g}" for name in ("answer_length", "surprise")
            )
        )


if __name__ == "__main__":
    main()
