"""slime.testing: helpers for a user's unit test of a reward, a generate function or a hook."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest

from slime.exceptions import ConfigError
from slime.rollout import sglang_rollout
from slime.testing import call, make_args, make_sample, make_tiny_tokenizer

NUM_GPUS = 0

pytest_plugins = ["slime.testing.fixtures"]


async def my_reward(args, sample):
    return float(sample.response == sample.label)


async def my_generate(args, sample, sampling_params):
    return await sglang_rollout.generate(args, sample, sampling_params)


def test_options_have_their_defaults_and_a_wrong_name_is_refused():
    """`make_args` gives every option its default and refuses an unknown name."""
    assert (
        make_args(rollout_temperature=0.5).rollout_temperature == 0.5
        and make_args().rollout_top_p == 1.0
    )
    with pytest.raises(
        ConfigError,
        match="unknown option 'rollout_temprature'. Did you mean 'rollout_temperature'?",
    ):
        make_args(rollout_temprature=0.5)


def test_a_sample_fits_together():
    """Ids, lengths, log-probs and mask of `make_sample` fit together; without a tokenizer ids are
    code points."""
    sample = make_sample("1+", "2", label="2", log_probs=[-1.0])
    assert (
        sample.tokens == [49, 43, 50]
        and sample.response_length == 1
        and sample.rollout_log_probs == [-1.0]
    )
    assert call(my_reward, make_args(), sample) == 1.0
    assert make_sample("1+").status is sample.Status.PENDING and make_sample("1+").tokens == []
    with pytest.raises(ConfigError, match="2 log_probs for 1 response tokens"):
        make_sample("1+", "2", log_probs=[-1.0, -1.0])


def test_a_generate_function_meets_a_scripted_engine(fake_engine, tmp_path):
    """A generate function runs against a scripted engine that answers ids 5, 6 with the log-prob
    -(k + 1) / 8 for token k."""
    fake_engine.answer = lambda prompt: [5, 6]
    args = make_args(hf_checkpoint=make_tiny_tokenizer(tmp_path))
    sample = call(my_generate, args, make_sample(prompt="1+1="), {"max_new_tokens": 4})
    assert sample.tokens[-2:] == [5, 6] and sample.rollout_log_probs == [-0.125, -0.25]
    assert len(fake_engine.requests) == 1


def test_a_generate_function_meets_a_real_engine(tiny_engine):
    """A generate function runs against a real engine: greedy responses repeat, and every token has
    its log-prob."""
    args = tiny_engine.args()
    params = {"max_new_tokens": 4, "temperature": 0.0}
    first, second = (
        call(my_generate, args, make_sample(prompt="1+1="), dict(params)) for _ in range(2)
    )
    assert 1 <= first.response_length <= 4 and first.tokens == second.tokens
    assert (
        len(first.rollout_log_probs) == first.response_length and max(first.rollout_log_probs) < 0
    )


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
