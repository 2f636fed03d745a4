"""Wall time of a GRPO step of the full stack against the plain loop doing the same work, measured
in one run.

Both start from the same warmed-up model and use the example's recipe. They take turns, plain - full
- plain, so that a machine whose speed drifts cannot favour one of them. A full step is the time
between the ends of two successive rollouts' training; the first steps are left out.

    python tools/bench/overhead.py MODEL [--rollouts 12]       # MODEL: the warm-up that `make
                                                               train` keeps in
                                                               examples/addition/data
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = 3
LIMIT = 3.0


def run_plain(model: Path, rollouts: int, scratch: Path) -> float:
    """Median seconds of a step of the plain loop, in steady state."""
    result = scratch / "plain.json"
    command = [
        sys.executable,
        str(ROOT / "tools/bench/plain_grpo.py"),
        "--model",
        str(model),
        "--stages",
        "grpo",
        "--json",
        str(result),
    ]
    command += ["--set", f"grpo.num_rollout={rollouts}", "--report-every", str(rollouts)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads(result.read_text())["step_s"]


def run_full(model: Path, rollouts: int, scratch: Path) -> float:
    """Median seconds of a step of `slime train`, in steady state."""
    from examples.addition import prepare

    data, run_dir = prepare.prepare(scratch / "data"), scratch / "run"
    command = [
        sys.executable,
        "-m",
        "slime.train",
        "--config",
        str(ROOT / "examples/addition/grpo.yaml"),
    ]
    command += [
        "--prompt-data",
        str(data / "train.jsonl"),
        "--eval-prompt-data",
        "addition",
        str(data / "eval.jsonl"),
    ]
    command += [
        "--hf-checkpoint",
        str(model),
        "--run-dir",
        str(run_dir),
        "--num-rollout",
        str(rollouts),
    ]
    command += [
        "--skip-eval-before-train",
        "--eval-interval",
        str(10 * rollouts),
        "--no-live-view",
        "--no-write-report",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    ends = sorted(
        record["time"] for record in records if "perf/weight_version" in record.get("metrics", {})
    )
    steps = [later - earlier for earlier, later in zip(ends[:-1], ends[1:], strict=True)]
    # the last one may hold the evaluation at the end
    return statistics.median(steps[SKIPPED - 1 : -1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", type=Path, help="Warmed-up Hugging Face folder.")
    parser.add_argument("--rollouts", type=int, default=12, help="Rollouts of each run.")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as scratch:
        before = run_plain(options.model, options.rollouts, Path(scratch))
        full = run_full(options.model, options.rollouts, Path(scratch))
        after = run_plain(options.model, options.rollouts, Path(scratch))
    ratio = full / statistics.mean([before, after])
    print(
        f"plain {before:.3f} s and {after:.3f} s, full stack {full:.3f} s a step: x{ratio:.2f} "
        f"(limit x{LIMIT:g})"
    )
    return int(ratio > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
