"""`slime supervise -- slime train ...`: restarts a run that failed, from its last checkpoint.

    slime supervise --max-restarts 5 --pause 10 -- slime train --config run.yaml --save ckpt

An attempt that fails is followed by another one, with --load on the folder of --save once that holds
a checkpoint; the pause before it doubles each time. It ends, with the status of the last attempt,
when the run is finished, when an attempt has status 2 (a configuration error, which comes again),
when the same rollout fails for the second time, after --max-restarts restarts, and on SIGINT or
SIGTERM. The first signal is passed on to the run, a second one ends it by force. Processes that an
attempt has left are ended before the next one. RUN_DIR/supervise.jsonl has a line for each attempt.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slime.config.cli import parse_command_line
from slime.config.derive import CHECKPOINT_TRACKER, has_megatron_checkpoint
from slime.config.observability import resolve_run_dir
from slime.config.specs import specs_by_name
from slime.data.ledger_audit import Books
from slime.exceptions import ConfigError
from slime.files.jsonl import JsonlWriter
from slime.files.ledger_file import FILE_NAME, read_books
from slime.ray.cluster_folder import sweep
from slime.rollout.rm_hub.grader_guard import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    children_of,
    prctl,
)

LOG_NAME = "supervise.jsonl"
LOOPS = {"train": "train", "train-async": "train-async"}
MODULES = {"slime.train": "train", "slime.train_async": "train-async"}
CONFIGURATION = 2
INTERRUPTED = 130
LONGEST_PAUSE_S = 600.0
STEP_S = 0.1  # between two looks at the run
END_S = 90.0  # that an interrupted run has to end in order
LEFT_S = 5.0  # that processes of a dead driver have to end by themselves
# Options that say where the first attempt begins; a restart begins at its own checkpoint.
FIRST_ONLY = (
    "load", "ckpt_step", "start_rollout_id", "finetune", "no_load_optim", "no_load_rng", "critic_load",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Command:
    """What is supervised: the words that start the loop, and its options. `save`: the folder of its
    checkpoints.
    """

    start: tuple[str, ...]
    options: tuple[str, ...]
    save: str | None
    load: str | None
    run_dir: str
    given: dict[str, str]  # option -> where it was given
    critic_save: str | None = None

    @property
    def ledger(self) -> Path:
        return Path(self.save or self.run_dir) / FILE_NAME

    @property
    def checkpoint(self) -> str | None:
        """The rollout of the last checkpoint, as its folder says; None where there is none."""
        if self.save is None or not has_megatron_checkpoint(self.save):
            return None
        return (Path(self.save) / CHECKPOINT_TRACKER).read_text(errors="replace").strip()

    @property
    def beginning(self) -> str:
        """Where the next attempt begins."""
        if self.save is None:
            return "as the first began: without --save there is no checkpoint"
        if self.checkpoint is None:
            return f"as the first began: {self.save} holds no checkpoint yet"
        return f"from the checkpoint after rollout {self.checkpoint} in {self.save}"

    def words(self) -> list[str]:
        """The command line of the next attempt: as it was given, or from the last checkpoint."""
        options = [*self.options, "--run-dir", self.run_dir]
        latest = self.checkpoint
        if self.save is None or latest is None:
            return [*self.start, *options]
        resumed = [*without_options(options, FIRST_ONLY), "--load", self.save]
        # what a file gives cannot be taken back, only given again
        again = {
            "ckpt_step": latest,
            "start_rollout_id": str(int(latest) + 1) if latest.isdecimal() else latest,
            "critic_load": self.critic_save or f"{self.save}/critic",
        }
        for name, value in again.items():
            if name in self.given and not any(_names(word, name) for word in self.options):
                resumed += [specs_by_name()[name].flags[0], value]
        return [*self.start, *resumed]


def _names(word: str, name: str) -> bool:
    return word.partition("=")[0] in specs_by_name()[name].flags


def without_options(words: Sequence[str], names: Sequence[str]) -> list[str]:
    """The words without these options and their values."""
    left, skip = [], False
    for word in words:
        if skip and not word.startswith("--"):
            continue
        skip = False
        for name in names:
            if _names(word, name):
                skip = specs_by_name()[name].kind is not bool and "=" not in word
                break
        else:
            left.append(word)
    return left


def command_of(words: Sequence[str]) -> Command:
    """The command behind `--`. ConfigError for another one than a training loop, and for options
    with which no attempt could go on from another.
    """
    start, options = _loop_of(list(words))
    line = parse_command_line(options)
    args = line.args
    if line.help_word is not None or line.print_config or line.dry_run:
        raise ConfigError("a command that only prints is not supervised. Run it without supervise.")
    for name in ("finetune", "no_load_optim", "no_load_rng"):
        if getattr(args, name) and not any(_names(word, name) for word in options):
            raise ConfigError(
                f"{name}: true in {line.config} would make each restart begin without it. Give "
                f"--{name.replace('_', '-')} on the command line: only the first attempt gets it."
            )
    run_dir = resolve_run_dir(args.run_dir, args.run_name)
    return Command(
        tuple(start),
        tuple(options),
        args.save,
        args.load,
        run_dir,
        dict(line.given),
        args.critic_save,
    )


def _loop_of(words: list[str]) -> tuple[list[str], list[str]]:
    """(the words that start the loop, its options)."""
    for place, word in enumerate(words):
        before = words[:place]
        if word in LOOPS and before and Path(before[-1]).name == "slime":
            return [sys.executable, "-m", "slime.cli", word] if place == 1 else [*before, word], (
                words[place + 1 :]
            )
        if word in LOOPS and before[-2:] == ["-m", "slime.cli"]:
            return [*before, word], words[place + 1 :]
        if word in MODULES and before[-1:] == ["-m"]:
            return [*before, word], words[place + 1 :]
    shown = " ".join(words) or "nothing"
    raise ConfigError(
        f"{shown!r:.80} stands behind --, which is no training loop. Write: slime supervise -- slime "
        "train ... (or slime train-async ...)."
    )


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One attempt that is over. status: as a shell tells it, 128 + the signal's number after one.
    rollout: the first whose training is not on record, None where the run had not begun. load: the
    folder that it went on from, and checkpoint: which one of --save, by its rollout.
    """

    number: int
    status: int
    rollout: int | None
    started: float
    seconds: float
    load: str | None
    checkpoint: str | None

    def __str__(self) -> str:
        how = (
            f"by {signal.Signals(self.status - 128).name}"
            if self.status > 128 and self.status - 128 in set(signal.Signals)
            else f"with status {self.status}"
        )
        where = "before its first rollout" if self.rollout is None else f"in rollout {self.rollout}"
        return f"attempt {self.number} ended {how} {where} after {self.seconds:.0f} s"


