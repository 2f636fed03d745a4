"""Breaks real runs of `slime train` and `slime train-async`, one fault after the other, and prints
what each led to.

    python tools/chaos/loops.py [--minutes 20] [--seed 0] [--only WORD ...] [--loops http recovery sync async]
                                [--folder DIR]

A run of each loop on the addition example's tiny model is broken by the cells of `cells`, in an
order drawn from the seed, each at a random moment; where it ends it is continued with --load, which
is the start of the next cell. A row has the evidence that the fault fired, when the terminal named
it, whether the run went on or with which status it ended, what `slime ledger` finds lost, and what is
left five seconds later. Status 1 where a row is not as it must be.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools")]

from chaos.cells import (  # noqa: E402
    ASYNC,
    EXTERNAL_KEY,
    GOES_ON,
    HTTP,
    RECOVERY,
    SYNC,
    Cell,
    TakenPort,
    broken_http,
    loop_cells,
    port_taken,
    recovery_cells,
)
from chaos.engine_http import served  # noqa: E402
from chaos.lineage import Lineage, Loop  # noqa: E402
from chaos.proxy import MODES, BreakingProxy  # noqa: E402

LOOPS = {"http": HTTP, "recovery": RECOVERY, "sync": SYNC, "async": ASYNC}
SHARES = {"http": 0.08, "recovery": 0.12, "sync": 0.42, "async": 0.38}  # of the time
LONGEST_S = 1.5  # from a moment at which a fault may come to the fault
ROLLOUTS_AFTER = 2  # that must train after a fault which a run survives


@dataclasses.dataclass
class Row:
    """What one fault led to."""

    loop: str
    cell: Cell
    fired: str = ""
    outcome: str = ""
    seen_s: float | None = None
    over_s: float | None = None
    status: int | None = None
    sentence: str = ""
    lost: str = "not asked"
    left: list[str] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        def seconds(value: float | None) -> str:
            return "-" if value is None else f"{value:.1f}"

        end = self.outcome if self.status is None else f"{self.outcome}, status {self.status}"
        cells = (
            self.cell.fault, self.cell.component, self.loop, end, seconds(self.seen_s),
            seconds(self.over_s), self.lost, "; ".join(self.left) or "nothing",
        )  # fmt: skip
        return "| " + " | ".join(cells) + " |"


HEAD = (
    "| fault | component | loop | the run | named after s | healed or over after s | lost | left |\n"
    "|---|---|---|---|---|---|---|---|"
)


class Breaker:
    """Cells of one lineage."""

    def __init__(self, lineage: Lineage, rng: random.Random, options: tuple[str, ...] = ()) -> None:
        self.lineage, self._rng, self._options = lineage, rng, options
        self._unproved: list[Row] = []
        self.rows: list[Row] = []

    def break_by(self, cell: Cell) -> None:
        """One cell; the run is started where it does not run."""
        row = Row(self.lineage.loop.name, cell)
        self.rows.append(row)
        self._unproved.append(row)
        try:
            if cell.at_start is not None:
                self._rest()
                row.fired = cell.strike(self.lineage)
                self.lineage.start(*self._options, *cell.at_start)
                self._see_the_end(row, time.monotonic())
            else:
                self._run_for_a_while()
                begun = time.monotonic()
                row.fired = cell.strike(self.lineage)
                if cell.expects == GOES_ON:
                    self._see_it_go_on(row, begun)
                else:
                    self._see_the_end(row, begun)
        except (AssertionError, RuntimeError, OSError, KeyError) as error:
            row.problems.append(f"{type(error).__name__}: {error}")
        finally:
            cell.restore(self.lineage)
            if not self.lineage.is_alive():
                self._prove()

    def finish(self) -> None:
        """The last proof: an undisturbed start, ended on purpose."""
        if self._unproved or not self.lineage.is_alive():
            self._rest()

    def _run_for_a_while(self) -> None:
        if not self.lineage.is_alive():
            self.lineage.start(*self._options)
            self.lineage.wait_until_it_trains()
        time.sleep(self._rng.random() * LONGEST_S)

    def _rest(self) -> None:
        """The run is ended by Ctrl-C, and what it did is proved."""
        if self.lineage.is_alive():
            self.lineage.close_run()
            self._prove()

    def _see_it_go_on(self, row: Row, begun: float) -> None:
        lineage, cell = self.lineage, row.cell
        if not lineage.wait_for_rollouts(ROLLOUTS_AFTER, timeout_s=cell.within_s):
            what = "stands still" if lineage.is_alive() else "has ended"
            row.outcome = what
            row.problems.append(f"the run {what}: {_error_of(lineage)}")
            lineage.close_run()
            return
        row.outcome, row.over_s = "goes on", time.monotonic() - begun
        assert lineage.run is not None
        if cell.is_harmless:
            alarms = [line for at, line in lineage.run.lines if at >= begun and is_alarm(line)]
            row.problems += [f"a false alarm: {line}" for line in alarms]
        else:
            row.seen_s = lineage.run.named_after(cell.component, begun)

    def _see_the_end(self, row: Row, begun: float) -> None:
        lineage, cell, run = self.lineage, row.cell, self.lineage.run
        assert run is not None
        row.status = run.finish(cell.within_s)
        row.over_s = time.monotonic() - begun
        row.sentence = _error_of(lineage)
        row.outcome = "ended" if row.status is not None else "did not end"
        row.seen_s = _named_after(lineage, cell.named or cell.component, begun)
        row.left = lineage.left()
        run.close()
        if row.status not in cell.statuses:
            row.problems.append(
                f"status {row.status}, expected {cell.statuses}: {run.text()[-1500:]}"
            )
        if cell.named and cell.named not in row.sentence:
            row.problems.append(f"the error does not name {cell.named!r}: {row.sentence!r}")
        if row.left:
            row.problems.append(f"left behind: {row.left}")

    def _prove(self) -> None:
        try:
            culprits = self.lineage.culprits()
            said = "nothing" if not culprits else f"{len(culprits)} culprits"
        except Exception as error:  # noqa: BLE001 - a proof that fails is a row's problem
            culprits, said = [f"{type(error).__name__}: {error}"], "no proof"
        for row in self._unproved:
            row.lost = said
            row.problems += culprits
        self._unproved.clear()


def is_alarm(line: str) -> bool:
    """Whether a line of the terminal says that a process has died or is frozen."""
    return ") has died" in line or ") is frozen" in line


def _error_of(lineage: Lineage) -> str:
    assert lineage.run is not None
    lines = [line for _, line in lineage.run.lines]
    places = [place for place, line in enumerate(lines) if line.startswith("error")]
    text = " ".join(lines[places[0] :]) if places else f"no error: {lines[-20:]}"
    return text if len(text) < 900 else f"{text[:300]} ... {text[-600:]}"


def _named_after(lineage: Lineage, word: str, begun: float) -> float | None:
    """Seconds until the terminal had a line with `word`."""
    assert lineage.run is not None
    for at, line in list(lineage.run.lines):
        if at >= begun and word in line:
            return at - begun
    return None


@contextlib.contextmanager
def lineage_of(loop: Loop, data: Path, folder: Path) -> Iterator[Lineage]:
    """A lineage that is closed at the end."""
    lineage = Lineage(loop, data, folder)
    try:
        yield lineage
    finally:
        lineage.close()


def break_loop(breaker: Breaker, cells: list[Cell], deadline: float, rng: random.Random) -> None:
    """As many cells as time allows; those that a run survives share one start."""
    groups = [
        [cell for cell in cells if (cell.expects == GOES_ON) == goes] for goes in (True, False)
    ]
    for group in groups:
        rng.shuffle(group)
    for cell in [cell for group in groups for cell in group]:
        if time.monotonic() > deadline:
            break
        breaker.break_by(cell)
        row = breaker.rows[-1]
        print(row, *row.problems, sep="\n    ", file=sys.stderr, flush=True)
    breaker.finish()


@contextlib.contextmanager
def external_engine(data: Path, folder: Path) -> Iterator[BreakingProxy]:
    """A proxy before an engine that the run did not start."""
    folder.mkdir()
    with served(folder, data / "model", key=EXTERNAL_KEY) as target:
        with BreakingProxy(target.host, target.port) as proxy:
            yield proxy


def rows_of(
    name: str, options: argparse.Namespace, data: Path, folder: Path, deadline: float
) -> tuple[list[Row], int]:
    """The rows of one loop, and the number of cells for which there was no time."""
    rng = random.Random(f"{options.seed}-{name}")
    with contextlib.ExitStack() as stack:
        extra: tuple[str, ...] = ()
        if name == "http":
            proxy = stack.enter_context(external_engine(data, folder / "engine"))
            cells = [broken_http(proxy, mode) for mode in MODES]
            extra = ("--rollout-external-engine-addrs", f"127.0.0.1:{proxy.port}")
            extra += ("--update-weight-disk-dir", str(folder / "weights"))
        elif name == "recovery":
            cells = list(recovery_cells())
        else:
            port = TakenPort()
            stack.callback(port.close)
            cells = list(loop_cells(LOOPS[name]))
            cells.append(port_taken("--sglang-port", "engine 0", port))
            cells.append(port_taken("--sglang-router-port", "the router", port))
        if options.only:
            cells = [
                cell for cell in cells
                if any(word in f"{cell.fault} {cell.component}" for word in options.only)
            ]  # fmt: skip
        lineage = stack.enter_context(lineage_of(LOOPS[name], data, folder / name))
        breaker = Breaker(lineage, rng, extra)
        break_loop(breaker, cells, deadline, rng)
        return breaker.rows, len(cells) - len(breaker.rows)


def main(argv: list[str] | None = None) -> int:
    """Status 0 where every row is as it must be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", help="cells whose fault or component has such a word")
    parser.add_argument("--loops", nargs="+", choices=sorted(LOOPS), default=list(LOOPS))
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended
    from examples.addition.prepare import prepare

    started = time.monotonic()
    rows: list[Row] = []
    num_left_out = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        data = Path(prepare(folder / "data"))
        for place, name in enumerate(options.loops):
            left_s = 60 * options.minutes - (time.monotonic() - started)
            share = SHARES[name] / sum(SHARES[one] for one in options.loops[place:])
            deadline = time.monotonic() + share * left_s
            found, left_out = rows_of(name, options, data, folder, deadline)
            rows += found
            num_left_out += left_out
    print(HEAD, *rows, sep="\n")
    problems = [(row, problem) for row in rows for problem in row.problems]
    for row, problem in problems:
        print(f"{row.cell.fault}, {row.cell.component}, {row.loop}: {problem}")
    print(
        f"{len(rows)} faults, {num_left_out} left out for lack of time, {len(problems)} problems, {time.monotonic() - started:.0f} s, load "
        f"{os.getloadavg()[0]:.0f}"
    )
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
