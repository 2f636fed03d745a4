"""What needs a second rank: a split vocabulary, a sequence split over context-parallel ranks,
whitening over all of them, further groups.

Two gloo processes run everything once; each test reads its part of what they returned.
"""

from __future__ import annotations

import dataclasses
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import mpu
from support.distributed import run_distributed
from support.dp_shards import advantages_of, make_long_samples, shards_of
from support.loss_cases import make_logits, make_samples, mask_sums_of, pack, reference_of
from support.pretend_rank import pretend_rank
from support.reference import ReferenceOptions, reference_advantages, reference_policy_loss

from slime.accelerator import process_groups
from slime.accelerator.process_groups import distributed_masked_whiten
from slime.backends.megatron_utils import cp_utils, loss
from slime.data.context_parallel import plan_response_layout
from slime.utils.ppo_utils import calculate_log_probs_and_entropy

NUM_GPUS = 0

WIDTH, ROWS = 6, 5
# the last sample is so short that rank 0 owns none of its response; the second one is longer on
# rank 1
SHAPES = [(3, 4), (1, 9), (4, 2), (8, 2)]
SEQUENCE_OPTIONS = {
    "gspo": {"advantage_estimator": "gspo"},
    "opsm": {"use_opsm": True},
    "gspo opsm per token": {
        "advantage_estimator": "gspo",
        "use_opsm": True,
        "calculate_per_token_loss": True,
    },
}
ESTIMATOR_OPTIONS = {
    "ppo": {"advantage_estimator": "ppo", "kl_coef": 0.2, "gamma": 0.9, "lambd": 0.8},
    "reinforce_plus_plus": {
        "advantage_estimator": "reinforce_plus_plus",
        "kl_coef": 0.2,
        "gamma": 0.9,
        "normalize_advantages": True,
    },
    "grpo whitened": {"normalize_advantages": True},
}


