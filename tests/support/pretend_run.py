"""A run that is none: enters rollouts into a ledger and ends as its plan says, for `slime supervise`.

    pretend_run.py PLAN.json --run-dir DIR [--load DIR]

The plan is a list, one entry per attempt: {"rollouts": 3, "end": 1} trains three and exits with
status 1, {"rollouts": 0, "end": -9} is killed, {"hang": true} ignores SIGTERM, {"child": true} leaves
a process behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from slime.data.run_ledger import Start, TrainedEntry
from slime.files.ledger_file import FILE_NAME, LedgerWriter, read_books


def main() -> int:
    plan, run_dir = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[3])
    books = read_books(run_dir / FILE_NAME) if (run_dir / FILE_NAME).exists() else None
    number = 0 if books is None else len(books.starts)
    step = plan[min(number, len(plan) - 1)]
    with open(run_dir / "commands.jsonl", "a") as file:
        file.write(json.dumps(sys.argv[1:]) + "\n")
    if step.get("child"):
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
        )
    if step.get("hang"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not step.get("silent"):
        writer, first = LedgerWriter(run_dir), step.get("first", 0)
        writer.append([Start(f"s{number}", time.time(), str(run_dir), first, (), None, ())])
        for rollout in range(first, first + step.get("rollouts", 0)):
            writer.append([TrainedEntry(f"s{number}", rollout, 0.0, "", 0, {})])
    (run_dir / "ready").write_text(str(number))
    while step.get("hang") or step.get("waits"):
        time.sleep(0.05)
    if step.get("end", 0) < 0:
        os.kill(os.getpid(), -step["end"])
    return step.get("end", 0)


if __name__ == "__main__":
    raise SystemExit(main())
