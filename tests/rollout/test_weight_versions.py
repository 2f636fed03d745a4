"""Which weights sampled which tokens, and what is taken out of the loss because of it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from types import SimpleNamespace

import pytest

from slime.data import weight_versions
from slime.data.sample import Sample
from slime.data.weight_versions import mask_older_samples, oldest_version, version_spans
from slime.rollout.generation import reset_to_prompt
from slime.rollout.sglang_rollout import mask_offpolicy_part

NUM_GPUS = 0

ARGS = SimpleNamespace(partial_rollout=True, mask_offpolicy_in_partial_rollout=True)


@pytest.fixture
def serving():
    """Sets the version that the engines serve, and clears it after the test."""
    yield weight_versions.set_current_weight_version
    weight_versions.set_current_weight_version(None)


def reply(version, tokens, **more):
    return {
        "tokens": list(range(tokens)),
        "log_probs": [-1.0] * tokens,
        "meta_info": {"weight_version": version, "finish_reason": {"type": "stop"}, **more},
    }


@pytest.mark.parametrize(
    "status", (Sample.Status.COMPLETED, Sample.Status.TRUNCATED, Sample.Status.ABORTED)
)
def test_what_was_there_before_is_masked_whatever_its_status(status):
    """Tokens of older weights are masked, also in a member that had finished in an earlier
    rollout."""
    sample = Sample(tokens=[1, 2, 3], response_length=2, status=status)
    mask_offpolicy_part(ARGS, sample)
    assert sample.loss_mask == [0, 0]
    for partial, mask in ((False, True), (True, False)):
        args = SimpleNamespace(partial_rollout=partial, mask_offpolicy_in_partial_rollout=mask)
        untouched = Sample(tokens=[1, 2, 3], response_length=2, status=status)
        mask_offpolicy_part(args, untouched)
        mask_older_samples(args, [untouched])
        assert untouched.loss_mask is None


def test_each_token_has_the_version_of_its_part_of_the_reply(serving):
    """Each token has the version of its part of the reply: of 3 tokens at version 1, 2 of a tool,
    and 4 that versions 1 and 2 share, 3 + 1 are older than 2."""
    sample = Sample(tokens=[9])
    sample.append_response_tokens(**reply("1", 3))
    sample.append_response_tokens(tokens=[7, 7], trainable=False)
    sample.append_response_tokens(**reply("1", 4, weight_versions=[["1", 1], ["2", 3]]))
    assert (
        version_spans(sample) == [("1", 3), (None, 2), ("1", 1), ("2", 3)]
        and oldest_version(sample) == 1
    )
    serving(2)
    mask_older_samples(ARGS, [sample])
    assert sample.loss_mask == [0, 0, 0, 0, 0, 0, 1, 1, 1]
    assert reset_to_prompt(sample).weight_version_spans == []
    assert version_spans(Sample.from_dict(sample.to_dict())) == version_spans(sample)


def test_a_mask_of_another_length_is_left_to_the_gate(serving):
    """A mask of a wrong length is left for the gate to find and raises nothing here."""
    serving(2)
    for mask in ([1], [1, 1, 1]):
        sample = Sample(tokens=[1, 2, 3], response_length=2, weight_versions=["1"], loss_mask=mask)
        mask_older_samples(ARGS, [sample])
        assert sample.loss_mask == mask


def test_tokens_of_the_weights_that_are_served_stay_in_the_loss(serving):
    """A group that goes on within one rollout after the engine ended its request has no older
    tokens."""
    sample = Sample(tokens=[9])
    sample.append_response_tokens(**reply("5", 3))
    serving(5)
    mask_offpolicy_part(ARGS, sample)
    mask_older_samples(ARGS, [sample])
    assert sample.loss_mask == [1, 1, 1]
    serving(6)  # finished under 5, taken by a rollout under 6: fully-async generation does this
    mask_older_samples(ARGS, [sample])
    assert sample.loss_mask == [0, 0, 0]


def test_a_mask_of_the_user_stays_and_unknown_versions_are_left_alone_at_the_end(serving):
    """Tokens that the user masked stay masked, and tokens without a version are not masked."""
    serving(3)
    sample = Sample(tokens=[9])
    sample.append_response_tokens(**reply("3", 2))
    sample.loss_mask = [0, 1]
    unnamed = Sample(tokens=[9])
    unnamed.append_response_tokens(**reply("default", 2))
    by_hand = Sample(tokens=[9, 1, 2], response_length=2, weight_versions=["2", "3"])
    mask_older_samples(ARGS, [sample, unnamed, by_hand])
    assert (sample.loss_mask, unnamed.loss_mask, by_hand.loss_mask) == ([0, 1], [1, 1], [0, 0])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
