"""Real runs of `slime train` in their own process, on the addition example's data: real Ray,
Megatron-core and engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "SLIME_ACCELERATOR": "cpu",
    "PYTHONPATH": str(ROOT),
}
RUN_VARIABLE = "SLIME_TEST_RUN"
OPTIONS = (
    "--input-key prompt --label-key label --apply-chat-template --custom-rm-path "
    "support.small_run.ends_in_time "
    "--rollout-batch-size 8 --n-samples-per-prompt 4 --global-batch-size 16 --micro-batch-size 8 "
    "--rollout-max-response-len 6 "
    "--lr 1e-3 --lr-decay-style constant --colocate --rollout-num-gpus 1 --num-cpus 2 "
    "--sglang-enable-deterministic-inference --rollout-shuffle "
    "--data-pad-size-multiplier 16 --no-live-view --no-write-report --gate-keep-truncated"
).split()


async def ends_in_time(args, sample, **kwargs) -> float:
    """A reward that an untrained model gets now and then: the share of even token ids in its
    response.
    """
    response = sample.tokens[-sample.response_length :]
    return sum(token % 2 == 0 for token in response) / max(1, len(response))


def command(data: Path, run_dir: Path, *options: object, asynchronous: bool = False) -> list[str]:
    """The command line of a small GRPO run; `options` come last and win. asynchronous: of
    train-async, on devices of their own.
    """
    base = [
        "--prompt-data",
        data / "train.jsonl",
        "--hf-checkpoint",
        data / "model",
        "--run-dir",
        run_dir,
    ]
    module = "slime.train_async" if asynchronous else "slime.train"
    shared = [option for option in OPTIONS if option != "--colocate" or not asynchronous]
    return [sys.executable, "-m", module, *map(str, base), *shared, *map(str, options)]


def start(
    data: Path, run_dir: Path, *options: object, asynchronous: bool = False
) -> subprocess.Popen:
    """The run as a process group of its own."""
    return launch(command(data, run_dir, *options, asynchronous=asynchronous), run_dir)


def launch(words: list[str], run_dir: Path, *, paths: tuple[Path, ...] = ()) -> subprocess.Popen:
    """A command of a run, as a process group of its own. paths: also searched for modules."""
    environment = {**os.environ, **ENVIRONMENT}
    # inherited by every process of the run, whatever it makes of its command line
    environment[RUN_VARIABLE] = str(run_dir)
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (*paths, ROOT, ROOT / "tests")))
    return subprocess.Popen(
        words,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def run(
    data: Path, run_dir: Path, *options: object, asynchronous: bool = False, timeout: float = 240
) -> str:
    """Runs to the end and returns what was printed; AssertionError with it for another status than
    0.
    """
    return finish(start(data, run_dir, *options, asynchronous=asynchronous), timeout=timeout)


def finish(process: subprocess.Popen, *, timeout: float = 240) -> str:
    """Waits for the end of a run and returns what was printed; AssertionError with it for another
    status than 0.
    """
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, _ = process.communicate(timeout=30)
        raise AssertionError(
            f"the run took more than {timeout} s; it printed:\n{output[-4000:]}"
        ) from None
    assert process.returncode == 0, (
        f"status {process.returncode}; the run printed:\n{output[-6000:]}"
    )
    return output


def records(run_dir: Path) -> list[dict]:
    """All records of metrics.jsonl."""
    return [
        json.loads(line)
        for line in (run_dir / "metrics.jsonl").read_text().splitlines()
        if line.strip()
    ]


def series(run_dir: Path, name: str) -> list[float]:
    """The values of one metric in the order of their steps."""
    found = [
        (r["step"], r["metrics"][name])
        for r in records(run_dir)
        if "step_key" in r and name in r["metrics"]
    ]
    return [value for _, value in sorted(found, key=lambda pair: pair[0])]
