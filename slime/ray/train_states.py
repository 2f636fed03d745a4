"""The states that the training ranks publish for those that may have to take their place
(--recovery-interval): where they are, and which is whole.

    /dev/shm/slime-ray-k3j2/actor/iter_0000005     in memory, else RUN_DIR/recovery/actor/...
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.backends.megatron_utils.checkpoint_files import Retention, prune
from slime.files.jsonl import size_of
from slime.tracking.tracking import FILE_NAME as METRICS
from slime.utils.misc import free_host_bytes

SPARE = 1.1  # of the room that a state needs
logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Point:
    """A published state. number: rollouts before it. logged: bytes of the metrics file then."""

    folder: Path
    number: int
    logged: int

    def of(self, group: Any) -> str:
        """Where the group's ranks write it and find it."""
        return str(self.folder / group.role)


class TrainStates:
    """`memory`: a folder in memory; None without one."""

    def __init__(self, args: argparse.Namespace, memory: Path | None) -> None:
        self._args = args
        self._disk = Path(os.path.abspath(args.run_dir), "recovery")
        has_one_machine = args.actor_num_nodes == 1 and args.ray_address is None
        self._memory = memory if has_one_machine else None
        self._num_bytes: int | None = None
        self._logged_before = self._num_logged()
        self._last: Point | None = None
        self._writing: tuple[Point, list[tuple[Any, list[Any]]]] | None = None

    def begin(self, groups: Sequence[Any], number: int) -> None:
        """All groups begin to write their state."""
        point = Point(self._place(groups), number, self._num_logged())
        refs = [(group, group.async_publish_state(point.of(group), number)) for group in groups]
        self._writing = (point, refs)

    def finish(self) -> Point | None:
        """The state that was begun, once it is written by all; None where none was. Whatever
        writing raises; the one before is then the last whole one.
        """
        if self._writing is None:
            return None
        (point, refs), self._writing = self._writing, None
        for group, group_refs in refs:
            group.finish_publish_state(group_refs)
        for group, _ in refs:
            prune(point.of(group), Retention(1), current=point.number)
        if self._last is not None and self._last.folder != point.folder:
            for group, _ in refs:
                shutil.rmtree(self._last.of(group), ignore_errors=True)
        self._last = point
        return point

    def place_of_manager(self) -> Path:
        """The folder of the rollout manager's state, which is small."""
        return (self._memory or self._disk) / "manager"

    def _place(self, groups: Sequence[Any]) -> Path:
        """Where the next state goes: memory, where it has room for it beside the one before; the
        run folder, which all machines see, where ranks may be on several.
        """
        if self._args.release_train:
            return self._disk.with_name("suspended")
        if self._memory is None:
            return self._disk
        if self._num_bytes is None:
            self._num_bytes = sum(group.state_bytes() for group in groups)
        room = min(shutil.disk_usage(self._memory).free, (free_host_bytes() or 0) // 2)
        if self._num_bytes * SPARE > room:
            if self._last is None or self._last.folder == self._memory:
                logger.warning(
                    "the training state (at most %.3g GB) does not fit into memory, of which "
                    "%.3g GB may be used: --recovery-interval keeps it in %s",
                    self._num_bytes / 1e9,
                    room / 1e9,
                    self._disk,
                )
            return self._disk
        return self._memory

    def num_logged(self, point: Point | None) -> int:
        """Bytes of the metrics file at the point; None: at the run's start."""
        return self._logged_before if point is None else point.logged

    def _num_logged(self) -> int:
        return size_of(Path(self._args.run_dir, METRICS))

    def remove(self) -> None:
        """Removes all of it."""
        for folder in (self._memory, self._disk):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
