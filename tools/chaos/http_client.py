"""A client that sends any bytes over many connections at once, from one thread, and reads what comes
back: raw sockets and epoll, so that it is faster than the server.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator

from chaos.http_grammar import LEAVE, RESET, SHUT, WAIT, Attack

PATIENCE_S = 30.0  # for the answer to a whole request
INCOMPLETE_S = 0.05  # for an answer to what may not be a request
READ_BYTES = 2**18
NO_HTTP = 999  # the status of bytes that are no response


@dataclasses.dataclass(frozen=True)
class Answer:
    """One response. `closes`: the server closes the connection after it."""

    status: int
    body: bytes
    closes: bool


class End(enum.Enum):
    """How an exchange ended."""

    ANSWERED = "answered"
    CLOSED = "closed"  # by the server, or reset
    LEFT = "left"  # by the client, as the attack says
    SILENT = "silent"  # nothing came in time
    REFUSED = "refused"  # no connection


def take_answer(
    buffer: bytes | bytearray, *, is_head: bool, at_end: bool
) -> tuple[Answer, int] | None:
    """(first response in `buffer`, its length), None while it is incomplete. ValueError where the
    bytes are no HTTP response. at_end: the connection has ended, which ends a body without a length.
    """
    end = buffer.find(b"\r\n\r\n")
    if end < 0:
        return None
    lines = bytes(buffer[:end]).split(b"\r\n")
    version, _, rest = lines[0].partition(b" ")
    if not version.startswith(b"HTTP/"):
        raise ValueError(f"not a status line: {lines[0][:100]!r}")
    status = int(rest[:3])
    headers = dict(_header(line) for line in lines[1:])
    start = end + 4
    if 100 <= status < 200 and status != 101:
        rest_taken = take_answer(buffer[start:], is_head=is_head, at_end=at_end)
        return None if rest_taken is None else (rest_taken[0], start + rest_taken[1])
    closes = headers.get(b"connection", b"").lower() == b"close"
    if is_head or status in (204, 304):
        return Answer(status, b"", closes), start
    if b"content-length" in headers:
        length = int(headers[b"content-length"])
        if len(buffer) < start + length:
            return None
        return Answer(status, bytes(buffer[start : start + length]), closes), start + length
    if headers.get(b"transfer-encoding") == b"chunked":
        taken = _take_chunks(buffer, start)
        return None if taken is None else (Answer(status, taken[0], closes), taken[1])
    return (Answer(status, bytes(buffer[start:]), True), len(buffer)) if at_end else None


def _header(line: bytes) -> tuple[bytes, bytes]:
    name, _, value = line.partition(b":")
    return name.lower(), value.strip()


def _take_chunks(buffer: bytes | bytearray, start: int) -> tuple[bytes, int] | None:
    parts = []
    while (line := buffer.find(b"\r\n", start)) >= 0:
        size = int(buffer[start:line], 16)
        start = line + 2 + size + 2
        if len(buffer) < start:
            return None
        if size == 0:
            return b"".join(parts), start
        parts.append(buffer[line + 2 : start - 2])
    return None


Done = Callable[[int, Attack, End, list[Answer]], None]


class Exchange:
    """One attack on one connection."""

    def __init__(self, number: int, attack: Attack, now: float) -> None:
        self.number, self.attack = number, attack
        self.answers: list[Answer] = []
        self.received = bytearray()
        self.unsent = memoryview(attack.parts[0])
        self.next_part = 1
        self.next_at = now
        self.is_sent = False
        self.since = now  # of the last progress

    @property
    def patience_s(self) -> float:
        """Seconds for which the client waits in silence."""
        is_whole = self.attack.must_answer and self.attack.after == WAIT
        return PATIENCE_S if is_whole else INCOMPLETE_S


class Client:
    """`run` sends attacks over at most `num_connections` connections; `begin` and `done` are called
    with each beginning and end. Attacks that are heavy go one at a time.
    """

    def __init__(
        self,
        address: tuple[str, int],
        num_connections: int,
        begin: Callable[[int, Attack], None],
        done: Done,
    ) -> None:
        self._address, self._limit = address, num_connections
        self._on_begin, self._done = begin, done
        self._epoll = select.epoll()
        self._busy: dict[int, tuple[socket.socket, Exchange]] = {}
        self._idle: list[socket.socket] = []
        self._num_heavy = 0

    def run(self, attacks: Iterator[tuple[int, Attack]], on_tick: Callable[[], None]) -> None:
        """Sends all of `attacks`; on_tick is called now and then."""
        waiting: list[tuple[int, Attack]] = []  # heavy ones
        is_over = False
        while not is_over or self._busy or waiting:
            while len(self._busy) < self._limit:
                if waiting and not self._num_heavy:
                    self._begin(*waiting.pop())
                    continue
                found = None if is_over else next(attacks, None)
                if found is None:
                    is_over = True
                    break
                if found[1].is_heavy and self._num_heavy:
                    waiting.append(found)
                else:
                    self._begin(*found)
            for descriptor, events in self._epoll.poll(0.005):
                if descriptor in self._busy:
                    self._act(descriptor, events)
            self._pass_time()
            on_tick()

    def close(self) -> None:
        """Closes what is open."""
        for sock in [sock for sock, _ in self._busy.values()] + self._idle:
            sock.close()
        self._busy.clear()
        self._idle.clear()
        self._epoll.close()

    # ---- one exchange ----

    def _begin(self, number: int, attack: Attack) -> None:
        self._on_begin(number, attack)
        exchange = Exchange(number, attack, time.monotonic())
        try:
            sock = self._idle.pop() if self._idle else self._connected()
        except OSError:
            self._done(number, attack, End.REFUSED, [])
            return
        self._num_heavy += attack.is_heavy
        self._busy[sock.fileno()] = (sock, exchange)
        self._epoll.register(sock, select.EPOLLIN)
        self._send(sock, exchange)

    def _connected(self) -> socket.socket:
        sock = socket.create_connection(self._address, timeout=10.0)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def _send(self, sock: socket.socket, exchange: Exchange) -> None:
        """Sends what is due, as far as the kernel takes it."""
        try:
            while True:
                if exchange.unsent:
                    count = sock.send(exchange.unsent)
                    exchange.unsent = exchange.unsent[count:]
                    exchange.since = time.monotonic()
                elif exchange.next_part < len(exchange.attack.parts):
                    exchange.next_at = time.monotonic() + exchange.attack.pause_s
                    exchange.unsent = memoryview(exchange.attack.parts[exchange.next_part])
                    exchange.next_part += 1
                    if exchange.attack.pause_s:
                        self._watch(sock, select.EPOLLIN)
                        return
                else:
                    self._after(sock, exchange)
                    return
        except BlockingIOError:
            self._watch(sock, select.EPOLLIN | select.EPOLLOUT)
        except OSError:  # the server refuses to read on; what it has said is read
            exchange.unsent = memoryview(b"")
            exchange.next_part = len(exchange.attack.parts)
            exchange.is_sent = True
            self._watch(sock, select.EPOLLIN)

    def _watch(self, sock: socket.socket, events: int) -> None:
        with contextlib.suppress(OSError):
            self._epoll.modify(sock, events)

    def _after(self, sock: socket.socket, exchange: Exchange) -> None:
        if exchange.is_sent:
            return
        exchange.is_sent = True
        self._watch(sock, select.EPOLLIN)
        after = exchange.attack.after
        if after == SHUT:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
        elif after in (RESET, LEAVE):
            if after == RESET:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._end(sock, exchange, End.LEFT)

    def _act(self, descriptor: int, events: int) -> None:
        sock, exchange = self._busy[descriptor]
        if events & select.EPOLLOUT:
            self._send(sock, exchange)
            if descriptor not in self._busy:
                return
        if events & ~select.EPOLLOUT:
            self._receive(sock, exchange)

    def _receive(self, sock: socket.socket, exchange: Exchange) -> None:
        try:
            block = sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            block = b""
        exchange.received += block
        exchange.since = time.monotonic()
        self._take_answers(exchange, at_end=not block)
        if not block:
            self._end(sock, exchange, End.ANSWERED if exchange.answers else End.CLOSED)
        elif len(exchange.answers) >= len(exchange.attack.methods):
            self._end(sock, exchange, End.ANSWERED)

    def _take_answers(self, exchange: Exchange, *, at_end: bool) -> None:
        methods = exchange.attack.methods
        while exchange.received:
            place = min(len(exchange.answers), len(methods) - 1)
            is_head = methods[place] == "HEAD"
            try:
                taken = take_answer(exchange.received, is_head=is_head, at_end=at_end)
            except ValueError as error:
                taken = Answer(NO_HTTP, str(error).encode(), True), len(exchange.received)
            if taken is None:
                return
            exchange.answers.append(taken[0])
            del exchange.received[: taken[1]]

    def _end(self, sock: socket.socket, exchange: Exchange, end: End) -> None:
        self._busy.pop(sock.fileno())
        self._epoll.unregister(sock)
        self._num_heavy -= exchange.attack.is_heavy
        is_clean = (
            end is End.ANSWERED
            and exchange.attack.must_answer
            and exchange.is_sent
            and not exchange.received
            and len(exchange.answers) == len(exchange.attack.methods)
            and not any(answer.closes for answer in exchange.answers)
        )
        if is_clean:
            self._idle.append(sock)
        else:
            sock.close()
        self._done(exchange.number, exchange.attack, end, exchange.answers)

    def _pass_time(self) -> None:
        now = time.monotonic()
        for sock, exchange in list(self._busy.values()):
            if not exchange.is_sent:
                if exchange.unsent.nbytes == 0 or exchange.attack.pause_s:
                    if now >= exchange.next_at:
                        self._send(sock, exchange)
            if sock.fileno() >= 0 and now - exchange.since > exchange.patience_s:
                self._end(sock, exchange, End.SILENT)
