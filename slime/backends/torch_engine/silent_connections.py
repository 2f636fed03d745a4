"""Closes connections on which no whole request arrives: half a header, or nothing at all.

Age is counted in sweeps of the event loop, not in seconds of the clock, so that a loop that was held
up by a long step takes no new client for a silent one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

SWEEP_SECONDS = 0.25
SILENT_SECONDS = 10.0
# More silent ones than this are closed after a second, the oldest first.
MAX_SILENT = 256
GRACE_SWEEPS = 4


class SilentConnections:
    """Watches the connections of one server: its `middleware` notes those that have spoken, `sweep`
    closes the others.
    """

    def __init__(self, server: web.Server) -> None:
        self._server = server
        self._spoken: set[web.RequestHandler] = set()
        self._sweeps: dict[web.RequestHandler, int] = {}  # of silent ones

    def note(self, request: web.Request) -> None:
        """The request's connection has sent a whole header."""
        self._spoken.add(request.protocol)

    async def sweep_for_ever(self) -> None:
        """Sweeps until it is cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep()

    def sweep(self) -> None:
        """Closes what has been silent for too long, and what is silent beyond the number."""
        connections = set(self._server.connections)
        self._spoken &= connections
        self._sweeps = {one: self._sweeps.get(one, 0) + 1 for one in connections - self._spoken}
        silent = sorted(self._sweeps, key=lambda connection: -self._sweeps[connection])
        for place, connection in enumerate(silent):
            sweeps = self._sweeps[connection]
            is_beyond = place < len(silent) - MAX_SILENT and sweeps > GRACE_SWEEPS
            if is_beyond or sweeps * SWEEP_SECONDS > SILENT_SECONDS:
                connection.force_close()


def noting(silent: Callable[[], SilentConnections]) -> Callable:
    """The middleware of a server whose connections are watched from its start on."""

    @web.middleware
    async def note(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        silent().note(request)
        return await handler(request)

    return note
