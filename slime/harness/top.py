"""`slime top RUN`: what a run is doing, in this terminal, also of a run that was started elsewhere.

It reads metrics.jsonl and progress.jsonl of the run's folder, and ends with the run, or with
Ctrl-C, which does nothing to the run. Exit status 1 where the run failed or died.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from slime.exceptions import ConfigError
from slime.harness.consistency_report import printable, read_config
from slime.harness.live_view import LiveView
from slime.harness.run_state import DIED, FAILED, UNKNOWN, State, state_of
from slime.tracking import progress
from slime.tracking.tracking import FILE_NAME

LOOK_EVERY_S = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Shows the run until it ends. ConfigError where the folder is no run."""
    options = _parser().parse_args(argv)
    folder: Path = options.run
    if not any((folder / name).is_file() for name in (FILE_NAME, progress.FILE_NAME)):
        raise ConfigError(
            f"{folder} is no run folder, or the run has not begun: it has neither {FILE_NAME} nor "
            f"{progress.FILE_NAME}."
        )
    total = read_config(folder).get("num_rollout")
    view = LiveView(
        str(folder),
        num_rollout=total if isinstance(total, int) else None,
        stream=sys.stdout,
        from_start=True,
    )
    view.start()
    state = state_of(folder)
    try:
        while state.is_live and view.is_shown:
            time.sleep(LOOK_EVERY_S)
            state = state_of(folder)
    except KeyboardInterrupt:
        pass
    finally:
        view.stop()
    print(_line(state), flush=True)
    return int(state.word in (FAILED, DIED))


def _line(state: State) -> str:
    words = "the run goes on" if state.is_live else f"the run has {state.word}"
    if state.word == UNKNOWN:
        words = "nothing says whether the run goes on"
    return words + (f": {printable(state.note)}" if state.note else "")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slime top", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="Run folder, of a run that goes on or has ended.")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
