"""What --record costs: wall time and CPU time of a GRPO step of the addition example, recorded and
not, in one run.

The run records one of four rollouts. A recorded step is compared with the third and fourth after
it, which nothing of the recording touches any more; what is still being written in the step after
it is charged to it. So a machine whose speed drifts favours neither, and CPU seconds, of all
processes of the run, do not see what else runs there. The first steps are left out. With --parts it
only measures, without a run, what the manager spends on the tables of a rollout of this size.

    python tools/bench/bench_recording.py MODEL [--rollouts 60]     # MODEL: a warmed-up Hugging Face
                                                                    # folder
    python tools/bench/bench_recording.py --parts
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "SLIME_BENCH_RUN"
EVERY = 4
SKIPPED = 4
LIMIT = 1.03


def command_of(model: Path, rollouts: int, data: Path, run_dir: Path) -> list[str]:
    """The GRPO stage of `make train`, without evaluations between, recorded."""
    words: list[object] = [sys.executable, "-m", "slime.train"]
    words += ["--config", ROOT / "examples/addition/grpo.yaml"]
    words += ["--prompt-data", data / "train.jsonl", "--hf-checkpoint", model]
    words += ["--eval-prompt-data", "addition", data / "eval.jsonl"]
    words += ["--run-dir", run_dir, "--num-rollout", rollouts, "--eval-interval", 10 * rollouts]
    words += ["--skip-eval-before-train", "--no-live-view", "--no-write-report"]
    words += ["--record", f"{run_dir}-recording", "--record-every", EVERY]
    return [str(word) for word in words]


def processes_of(name: str) -> list[Path]:
    """The /proc folders of the processes that inherited the run's name."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                environment = (folder / "environ").read_bytes()
            except OSError:
                continue
            if f"{VARIABLE}={name}".encode() in environment:
                found.append(folder)
    return found


def cpu_seconds(folders: list[Path]) -> float:
    """CPU time of the processes so far."""
    ticks = 0
    for folder in folders:
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def ends_of_steps(command: list[str], run_dir: Path) -> list[tuple[float, float]]:
    """(wall clock, CPU seconds of the run so far) at the end of each rollout's training."""
    name = uuid.uuid4().hex
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), VARIABLE: name}
    found: list[tuple[float, float]] = []
    records, folders = run_dir / "metrics.jsonl", []
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            time.sleep(0.005)
            text = records.read_text() if records.exists() else ""
            count = text.count('"perf/weight_version"')
            if count > len(found):
                folders = folders if len(found) > SKIPPED else processes_of(name)
                found += [(time.monotonic(), cpu_seconds(folders))] * (count - len(found))
    if process.returncode:
        raise SystemExit(f"the run ended with status {process.returncode}")
    return found


def cost(ends: list[tuple[float, float]], column: int) -> tuple[float, float]:
    """(median of a step that is not recorded, ratio of a recorded one to it)."""
    steps = {i: ends[i][column] - ends[i - 1][column] for i in range(SKIPPED + 2, len(ends) - 1)}
    by_place = {
        place: statistics.median(v for i, v in steps.items() if i % EVERY == place)
        for place in range(EVERY)
    }
    plain = statistics.median(v for i, v in steps.items() if i % EVERY >= 2)
    return plain, 1 + (by_place[0] - plain + by_place[1] - plain) / plain


def measure(model: Path, rollouts: int) -> float:
    """Runs, prints wall and CPU time, and returns the ratio of CPU time."""
    from examples.addition import prepare

    with tempfile.TemporaryDirectory() as scratch:
        data, run_dir = prepare.prepare(Path(scratch) / "data"), Path(scratch) / "run"
        ends = ends_of_steps(command_of(model, rollouts, data, run_dir), run_dir)
    ratios = {}
    for column, name in enumerate(("wall", "CPU")):
        plain, ratios[name] = cost(ends, column)
        print(f"{name}: {plain:.3f} s of a step that is not recorded, x{ratios[name]:.3f} recorded")
    return ratios["CPU"]


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
            begun = time.process_time()
            make()
            times.append(time.process_time() - begun)
        print(
            f"{name}: {1000 * statistics.median(times):.2f} ms of CPU time for {num_samples} samples"
        )


def main() -> int:
    """Status 1 where the ratio is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, nargs="?", help="Warmed-up Hugging Face folder.")
    parser.add_argument("--rollouts", type=int, default=60, help="Rollouts of the run.")
    parser.add_argument("--parts", action="store_true", help="Only the tables of the manager.")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if options.parts or options.model is None:
        parts()
        return 0
    ratio = measure(options.model, options.rollouts)
    print(f"--record costs x{ratio:.3f} of a step's CPU time (limit x{LIMIT:g})")
    return int(ratio > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
