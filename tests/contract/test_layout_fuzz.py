"""Random layouts: the whole chain from samples to metrics gives what one process with plain loops
gives, to 1e-9, and the same advantages bit for bit.

The reference below is deliberately naive: no arrays, no ranks, no columns. If the two agree on
random lengths, rewards, groups, invalid members, masks, fan-out, caps, data and context parallel
sizes, there is no layout on which a reward meets another sample's data.
"""

import math
import pickle
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.dp_shards import advantages_of, make_long_samples, shards_of
from support.pretend_rank import pretend_rank

from slime.algorithms.table import ESTIMATORS
from slime.backends.megatron_utils.data import to_train_device
from slime.data.batch import localize
from slime.data.columns import ColumnsConfig, build_train_columns, compute_rewards
from slime.data.sample import Sample
from slime.data.schedule import ScheduleConfig
from slime.data.split import SplitConfig, split_by_dp
from slime.metrics import contributions as c
from slime.metrics.statistics import pass_at_k
from slime.metrics.train_metrics import (
    TrainMetricsConfig,
    correct_sample_contributions,
    multi_turn_contributions,
    pass_rates,
    phase_contributions,
)

NUM_GPUS = 0
LONGEST = 12


@st.composite
def batches(draw):
    """Samples of 1-5 prompts with 1-4 rollouts of 1-3 samples each; every token's log-prob is its
    own number.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    samples, rollout_id = [], 0
    for group in range(draw(st.integers(1, 5))):
        for _ in range(draw(st.integers(1, 4))):
            reward = float(rng.integers(0, 3)) / 2
            for _ in range(1 if rng.random() < 0.7 else int(rng.integers(2, 4))):
                prompt, response = int(rng.integers(1, 9)), int(rng.integers(0, 13))
                valid = rng.random() > 0.2
                samples.append(
                    Sample(
                        index=len(samples),
                        group_index=group,
                        rollout_id=rollout_id,
                        tokens=rng.integers(0, 50_000, prompt + response).tolist(),
                        response_length=response,
                        loss_mask=rng.integers(0, 2, response).tolist()
                        if rng.random() < 0.6
                        else None,
                        reward=reward if valid or rng.random() < 0.5 else None,
                        rollout_log_probs=(-rng.random(response) * 3).astype(np.float32).tolist(),
                        remove_sample=bool(rng.random() < 0.1),
                        valid=bool(valid),
                        invalid_reason=None if valid else "empty",
                        metadata={"round_number": int(rng.integers(1, 5))},
                        status=Sample.Status.TRUNCATED
                        if rng.random() < 0.2
                        else Sample.Status.COMPLETED,
                    )
                )
            rollout_id += 1
    order = rng.permutation(len(samples)).tolist()
    return [samples[i] for i in order]


@st.composite
def layouts(draw):
    """(dp size, cp size, packing, token cap, pad unit, interleaving group)."""
    return (
        draw(st.integers(1, 8)),
        draw(st.sampled_from([1, 1, 2, 4])),
        draw(st.sampled_from(["balanced", "first_fit", "static"])),
        draw(st.integers(8, 64)),
        draw(st.sampled_from([0, 4, 16])),
        draw(st.sampled_from([1, 2])),
    )


def reference(samples, trained):
    """The metrics, in one process and with loops, over the samples that a step trains."""
    masks = [
        [0] * s.response_length if s.remove_sample else s.loss_mask or [1] * s.response_length
        for s in samples
    ]
    ids = {samples[i].rollout_id for i in trained}
    sums = {r: sum(sum(masks[i]) for i in trained if samples[i].rollout_id == r) for r in ids}
    sizes = {r: sum(1 for i in trained if samples[i].rollout_id == r) for r in ids}
    live = [r for r in ids if sums[r]]
    out = {}

    def over_rollouts(name, value):
        if trained:
            out[name] = math.fsum(value(i) / sizes[samples[i].rollout_id] for i in trained) / len(
                ids
            )

    over_rollouts("response_lengths", lambda i: samples[i].response_length)
    over_rollouts("round_number", lambda i: samples[i].metadata["round_number"])
    if live:
        tokens = [
            samples[i].rollout_log_probs[j] / sums[samples[i].rollout_id]
            for i in trained
            for j in range(samples[i].response_length)
            if masks[i][j]
        ]
        out["rollout_log_probs"] = math.fsum(tokens) / len(live)
    scored = {}
    for s in samples:
        if s.valid and s.reward is not None:
            scored.setdefault((s.group_index, s.rollout_id), []).append(s.reward)
    if scored and trained:
        out["raw_reward"] = math.fsum(math.fsum(v) / len(v) for v in scored.values()) / len(scored)
    groups = {}
    for (group, _), values in scored.items():
        groups.setdefault(group, []).append(values[0])
    for k in (1, 2, 4):
        terms = [
            pass_at_k(len(v), sum(r == 1 for r in v), k) for v in groups.values() if len(v) >= k
        ]
        if terms and max(map(len, groups.values())) > 1:
            out[f"pass@{k}"] = math.fsum(terms) / len(terms)
    correct = [i for i in trained if samples[i].reward == 1]
    lengths = [samples[i].response_length for i in correct]
    if correct:
        out["correct_response_lengths"] = sum(lengths) / len(lengths)
        out["correct_length/p25"] = sum(0 <= n <= LONGEST / 4 for n in lengths) / len(lengths)
        out["correct_length/p100"] = sum(n > 3 * LONGEST / 4 for n in lengths) / len(lengths)
        out["correct_response_length/quantile_50"] = float(np.median(lengths))
        masked = [i for i in correct if sum(masks[i])]
        if masked:
            entropy = [
                -sum(p for p, m in zip(samples[i].rollout_log_probs, masks[i], strict=True) if m)
                / sum(masks[i])
                for i in masked
            ]
            out["correct_entropy"] = math.fsum(entropy) / len(entropy)
    if trained:
        out["turns_max"] = max(samples[i].metadata["round_number"] for i in trained)
    return out


def run_chain(samples, layout):
    """The real chain: rewards, columns, split, wire, arrival, device, contributions of every rank,
    reduction.
    """
    dp_size, cp_size, packing, cap, pad_to, group = layout
    settings_ = ColumnsConfig(divide_by_std=True)
    columns = build_train_columns(samples, compute_rewards(samples, settings_)[:2], settings_)
    token_cap = None if packing == "static" else cap
    schedule = ScheduleConfig(
        dp_size, dp_size * group, token_cap, 2, "balanced" if packing == "balanced" else "first_fit"
    )
    config = SplitConfig(4, 8, schedule, keep_trailing=True, pad_to=pad_to if cp_size == 1 else 0)
    split = split_by_dp(columns, config)
    shards = [pickle.loads(pickle.dumps(shard, protocol=5)) for shard in split.shards]  # noqa: S301  our own bytes
    phase, panels, rates, advantages, trained = [], [], {}, {}, []
    for rank, shard in enumerate(shards):
        trained += localize(shard, rank)["partition"]
        for cp_rank in range(cp_size):
            batch = to_train_device(
                localize(shard, rank, dp_size=dp_size), "cpu", cp_rank=cp_rank, cp_size=cp_size
            )
            place = TrainMetricsConfig(
                cp_size=cp_size, cp_rank=cp_rank, rollout_max_response_len=LONGEST
            )
            advantages.update(zip(batch["sample_indices"], batch["rewards"], strict=True))
            phase.append(
                phase_contributions(batch, cp_size=cp_size, cp_rank=cp_rank)
                | correct_sample_contributions(batch, config=place)
            )
            turns = multi_turn_contributions(batch, config=place)
            panels.append(
                {"turns_max": turns["multi_turn_metric/round_number_max"]}
                if "multi_turn_metric/round_number_max" in turns
                else {}
            )
            rates = pass_rates(batch, config=place)
    return (
        {**c.merge_all(phase), **c.merge_all(panels), **rates},
        advantages,
        sorted(trained),
        split.plan,
    )


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(batches(), layouts())
def test_every_layout_gives_the_single_process_numbers(samples, layout):
    """Metrics and advantages equal those of a single process for any dp, cp, packing and order of
    samples: sums, means, maxima, quantiles and pass@k."""
    found, advantages, trained, plan = run_chain(samples, layout)
    expected = reference(samples, trained)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    assert all(math.isfinite(value) for value in found.values()), (
        "no NaN from empty or fully masked batches"
    )
    assert plan.num_trained_samples + sum(plan.dropped.values()) == len(samples), "conservation"
    again = run_chain(samples, (1, 1, "static", 8, 0, 1))
    assert advantages == again[1], "bit-identical at every split"
    for name in set(found) & set(again[0]):
        assert found[name] == pytest.approx(again[0][name], rel=1e-9, abs=1e-15), name


# what each estimator is given beside the reward: everything it may take per token
PER_TOKEN = {
    "plain": {},
    "kl k1": {"kl_coef": 0.2, "kl_loss_type": "k1"},
    "kl k2": {"kl_coef": 0.2, "kl_loss_type": "k2"},
    "kl k3": {"kl_coef": 0.2, "kl_loss_type": "k3"},
    "low_var_kl and distillation": {
        "kl_coef": 0.2,
        "kl_loss_type": "low_var_kl",
        "use_opd": True,
        "opd_kl_coef": 0.3,
    },
}


@pytest.mark.parametrize("per_token", sorted(PER_TOKEN))
@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_advantages_and_returns_have_the_same_bits_on_every_rank_count_and_in_every_order(
    estimator, per_token
):
    """A sample's advantages and returns have the same bits whatever else is on its rank, however
    long the longest response is, and wherever it stands."""
    samples, options = make_long_samples(), PER_TOKEN[per_token]
    layouts = [
        (24, 1, "static"),
        (24, 2, "balanced"),
        (24, 2, "static"),
        (24, 4, "balanced"),
        (24, 4, "first_fit"),
    ]
    # two groups; one sample, so that three ranks have none
    few = [(8, 4, "balanced"), (8, 2, "static"), (1, 4, "balanced")]
    with pretend_rank():
        (batch,) = shards_of(samples, estimator, 1)
        expected = advantages_of(batch, estimator, **options)
        assert sorted(expected) == [i for i in range(24) if i != 14]
        for seed, (num_samples, dp_size, packing) in enumerate(layouts + few):
            order = np.random.default_rng(seed).permutation(num_samples)
            if num_samples == 1:  # a group of one has another baseline
                expected = advantages_of(
                    *shards_of(samples[:1], estimator, 1), estimator, **options
                )
            found = {}
            for batch in shards_of(
                [samples[i] for i in order], estimator, dp_size, packing=packing
            ):
                found |= advantages_of(batch, estimator, **options)
            assert sorted(found) == [i for i in sorted(expected) if i < num_samples]
            wrong = [i for i in found if found[i] != expected[i]]
            assert not wrong, f"samples whose bits differ at dp {dp_size}, {packing}: {wrong}"


def test_metrics_are_the_same_number_at_dp_1_2_4_and_any_order():
    """A mean over 2, 4 and 7 ranks equals the single one bit for bit, for values of many sizes that
    cancel."""
    rng = np.random.default_rng(3)
    values = rng.normal(size=1000) * 10.0 ** rng.integers(-8, 8, 1000)
    whole = c.merge([c.mean(values, 1000)])[""]
    for ranks in (2, 4, 7):
        parts = [
            c.mean(piece, len(piece)) for piece in np.array_split(rng.permutation(values), ranks)
        ]
        assert c.merge(parts)[""] == whole


def test_tokens_arrive_on_some_layout_unchanged():
    """Ids arrive as they were sent: a spot check on values beside the fuzz on metrics."""
    samples = [
        Sample(
            index=i,
            group_index=i,
            tokens=[7 * i + t for t in range(5 + i)],
            response_length=2,
            reward=1.0,
            status=Sample.Status.COMPLETED,
        )
        for i in range(9)
    ]
    settings_ = ColumnsConfig(group_baseline=False)
    columns = build_train_columns(samples, compute_rewards(samples, settings_)[:2], settings_)
    split = split_by_dp(
        columns, SplitConfig(9, 9, ScheduleConfig(3, 3, token_cap=20, packing="balanced"), pad_to=4)
    )
    for rank, shard in enumerate(split.shards):
        batch = to_train_device(localize(shard, rank), "cpu")
        for index, tokens in zip(batch["sample_indices"], batch["tokens"], strict=True):
            assert torch.equal(tokens, torch.tensor(samples[index].tokens))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
