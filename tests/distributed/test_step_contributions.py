"""A metric of the train step with a reduction of its own is one line in a loss, and the same number
on every layout of ranks and micro-batches.

Its values are the engine's log-probs of the trained tokens, which are data: whatever the layout,
the reference is numpy over the recorded samples, and nothing but the exact number passes.
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pytest
from support.distributed import run_distributed
from support.layout_batch import ROWS, make_folders, read_records
from support.layout_cell import run_cells
from support.layout_matrix import command_line, read_metrics
from support.layout_reference import step_positions
from support.training_plugins import LIKELY

from slime.utils.arguments import parse_args

NUM_GPUS = 0

# The trailing step is one rollout of two samples in one micro-batch, so under dp2 the other rank
# has none of them; dynamic micro-batches are unequal.
LAYOUTS = {
    1: ("dp1", "dp1 dynamic", "dp1 recompute"),
    2: ("dp2", "dp2 dynamic", "tp2 sp", "cp2", "cp2 dynamic recompute", "pp2", "pp2 vpp2"),
}
PER_TOKEN = {"dp1 dynamic", "dp2 dynamic", "cp2"}


def _words(layout, folders, run_dir):
    words = command_line("grpo", layout, folders, run_dir) + ["--keep-trailing-rollouts"]
    words += ["--loss-type", "custom_loss", "--custom-loss-function-path"]
    words += ["support.training_plugins.policy_loss_with_own_reductions"]
    return words + (["--calculate-per-token-loss"] if layout in PER_TOKEN else [])


@pytest.fixture(scope="module")
def metrics(tmp_path_factory):
    """{layout: the metrics of each train step} of the recorded rollout batch."""
    root, found = tmp_path_factory.mktemp("own_reductions"), {}
    folders = make_folders(root / "models", ("qwen3",))
    for ranks, layouts in LAYOUTS.items():
        cells = []
        for layout in layouts:
            (root / layout).mkdir()
            cells.append((layout, "actor", parse_args(_words(layout, folders, root / layout))))
        run_distributed(run_cells, ranks, cells, timeout=250)
        for layout in layouts:
            steps = read_metrics(root / layout)["train/step"]
            found[layout] = [values for _, values in steps]
    return found


def _expected():
    """Per step the metrics below train/engine, from the recorded samples alone."""
    records = read_records()
    steps = []
    for positions in step_positions(records, 6, keep_trailing=True):
        values = np.array(
            [
                value
                for i in positions
                if not ROWS[i].removed
                for value, mask in zip(
                    records[i]["rollout_log_probs"], records[i]["loss_mask"], strict=True
                )
                if mask
            ],
            dtype=np.float32,
        ).astype(np.float64)
        likely = values[values > LIKELY]
        step = {
            "max": values.max(),
            "min": values.min(),
            "token_mean": math.fsum(values.tolist()) / len(values),
            "total": math.fsum(values.tolist()),
            **{f"quantile_{p}": np.quantile(values, p / 100) for p in (25, 50, 75, 100)},
        }
        steps.append(step | ({"likely_max": likely.max()} if len(likely) else {}))
    return steps


@pytest.mark.timeout(500)
@pytest.mark.parametrize("layout", [name for names in LAYOUTS.values() for name in names])
def test_each_reduction_is_exact_on_every_layout(metrics, layout):
    """Maximum, minimum, quantiles, mean and sum over all trained tokens of a step are numpy's, to
    the last bit: over micro-batches of unequal size, ranks without samples, and tokens that are
    split over data, context, tensor and pipeline ranks."""
    expected = _expected()
    found = [
        {
            name.removeprefix("train/engine/"): value
            for name, value in step.items()
            if name.startswith("train/engine")
        }
        for step in metrics[layout]
    ]
    assert len(expected) == 3 and [len(step) for step in expected].count(9) >= 1
    assert found == expected


def test_the_sums_beside_them_are_as_without(metrics):
    """The metrics that are reduced like the loss stand beside them, one set for all layouts."""
    names = {
        layout: {name for name in steps[0] if not name.startswith("train/engine")}
        for layout, steps in metrics.items()
    }
    assert {"train/loss", "train/pg_loss", "train/ppo_kl"} < names["dp1"]
    assert len(set(map(frozenset, names.values()))) == 1


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
