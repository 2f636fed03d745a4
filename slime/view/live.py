"""Tells open pages that a run has written something: one look a second at the sizes of a few files,
for all pages together.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from slime.gate.gate import RECORD_FILE
from slime.harness.run_state import LOGS, state_of
from slime.tracking import progress
from slime.tracking.tracking import FILE_NAME
from slime.view.catalog import Entry
from slime.view.site import Site, text_in

INTERVAL_S = 1.0
LEAST_BETWEEN_S = 2.0  # of two messages to a page
HEARTBEAT_S = 20.0
MOST_PAGES = 32
WATCHED = (FILE_NAME, progress.FILE_NAME, RECORD_FILE, *(f"logs/{name}" for name in LOGS))


class Live:
    """The open pages that follow runs."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.num_pages = 0
        self._seen: dict[Entry, tuple[float, tuple[int, ...]]] = {}

    async def endpoint(self, request: Request) -> Response:
        """Server-sent events: `change` with what the run does."""
        if self.num_pages >= MOST_PAGES:
            return PlainTextResponse(f"{MOST_PAGES} pages follow already", status_code=503)
        slugs = request.query_params.getlist("run")[:100]
        known = {entry.slug: entry for entry in self.site.catalog.entries()}
        entries = [known[slug] for slug in slugs if slug in known] or list(known.values())[:100]
        once = text_in(request, "once") == "1"
        return StreamingResponse(
            self._events(entries, once=once),
            media_type="text/event-stream",
            headers={"x-accel-buffering": "no"},
        )

    async def _events(self, entries: Sequence[Entry], *, once: bool) -> AsyncIterator[str]:
        self.num_pages += 1
        try:
            sizes = {entry: self._sizes(entry) for entry in entries}
            yield "retry: 3000\n\n"
            told = heard = time.monotonic()
            while True:
                await asyncio.sleep(INTERVAL_S)
                now = time.monotonic()
                changed = [entry for entry in entries if self._sizes(entry) != sizes[entry]]
                if changed and now - told >= LEAST_BETWEEN_S:
                    sizes.update({entry: self._sizes(entry) for entry in changed})
                    said = await asyncio.to_thread(_said, changed[0])
                    yield f"event: change\ndata: {said}\n\n"
                    told = heard = now
                    if once:
                        return
                elif now - heard > HEARTBEAT_S:
                    yield ": nothing new\n\n"
                    heard = now
        finally:
            self.num_pages -= 1

    def _sizes(self, entry: Entry) -> tuple[int, ...]:
        """Looked up at most once in half an interval, however many pages ask."""
        now = time.monotonic()
        known = self._seen.get(entry)
        if known is not None and now - known[0] < INTERVAL_S / 2:
            return known[1]
        sizes = tuple(_size(entry.path / name) for name in WATCHED)
        if entry.recording is not None:
            sizes += (_changed_at(entry.recording),)
        self._seen[entry] = now, sizes
        return sizes


def _said(entry: Entry) -> str:
    """One line about a run; nothing of it can begin another event."""
    state = state_of(entry.path)
    text = f"{state.word} {state.phase}".strip()
    return "".join(c for c in text if c.isprintable())[:120]


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def _changed_at(folder: Path) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return -1
