"""Every reason for which a sample is not trained has its facts in one entry, and the code does what
the entry says.
"""

import ast
import pickle
from pathlib import Path

import numpy as np
import pytest
from support.gate_samples import sound_sample

import slime
from slime.backends.megatron_utils.trained_samples import find_not_trained
from slime.data.columns import counts_in_baseline
from slime.data.ledger import PREFIX, Ledger, finished_metrics, ledger_of_rollout
from slime.data.reasons import (
    MODEL_FAILURES,
    REASONS,
    DropReason,
    InBaseline,
    InvalidReason,
    Stage,
    is_model_failure,
)
from slime.data.sample import Status
from slime.data.schedule import ScheduleConfig
from slime.data.split import SplitConfig, plan_split
from slime.gate.checks import CHECKS

NUM_GPUS = 0

SLIME = Path(slime.__file__).parent
ALL = (*InvalidReason, *DropReason)


def test_names_are_unique_and_a_reason_survives_a_pickle():
    """A reason travels between processes as itself, with its facts."""
    assert len({reason.value for reason in ALL}) == len(ALL) == 28
    for reason in ALL:
        assert pickle.loads(pickle.dumps(reason)) is reason
        assert type(reason)(reason.value).facts is reason.facts


def test_numbers_of_recorded_reasons_stay():
    """A reason's number stands in histories and train data of earlier runs; new ones come last."""
    assert [reason.value for reason in REASONS[:14]] == (
        "failed aborted empty too_short too_long truncated logprob_mismatch bad_token bad_logprob "
        "repetitive misaligned bad_format bad_reward rejected"
    ).split()
    assert [reason.code for reason in REASONS] == list(range(1, len(REASONS) + 1))


def test_the_gate_finds_every_reason_of_its_own_and_levels_are_those_of_the_checks():
    """A reason without a check is never found; a check's level is that of its reason."""
    assert {check.reason for check in CHECKS} == set(REASONS)
    assert {reason for reason in REASONS if reason.facts.has_level} == {
        check.reason for check in CHECKS if check.quality
    }
    assert all(check.quality in (None, check.reason.value) for check in CHECKS)
    assert all(reason.facts.stage is Stage.GATE for reason in REASONS)


@pytest.mark.parametrize("reason", REASONS)
def test_a_rejected_sample_shifts_no_baseline_and_fails_where_the_model_failed(reason):
    """A rejected sample is outside its group's baseline; it is wrong in pass@k only where the model
    answered badly."""
    sample = sound_sample(valid=False, invalid_reason=reason.value)
    assert reason.facts.in_baseline is InBaseline.NO
    assert not counts_in_baseline(sample) and not counts_in_baseline(sample, removed_count=True)
    assert is_model_failure(sample) is reason.facts.is_model_failure is (reason in MODEL_FAILURES)
    assert not is_model_failure(sound_sample(invalid_reason=reason.value))


def test_a_kept_sample_is_a_member_of_its_baseline():
    """What a policy keeps counts, an aborted one too; a failed one never does."""
    for reason in REASONS:
        kept = sound_sample(invalid_reason=reason.value)
        if reason is InvalidReason.ABORTED:
            kept.status = Status.ABORTED
        if reason.facts.can_train:
            assert counts_in_baseline(kept), reason
    assert not counts_in_baseline(sound_sample(status=Status.FAILED))


def test_a_masked_sample_counts_in_its_baseline_on_request():
    """`--removed-samples-in-baseline` decides over samples that are masked in every token."""
    masked = sound_sample(loss_mask=[0] * 12)
    assert DropReason.FULLY_MASKED.facts.in_baseline is InBaseline.ON_REQUEST
    assert not counts_in_baseline(masked) and counts_in_baseline(masked, removed_count=True)


