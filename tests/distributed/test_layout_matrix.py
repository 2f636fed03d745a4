"""One recorded rollout through the real actor under parallel layouts and algorithms gives plain
torch's numbers. The whole matrix: make test-layouts.

A cell compares losses, gradients before clipping, every per-token field gathered back, every
metric, and the weights after all steps with `support.layout_reference`, and every metric with one
process. Tolerances: 1e-5 relative, 1e-4 for gradients.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
import torch
from support.distributed import run_distributed
from support.layout_batch import ROWS, make_samples, read_records, write_rollouts
from support.layout_cell import owned_places, run_cells
from support.layout_matrix import (
    CRITIC,
    LAYOUTS,
    Comparison,
    Matrix,
    command_line,
    named_metrics,
    read_metrics,
)
from support.layout_reference import normalized_rewards, step_positions

from slime.files.rollout_dump import read_rollout_dump
from slime.utils.arguments import parse_args

NUM_GPUS = 0

ALGORITHMS = ("all together", "gspo", "ppo", "reinforce++")
ONE_PROCESS = ("dp1", "dp1 trailing", "moe dp1")
TWO_PROCESSES = ("dp2 dynamic", "tp2 sp", "pp2 vpp2", "cp2 dynamic recompute", "moe ep2")
FOUR_PROCESSES = ("dp4 idle-ranks",)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    return Matrix(tmp_path_factory.mktemp("matrix"))


@pytest.fixture(scope="module")
def one_process(matrix):
    return matrix.run(ONE_PROCESS, ALGORITHMS, timeout=300)


@pytest.fixture(scope="module")
def two_processes(matrix, one_process):
    return matrix.run(TWO_PROCESSES, ALGORITHMS, timeout=500)


@pytest.fixture(scope="module")
def four_processes(matrix, one_process):
    return matrix.run(FOUR_PROCESSES, ALGORITHMS, timeout=500)


def _check(cells, layout, algorithm):
    (cell,) = (c for c in cells if (c.layout, c.algorithm) == (layout, algorithm))
    assert not cell.failure, cell.failure
    assert cell.difference > 0, "nothing was compared"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("layout", ONE_PROCESS)
def test_one_process_computes_what_plain_torch_computes(layout, algorithm, one_process):
    """One process of the production path gives plain torch's numbers, before anything is
    parallel."""
    _check(one_process, layout, algorithm)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("layout", TWO_PROCESSES)
def test_two_processes_compute_what_plain_torch_computes(layout, algorithm, two_processes):
    """Each kind of parallelism alone gives plain torch's numbers."""
    _check(two_processes, layout, algorithm)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("layout", FOUR_PROCESSES)
def test_ranks_without_samples_take_part(layout, algorithm, four_processes):
    """A last step with one rollout for four data-parallel ranks does not hang, and the idle ranks
    have no weight."""
    _check(four_processes, layout, algorithm)


@pytest.fixture(scope="module")
def nothing(matrix, tmp_path_factory):
    """{(what was done to all samples, algorithm): (the ranks' results, metrics)} of rollouts in
    which nothing can be trained, on two ranks.
    """
    root = tmp_path_factory.mktemp("nothing")
    template, cells, folders = write_rollouts(root), [], {}
    for number, change in ((1, "masked"), (2, "rejected")):
        Path(template.format(rollout_id=number)).rename(root / f"{change}_0.jsonl")
        for algorithm in ("grpo", "ppo whitened", "all together", CRITIC):
            folder = folders[change, algorithm] = root / f"{change}-{len(folders)}"
            folder.mkdir()
            words = command_line(algorithm, "dp2", matrix.folders, folder)
            words += ["--load-debug-rollout-data", str(root / f"{change}_{{rollout_id}}.jsonl")]
            cells.append(
                (
                    (change, algorithm),
                    "critic" if algorithm == CRITIC else "actor",
                    parse_args(words),
                )
            )
    by_rank = run_distributed(run_cells, 2, cells, timeout=200)
    return {
        cell: ([rank[cell] for rank in by_rank], read_metrics(folder))
        for cell, folder in folders.items()
    }


