"""What --record costs: wall time of a GRPO step of the addition example with and without it, in one
run of this program.

Runs with and without take turns, so that a machine whose speed drifts favours neither; a pair's
ratio is of the medians of its two runs, the first steps left out, and the result is the median of
the pairs' ratios. With --parts it only measures, without a run, what the manager spends on the
samples of a rollout of this size.

    python tools/bench/bench_recording.py MODEL [--rollouts 10] [--pairs 3]   # MODEL: a warmed-up
                                                                              # Hugging Face folder
    python tools/bench/bench_recording.py --parts
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = 3
LIMIT = 1.03


def command_of(model: Path, rollouts: int, data: Path, run_dir: Path) -> list[str]:
    """The GRPO stage of `make train`, without evaluations between."""
    words: list[object] = [sys.executable, "-m", "slime.train"]
    words += ["--config", ROOT / "examples/addition/grpo.yaml"]
    words += ["--prompt-data", data / "train.jsonl", "--hf-checkpoint", model]
    words += ["--eval-prompt-data", "addition", data / "eval.jsonl"]
    words += ["--run-dir", run_dir, "--num-rollout", rollouts, "--eval-interval", 10 * rollouts]
    words += ["--skip-eval-before-train", "--no-live-view", "--no-write-report"]
    return [str(word) for word in words]


def step_seconds(command: list[str], run_dir: Path) -> float:
    """Median seconds from the end of one rollout's training to that of the next."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    ends = sorted(
        record["time"] for record in records if "perf/weight_version" in record.get("metrics", {})
    )
    steps = [later - earlier for earlier, later in zip(ends[:-1], ends[1:], strict=True)]
    # the last one may hold the evaluation at the end
    return statistics.median(steps[SKIPPED - 1 : -1])


def measure(model: Path, rollouts: int, pairs: int) -> float:
    """Runs the pairs, prints each, and returns the median of their ratios."""
    from examples.addition import prepare

    ratios = []
    with tempfile.TemporaryDirectory() as scratch:
        data = prepare.prepare(Path(scratch) / "data")
        for pair in range(pairs):
            seconds = {}
            # who comes first changes from pair to pair
            for records in (False, True) if pair % 2 == 0 else (True, False):
                run_dir = Path(scratch) / f"run-{pair}-{records}"
                command = command_of(model, rollouts, data, run_dir)
                extra = ["--record", str(run_dir) + "-recording"] if records else []
                seconds[records] = step_seconds(command + extra, run_dir)
            ratios.append(seconds[True] / seconds[False])
            print(
                f"pair {pair}: {seconds[False]:.3f} s without, {seconds[True]:.3f} s with: "
                f"x{ratios[-1]:.3f}",
                flush=True,
            )
    return statistics.median(ratios)


def parts(num_samples: int = 1536, response: int = 5) -> None:
    """Prints the milliseconds of each table that the manager makes while the rollout waits."""
    from slime.data.columns import ColumnsConfig, build_train_columns, compute_rewards
    from slime.data.number_list import number_list
    from slime.data.sample import Sample
    from slime.data.schedule import ScheduleConfig
    from slime.data.split import SplitConfig, plan_split
    from slime.gate.config import GateConfig
    from slime.gate.judge import postprocess_output_data
    from slime.recording import rollout_side

    samples = [
        Sample(
            index=i,
            group_index=i // 8,
            prompt="12+34=",
            tokens=number_list([3, 5, 7, 9, 11, 13] + [20] * response),
            response="46",
            response_length=response,
            loss_mask=number_list([1] * response),
            rollout_log_probs=number_list([-0.5] * response),
            reward=float(i % 2),
            label="46",
            status=Sample.Status.COMPLETED,
            finish_reason="stop",
            weight_versions=["7"],
            weight_version_spans=[["7", response]],
            metadata={"source_name": "addition"},
        )
        for i in range(num_samples)
    ]
    judged = postprocess_output_data(samples, GateConfig())
    settings = ColumnsConfig(group_baseline=False)
    columns = build_train_columns(samples, compute_rewards(samples, settings)[:2], settings)
    _, plan = plan_split(
        columns, SplitConfig(128, num_samples, ScheduleConfig(2, 2, 4096, None, "balanced"))
    )
    places = list(range(num_samples))
    for name, make in {
        "samples": lambda: rollout_side.judged_table(samples, judged),
        "columns": lambda: rollout_side.columns_table(columns, places, places),
        "schedule": lambda: rollout_side.schedule_table(plan, places),
    }.items():
        times = []
        for _ in range(20):
            begun = time.perf_counter()
            make()
            times.append(time.perf_counter() - begun)
        print(f"{name}: {1000 * statistics.median(times):.2f} ms of {num_samples} samples")


def main() -> int:
    """Status 1 where the ratio is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, nargs="?", help="Warmed-up Hugging Face folder.")
    parser.add_argument("--rollouts", type=int, default=10, help="Rollouts of each run.")
    parser.add_argument("--pairs", type=int, default=3, help="Pairs of runs.")
    parser.add_argument("--parts", action="store_true", help="Only the tables of the manager.")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if options.parts or options.model is None:
        parts()
        return 0
    ratio = measure(options.model, options.rollouts, options.pairs)
    print(f"--record costs x{ratio:.3f} of a step (limit x{LIMIT:g})")
    return int(ratio > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