def test_what_the_split_leaves_out_is_in_no_denominator():
    """Of five rollouts in steps of two one is rejected, one fully masked, one trailing and one
    invalid without a reason: only tokens of the two others are in a denominator."""
    num = 6
    data = {
        "tokens": [list(range(5)) for _ in range(num)],
        "response_lengths": [4] * num,
        "loss_masks": [[1] * 4, [0] * 4, [1] * 4, [1] * 4, [1] * 4, [1] * 4],
        "rewards": [0.0] * num,
        "rollout_ids": list(range(num)),
        "valid": [True, True, False, False, True, True],
        "invalid_reason": [None, None, "truncated", None, None, None],
    }
    _, plan = plan_split(data, SplitConfig(3, 5, ScheduleConfig(1, 1, token_cap=64)))
    expected = {
        DropReason.FULLY_MASKED.value: 1,
        DropReason.TRAILING.value: 1,
        DropReason.INVALID.value: 1,
        InvalidReason.TRUNCATED.value: 1,
    }
    assert plan.dropped == expected
    assert not any(reason.facts.in_denominator for reason in ALL if reason.value in expected)
    assert np.asarray(plan.rollout_mask_sums_N).tolist() == [4, 0, 0, 0, 4, 0]


def test_what_is_counted_stands_under_the_key_of_its_entry():
    """The ledger's metrics are named by the entries: dropped before training, or not trained."""
    for reason in ALL:
        kind = "not_trained/" if reason.facts.stage is Stage.TRAINER else "dropped/"
        if reason.ledger_key is not None:
            assert reason.ledger_key == kind + reason.value
    ledger = Ledger(sampled=3, trained=1, dropped={DropReason.TRAILING.value: 2})
    assert ledger.plan_metrics()[f"{PREFIX}{DropReason.TRAILING.ledger_key}"] == 2
    batch = {
        "loss_masks": [[0, 0], [1, 1], [1, 1]],
        "num_microbatches": [2, 1],
        "micro_batch_indices": [[0], [1], [2]],
    }
    gone = find_not_trained(batch, trainable_before=[True, True, True], skipped_steps=[1])
    metrics = finished_metrics(3, {reason: len(rows) for reason, rows in gone.items()})
    for reason in (reason for reason in DropReason if reason.facts.stage is Stage.TRAINER):
        assert metrics[f"{PREFIX}{reason.ledger_key}"] == 1


def test_a_sample_that_the_converter_leaves_out_is_counted_under_its_name():
    """Two of three samples have rows; the one without is the converter's to explain."""
    ledger = ledger_of_rollout(
        [None, None, None],
        [0, 2],
        trains=[True, True],
        num_trained=2,
        dropped_by_split={},
        dropped_before={},
    )
    assert ledger.dropped == {DropReason.LEFT_OUT.value: 1}


def literals_of(path):
    """String constants of a module that are no docstrings, with their lines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in docstrings:
                yield node.value, node.lineno


# Words that mean something else there too: a sample's status, an engine's answer, a column.
OTHER_MEANINGS = {
    "failed",
    "aborted",
    "truncated",
    "invalid",
    "empty",
    "update_skipped",
    "rejected",
}


SPELLED_IN = ("data/reasons.py", "gate/checks.py", "gate/quality_checks.py", "gate/text_checks.py")


def test_no_module_spells_a_reason_that_has_an_entry():
    """A second spelling is a second place for a fact. The gate's checks name their levels."""
    names = {reason.value for reason in ALL} - OTHER_MEANINGS
    found = {
        f"{path.relative_to(SLIME)}: {value}"
        for path in SLIME.rglob("*.py")
        if path.relative_to(SLIME).as_posix() not in SPELLED_IN
        for value, _ in literals_of(path)
        if value in names
    }
    assert found == set()


def test_data_and_metrics_know_nothing_of_the_gate():
    """The reasons lie below the gate, so that columns and metrics need not import it."""
    for folder in ("data", "metrics"):
        for path in (SLIME / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                modules = (
                    [alias.name for alias in node.names]
                    if isinstance(node, ast.Import)
                    else [node.module or ""]
                    if isinstance(node, ast.ImportFrom)
                    else []
                )
                assert not any(name.startswith("slime.gate") for name in modules), path


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
