"""Declared fields of a plug-in in evaluation, a misspelt source, and fan-out without rollout_id."""

import asyncio
import logging
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest

from slime.data.columns import ColumnsConfig, build_train_columns
from slime.data.fields import Reduce, Rows, Scope
from slime.data.structure import validate_rollout_id_annotated
from slime.harness.report import find_reward_problems
from slime.harness.run_records import FAMILIES, RunRecords, pick
from slime.metrics.contributions import merge_all
from slime.metrics.declared import declared_contributions
from slime.metrics.rollout_metrics import RolloutMetricsConfig, eval_metrics
from slime.rollout.sglang_rollout import _call_generate
from slime.testing import make_args, make_sample

NUM_GPUS = 0


def samples_of_two_attempts():
    """Attempt 0 has two rows (solved 1 and 0), attempt 1 one row (solved 1)."""
    rows = [(0, 1, [1.0, 3.0]), (0, 0, [5.0, 0.0]), (1, 1, [2.0, 2.0])]
    return [
        make_sample("q", "ab", index=i, rollout_id=attempt, reward=1.0, loss_mask=[1, 0] if i == 1 else [1, 1],
                    metadata={"solved": solved, "surprise": surprise})
        for i, (attempt, solved, surprise) in enumerate(rows)
    ]  # fmt: skip


def test_declared_fields_are_metrics_in_evaluation(declared):
    """Evaluation reduces declared fields as training does: (mean of 1 and 0, then 1) -> 0.75;
    tokens (1 + 3 + 5) / 3 and (2 + 2) / 2 -> 2.5; largest 1."""
    declared("solved", source="metadata.solved", wire_dtype="int32", reduce=Reduce.SAMPLE_MEAN)
    declared(
        "most",
        source="metadata.solved",
        wire_dtype="int32",
        reduce=Reduce.MAX,
        metric="most_solved",
    )
    declared("surprise", scope=Scope.TOKEN, rows=Rows.RESPONSE, source="metadata.surprise", wire_dtype="float32",
             to_device=True, cp_sharded=True, reduce=Reduce.ROLLOUT_MEAN)  # fmt: skip
    samples = samples_of_two_attempts()
    metrics = eval_metrics(
        RolloutMetricsConfig(), {"rewards": [1.0] * 3, "samples": samples}, group_size=1
    )
    assert (metrics["/solved"], metrics["/most_solved"], metrics["/surprise"]) == (0.75, 1.0, 2.5)


def test_a_declared_fields_quantiles_are_metrics_in_evaluation_too(declared):
    """Quantiles have the names of training: of 1, 2 and 4 per sample 1.5, 2, 3, 4; the median of
    the five trained tokens 1, 3, 5, 2, 2 is 2. A NaN does not count."""
    declared("hops", source="metadata.hops", wire_dtype="float32", reduce=Reduce.QUANTILES)
    declared("surprise", scope=Scope.TOKEN, rows=Rows.RESPONSE, source="metadata.surprise", wire_dtype="float32",
             to_device=True, cp_sharded=True, reduce=Reduce.QUANTILES)  # fmt: skip
    declared("mean_hops", source="metadata.hops", wire_dtype="float32", reduce=Reduce.MEAN)
    samples = [
        *samples_of_two_attempts(),
        make_sample("q", "ab", index=3, rollout_id=2, reward=1.0),
    ]
    for sample, hops in zip(samples, (4, 1, 2, math.nan), strict=True):
        sample.metadata["hops"] = hops
    metrics = merge_all([declared_contributions(samples)])
    assert [metrics[f"hops/quantile_{share}"] for share in (25, 50, 75, 100)] == [
        1.5,
        2.0,
        3.0,
        4.0,
    ]
    assert metrics["surprise/quantile_50"] == 2.0 and metrics["surprise/quantile_100"] == 5.0
    assert metrics["mean_hops"] == 7 / 3 and "hops" not in metrics


def test_a_source_that_no_sample_has_is_warned_about_once(declared, caplog):
    """A declared source that no sample has, such as the typo metadata.slved, is warned about
    once."""
    declared("slved", source="metadata.slved", wire_dtype="int32", reduce=Reduce.SAMPLE_MEAN)
    samples = samples_of_two_attempts()
    with caplog.at_level(logging.WARNING):
        build_train_columns(samples, ([1.0] * 3, [0.0] * 3), ColumnsConfig())
        assert merge_all([declared_contributions(samples)]) == {}
    found = [record.getMessage() for record in caplog.records if "slved" in record.getMessage()]
    assert (
        len(found) == 1
        and "no sample of 3 has it" in found[0]
        and "Did you mean metadata.solved?" in found[0]
    )


async def two_rows(args, sample, sampling_params):
    return [make_sample("q", text, index=sample.index) for text in ("ab", "c")]


def test_fan_out_without_a_rollout_id_gets_its_members(monkeypatch):
    """Rows of one execution without rollout ids become one rollout with one vote and one
    denominator; ids that a function sets stay."""
    args = make_args(custom_generate_function_path=f"{__name__}.two_rows")
    rows = asyncio.run(_call_generate(args, make_sample("q", index=7), {}, False))
    assert [row.rollout_id for row in rows] == [7, 7]
    validate_rollout_id_annotated([[rows]])
    rows[0].rollout_id = None
    with pytest.raises(
        AssertionError,
        match="Add to your generate function: for one in samples: one.rollout_id = sample.index",
    ):
        validate_rollout_id_annotated([[rows]])


def test_the_live_line_has_one_length_and_a_custom_loss_keeps_its_log_prob_column():
    """The live line takes the trainer-engine gap from `rollout/logprob_abs_diff/mean`, which every
    loss has, and the length from one metric."""
    assert pick({"rollout/logprob_abs_diff/mean": 2e-7}, FAMILIES) == {"logprob diff": 2e-7}
    assert pick({"rollout/response_len/mean": 9.0, "rollout/response_lengths": 4.0}, FAMILIES) == {
        "length": 4.0
    }
    assert len(FAMILIES["length"]) == 1


def test_a_run_that_only_generates_has_a_reward():
    """A run with --debug-rollout-only, which logs rollout/reward/mean alone, has a reward in the
    report."""
    run = RunRecords({"rollout/reward/mean": {0: 0.25, 1: 0.5}}, 0)
    assert find_reward_problems(run) == []
    assert pick({"rollout/reward/mean": 0.25}, FAMILIES) == {"reward": 0.25}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
