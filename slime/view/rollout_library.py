"""The rollouts that were looked at last."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from slime.recording import manifest
from slime.view.catalog import RolloutRef
from slime.view.rollout_table import RolloutTable


class RolloutLibrary:
    """The rollouts that were looked at last; the oldest are closed."""

    MOST = 4
    MOST_BYTES = 400 << 20

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[Any, ...], RolloutTable] = {}
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hashes")

    def get(self, ref: RolloutRef) -> RolloutTable:
        """The table of a rollout. `RolloutDataError` where it has none."""
        key = (ref, _changed_at(ref))
        with self._lock:
            found = self._open.pop(key, None)
            if found is None:
                found = RolloutTable(ref, self._background)
            self._open[key] = found
            self._evict()
            return found

    def _evict(self) -> None:
        for key in list(self._open)[:-1]:
            total = sum(one.num_bytes for one in self._open.values())
            if len(self._open) <= self.MOST and total <= self.MOST_BYTES:
                return
            self._open.pop(key).is_wanted = False  # closed by whoever uses it last

    def close(self) -> None:
        self._background.shutdown(wait=False, cancel_futures=True)


def _changed_at(ref: RolloutRef) -> tuple[int, ...]:
    paths = (
        [manifest.manifest_path(ref.path, writer) for writer in manifest.WRITERS]
        if ref.kind == "recorded"
        else [ref.path]
    )
    found = []
    for path in paths:
        try:
            found.append(path.stat().st_mtime_ns)
        except OSError:
            found.append(0)
    return tuple(found)