WHITENED = ("grpo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


def _vocabulary_case():
    x = torch.randn(ROWS, 2 * WIDTH, generator=torch.Generator().manual_seed(1)) * 3
    return (
        x,
        torch.tensor([0, 11, 5, 6, 3]),
        torch.rand(ROWS, 2 * WIDTH, generator=torch.Generator().manual_seed(2)) < 0.4,
    )


def _split_vocabulary(rank: int) -> dict:
    x, targets, keep = _vocabulary_case()
    columns = slice(rank * WIDTH, (rank + 1) * WIDTH)
    results = {}
    for name, mask in (("full", None), ("nucleus", keep[:, columns])):
        part = x[:, columns].clone().requires_grad_()
        log_prob, entropy = calculate_log_probs_and_entropy(
            part, targets, None, with_entropy=True, chunk_size=2, log_prob_keep_mask=mask
        )
        (log_prob.squeeze(1) * torch.arange(1.0, 6.0) + 0.5 * entropy).sum().backward()
        results[name] = (log_prob.detach(), entropy.detach(), part.grad)
    return results


def _sequence_losses(rank: int, alone) -> dict:
    results = {}
    for name, changes in SEQUENCE_OPTIONS.items():
        options = ReferenceOptions(**changes)
        samples = make_samples(SHAPES, 5)
        logits = make_logits(samples, 6)
        advantages, _, _ = reference_advantages(samples, options)
        args = SimpleNamespace(**dataclasses.asdict(options))
        with pretend_rank(cp_size=2, cp_rank=rank, tp_group=alone):
            batch, packed = pack(samples, logits, advantages, mask_sums_of(samples))
            step_loss, normaliser, reported = loss.loss_function(
                args, batch, 1, len(samples), packed
            )
        step_loss.backward()
        gradients = [rows.grad for rows in logits]
        results[name] = (step_loss.detach(), normaliser, reported, gradients)
    return results


def _estimators(rank: int) -> dict:
    results = {}
    for name, changes in ESTIMATOR_OPTIONS.items():
        samples = make_samples(SHAPES, 5)
        data = {
            "total_lengths": [len(s.tokens) for s in samples],
            "response_lengths": [s.response_length for s in samples],
            "loss_masks": [torch.tensor(s.loss_mask) for s in samples],
            "rewards": [s.reward for s in samples],
        }
        with pretend_rank(cp_size=2, cp_rank=rank):
            for field in ("log_probs", "ref_log_probs", "values"):
                data[field] = [
                    cp_utils.slice_log_prob_with_cp(
                        torch.tensor(getattr(s, field), dtype=torch.float64),
                        len(s.tokens),
                        s.response_length,
                    )
                    for s in samples
                ]
            loss.compute_advantages_and_returns(SimpleNamespace(**changes), data)
            gathered = {
                field: [
                    cp_utils.all_gather_with_cp(v, t, r)
                    for v, t, r in zip(
                        data[field], data["total_lengths"], data["response_lengths"], strict=True
                    )
                ]
                for field in ("advantages", "returns", "kl")
            }
        results[name] = {field: [v.tolist() for v in values] for field, values in gathered.items()}
    return results


def _allgather_cp(rank: int, alone) -> list:
    samples = make_samples(SHAPES, 5)
    stream = torch.cat([rows.detach() for rows in make_logits(samples, 6)])
    rows = -(-len(stream) // 2)
    local = torch.nn.functional.pad(stream, (0, 0, 0, 2 * rows - len(stream)))[
        rank * rows : (rank + 1) * rows
    ]
    args = SimpleNamespace(
        rollout_temperature=1.0, log_probs_chunk_size=-1, allgather_cp=True, entropy_coef=0.0
    )
    with pretend_rank(cp_size=2, cp_rank=rank, tp_group=alone):
        _, out = loss.get_log_probs_and_entropy(
            local.unsqueeze(0),
            args=args,
            unconcat_tokens=[torch.tensor(s.tokens) for s in samples],
            total_lengths=[len(s.tokens) for s in samples],
            response_lengths=[s.response_length for s in samples],
        )
    return out["log_probs"]


def _gather_gradient(rank: int) -> tuple:
    """Weighs the gathered response by 1..7 on both ranks; each local entry must receive the sum of
    both ranks' weights.
    """
    with pretend_rank(cp_size=2, cp_rank=rank):
        layout = cp_utils.get_response_layout([11], [7])
        local = layout.response_indices.double().requires_grad_()
        full = cp_utils.all_gather_with_cp(local, 11, 7)
    (full * torch.arange(1.0, 8.0)).sum().backward()
    return full.detach().tolist(), local.grad.tolist()


def _whitening(rank: int) -> dict:
    def run(parts, masks, **options):
        return distributed_masked_whiten(
            torch.tensor(parts[rank]), torch.tensor(masks[rank]), **options
        ).tolist()

    ones = ([1, 1, 1], [1])
    results = {
        "ragged": run(([1.0, 1.0, 1.0], [5.0]), ones),
        "empty rank": run(([], [1.0, 3.0]), ([], [1, 1])),
        "scale only": run(([1.0, 1.0, 1.0], [5.0]), ones, shift_mean=False),
        "far from zero": run(([1e6 + 1, 1e6 + 1, 1e6 + 1], [1e6 + 5]), ones),
        "junk": run(([1.0, float("nan"), 1.0, 1.0], [5.0, float("inf")]), ([1, 0, 1, 1], [1, 0])),
    }
    with pytest.raises(ValueError, match="no position has mask 1 on any rank"):
        run(([1.0], [2.0]), ([0], [0]))
    results["nothing"] = run(([1.0, 3.0], []), ([0, 0], []), allow_empty=True)
    return results


def _whitened_shards(rank: int, alone) -> dict:
    """{(estimator, data-parallel size): {sample: whitened advantages at its trained tokens}} of
    this rank's samples, in an order of each size's own.
    """
    results = {}
    for dp_size, group, local in ((1, alone, 0), (2, None, rank)):
        samples = [make_long_samples()[i] for i in np.random.default_rng(dp_size).permutation(24)]
        for estimator in WHITENED:
            with pretend_rank(dp_size=dp_size), pytest.MonkeyPatch.context() as patch:
                patch.setattr(mpu, "get_data_parallel_group", lambda group=group, **_: group)
                batch = shards_of(samples, estimator, dp_size)[local]
                advantages_of(batch, estimator, normalize_advantages=True, kl_coef=0.1)
            pairs = zip(batch["advantages"], batch["loss_masks"], strict=True)
            kept = [values[mask != 0].tolist() for values, mask in pairs]
            results[estimator, dp_size] = dict(zip(batch["sample_indices"], kept, strict=True))
    return results


def _groups(rank: int, folder: str) -> tuple:
    process_groups.set_gloo_group(None)
    with pytest.raises(RuntimeError, match="init_gloo_group"):
        process_groups.get_gloo_group()
    group = process_groups.init_gloo_group()
    assert process_groups.init_gloo_group() is group is process_groups.get_gloo_group()
    value = torch.tensor([float(rank + 1)])
    dist.all_reduce(value, group=group)
    other = process_groups.init_process_group(
        backend="gloo",
        init_method=f"file://{folder}/rendezvous",
        world_size=2,
        rank=1 - rank,
        group_name="weights",
        timeout=timedelta(seconds=30),
    )
    received = torch.tensor([100.0 + rank])
    dist.broadcast(received, src=0, group=other)  # rank 0 of this group is rank 1 of the world
    return value.item(), received.item()


def _everything(rank, world_size, folder):
    # the world is the context-parallel group; a tensor-parallel group of one keeps the vocabulary
    # whole
    alone = [dist.new_group([member]) for member in range(world_size)][rank]
    return {
        "vocabulary": _split_vocabulary(rank),
        "sequence": _sequence_losses(rank, alone),
        "estimators": _estimators(rank),
        "allgather": _allgather_cp(rank, alone),
        "gradient": _gather_gradient(rank),
        "whitening": _whitening(rank),
        "whitened shards": _whitened_shards(rank, alone),
        "groups": _groups(rank, folder),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_distributed(_everything, 2, str(tmp_path_factory.mktemp("groups")), timeout=100)


@pytest.mark.parametrize("name", ["full", "nucleus"])
def test_a_split_vocabulary_gives_the_whole_ones_log_probs_entropies_and_gradients(ranks, name):
    """With rank r owning columns from r * V/tp on, both ranks report the log-probs and entropies of
    the whole vocabulary, and each the gradient of its own columns."""
    x, targets, keep = _vocabulary_case()
    whole = x.clone().requires_grad_()
    mask = keep if name == "nucleus" else None
    log_prob, entropy = calculate_log_probs_and_entropy(
        whole, targets, None, with_entropy=True, log_prob_keep_mask=mask
    )
    (log_prob.squeeze(1) * torch.arange(1.0, 6.0) + 0.5 * entropy).sum().backward()
    for rank in range(2):
        results = ranks[rank]["vocabulary"][name]
        for actual, wanted in zip(results[:2], (log_prob, entropy), strict=True):
            torch.testing.assert_close(actual, wanted.detach(), rtol=0, atol=2e-6)
        torch.testing.assert_close(
            results[2], whole.grad[:, rank * WIDTH : (rank + 1) * WIDTH], rtol=0, atol=2e-6
        )


@pytest.mark.parametrize("name", sorted(SEQUENCE_OPTIONS))
def test_sequence_ratios_span_the_context_parallel_ranks(ranks, name):
    """GSPO's ratio and OPSM's distance are over the whole response; a rank that owns no part of it
    still takes part, forward and backward."""
    options = ReferenceOptions(**SEQUENCE_OPTIONS[name])
    samples = make_samples(SHAPES, 5)
    logits = make_logits(samples, 6)
    advantages, _, _ = reference_advantages(samples, options)
    value, metrics = reference_policy_loss(
        samples, *reference_of(samples, logits, options), advantages, options
    )
    value.backward()
    parts = [rank["sequence"][name] for rank in ranks]
    total, values = sum(part[0] for part in parts), sum(part[2]["values"] for part in parts)
    if options.calculate_per_token_loss:
        scale, divisor = sum(int(part[1]) for part in parts), float(values[0]) / 2
    else:
        scale, divisor = 2, len(samples)
    assert float(total) / scale == pytest.approx(float(value), rel=1e-5)
    for key, actual in zip(parts[0][2]["keys"], values[1:].tolist(), strict=True):
        assert actual / divisor == pytest.approx(metrics[key], rel=1e-5, abs=1e-6), key
    for sample, expected in enumerate(logits):
        actual = sum(part[3][sample] for part in parts) / scale
        wanted = (
            torch.zeros_like(expected) if expected.grad is None else expected.grad
        )  # a fully masked sample has none
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", sorted(ESTIMATOR_OPTIONS))
def test_advantages_of_split_sequences_equal_the_reference(ranks, name):
    """GAE, discounted returns and whitening see the whole sequence, and both ranks agree."""
    samples = make_samples(SHAPES, 5)
    options = ReferenceOptions(**ESTIMATOR_OPTIONS[name])
    for field, expected in zip(
        ("advantages", "returns", "kl"), reference_advantages(samples, options), strict=True
    ):
        for rank in range(2):
            for actual, wanted in zip(
                ranks[rank]["estimators"][name][field], expected, strict=True
            ):
                assert actual == pytest.approx(wanted, abs=1e-6), field


def test_allgather_context_parallel_hands_on_zigzag_parts(ranks):
    """Under allgather CP rows are cut contiguously, and everything downstream gets zigzag parts."""
    samples = make_samples(SHAPES, 5)
    expected = reference_of(samples, make_logits(samples, 6), ReferenceOptions())[0]
    for rank in range(2):
        for sample, actual, wanted in zip(samples, ranks[rank]["allgather"], expected, strict=True):
            layout = plan_response_layout(
                [len(sample.tokens)], [sample.response_length], cp_size=2, cp_rank=rank
            )
            torch.testing.assert_close(
                actual.double(), wanted.detach()[layout.response_indices], rtol=0, atol=1e-5
            )


def test_gathered_responses_are_in_order_and_differentiable(ranks):
    """Total 11, response 7: rank 0 owns entry 6, rank 1 entries 0..5; both ranks'
    uses flow back.
    """
    for rank, owned in enumerate(([6], [0, 1, 2, 3, 4, 5])):
        full, gradient = ranks[rank]["gradient"]
        assert full == [0, 1, 2, 3, 4, 5, 6]
        assert gradient == [2.0 * (index + 1) for index in owned]


def test_whitening_is_over_all_ranks(ranks):
    """Slices 1 1 1 and 5 have mean 2 and variance 4 (Bessel); a slice by itself would give zeros,
    and 0/0 on the other rank."""
    first, second = (rank["whitening"] for rank in ranks)
    for name in ("ragged", "far from zero"):
        assert first[name] == pytest.approx([-0.5] * 3) and second[name] == pytest.approx([1.5])
    assert first["empty rank"] == [] and second["empty rank"] == pytest.approx(
        [-0.70710678, 0.70710678]
    )
    assert first["scale only"] == pytest.approx([0.5] * 3) and second[
        "scale only"
    ] == pytest.approx([2.5])
    assert (first["nothing"], second["nothing"]) == ([1.0, 3.0], [])
    assert [first["junk"][i] for i in (0, 2, 3)] == pytest.approx([-0.5] * 3) and second["junk"][
        0
    ] == pytest.approx(1.5)


@pytest.mark.parametrize("estimator", WHITENED)
def test_whitened_advantages_do_not_depend_on_the_split(ranks, estimator):
    """Whitened advantages differ between splits by the last bit of float32 at most: the sums over
    ranks are in float64, in the layout's order."""
    first, second = (rank["whitened shards"] for rank in ranks)
    alone, parts = first[estimator, 1], (first[estimator, 2], second[estimator, 2])
    assert alone == second[estimator, 1]
    assert (
        sorted(alone) == sorted([*parts[0], *parts[1]])
        and len(alone) == 23
        and min(map(len, parts)) > 1
    )
    for index, values in {**parts[0], **parts[1]}.items():
        assert values == pytest.approx(alone[index], rel=2**-23, abs=0), index
    flat = np.array([value for values in alone.values() for value in values])
    assert flat.mean() == pytest.approx(0, abs=1e-6) and flat.std(ddof=1) == pytest.approx(
        1, abs=1e-6
    )


def test_further_groups_have_their_own_ranks(ranks):
    """The gloo group sums over the world; the second main group broadcasts from its own rank 0,
    which is world rank 1.
    """
    assert [rank["groups"] for rank in ranks] == [(3.0, 101.0), (3.0, 101.0)]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
