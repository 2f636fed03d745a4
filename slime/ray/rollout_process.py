"""The rollout manager as a process of a run, and what another process needs to go on in its place
(--recovery-interval).

After each rollout, evaluation and checkpoint it writes, into a folder that outlives it:

    manager/state_7.json                    the data position, and which rollout used which groups;
                                            what the gate warned of; how long its files were
    manager/rollout/gate_history_7.jsonl    the gate's history
"""

from __future__ import annotations

import argparse
import gc
import logging
from pathlib import Path
from typing import Any

import orjson

from slime.exceptions import RolloutDataError
from slime.files import atomic, exact_json
from slime.files.jsonl import size_of
from slime.gate.gate import history_path
from slime.prompts.data_source import RolloutDataSource
from slime.ray.rollout import RolloutManager
from slime.supervision.heart import ROLLOUT_MANAGER, start_heart
from slime.tracking.spans import span
from slime.tracking.tracking import FILE_NAME as METRICS
from slime.tracking.tracking import finish_tracking, skip_logged
from slime.utils.misc import Box

logger = logging.getLogger(__name__)

NUM_KEPT = 3  # one is generated while the one before may not have been handed out


def state_path(folder: str | Path, rollout_id: int) -> Path:
    """Where the manager's state after a rollout is."""
    return Path(folder) / f"state_{rollout_id}.json"


class RolloutManagerActor(RolloutManager):
    """`RolloutManager` in its process. What its start raises, `ready` raises: Ray would abort the
    process, with pages of native stack.

    keep: the folder of its state, None for none.
    """

    def __init__(self, args: argparse.Namespace, pg: tuple, keep: str | None = None) -> None:
        start_heart(ROLLOUT_MANAGER)
        self._failure: Exception | None = None
        self._is_warm = self._generates = False
        self._keep_in = keep
        self._last_rollout = -1
        try:
            super().__init__(args, pg)
        except Exception as error:  # noqa: BLE001 - raised again by `ready`
            self._failure = error
            return
        if keep is not None and not hasattr(self.data_source or RolloutDataSource, "whole_state"):
            self._keep_in = None
            logger.warning(
                "--data-source-path %s has no whole_state and restore_whole: the loss of the "
                "rollout manager ends the run",
                args.data_source_path,
            )

    def generate(self, rollout_id: int) -> list[Box] | None:
        self._generates = True
        boxes = super().generate(rollout_id)
        if not self._is_warm:
            # What a first rollout loaded stays. Python's full collections would walk over all of
            # it, 0.2 s in the middle of a later rollout.
            with span("collect_garbage"):
                gc.collect()
                gc.freeze()
            self._is_warm = True
        self._generates, self._last_rollout = False, rollout_id
        self._keep_state()
        return boxes

    def eval(self, rollout_id: int) -> None:
        super().eval(rollout_id)
        self._keep_state()

    def save(self, rollout_id: int) -> None:
        super().save(rollout_id)
        self._keep_state()

    def begin_ledger(self, start_rollout_id: int) -> str:
        self._last_rollout = start_rollout_id - 1
        start = super().begin_ledger(start_rollout_id)
        self._keep_state()
        return start

    def _keep_state(self) -> None:
        """Writes the state after the last rollout; during the next one that is written already."""
        if self._keep_in is None or self._generates:
            return
        self.finish_recording()
        try:
            with span("keep_state"):
                self._write_state(Path(self._keep_in), self._last_rollout)
        except OSError as error:
            logger.warning(
                "the rollout manager's state was not kept: %s. Its loss would end the run.", error
            )

    def _write_state(self, folder: Path, number: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "start": None if self.ledger.start is None else self.ledger.start.start,
            "data": None if self.data_source is None else self.data_source.whole_state(),
            "gate": self.gate.keep(folder, number),
            "logged": size_of(Path(self.args.run_dir, METRICS)),
        }
        text = exact_json.dumps(state, option=orjson.OPT_SERIALIZE_NUMPY)
        atomic.write_bytes(state_path(folder, number), text)
        for path in (state_path, history_path):
            path(folder, number - NUM_KEPT).unlink(missing_ok=True)

    def go_on(self, rollout_id: int) -> str:
        """Takes the place of a manager whose process has ended, with `rollout_id` the last rollout
        that it handed out. Returns the name of its start in the ledger.
        """
        assert self._keep_in is not None
        path = state_path(self._keep_in, rollout_id)
        if not path.is_file():
            raise RolloutDataError(
                f"the rollout manager cannot be started again: its state {path} was not kept"
            )
        state: dict[str, Any] = exact_json.loads(path.read_bytes())
        skip_logged(state["logged"])
        self._last_rollout = rollout_id
        if self.data_source is not None:
            self.data_source.restore_whole(state["data"], rollout_id)
        self.gate.go_on(self._keep_in, rollout_id, state["gate"])
        return self.ledger.go_on(state["start"], rollout_id + 1)

    def ready(self) -> None:
        """Returns once the engines answer; raises what kept the manager from starting."""
        if self._failure is not None:
            raise self._failure

    def dispose(self) -> None:
        """Stops engines and writers, as far as they were started."""
        if self._failure is None:
            super().dispose()
        else:
            finish_tracking(self.args, primary=False)