def failed_rollout(before: Books | None, after: Books | None) -> int | None:
    """The rollout that the newest start was at: the first one whose training is not on record."""
    if after is None:
        return None
    new = [start for start in after.starts if before is None or start not in before.starts]
    if not new:
        return None
    start = new[-1]
    done = [rollout for name, rollout in after.trained if name == start]
    return max(done) + 1 if done else after.starts[start].first


def books_at(path: Path) -> Books | None:
    """The ledger as far as it can be read; None without one."""
    try:
        return read_books(path)
    except OSError:
        return None


class Supervisor:
    """Runs attempts one after the other."""

    def __init__(self, command: Command, *, max_restarts: int, pause_s: float) -> None:
        self.command, self.max_restarts, self.pause_s = command, max_restarts, pause_s
        self.log = JsonlWriter(Path(command.run_dir) / LOG_NAME)
        self.process: subprocess.Popen | None = None
        self.signalled: int | None = None  # the first signal
        self._deadline: float | None = None

    def run(self) -> int:
        """The status of the last attempt that ran."""
        failures: collections.Counter[int | None] = collections.Counter()
        last: Attempt | None = None
        with self._listening():
            for number in range(1, self.max_restarts + 2):
                attempt, has_begun = self._attempt(number)
                if last is not None and not has_begun and attempt.status == 0:
                    # all rollouts were done, and the attempt before had failed after them
                    return self._end(f"the run is finished; {last} is its status", last.status)
                if attempt.status == 0:
                    return self._end(
                        f"the run is finished, after {number - 1} restarts", attempt.status
                    )
                last = attempt
                failures[attempt.rollout] += 1
                if (sentence := self._why_not_again(attempt, failures)) is not None:
                    return self._end(f"{attempt}; {sentence}", attempt.status)
                pause = min(self.pause_s * 2 ** (number - 1), LONGEST_PAUSE_S)
                self._say(
                    f"{attempt}; restart {number} of {self.max_restarts} in {pause:g} s, "
                    f"{self.command.beginning}"
                )
                if not self._pause(pause):
                    return self._end("interrupted: no further attempt", INTERRUPTED)
        raise AssertionError("the last attempt is followed by no other")

    def _why_not_again(
        self, attempt: Attempt, failures: collections.Counter[int | None]
    ) -> str | None:
        """Why there is no further attempt; None where there is one."""
        if self.signalled is not None or attempt.status == INTERRUPTED:
            return "it was interrupted, and is not started again"
        if attempt.status == CONFIGURATION:
            return "a configuration error comes again; correct the options"
        if failures[attempt.rollout] > 1:
            what = "its start" if attempt.rollout is None else f"rollout {attempt.rollout}"
            return f"{what} failed for the second time, and would again"
        if attempt.number > self.max_restarts:
            return f"--max-restarts {self.max_restarts} are used up"
        return None

    def _attempt(self, number: int) -> tuple[Attempt, bool]:
        """One attempt to its end, and whether its run has begun."""
        before, started = books_at(self.command.ledger), time.time()
        words, checkpoint = self.command.words(), self.command.checkpoint
        self.process = subprocess.Popen(
            words,
            start_new_session=True,  # a terminal's Ctrl-C comes to the supervisor alone
            preexec_fn=_end_with_parent,
        )
        try:
            status = self._watch(self.process)
        finally:
            self._end_what_is_left()
            self.process = None
        after = books_at(self.command.ledger)
        attempt = Attempt(
            number,
            128 - status if status < 0 else status,
            failed_rollout(before, after),
            started,
            time.time() - started,
            self.command.load if checkpoint is None else self.command.save,
            checkpoint,
        )
        with contextlib.suppress(OSError):
            self.log.write(dataclasses.asdict(attempt))
        known = before.starts if before is not None else {}
        return attempt, after is not None and bool(after.starts.keys() - known.keys())

    def _watch(self, process: subprocess.Popen) -> int:
        """Waits for the end of an attempt; one that does not end after a signal is ended by
        force.
        """
        while (status := process.poll()) is None:
            if self._deadline is not None and time.monotonic() > self._deadline:
                process.kill()
            self._step(except_for=process.pid)
        return status

    def _step(self, *, except_for: int | None = None) -> None:
        """Between two looks: children that have ended are gone, but for one."""
        reap(except_for=except_for)
        time.sleep(STEP_S)

    def _end_what_is_left(self) -> None:
        """Ends every process below this one: those of a dead driver become its children."""
        deadline = time.monotonic() + LEFT_S
        while left := living_below(os.getpid()):
            if time.monotonic() > deadline or self._deadline is not None:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            self._step()
        sweep()

    def _pause(self, seconds: float) -> bool:
        """Waits; False where a signal came."""
        end = time.monotonic() + seconds
        while self.signalled is None and time.monotonic() < end:
            self._step()
        return self.signalled is None

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Inside, signals are passed on."""
        previous = {
            number: signal.signal(number, self._take_signal)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _take_signal(self, number: int, frame: types.FrameType | None) -> None:
        if self.signalled is None:
            self.signalled = number
            self._deadline = time.monotonic() + END_S
            if self.process is not None:
                self.process.send_signal(number)
        else:
            self._deadline = time.monotonic()

    def _say(self, text: str) -> None:
        print(f"supervise: {text}", file=sys.stderr, flush=True)

    def _end(self, text: str, status: int) -> int:
        self._say(text)
        self.log.close()
        return status


def _end_with_parent() -> None:
    """Asks the kernel for SIGTERM when the supervisor ends."""
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def living_below(parent: int) -> list[int]:
    """The processes below `parent` that have not ended."""
    found = []
    for pid in children_of(parent) - {parent}:
        with contextlib.suppress(OSError, IndexError):
            state = (
                Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
            )
            if state not in "ZX":
                found.append(pid)
    return found


def reap(*, except_for: int | None = None) -> None:
    """Takes the status of children that have ended, so that they are gone."""
    for pid in children_of(os.getpid()) - {os.getpid(), except_for}:
        with contextlib.suppress(ChildProcessError):  # a child's child
            os.waitpid(pid, os.WNOHANG)


def _positive(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= LONGEST_PAUSE_S:
        raise ValueError
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """`slime supervise`."""
    words = list(sys.argv[1:] if argv is None else argv)
    own, behind = (
        (words[: words.index("--")], words[words.index("--") + 1 :])
        if "--" in words
        else (words, [])
    )
    parser = argparse.ArgumentParser(
        prog="slime supervise",
        usage="slime supervise [--max-restarts N] [--pause S] -- slime train ...",
        description=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--max-restarts", type=_positive, default=3, metavar="N", help="Restarts at most (3)."
    )
    parser.add_argument(
        "--pause",
        type=_seconds,
        default=5.0,
        metavar="S",
        help=f"Seconds before the first restart (5), doubled each time, at most {LONGEST_PAUSE_S:g}.",
    )
    options: Any = parser.parse_args(own)
    command = command_of(behind)
    if sys.platform.startswith("linux"):
        prctl(PR_SET_CHILD_SUBREAPER, 1)
    if command.save is None:
        print("supervise: without --save every restart begins anew", file=sys.stderr)
    supervisor = Supervisor(command, max_restarts=options.max_restarts, pause_s=options.pause)
    return supervisor.run()
