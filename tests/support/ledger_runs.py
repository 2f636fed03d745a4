"""Runs of the loop without engines and ranks: the real data source and the real ledger of both sides,
with outcomes drawn at random, ended at any moment as by a kill. And ledgers that somebody has edited.
"""

from __future__ import annotations

import json
import random
import shutil
import types
from pathlib import Path

from support.rollout_args import rollout_args, write_prompts

from slime.data.ledger import Ledger
from slime.files import exact_json
from slime.files.ledger_file import FILE_NAME, copy_ledger_state
from slime.files.sealed import seal, unseal
from slime.prompts.data_source import RolloutDataSourceWithBuffer
from slime.ray.run_ledger import RolloutLedger, TrainLedger

TRACKER = "latest_checkpointed_iteration.txt"
GROUPS, SIZE = 3, 2
REASONS = ("truncated", "bad_reward")


class Killed(Exception):
    """The process ends here."""


class SimulatedRun:
    """A run over `folder`; each call of `until_killed` is one process."""

    def __init__(self, folder: Path, seed: int, *, prompts: int = 7, ahead: bool = False) -> None:
        self.folder, self.rng, self.ahead = folder, random.Random(seed), ahead
        self.prompts = write_prompts(folder / "prompts.jsonl", prompts)
        self.save_folder = folder / "save"
        self.steps_left: int | None = None

    def step(self) -> None:
        """A moment at which the process may end."""
        if self.steps_left is not None:
            self.steps_left -= 1
            if self.steps_left < 0:
                raise Killed

    def start(self) -> int:
        """A new process: what it loads, and its first rollout."""
        pointer = self.save_folder / TRACKER
        first = int(pointer.read_text()) + 1 if pointer.exists() else 0
        folder = str(self.save_folder)
        self.args = rollout_args(
            prompt_data=self.prompts, save=folder, load=folder if first else None, rollout_shuffle=True,
            n_samples_per_prompt=SIZE, run_dir=str(self.folder / "run"),
        )  # fmt: skip
        self.source = RolloutDataSourceWithBuffer(self.args)
        self.ledger = RolloutLedger(self.args, self.source)
        if first:
            self.source.load(first - 1)
        self.train = TrainLedger(self.args, self.ledger.begin(first))
        self.states = {first - 1: self.source.whole_state()}
        return first

    def replace_manager(self, last: int) -> None:
        """Another process in place of the manager's, which handed out rollout `last` last."""
        before, state = self.ledger.start.start, exact_json.loads(exact_json.dumps(self.states[last]))  # fmt: skip
        self.ledger.close()
        self.source = RolloutDataSourceWithBuffer(self.args)
        self.source.restore_whole(state, last)
        self.ledger = RolloutLedger(self.args, self.source)
        self.train.go_on(self.ledger.go_on(before, last + 1), last + 1)

    def handed_out(self, rollout: int, lost: random.Random) -> int:
        """One rollout, whose manager is lost now and then at a random moment."""
        while True:
            self.steps_left = lost.randrange(0, 7)
            try:
                num = self.generate(rollout)
                self.states[rollout] = self.source.whole_state()
                return num
            except Killed:
                self.replace_manager(rollout - 1)
            finally:
                self.steps_left = None

    def with_lost_managers(self, last: int, lost: random.Random) -> None:
        """Runs to rollout `last` - 1 in one driver's process."""
        first = self.start()
        planned = {first: self.handed_out(first, lost)} if self.ahead else {}
        for rollout in range(first, last):
            ahead = rollout + self.ahead
            if ahead < last:
                planned[ahead] = self.handed_out(ahead, lost)
            if lost.random() < 0.3:  # after it was handed out
                self.replace_manager(min(ahead, last - 1))
            self.train.enter(rollout, planned.pop(rollout), {"update_skipped": []})
            if rollout % 2 or rollout == last - 1:
                self.save(rollout)
        self.train.close()
        self.ledger.close()
        self.train.writer.close()

    def generate(self, rollout: int) -> int:
        """One rollout: some groups are given back, one may be filtered, samples are rejected."""
        rng = self.rng
        groups = self.source.get_samples(GROUPS + rng.randrange(3))
        self.step()
        returned = groups[GROUPS:]
        filtered = groups[:1] if rng.random() < 0.3 else []
        kept = groups[len(filtered) : GROUPS]
        if returned:
            self.source.add_samples(returned)
        self.step()
        self.source.commit(rollout, [group[0].group_index for group in [*filtered, *kept]])
        dropped = [("dynamic_filter_x", sample.index) for group in filtered for sample in group]
        marks = [
            types.SimpleNamespace(
                index=sample.index, reason=rng.choice(REASONS) if rng.random() < 0.2 else None
            )
            for group in kept
            for sample in group
        ]
        rows = [(place, place % 2, None) for place, mark in enumerate(marks) if mark.reason is None]
        gone = {reason: sum(mark.reason == reason for mark in marks) for reason in REASONS}
        self.step()
        self.ledger.enter(
            rollout, marks, dropped, rows,
            counts=Ledger(len(marks) + len(dropped), len(rows), {**gone, "dynamic_filter_x": len(dropped)}),
        )  # fmt: skip
        self.step()
        return len(rows)

    def save(self, rollout: int) -> None:
        self.train.sync()
        self.source.save(rollout)
        self.step()
        self.ledger.save(rollout)
        self.step()
        folder = self.save_folder / f"iter_{rollout:07d}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        copy_ledger_state(str(self.save_folder), rollout, folder)
        self.step()
        (self.save_folder / TRACKER).write_text(str(rollout))
        self.step()

    def until_killed(self, last: int, steps: int | None = None) -> bool:
        """Runs to rollout `last` - 1, or until it is killed after `steps` moments; whether it came
        to the end.
        """
        self.steps_left = steps
        first = self.start()
        try:
            planned = {first: self.generate(first)} if self.ahead and first < last else {}
            for rollout in range(first, last):
                if self.ahead:
                    num = planned.pop(rollout)
                    if rollout + 1 < last:
                        planned[rollout + 1] = self.generate(rollout + 1)
                else:
                    num = self.generate(rollout)
                self.step()
                gone = {"update_skipped": []}
                self.train.enter(rollout, num, gone)
                self.step()
                if rollout % 2 or rollout == last - 1:
                    self.save(rollout)
            self.train.close()
        except Killed:
            return False
        finally:
            self.ledger.close()
            self.train.writer.close()
        return True


def edit_entries(folder: Path, change) -> None:
    """Rewrites every entry as `change(entry)` makes it (None: the line goes), with its hash."""
    path = folder / FILE_NAME
    lines = []
    for line in path.read_bytes().splitlines():
        entry = change(unseal(line))
        if entry is not None:
            lines.append(seal(exact_json.dumps(entry)) + b"\n")
    path.write_bytes(b"".join(lines))


def proof_of(run: Path, capsys) -> tuple[int, dict]:
    """(exit status, the JSON) of `slime ledger`."""
    from slime.harness.ledger import main

    capsys.readouterr()
    status = main([str(run), "--json"])
    printed = capsys.readouterr()
    return status, json.loads(printed.out) if printed.out else {"error": printed.err}
