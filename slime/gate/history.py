"""The gate's statistics of earlier rollouts, and the file from which a resumed run restores them.

A checkpoint's gate_history_7.jsonl holds a head line and one line per rollout: numbers that drift
and alarms compare with, no samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.files import atomic
from slime.files.jsonl import encode, read_jsonl
from slime.files.sealed_lines import is_whole, sealed
from slime.gate.statistics import GateStatistics

FORMAT = "slime-gate-history-1"
# Rollouts may be generated ahead of the one whose checkpoint is written; so many more are
# remembered than compared with.
_AHEAD = 4


class GateHistory:
    """Statistics of the last `window` rollouts, training and evaluation apart."""

    def __init__(self, window: int):
        self.window = max(window, 1)
        # by evaluation, then by rollout, oldest first
        self._past: dict[bool, dict[int, GateStatistics]] = {False: {}, True: {}}
        self._start: dict[int, GateStatistics] = {}  # the run's first rollouts

    def level_of_failures(self) -> tuple[dict[int, GateStatistics], dict[int, GateStatistics]]:
        """(the run's first `window` training rollouts, the last `window` of those after them), by
        rollout.
        """
        later = {
            number: past for number, past in self._past[False].items() if number not in self._start
        }
        return dict(self._start), dict(list(later.items())[-self.window :])

    def last(self, *, evaluation: bool) -> list[GateStatistics]:
        """The statistics of at most `window` rollouts, oldest first."""
        return list(self._past[evaluation].values())[-self.window :]

    def add(self, rollout_id: int, statistics: GateStatistics, *, evaluation: bool) -> None:
        """Remembers a rollout, in the form that a file gives back: nothing that is computed later
        depends on where it came from.
        """
        past = self._past[evaluation]
        past.pop(rollout_id, None)
        past[rollout_id] = GateStatistics.from_history(statistics.to_history())
        if not evaluation and (rollout_id in self._start or len(self._start) < self.window):
            self._start[rollout_id] = past[rollout_id]
        for oldest in list(past)[: -(self.window + _AHEAD)]:
            del past[oldest]

    def write(self, path: Path, rollout_id: int) -> None:
        """Writes what a run remembers whose last trained rollout is `rollout_id`, whole or not at
        all. OSError where the disk takes none.

        Later rollouts, generated ahead, are left out; an evaluation named `rollout_id` + 1 is one
        of the weights after `rollout_id`.
        """
        records = [
            {"rollout_id": number, "evaluation": evaluation, **past[number].to_history()}
            for evaluation, past in self._past.items()
            for number in [number for number in past if number <= rollout_id + evaluation][
                -self.window :
            ]
        ]
        start = {
            str(number): first.to_history()
            for number, first in self._start.items()
            if number <= rollout_id
        }
        head = {
            "format": FORMAT,
            "rollout_id": rollout_id,
            "records": len(records),
            "start": start,
            "sealed": True,
        }
        atomic.write_bytes(path, sealed(map(encode, [head, *records])))

    def read(self, path: Path, rollout_id: int) -> str | None:
        """Restores what `write` wrote, and nothing else. Returns a message about what is missing,
        None if nothing is.
        """
        self._past = {False: {}, True: {}}
        self._start = {}
        if not path.exists():
            return f"there is no {path}"
        try:
            lines, num_lost = read_jsonl(path)
        except OSError as error:
            return f"{path} cannot be read: {error}"
        num_expected, is_sealed = None, False
        if lines and "blake2b" in lines[-1]:
            lines.pop()
        for line in lines:
            if "format" in line:
                is_sealed = bool(line.get("sealed"))
                if line["format"] != FORMAT:
                    return f"{path} has format {line['format']!r}; this version reads {FORMAT}"
                num_expected = line.get("records")
                try:
                    self._start = {
                        int(number): GateStatistics.from_history(first)
                        for number, first in line.get("start", {}).items()
                    }
                except (LookupError, TypeError, ValueError, OverflowError, AttributeError):
                    return f"the head of {path} is damaged"
                continue
            try:
                self._remember(line, rollout_id)
            except (LookupError, TypeError, ValueError, OverflowError, AttributeError):
                num_lost += 1
        if not isinstance(num_expected, int):
            return f"the head of {path} is damaged"
        num_missing = num_expected - sum(map(len, self._past.values()))
        if num_missing or num_lost:
            return (
                f"{num_missing} of {num_expected} lines of {path} are damaged or missing, "
                f"{num_lost} lines are no records"
            )
        if is_sealed and not is_whole(path.read_bytes()):
            return f"{path} is damaged: its last line is not the hash of those before it"
        return None

    def _remember(self, line: Mapping[str, Any], rollout_id: int) -> None:
        number, evaluation = line["rollout_id"], line["evaluation"]
        if (
            not isinstance(number, int)
            or not isinstance(evaluation, bool)
            or number > rollout_id + evaluation
        ):
            raise ValueError(
                f"rollout {number!r}, evaluation {evaluation!r} is none before rollout "
                f"{rollout_id + 1}"
            )
        self._past[evaluation][number] = GateStatistics.from_history(line)
