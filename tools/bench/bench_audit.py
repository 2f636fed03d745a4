"""How long `slime audit` takes, and how much memory, by shape; asserts the limits that the project
promises; exit status 1 if one is broken.

    python tools/bench/bench_audit.py                   # 8,192 samples x 2,000 tokens of each shape
                                                        # in 10 s of CPU and 2 GB; 200 steps of 64
                                                        # samples in 20 s
    python tools/bench/bench_audit.py --samples 1024    # smaller
    python tools/bench/bench_audit.py --shape slime     # one shape

Each audit runs in a process of its own, whose peak memory is what the kernel counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
for folder in (ROOT, ROOT / "tests"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from harness.test_audit_faults import WRITERS  # noqa: E402
from support import audit_files as files  # noqa: E402

VOCABULARY, GROUP = 150_000, 8
SECONDS, SECONDS_OF_STEPS, GIGABYTES = 10.0, 20.0, 2.0


def large_step(count: int, length: int) -> list[dict]:
    """`count` samples of `length` tokens, in groups of GROUP, with everything that is recorded."""
    rng = np.random.default_rng(0)
    rewards = (rng.random(count) < 0.4).astype(float)
    advantages = files.grpo(rewards, size=GROUP)
    words = np.array([f"{word}{number}" for word in files.WORDS for number in range(40)])
    samples = []
    for i in range(count):
        log_probs = -rng.exponential(0.8, size=length)
        samples.append(
            {
                "prompt": f"Problem {i // GROUP}: what is {i // GROUP} plus one?",
                "response": " ".join(rng.choice(words, size=length).tolist()),
                "label": str(i // GROUP + 1),
                "group": i // GROUP,
                "index": i,
                "reward": float(rewards[i]),
                "advantage": float(advantages[i]),
                "prompt_ids": [*range(100), i // GROUP],
                "ids": rng.integers(0, VOCABULARY, size=length).tolist(),
                "mask": [1] * length,
                "rollout_log_probs": log_probs.tolist(),
                "log_probs": (log_probs + rng.normal(0, 0.004, length)).clip(max=0).tolist(),
            }
        )
    return samples


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one `slime audit` took. cpu: seconds of all its threads, which other processes on the
    machine do not lengthen; the limits are on it.
    """

    seconds: float
    cpu: float
    gigabytes: float
    status: int

    def __str__(self) -> str:
        return f"{self.seconds:6.1f} s  {self.cpu:6.1f} s of CPU  {self.gigabytes:5.2f} GB"


def measure(path: Path, *extra: str) -> Cost:
    """Runs `slime audit` in a process of its own."""
    words = [sys.executable, "-m", "slime.cli", "audit", str(path), *extra]
    begun = time.monotonic()
    child = os.posix_spawn(
        sys.executable,
        words,
        {**os.environ, "PYTHONPATH": str(ROOT)},
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )
    _, status, usage = os.wait4(child, 0)
    return Cost(
        time.monotonic() - begun,
        usage.ru_utime + usage.ru_stime,
        usage.ru_maxrss / 2**20,
        os.waitstatus_to_exitcode(status),
    )


def measure_large(folder: Path, shape: str, make: Callable[[], list[dict]]) -> bool:
    """Writes one step in a shape, measures its audit, and returns whether it is within the limits."""
    folder.mkdir()
    pid = os.fork()  # what the writing takes is no part of any measurement
    if not pid:
        WRITERS[shape](folder, {0: make()})
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, f"{shape} could not be written"
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6
    extra = ("--mapping", str(folder / "keys.json.txt")) if shape == "mapped" else ()
    cost = measure(folder, *extra)
    is_within = cost.cpu <= SECONDS and cost.gigabytes <= GIGABYTES and cost.status in (0, 1)
    verdict = "ok" if is_within else f"over {SECONDS:g} s or {GIGABYTES:g} GB"
    print(f"{shape:12} {size:6.0f} MB  {cost}  {verdict}", flush=True)
    return is_within


def measure_steps(folder: Path, shape: str, steps: int) -> bool:
    """Writes many small steps, measures, and returns whether it is within the limit."""
    folder.mkdir()
    for step in range(steps):
        parts = [files.samples_of(3 * step + part) for part in range(3)]
        samples = [one for part in parts for one in part][:64]
        WRITERS[shape](folder, {step: samples})
    cost = measure(folder)
    print(f"{shape:12} {steps} steps of 64 samples  {cost}", flush=True)
    return cost.cpu <= SECONDS_OF_STEPS


def main() -> int:
    """Measures, prints, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--shape", choices=sorted(WRITERS), default=None, help="Default: all.")
    options = parser.parse_args()
    shapes = [options.shape] if options.shape else list(WRITERS)
    good = True
    for shape in shapes:
        with tempfile.TemporaryDirectory() as folder:
            good &= measure_large(
                Path(folder) / "large",
                shape,
                lambda: large_step(options.samples, options.tokens),
            )
    for shape in [one for one in ("verl", "slime", "recording") if one in shapes]:
        with tempfile.TemporaryDirectory() as folder:
            good &= measure_steps(Path(folder) / "steps", shape, options.steps)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
