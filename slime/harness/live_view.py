"""What a run is doing, in the terminal: a moving panel, or plain lines when the output is a file.

The driver's thread follows metrics.jsonl and progress.jsonl of the run folder, so it shows what
every process reports and none of them waits for it. `RunState` is pure: records in, text out.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from slime.algorithms.table import LOSSES
from slime.files.jsonl import JsonlTail
from slime.harness.run_records import EVAL_FAMILIES, FAMILIES, pick
from slime.tracking import progress
from slime.tracking.tracking import start_run_folder

POLL_INTERVAL_S = 0.25
# a plain line is printed at least this often, so that ten seconds never pass without one
SILENCE_S = 8.0


def format_duration(seconds: float) -> str:
    """Returns "42 s", "3:07" or "1:02:07"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@dataclasses.dataclass
class RunState:
    """Where a run stands, from its records. Times are seconds since the epoch, as in
    the records.
    """

    started: float
    num_rollout: int | None = None
    hidden: tuple[str, ...] = ()
    phase: str = "starting"
    phase_since: float = 0.0
    done: int = 0
    total: int | None = None
    values: dict[str, float] = dataclasses.field(default_factory=dict)
    # metrics of unprinted rollouts, in order
    pending: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    last_printed: int | None = None
    # rollout -> its optimizer steps
    num_steps: dict[int, int] = dataclasses.field(default_factory=dict)
    # rollout -> when its training ended
    ended: dict[int, float] = dataclasses.field(default_factory=dict)

    def on_progress(self, record: dict[str, Any]) -> None:
        """Takes one record of progress.jsonl."""
        if record.get("phase") != self.phase:
            self.phase_since = record.get("time", self.started)
        self.phase, self.done, self.total = (
            str(record.get("phase")),
            record.get("done") or 0,
            record.get("total"),
        )

    def on_metrics(self, record: dict[str, Any]) -> list[str]:
        """Takes one record of metrics.jsonl; returns the lines that are now complete: of rollouts,
        of an evaluation.

        Generation may be a rollout ahead of training, so records of two rollouts come mixed. A
        rollout is complete when it was trained and the next one has begun; where its training is
        not timed, when the one after that has.
        """
        key, step, metrics = record.get("step_key"), record.get("step"), record.get("metrics") or {}
        if key == "eval/step":
            scores = [
                f"{name} {value:.4g}"
                for name, value in sorted(pick(metrics, EVAL_FAMILIES).items())
            ]
            trained = self._take(lambda rollout, later: rollout in self.ended)
            return trained + ([f"evaluation {step}  " + "  ".join(scores)] if scores else [])
        named = {
            name: metrics[name] for names in FAMILIES.values() for name in names if name in metrics
        }
        if key != "rollout/step":
            rollout = self._rollout_of(step)
            if rollout is None:
                self.values.update(pick(named, FAMILIES))
            else:
                self.pending[rollout].update(named)
            return []
        assert isinstance(step, int), f"a record of rollout/step has the step {step!r}"
        if step not in self.pending:
            if self.last_printed is not None and step <= self.last_printed:
                # the weight update after a rollout, which was printed when its evaluation came
                return []
            self.pending[step] = {}
            self.pending = dict(sorted(self.pending.items()))
        self.pending[step].update(named)
        if "schedule/num_steps" in metrics:
            self.num_steps[step] = int(metrics["schedule/num_steps"])
        if "perf/step_time" in metrics:
            self.ended.setdefault(step, record.get("time", self.started))
        return self._take(
            lambda rollout, later: later > 1 or (later == 1 and rollout in self.ended)
        )

    def on_end(self) -> list[str]:
        """Returns the lines of the rollouts that are not printed yet: the run is over."""
        return self._take(lambda rollout, later: True)

    def _rollout_of(self, train_step: object) -> int | None:
        """The pending rollout that optimizer step `train_step` belongs to: by the numbers where
        they fit, else the first untrained one.
        """
        for rollout in self.pending:
            num_steps = self.num_steps.get(rollout)
            if num_steps and isinstance(train_step, int) and train_step // num_steps == rollout:
                return rollout
        return next((rollout for rollout in self.pending if rollout not in self.ended), None)

    def _take(self, is_complete: Callable[[int, int], bool]) -> list[str]:
        """The lines of the first pending rollouts for which `is_complete(rollout, number of later
        ones)`, in order.
        """
        lines = []
        while self.pending:
            rollout = next(iter(self.pending))
            if not is_complete(rollout, len(self.pending) - 1):
                break
            # picked once all records are there: several may carry names of one label
            self.values.update(pick(self.pending.pop(rollout), FAMILIES))
            self.last_printed = rollout
            lines.append(self.rollout_line(rollout))
        return lines

    def rollout_line(self, rollout: int) -> str:
        """Returns one line: the rollout's number, reward, pass rate, length, KL, speed."""
        shown = [
            f"{label} {self.values[label]:.4g}"
            for label in FAMILIES
            if label in self.values and label not in self.hidden
        ]
        of = f"/{self.num_rollout}" if self.num_rollout else ""
        return f"rollout {rollout + 1}{of}  " + "  ".join(shown)

    def remaining_s(self, now: float) -> float | None:
        """Returns the expected seconds to the end from the last rollouts' pace, None before two of
        them are over.
        """
        recent = list(self.ended.values())[-8:]
        if len(recent) < 2 or not self.num_rollout:
            return None
        pace = (recent[-1] - recent[0]) / (len(recent) - 1)
        return max(0.0, (self.num_rollout - 1 - max(self.ended)) * pace - (now - recent[-1]))

    def progress_line(self, now: float) -> str:
        """Returns one line for the time between records: the current phase and its duration."""
        share = f" {self.done}/{self.total}" if self.total else ""
        return (
            f"  ... {self.phase}{share}, "
            f"{format_duration(max(0.0, now - (self.phase_since or self.started)))}"
        )


