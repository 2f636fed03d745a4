"""`slime bisect DIR --good REV --bad REV`: which commit made a recording come out otherwise.

Every commit that `git bisect` asks for is checked out in a temporary worktree, where `slime replay`
of that commit runs the recording again: exit status 0 is good, 1 is bad, anything else (a commit
without the command, one that does not start or cannot replay the recording, a time-out) is skipped.
The first bad commit is printed with the first difference that its replay found. Your own checkout, index and a bisection
under way in it are not touched.

    slime bisect runs/rec --good v1.2 --bad HEAD --rollout 7 --stage rewards
    slime bisect runs/rec --good v1.2 --bad HEAD --command "python check.py {recording}"

Exit status 0: found, 1: only skipped commits are left, 2: it could not be looked for.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from slime.exceptions import ConfigError, SlimeError
from slime.harness.consistency_report import printable

GIT_TIMEOUT_S = 600.0
TRIAL_TIMEOUT_S = 3600.0
GOOD, BAD, SKIP = "good", "bad", "skip"
_STATUS = {0: GOOD, 1: BAD}
_FOUND = re.compile(r"^([0-9a-f]{40,64}) is the first bad commit", re.MULTILINE)
_CANDIDATE = re.compile(r"^[0-9a-f]{40,64}$", re.MULTILINE)
_SHOWN_LINES = 25
# what `slime replay` prints of a stage that it compared; Python's own errors have status 1 as well
_COMPARED = {
    GOOD: re.compile(r"^rollout [0-9]+ \w+: identical", re.MULTILINE),
    BAD: re.compile(r"^rollout [0-9]+ \w+: different: ", re.MULTILINE),
}


@dataclasses.dataclass(frozen=True)
class Trial:
    """One commit, tried. `output`: what the replay printed, `note`: why it was skipped."""

    commit: str
    subject: str
    outcome: str
    seconds: float
    output: str
    note: str = ""

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"{self.outcome:5} {self.commit[:12]} {self.subject}, {self.seconds:.1f} s{note}"


@dataclasses.dataclass(frozen=True)
class Commit:
    """What is printed of a commit."""

    hash: str
    author: str
    date: str
    subject: str


class Repository:
    """A git repository, or a worktree of one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def git(self, *words: str, refused: str = "") -> str:
        """What git prints. ConfigError with git's message, after `refused`, where it fails."""
        status, output = self.try_git(*words)
        if status:
            what = refused or f"git {' '.join(words[:2])} failed in {self.folder}"
            raise ConfigError(f"{what}: {printable(output.strip())[:500]}")
        return output

    def try_git(self, *words: str) -> tuple[int, str]:
        """(exit status, what git printed). No hook of the repository runs."""
        command = ["git", "-c", "core.hooksPath=/dev/null", "-c", "advice.detachedHead=false"]
        # a hook or an alias that calls us has set where git should look
        environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        environment |= {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"}
        try:
            done = subprocess.run(
                [*command, *words],
                cwd=self.folder,
                env=environment,
                text=True,
                errors="replace",
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=GIT_TIMEOUT_S,
            )
        except FileNotFoundError as error:
            raise ConfigError(f"slime bisect needs git and the folder {self.folder}.") from error
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"git {words[0]} took more than {GIT_TIMEOUT_S:g} s.") from error
        return done.returncode, done.stdout

    def commit_of(self, revision: str, flag: str) -> str:
        """The full hash of a revision. ConfigError naming the flag where there is none."""
        return self.git(
            "rev-parse",
            "--verify",
            "--quiet",
            "--end-of-options",
            f"{revision}^{{commit}}",
            refused=f"{flag} {revision} is no commit of {self.folder}",
        ).strip()

    def describe(self, commit: str) -> Commit:
        """Author, date and subject of a commit."""
        output = self.git("show", "-s", "--format=%H%x00%an <%ae>%x00%ad%x00%s", commit)
        return Commit(*(printable(part) for part in output.rstrip("\n").split("\0")))


@contextlib.contextmanager
def temporary_worktree(repository: Repository, commit: str) -> Iterator[Repository]:
    """A worktree of its own, removed afterwards whatever happens."""
    root = Path(tempfile.mkdtemp(prefix="slime-bisect-"))
    place = root / "worktree"
    try:
        repository.git("worktree", "add", "--detach", "--quiet", str(place), commit)
        yield Repository(place)
    finally:
        repository.try_git("worktree", "remove", "--force", "--force", str(place))
        shutil.rmtree(root, ignore_errors=True)
        repository.try_git("worktree", "prune")


