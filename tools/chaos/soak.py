"""Trains for hours on the tiny model and watches whether a process of the run grows.

    python tools/chaos/soak.py [--hours 2 | --rollouts 2000] [--every 50] [--loop sync] [--out FILE]

Every 50 rollouts, of each process: private memory, descriptors, threads; and the run's files in
/dev/shm. After the first fifth (at least 200 rollouts, where there are so many) a line is laid through
each series (Theil and Sen's). Status 1 where memory rises by more than 1 MB per 1,000 rollouts, or
anything else by more than nothing.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools")]

from lose_processes import WatchedRun  # noqa: E402

from chaos.vital_signs import private_bytes, shared_files, vital_signs  # noqa: E402

MEMORY = "memory"
LIMIT_BYTES = 2**20  # per 1,000 rollouts
WARM_UP_SHARE, WARM_UP_ROLLOUTS = 0.2, 200
START_S = 300.0
STANDSTILL_S = 300.0
LOOPS = {"sync": ("slime.train", ()), "async": ("slime.train_async", ("--colocate",))}
# an iteration well below a second
OPTIONS = (
    "--rollout-batch-size 4 --n-samples-per-prompt 2 --global-batch-size 8 --micro-batch-size 8 "
    "--rollout-max-response-len 4"
).split()


@dataclasses.dataclass(frozen=True)
class Trend:
    """A series after the warm-up. `slope`: per 1,000 rollouts."""

    process: str
    what: str
    first: float
    last: float
    slope: float

    @property
    def is_growth(self) -> bool:
        """Whether it rises by more than it may."""
        if self.what == MEMORY:
            return self.slope > LIMIT_BYTES
        return self.slope > 0 and self.last > self.first

    def __str__(self) -> str:
        unit = 2**20 if self.what == MEMORY else 1
        name = "memory, MiB" if self.what == MEMORY else self.what
        return (
            f"| {self.process} | {name} | {self.first / unit:.1f} | {self.last / unit:.1f} | "
            f"{self.slope / unit:+.2f} | {'GROWS' if self.is_growth else 'steady'} |"
        )


def slope_of(points: Sequence[tuple[float, float]]) -> float:
    """The median of the slopes between all pairs of points; 0 for fewer than two."""
    slopes = [
        (y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in itertools.combinations(points, 2) if x1 > x0
    ]
    return statistics.median(slopes) if slopes else 0.0


def trends_of(samples: Sequence[dict]) -> list[Trend]:
    """One trend per process and figure; samples: {"rollout", "processes": {name: {what: value}}}."""
    last = samples[-1]["rollout"]
    begin = min(max(WARM_UP_SHARE * last, WARM_UP_ROLLOUTS), 0.5 * last)
    series: dict[tuple[str, str], list[tuple[float, float]]] = collections.defaultdict(list)
    for sample in samples:
        if sample["rollout"] >= begin:
            for process, figures in sample["processes"].items():
                for what, value in figures.items():
                    series[process, what].append((sample["rollout"], value))
    found = []
    for (process, what), points in sorted(series.items()):
        part = max(1, len(points) // 4)
        first = statistics.median(value for _, value in points[:part])
        end = statistics.median(value for _, value in points[-part:])
        found.append(Trend(process, what, first, end, 1000 * slope_of(points)))
    return found


def look_at(run: WatchedRun) -> dict[str, dict[str, int]]:
    """{process: {memory, descriptors, threads}} of all processes of the run, and its shared files."""
    pids = {**run.processes(), "the driver": run.process.pid}
    found: dict[str, dict[str, int]] = {}
    for role, pid in pids.items():
        with contextlib.suppress(OSError):
            signs = vital_signs(pid)
            found[role] = {
                MEMORY: private_bytes(pid),
                "descriptors": signs.descriptors,
                "threads": signs.threads,
            }
    found["/dev/shm"] = {"files": len(shared_files(pids.values()))}
    return found


class Progress:
    """Training steps that the metrics show; only what is new is read."""

    def __init__(self, path: Path) -> None:
        self._path, self._place, self._count = path, 0, 0

    def count(self) -> int:
        """The steps so far."""
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            file.seek(self._place)
            whole = file.read().rpartition(b"\n")[0]
            self._place += len(whole)
            self._count += whole.count(b'"train/loss"')
        return self._count


def soak(run: WatchedRun, *, rollouts: int, until: float, every: int, out: Path) -> list[dict]:
    """Samples until so many rollouts have trained or the time is over. RuntimeError where the run
    ends or stands still.
    """
    run.wait_until_trained(timeout_s=START_S)
    progress, samples = Progress(run.folder / "metrics.jsonl"), []
    begun, due = time.monotonic(), every
    moved_at, moved_to = begun, 0
    while True:
        trained, now = progress.count(), time.monotonic()
        if trained > moved_to:
            moved_at, moved_to = now, trained
        if run.process.poll() is not None or now - moved_at > STANDSTILL_S:
            raise RuntimeError(f"the run stands still at {trained}:\n{run.text()[-3000:]}")
        if trained >= due:
            samples.append({"rollout": trained, "seconds": now - begun, "processes": look_at(run)})
            with out.open("a") as file:
                file.write(json.dumps(samples[-1]) + "\n")
            due = trained - trained % every + every
            if len(samples) % 10 == 0:
                print(f"{trained} rollouts, {now - begun:.0f} s", file=sys.stderr, flush=True)
        if trained >= rollouts or now > until:
            return samples
        time.sleep(0.2)


def main(argv: list[str] | None = None) -> int:
    """Status 0 where nothing grows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hours", type=float, default=24.0, help="at most")
    parser.add_argument("--rollouts", type=int, default=10**9, help="at most")
    parser.add_argument("--every", type=int, default=50, help="rollouts from sample to sample")
    parser.add_argument("--loop", choices=sorted(LOOPS), default="sync")
    parser.add_argument("--out", type=Path, help="samples as JSON lines")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended
    from examples.addition.prepare import prepare

    module, without = LOOPS[options.loop]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = Path(prepare(folder / "data"))
        begun = time.monotonic()
        run = WatchedRun(data, folder / "run", *OPTIONS, module=module, without=without)
        try:
            samples = soak(
                run,
                rollouts=options.rollouts,
                until=begun + 3600 * options.hours,
                every=options.every,
                out=options.out or folder / "samples.jsonl",
            )
        finally:
            run.close()
        left = run.left()
    if len(samples) < 4:
        print(f"only {len(samples)} samples: more rollouts, or a smaller --every")
        return 1
    trends = trends_of(samples)
    print("| process | figure | after warm-up | at the end | per 1,000 rollouts | |")
    print("|---|---|---|---|---|---|")
    print(*trends, sep="\n")
    growing = [trend for trend in trends if trend.is_growth]
    count, seconds = samples[-1]["rollout"], samples[-1]["seconds"]
    print(
        f"{count} rollouts in {seconds:.0f} s ({seconds / count:.2f} s each), {len(growing)} grow, "
        f"left behind: {left or 'nothing'}, load {os.getloadavg()[0]:.0f}"
    )
    return int(bool(growing or left))


if __name__ == "__main__":
    raise SystemExit(main())