class LiveView:
    """A thread that shows the run until it is stopped. A failure in it ends the view, never the
    run.
    """

    def __init__(
        self,
        run_dir: str,
        *,
        num_rollout: int | None = None,
        hidden: tuple[str, ...] = (),
        stream: TextIO | None = None,
        poll_interval_s: float = POLL_INTERVAL_S,
        is_shared: bool = False,
        from_start: bool = False,
    ) -> None:
        """is_shared: a debugger may wait for input on the terminal, so nothing is redrawn and
        silence is not commented. from_start: of a run that may have been going on for long.
        """
        self._stream = stream or sys.stderr
        self._is_shared = is_shared
        self._state = RunState(started=time.time(), num_rollout=num_rollout, hidden=hidden)
        from_end = not from_start
        self._metrics = JsonlTail(Path(run_dir) / "metrics.jsonl", from_end=from_end)
        self._progress = JsonlTail(Path(run_dir) / progress.FILE_NAME, from_end=from_end)
        self._poll_interval_s = poll_interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live-view", daemon=True)
        self._last_line = time.monotonic()

    def start(self) -> None:
        self._thread.start()

    @property
    def is_shown(self) -> bool:
        """Whether it still shows the run: False once the terminal or pipe is closed."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Shows what is left and returns when the terminal is as it was."""
        self._stop.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # a closed terminal or pipe
            if self._stream.isatty() and not self._is_shared:
                self._run_panel()
            else:
                self._run_lines()

    def _read(self) -> list[str]:
        for record in self._progress.read():
            self._state.on_progress(record)
        return [line for record in self._metrics.read() for line in self._state.on_metrics(record)]

    def _run_lines(self) -> None:
        self._print(
            f"run started, {'?' if self._state.num_rollout is None else self._state.num_rollout} "
            "rollouts"
        )
        while True:
            stopping = self._stop.wait(self._poll_interval_s)
            for line in self._read():
                self._print(line)
            if stopping:
                for line in self._state.on_end():
                    self._print(line)
                return
            if time.monotonic() - self._last_line > SILENCE_S and not self._is_shared:
                self._print(self._state.progress_line(time.time()))

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)
        self._last_line = time.monotonic()

    def _run_panel(self) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
        )
        from rich.table import Table

        console = Console(file=self._stream)
        bars = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"), console=console, auto_refresh=False,
        )  # fmt: skip
        run_bar = bars.add_task("rollouts", total=self._state.num_rollout, note="")
        phase_bar = bars.add_task("starting", total=None, note="")
        grid = Table.grid()
        grid.add_row(bars)
        with Live(
            grid,
            console=console,
            refresh_per_second=4,
            redirect_stdout=False,
            redirect_stderr=False,
        ) as live:
            shown_phase = None
            while not self._stop.wait(self._poll_interval_s):
                for line in self._read():
                    live.console.print(line, highlight=False, markup=False)
                state = self._state
                if state.phase != shown_phase:
                    shown_phase = state.phase
                    bars.reset(phase_bar, total=state.total, description=state.phase)
                bars.update(phase_bar, completed=state.done, total=state.total)
                remaining = state.remaining_s(time.time())
                note = "" if remaining is None else f"about {format_duration(remaining)} left"
                bars.update(run_bar, completed=len(state.ended), note=note)
            for line in (*self._read(), *self._state.on_end()):
                live.console.print(line, highlight=False, markup=False)


@contextlib.contextmanager
def live_view(args: argparse.Namespace) -> Iterator[None]:
    """Shows the run of `args` on standard error while the body runs, if `args.live_view`."""
    if not args.live_view:
        yield
        return
    # supervised samples have reward 0
    hidden = ("reward", "pass rate") if LOSSES[args.loss_type].is_supervised else ()
    view = LiveView(
        start_run_folder(args), num_rollout=args.num_rollout, hidden=hidden, is_shared=args.local
    )
    view.start()
    try:
        yield
    finally:
        view.stop()