class Bisection:
    """Tries commits in a worktree, each once. `replays`: the words are of `slime replay`, whose
    status counts where its output says what it compared.
    """

    def __init__(
        self, worktree: Repository, words: Sequence[str], *, timeout_s: float, replays: bool
    ) -> None:
        self.worktree, self.words, self.timeout_s = worktree, list(words), timeout_s
        self.replays = replays
        self.trials: dict[str, Trial] = {}

    def try_commit(self, commit: str) -> Trial:
        """Checks the commit out and runs the command in it."""
        if commit not in self.trials:
            self.worktree.git("checkout", "--detach", "--force", "--quiet", commit)
            self.worktree.git("clean", "-ffdxq")
            self.trials[commit] = self._run(commit)
            print(self.trials[commit], flush=True)
        return self.trials[commit]

    def _run(self, commit: str) -> Trial:
        subject = self.worktree.describe(commit).subject
        begun = time.monotonic()
        status, output = run_in(self.worktree.folder, self.words, timeout_s=self.timeout_s)
        note = ""
        outcome = SKIP if status is None else _STATUS.get(status, SKIP)
        if self.replays and outcome != SKIP and not _COMPARED[outcome].search(output):
            outcome = SKIP
        if status is None:
            note = f"took more than {self.timeout_s:g} s"
        elif outcome == SKIP:
            lines = [line for line in output.splitlines() if line.strip()]
            last = printable(lines[-1])[:160] if lines else "printed nothing"
            note = f"status {status}: {last}"
        return Trial(commit, subject, outcome, time.monotonic() - begun, output, note)

    def find(self, good: str, bad: str) -> list[str]:
        """The first bad commit; several where only skipped ones are left. ConfigError where an end
        is not what it was said to be.
        """
        for commit, expected, flag in ((good, GOOD, "--good"), (bad, BAD, "--bad")):
            trial = self.try_commit(commit)
            if trial.outcome != expected:
                raise ConfigError(
                    f"{flag} {commit[:12]} is {trial.outcome}, so there is nothing to look for"
                    f"{': ' + trial.note if trial.note else '.'}"
                    f"{_indented(first_cause(trial.output))}"
                )
        output = self.worktree.git("bisect", "start", bad, good)
        while True:
            found = _FOUND.search(output)
            if found is not None:
                return [found[1]]
            if "only 'skip'ped commits left" in output:
                return _CANDIDATE.findall(output)
            commit = self.worktree.git("rev-parse", "HEAD").strip()
            trial = self.try_commit(commit)
            # status 2 says that only skipped commits are left
            _, output = self.worktree.try_git("bisect", trial.outcome, commit)
            if not _is_going_on(output):
                raise SlimeError(f"git bisect ended: {printable(output.strip())[:500]}")


def _is_going_on(output: str) -> bool:
    words = ("Bisecting:", "is the first bad commit", "only 'skip'ped commits left")
    return any(word in output for word in words)


def run_in(folder: Path, words: Sequence[str], *, timeout_s: float) -> tuple[int | None, str]:
    """(exit status, output) of a command that imports the folder's code with this interpreter; None
    where it took longer, and was ended with all its processes.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment["PYTHONPATH"] = str(folder)
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    # compiled files are told apart by size and second, and commits change faster than that
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    with tempfile.TemporaryFile() as file:
        try:
            process = subprocess.Popen(
                words,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"{words[0]} cannot be started: {error}") from error
        status: int | None
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):  # its children, also of one that ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(GIT_TIMEOUT_S)
        file.seek(0)
        return status, file.read().decode("utf-8", "replace")


def first_cause(output: str) -> list[str]:
    """The lines of a replay's output that name the first difference; its last lines where none do."""
    lines = [printable(line) for line in output.splitlines() if line.strip()]
    start = next((i for i, line in enumerate(lines) if "first difference" in line), None)
    if start is None:
        return lines[-_SHOWN_LINES:]
    depth = len(lines[start]) - len(lines[start].lstrip())
    chosen = [lines[start]]
    for line in lines[start + 1 :]:
        if len(line) - len(line.lstrip()) <= depth:
            break
        chosen.append(line)
    return [line[depth:] for line in chosen[:_SHOWN_LINES]]


