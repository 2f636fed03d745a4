"""What --record costs: CPU time and wall time of a GRPO step of the addition example, recorded and
not.

Two runs of the same job go side by side, from the same seed, one of them recorded in every rollout,
as a user gets it; a step of the one is compared with the same step of the other. So a machine whose
speed drifts favours neither, and CPU seconds, of all processes of a run, do not see what else runs
there. What is written in the background is counted in the step in which that happens. The first
steps, in which processes warm up, are left out. With --parts it only measures, without a run, what
the manager spends on the tables of a rollout of this size.

    python tools/bench/bench_recording.py MODEL [--rollouts 60]     # MODEL: a warmed-up Hugging Face
                                                                    # folder
    python tools/bench/bench_recording.py --parts
"""

from __future__ import annotations

import argparse
import itertools
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
SKIPPED, BLOCK = 4, 8
LIMIT = 1.03


def command_of(
    model: Path, rollouts: int, data: Path, run_dir: Path, *, is_recorded: bool
) -> list[str]:
    """The GRPO stage of `make train`, without evaluations between."""
    words: list[object] = [sys.executable, "-m", "slime.train"]
    words += ["--config", ROOT / "examples/addition/grpo.yaml"]
    words += ["--prompt-data", data / "train.jsonl", "--hf-checkpoint", model]
    words += ["--eval-prompt-data", "addition", data / "eval.jsonl"]
    words += ["--run-dir", run_dir, "--num-rollout", rollouts, "--eval-interval", 10 * rollouts]
    words += ["--skip-eval-before-train", "--no-live-view", "--no-write-report"]
    words += ["--record", f"{run_dir}-recording"] if is_recorded else []
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


class WatchedRun:
    """A run under way. `ends`: (wall clock, CPU seconds of the run so far) at the end of each
    rollout's training.
    """

    def __init__(self, command: list[str], run_dir: Path) -> None:
        self.ends: list[tuple[float, float]] = []
        self._records, self._name = run_dir / "metrics.jsonl", uuid.uuid4().hex
        self._folders: list[Path] = []
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        environment[VARIABLE] = self._name
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL
        )

    def look(self) -> bool:
        """Notes the steps that have ended since the look before; whether the run goes on."""
        goes_on = self._process.poll() is None
        if self._process.returncode:
            raise SystemExit(f"the run ended with status {self._process.returncode}")
        text = self._records.read_text() if self._records.exists() else ""
        count = text.count('"perf/weight_version"')
        if count > len(self.ends):
            self._folders = self._folders if len(self.ends) > SKIPPED else processes_of(self._name)
            now = time.monotonic(), cpu_seconds(self._folders)
            self.ends += [now] * (count - len(self.ends))
        return goes_on

    def stop(self) -> None:
        """Ends the run, as Ctrl-C would."""
        self._process.terminate()
        self._process.wait()

    def seconds(self, column: int) -> list[float]:
        """Wall or CPU seconds of each step; the last one shuts down and is left out."""
        ends = [end[column] for end in self.ends[SKIPPED:-1]]
        return [after - before for before, after in itertools.pairwise(ends)]


def measure(model: Path, rollouts: int) -> float:
    """Runs, prints wall and CPU time, and returns the ratio of CPU time."""
    from examples.addition import prepare

    with tempfile.TemporaryDirectory() as scratch:
        data, runs = prepare.prepare(Path(scratch) / "data"), []
        try:
            for name in ("plain", "recorded"):
                run_dir = Path(scratch) / name
                words = command_of(model, rollouts, data, run_dir, is_recorded=name == "recorded")
                runs.append(WatchedRun(words, run_dir))
            while any([run.look() for run in runs]):
                time.sleep(0.005)
        finally:
            for run in runs:
                run.stop()
    ratios = {}
    for column, name in enumerate(("wall", "CPU")):
        plain, recorded = (run.seconds(column) for run in runs)
        # by blocks, since what the end of one step takes of the next one cancels out within them
        each = [
            statistics.fmean(recorded[i : i + BLOCK]) - statistics.fmean(plain[i : i + BLOCK])
            for i in range(0, len(plain) - BLOCK + 1, BLOCK)
        ]
        mean = statistics.fmean(plain)
        ratios[name] = 1 + (statistics.fmean(recorded) - mean) / mean
        error = statistics.stdev(each) / len(each) ** 0.5 / mean
        print(
            f"{name}: {mean:.3f} s of a step that is not recorded, x{ratios[name]:.3f} recorded "
            f"(standard error {error:.3f}, {len(plain)} steps)"
        )
    return ratios["CPU"]


def parts(num_samples: int = 1536, response: int = 5) -> None:
    """Prints the milliseconds of each table that the manager makes while the rollout waits."""
    from slime.data.columns import ColumnsConfig, build_train_columns, compute_rewards
    from slime.data.number_list import number_list
    from slime.data.sample import PrefixCacheInfo, Sample
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
            session_id=f"{i // 8}-{i}",
            prefix_cache_info=PrefixCacheInfo(0, 6),
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
    parser.add_argument("--rollouts", type=int, default=60, help="Rollouts of each run.")
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
