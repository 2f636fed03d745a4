"""Small numbers behind metrics, each with a value that can be checked by hand."""

import random
import types
import zlib

import pytest

from slime.metrics.statistics import (
    compression_ratio,
    compute_pass_rate,
    compute_ragged_pass_rate,
    compute_rollout_step,
    compute_train_step,
    has_repetition,
    is_solved,
    pass_at_k,
    powers_of_two_up_to,
)

NUM_GPUS = 0
NAN = float("nan")


@pytest.mark.parametrize(
    ("num_samples", "num_solved", "k", "expected"),
    [
        (4, 1, 2, 1 - 3 / 6),  # 3 of the 6 pairs miss the solved one
        # one pair of three misses it: not certain, although as many are unsolved as are drawn
        (3, 1, 2, 1 - 1 / 3),
        (4, 3, 2, 1.0),  # one unsolved cannot fill a pair
        (5, 0, 3, 0.0),
        (4, 2, 1, 0.5),
    ],
)
def test_pass_at_k_draws_without_replacement(num_samples, num_solved, k, expected):
    """pass@k draws without replacement; with replacement two draws of (4, 1) would give 7/16."""
    assert pass_at_k(num_samples, num_solved, k) == pytest.approx(expected, abs=1e-15)


def test_a_group_counts_where_it_has_enough_members():
    """A group counts in pass@k if it has k members: with a solved single and one of four, pass@2 is
    that of the four, and not 0.75."""
    assert compute_ragged_pass_rate([1, 1, 0, 0, 0], [7, 3, 3, 3, 3]) == {
        "pass@1": pytest.approx((1 + 0.25) / 2),
        "pass@2": pytest.approx(0.5),
        "pass@4": 1.0,
    }


def test_each_group_has_one_vote_however_alike_they_are():
    """Two groups with one of two and one with two of two give (0.5 + 0.5 + 1) / 3, and not the mean
    over distinct groups, 0.75."""
    rates = compute_ragged_pass_rate([1, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2])
    assert rates == {"pass@1": pytest.approx(2 / 3), "pass@2": 1.0}
    assert compute_pass_rate([1, 0, 0, 1, 1, 1], 2) == rates
    assert compute_pass_rate([1, 0], 1) == {}


def test_what_has_no_score_is_no_failure():
    """A member without a score, such as one whose grader crashed, leaves its group: [1, nan] is one
    solved of one."""
    assert compute_ragged_pass_rate([1, NAN, 0, 0], [0, 0, 1, 1]) == {"pass@1": 0.5, "pass@2": 0.0}
    assert compute_ragged_pass_rate([NAN, NAN], [0, 0]) == {}


def test_solved_is_exactly_one_or_at_least_the_threshold():
    """Without a threshold a sample is solved at reward 1 exactly; a threshold includes its own
    value."""
    assert is_solved([1, 1.5, 0.5, NAN]).tolist() == [True, False, False, False]
    assert is_solved([1, 1.5, 0.5, 0.4, NAN], 0.5).tolist() == [True, True, True, False, False]


def test_k_goes_in_powers_of_two_up_to_the_group():
    """k takes the powers of two up to the group's size, which may be one of them."""
    assert [powers_of_two_up_to(size) for size in (0, 1, 4, 5)] == [[], [1], [1, 2, 4], [1, 2, 4]]


def test_compression_is_a_ratio_and_what_is_saved():
    """1000 equal bytes have a large ratio; an empty text has an infinite ratio and saves
    nothing."""
    size = len(zlib.compress(b"a" * 1000, 9))
    assert compression_ratio("a" * 1000) == (1000 / size, pytest.approx(100 * (1 - size / 1000)))
    assert compression_ratio("") == (float("inf"), 0.0)


def test_a_loop_is_looked_for_at_the_end_of_long_texts():
    """A loop is looked for at the end of long texts: a list at the beginning is none, and short
    texts always compress well."""
    noise = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=20_000))
    assert has_repetition(noise + "ab" * 5_000) and has_repetition("ab" * 6_000)
    assert not has_repetition("ab" * 10_000 + noise)
    assert not has_repetition("ab" * 5_000)


def test_axes_count_rollouts_and_planned_optimizer_steps():
    """5 prompts of 2 samples in steps of 4 are 2.5 steps, planned as three; the train axis never
    repeats a value."""
    args = types.SimpleNamespace(
        rollout_batch_size=5,
        n_samples_per_prompt=2,
        global_batch_size=4,
        wandb_always_use_train_step=False,
    )
    assert compute_rollout_step(args, 3) == 3
    args.wandb_always_use_train_step = True
    assert compute_rollout_step(args, 3) == 3 * 10 // 4
    assert compute_train_step(args, 2, 1, last=-1) == 2 * 3 + 1
    assert [compute_train_step(args, 2, 1, last=last) for last in (6, 7, 9)] == [7, 8, 10]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
