"""When a rollout needs a log-prob pass of its own before training, and why."""

import dataclasses

import pytest
import torch

from slime.backends.megatron_utils import log_prob_capture
from slime.backends.megatron_utils.log_prob_plan import LogProbPlan, reasons_to_recompute_log_probs
from slime.config.cli import parse_command_line

NUM_GPUS = 0


@pytest.mark.parametrize(
    ("options", "num_steps", "words"),
    [
        ("", 1, None),
        ("", 2, "2 optimizer steps per rollout"),
        ("--loss-type custom_loss", 1, "loss type custom_loss"),
        ("--kl-coef 0.1", 1, "--kl-coef"),
        ("--use-rollout-logprobs", 1, "--use-rollout-logprobs"),
        ("--get-mismatch-metrics", 1, "--get-mismatch-metrics"),
        ("--advantage-estimator ppo", 1, "the critic's advantages"),
        ("--keep-old-actor", 1, "--keep-old-actor"),
        ("--use-opd", 1, "--use-opd"),
        ("--advantage-estimator gspo", 1, "gspo"),
        ("--use-rollout-entropy", 1, "--use-rollout-entropy"),
    ],
)
def test_each_reason_for_a_pass_is_the_only_one(options, num_steps, words):
    """Each listed reason alone requires the log-prob pass; with one step per rollout and none of
    them the step's own log-probs are the old ones."""
    plan = LogProbPlan.from_args(parse_command_line(options.split()).args, num_steps)
    reasons = reasons_to_recompute_log_probs(plan)
    if words is None:
        assert reasons == []
        return
    (reason,) = reasons
    assert words in reason
    assert len(reasons_to_recompute_log_probs(dataclasses.replace(plan, num_steps=5))) == (
        1 if num_steps > 1 else 2
    )


def test_kept_log_probs_come_back_in_the_order_of_the_batch():
    """Captured log-probs are returned in the batch's order, also where the schedule put position 7
    before position 3; taking them ends the capture."""
    log_prob_capture.enable_log_prob_capture()
    log_prob_capture._maybe_capture_log_probs({"partition": [3]}, [torch.tensor([-3.0, -3.5])])
    log_prob_capture._maybe_capture_log_probs({"partition": [7]}, [torch.tensor([-7.0])])
    taken = log_prob_capture.take_captured_log_probs([7, 3])
    assert [values.tolist() for values in taken] == [[-7.0], [-3.0, -3.5]]
    log_prob_capture._maybe_capture_log_probs({"partition": [3]}, [torch.zeros(2)])
    assert log_prob_capture.take_captured_log_probs([3]) is None


def test_log_probs_of_some_samples_are_not_taken_for_all():
    """A rank that captured only its first sample's log-probs has no column of them, nor has one
    that captured nothing."""
    log_prob_capture.enable_log_prob_capture()
    log_prob_capture._maybe_capture_log_probs({"partition": [0]}, [torch.ones(1)])
    assert log_prob_capture.take_captured_log_probs([0, 1]) is None
    assert log_prob_capture.take_captured_log_probs([]) is None


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