def _indented(lines: Sequence[str]) -> str:
    return "".join(f"\n  {line}" for line in lines)


def words_of(options: argparse.Namespace) -> list[str]:
    """The command of a trial: --command, or the replay of the recording."""
    recording = str(options.recording.resolve())
    if options.command is not None:
        try:
            words = shlex.split(options.command)
        except ValueError as error:
            raise ConfigError(f"--command {options.command!r}: {error}.") from error
        if not words:
            raise ConfigError("--command is empty.")
        return [word.replace("{recording}", recording) for word in words]
    words = [sys.executable, "-m", "slime.cli", "replay", recording]
    for flag, value in (("--rollout", options.rollout), ("--stage", options.stage)):
        words += [] if value is None else [flag, str(value)]
    return words


def bisect(options: argparse.Namespace) -> tuple[list[Commit], dict[str, Trial]]:
    """(the first bad commit, or the candidates, every trial by commit)."""
    if not options.recording.is_dir():
        raise ConfigError(f"There is no recording at {options.recording}.")
    if not options.timeout > 0:
        raise ConfigError(f"--timeout {options.timeout:g} must be above 0.")
    repository = Repository(options.repository)
    repository.git("rev-parse", "--git-dir", refused=f"{options.repository} is no git repository")
    good = repository.commit_of(options.good, "--good")
    bad = repository.commit_of(options.bad, "--bad")
    if repository.try_git("merge-base", "--is-ancestor", good, bad)[0] or good == bad:
        raise ConfigError(
            f"--good {options.good} ({good[:12]}) does not come before --bad {options.bad} "
            f"({bad[:12]}). Swap them, or give a common ancestor as --good."
        )
    with temporary_worktree(repository, bad) as worktree:
        bisection = Bisection(
            worktree,
            words_of(options),
            timeout_s=options.timeout,
            replays=options.command is None,
        )
        found = bisection.find(good, bad)
        return [repository.describe(commit) for commit in found], bisection.trials


def main(argv: Sequence[str] | None = None) -> int:
    """`slime bisect`."""
    parser = argparse.ArgumentParser(
        prog="slime bisect",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recording", type=Path, help="Folder that --record wrote.")
    parser.add_argument("--good", required=True, metavar="REV", help="A commit that replays it.")
    parser.add_argument("--bad", required=True, metavar="REV", help="A later one that does not.")
    parser.add_argument("--rollout", type=int, help="Replay this rollout alone.")
    parser.add_argument("--stage", help="Replay this stage alone, as in slime replay --stage.")
    parser.add_argument(
        "--command",
        help="Run this instead of slime replay, in the worktree and without a shell; 'python' is "
        "this interpreter, {recording} is the recording. Status 0: good, 1: bad, else: skip.",
    )
    parser.add_argument(
        "--repository", type=Path, default=Path(), help="A checkout of slime. Default: here."
    )
    parser.add_argument(
        "--timeout", type=float, default=TRIAL_TIMEOUT_S, help="Seconds of one replay."
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object at the end.")
    options = parser.parse_args(argv)
    with contextlib.redirect_stdout(sys.stderr if options.json else sys.stdout):
        commits, trials = bisect(options)
    if options.json:
        print(json.dumps(_as_json(commits, trials)))
    else:
        print(*_lines(commits, trials), sep="\n")
    return 0 if len(commits) == 1 else 1


def _lines(commits: Sequence[Commit], trials: dict[str, Trial]) -> list[str]:
    if len(commits) != 1:
        names = [f"  {one.hash} {one.subject}" for one in commits]
        return ["only skipped commits are left; the first bad one is among", *names]
    (commit,) = commits
    return [
        f"first bad commit: {commit.hash}",
        f"  subject: {commit.subject}",
        f"  author:  {commit.author}",
        f"  date:    {commit.date}",
        *first_cause(trials[commit.hash].output),
    ]


def _as_json(commits: Sequence[Commit], trials: dict[str, Trial]) -> dict[str, object]:
    return {
        "first_bad": dataclasses.asdict(commits[0]) if len(commits) == 1 else None,
        "candidates": [dataclasses.asdict(one) for one in commits],
        "cause": first_cause(trials[commits[0].hash].output) if len(commits) == 1 else [],
        "trials": [
            {name: value for name, value in dataclasses.asdict(one).items() if name != "output"}
            for one in trials.values()
        ],
    }


if __name__ == "__main__":
    raise SystemExit(main())
