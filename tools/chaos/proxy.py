"""A proxy before an engine, that breaks what it carries while it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator

PASS, SLOW, CUT, GARBAGE, JUNK_JSON, WRONG_STATUS, REFUSE, SILENT = (
    "pass", "slow", "cut", "garbage", "junk JSON", "status 500", "refuse", "silent",
)  # fmt: skip
MODES = (SLOW, CUT, GARBAGE, JUNK_JSON, WRONG_STATUS, REFUSE, SILENT)
BLOCK = 2**16
SLOW_S = 0.4  # before each block
SILENT_S = 3.0
JUNK = b'{"text": 5, "meta_info": [null], "output_ids": "x"}'
REPLIES = {
    GARBAGE: b"\x00\xff\x16\x03 not HTTP\r\n\r\n" + bytes(range(256)),
    JUNK_JSON: b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
    % (len(JUNK), JUNK),
    WRONG_STATUS: b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 4\r\n\r\noops",
}


class BreakingProxy:
    """Carries connections from its port to an engine's. `mode` and `only` may be set at any time:
    requests whose first line holds `only` are broken; `num_broken` counts them.
    """

    def __init__(self, host: str, port: int) -> None:
        self._upstream = (host, port)
        self.mode, self.only, self.num_broken = PASS, "/generate", 0
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> BreakingProxy:
        self._thread.start()
        self._ready.wait(10)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._carry, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()

    @contextlib.contextmanager
    def broken(self, mode: str, only: str = "/generate") -> Iterator[Callable[[], int]]:
        """Inside, requests are broken; the result tells how many were."""
        before, self.only, self.mode = self.num_broken, only, mode
        try:
            yield lambda: self.num_broken - before
        finally:
            self.mode = PASS

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            upstream_reader, upstream_writer = await asyncio.open_connection(*self._upstream)
            try:
                await self._exchange(reader, writer, upstream_reader, upstream_writer)
            finally:
                upstream_writer.close()
        writer.close()

    async def _exchange(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        upstream_reader: asyncio.StreamReader,
        upstream_writer: asyncio.StreamWriter,
    ) -> None:
        """One request after the other; the connection ends with a broken one."""
        while head := await _head(reader):
            mode = self.mode if self.only.encode() in head.partition(b"\r\n")[0] else PASS
            self.num_broken += mode != PASS
            if mode == REFUSE:
                return
            body = await reader.readexactly(_length(head))
            if mode in REPLIES:
                writer.write(REPLIES[mode])
                await writer.drain()
                return
            upstream_writer.write(head + body)
            await upstream_writer.drain()
            answer_head = await _head(upstream_reader)
            if not answer_head:
                return
            answer = answer_head + await upstream_reader.readexactly(_length(answer_head))
            if mode == SILENT:
                await asyncio.sleep(SILENT_S)
                return
            if mode == CUT:
                writer.write(answer[: len(answer) // 2])
                await writer.drain()
                return
            if mode == SLOW:
                for start in range(0, len(answer), max(1, len(answer) // 3)):
                    await asyncio.sleep(SLOW_S)
                    writer.write(answer[start : start + max(1, len(answer) // 3)])
                    await writer.drain()
            else:
                writer.write(answer)
                await writer.drain()


async def _head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0
