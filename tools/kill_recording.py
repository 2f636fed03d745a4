"""Kills a process that records, at random times, and checks what is left.

    python tools/kill_recording.py [--times 200] [--folder DIR] [--seed 0]

Each time a process of its own records rollouts through the writers of a run, as fast as it can, and
is ended with SIGKILL. Then every part that a manifest lists must have the size and hash that the
manifest says, and the next start must leave no temporary file of the dead process.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROLLOUTS = 1_000_000
SLOWEST_S = 0.25  # of a kill after the first rollout


def record(root: Path) -> None:
    """Records rollouts until it is killed."""
    import numpy as np
    import pyarrow

    from slime.files import tables
    from slime.recording.manifest import ROLLOUT, TRAIN
    from slime.recording.writer import PartWriter

    rng = np.random.default_rng(os.getpid())
    rollouts = PartWriter(root, ROLLOUT, run=0, keep=3)
    ranks = PartWriter(root, TRAIN, run=0)
    for rollout_id in range(ROLLOUTS):
        table = pyarrow.table({"numbers": rng.normal(size=int(rng.integers(1, 200_000)))})

        def write(path: Path, table: pyarrow.Table = table) -> int:
            tables.write_table_to(path, table)
            return len(table)

        number = rollout_id % 6  # numbers come again, as in a run that resumes
        rollouts.begin(number)
        for part in ("samples", "columns", "schedule"):
            rollouts.add(part, write)
        rollouts.finish()
        ranks.begin(number)
        ranks.add("train", write)
        ranks.finish()
        if rollouts.failed or ranks.failed:
            raise SystemExit("the recording has stopped by itself")
        rollouts.close()
        ranks.close()
        if rollout_id == 0:
            sys.stdout.write("recording\n")
            sys.stdout.flush()


def problems_of(root: Path) -> tuple[list[str], int]:
    """(one sentence per listed part that is damaged, number of parts that are listed)."""
    from slime.recording.reader import Recording

    recording = Recording(root)
    found, count = [], 0
    for rollout_id in recording.rollouts:
        rollout = recording.rollout(rollout_id)
        found += rollout.problems()
        count += len(rollout.parts)
    return found, count


def left_over(root: Path) -> list[str]:
    """Temporary files and folders below `root`."""
    return sorted(str(path) for path in root.rglob(".*"))


def kill_once(root: Path, wait_s: float) -> tuple[list[str], int, int]:
    """Records into `root`, kills after `wait_s` seconds; (problems, listed parts, temporary files
    that the process left).
    """
    from slime.recording.writer import clean_up

    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, __file__, "--record-into", str(root)]
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            return [f"it ended by itself with status {process.wait()}"], 0, 0
        time.sleep(wait_s)
        process.send_signal(signal.SIGKILL)
    found, count = problems_of(root)
    temporary = len(left_over(root))
    clean_up(root)
    found += [f"{path} is left of a dead process" for path in left_over(root)]
    again, _ = problems_of(root)
    return found + again, count, temporary


def main(argv: list[str] | None = None) -> int:
    """Status 0 where nothing was wrong after any kill."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=200, help="kills")
    parser.add_argument("--folder", type=Path, help="record here instead of a temporary folder")
    parser.add_argument("--seed", type=int, default=0, help="of the times at which it is killed")
    parser.add_argument("--record-into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.record_into is not None:
        record(options.record_into)
        return 0
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as temporary:
        root = options.folder or Path(temporary) / "recording"
        root.mkdir(parents=True, exist_ok=True)
        (root / "run_0000.json").write_text("{}")
        bad, parts, files, in_the_middle = 0, 0, 0, 0
        for time_of in range(options.times):
            found, count, left = kill_once(root, rng.uniform(0.0, SLOWEST_S))
            parts, files, in_the_middle = parts + count, files + left, in_the_middle + (left > 0)
            bad += bool(found)
            for problem in found:
                print(f"kill {time_of}: {problem}")
    print(
        f"{options.times} kills, {in_the_middle} of them in the middle of a file: {parts} listed "
        f"parts verified, {files} temporary files removed, {bad} kills with problems"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