@pytest.mark.timeout(300)
def test_a_rollout_in_which_nothing_can_be_trained_is_no_step_or_one_of_gradient_zero(nothing):
    """A rollout that is masked or rejected whole is a step of gradient 0 or no step, and ends no
    run: whitened or not, policy and critic, per sample or per token."""
    for (change, algorithm), (by_rank, metrics) in nothing.items():
        (gradients,) = (rank.gradients for rank in by_rank if any(rank.weights))
        assert (
            len(gradients) == len(metrics.get("train/step", [])) == (2 if change == "masked" else 0)
        ), (change, algorithm)
        assert all(
            int(torch.count_nonzero(tensor)) == 0 for step in gradients for tensor in step.values()
        )
        named = named_metrics(metrics)
        assert all(value == value for value in named.values())
        assert all(
            value == 0 for name, value in named.items() if name.endswith(("loss", "grad_norm"))
        )
        if change == "rejected" and algorithm != CRITIC:
            assert named["0 train/weight_delta"] == 0


def test_the_recorded_batch_is_what_its_script_says():
    """The recorded batch is what its script writes, so that no number of the matrix moves by a hand
    edit."""
    recorded = read_rollout_dump(Path(__file__).parent / "data" / "layout_batch_0.jsonl")
    for index, (sample, made) in enumerate(
        zip(recorded, make_samples([s.rollout_log_probs for s in recorded]), strict=True)
    ):
        made.rollout_log_probs = sample.rollout_log_probs
        assert sample.to_dict() == made.to_dict(), index
        assert len(sample.rollout_log_probs) == ROWS[index].response


def test_the_batch_holds_what_breaks_layouts():
    """The batch has one-token responses, sequences below two chunks per rank, odd lengths, uneven
    groups, fan-out, masks and rejected members."""
    records = read_records()
    assert [ROWS[i].response for i in (1, 4, 11)] == [1, 1, 1]
    assert min(len(record["tokens"]) for record in records) == 2
    groups = [
        {r["rollout_id"] for r in records if r["group_index"] == group and r["valid"]}
        for group in range(6)
    ]
    assert [len(group) for group in groups] == [4, 2, 3, 2, 2, 0]
    assert step_positions(records, 6, keep_trailing=True) == [
        [0, 1, 2, 3, 4, 5, 7, 8],
        [9, 10, 11, 13, 14, 15],
        [16, 17],
    ]
    # group 1: rollouts 104 (three samples of reward 0.75) and 105 (0.25); the rejected member with
    # reward 900 moves nothing
    assert normalized_rewards(records, {"advantage_estimator": "dr_grpo"})[2:9:6] == [0.25, -0.25]


def test_context_parallel_ranks_own_every_token_once():
    """Context-parallel ranks own every token once, with an uneven last chunk; the matrix gathers by
    code of its own."""
    # 5 + 13 tokens over 2 ranks: chunks of 5 rows; rows 0-4 and 15-19 are rank 0's, 5-14 rank 1's;
    # row 4 predicts the first response token
    assert owned_places(18, 13, cp_size=2, cp_rank=0) == [0, 11, 12]
    assert owned_places(18, 13, cp_size=2, cp_rank=1) == list(range(1, 11))
    for row in ROWS:
        places = [
            owned_places(row.prompt + row.response, row.response, cp_size=2, cp_rank=rank)
            for rank in range(2)
        ]
        assert sorted(places[0] + places[1]) == list(range(row.response))


def test_every_layout_of_the_issue_is_in_the_matrix():
    """The matrix holds every required layout, with at most four processes, as CI has."""
    assert all(layout.ranks <= 4 for layout in LAYOUTS.values())
    options = {name for layout in LAYOUTS.values() for name in layout.options}
    assert options >= {
        "tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage",
        "context_parallel_size", "expert_model_parallel_size", "use_distributed_optimizer", "use_dynamic_batch_size", "recompute_granularity",
    }  # fmt: skip


def test_a_comparison_sees_a_single_wrong_number(matrix, one_process):
    """The comparison fails for a weight off by 1e-4 of the largest, and for a missing metric."""
    expected = matrix.expected("dp1", "gspo")
    comparison = Comparison(expected, [], {}, None)
    wrong = {name: tensor.clone() for name, tensor in expected.weights.items()}
    comparison._compare_tensors("weight", wrong, expected.weights, comparison.values)
    assert max(comparison.values.values()) == 0
    wrong["lm_head.weight"][3, 4] += 1e-4 * wrong["lm_head.weight"].abs().max()
    comparison._compare_tensors("weight", wrong, expected.weights, comparison.values)
    assert comparison.values["weight lm_head.weight"] == pytest.approx(1e-4, rel=1e-3)
    comparison._steps()
    assert comparison.problems == ["steps [] were logged, expected 2"]
    assert torch.isfinite(torch.tensor(expected.steps[0]["grad_norm"]))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
