"""Clients that send half a request, or nothing, cost the engine neither its answers nor its
connections."""

import json
import socket
import sys
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
from support.tiny_models import make_tiny_checkpoint

from slime.backends.torch_engine import http_json, silent_connections
from slime.backends.torch_engine import server as server_module
from slime.backends.torch_engine.engine_config import EngineConfig
from slime.backends.torch_engine.server_thread import EngineServerThread

NUM_GPUS = 0

KEY = "connection-test-key"
HALF_HEADER = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Le"
HALF_BODY = (
    "POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    f"Authorization: Bearer {KEY}\r\nContent-Length: 500\r\n\r\n"
    '{"input_ids": [5'
).encode()
HALF_WEIGHTS = HALF_BODY.replace(b"/generate", b"/update_weights_from_tensor?weight_version=1")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp("m") / "qwen3", "qwen3")
    with EngineServerThread(EngineConfig(str(folder), api_key=KEY)) as started:
        yield started


def generate(server):
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2, "sampling_seed": 1}}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(server.url + "/generate", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.loads(response.read())["output_ids"]


def count_closed(sockets):
    closed = 0
    for one in sockets:
        one.setblocking(False)
        try:
            while one.recv(4096):
                pass
            closed += 1
        except BlockingIOError:
            pass
        except ConnectionError:
            closed += 1
    return closed


def opened(server, what, count):
    sockets = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(count)]
    for one in sockets:
        one.sendall(what)
    return sockets


def test_1500_half_sent_requests_are_closed_and_the_engine_answers_meanwhile(server, monkeypatch):
    """1,500 connections with half a header, half a body, half of the weights, or nothing: the engine
    answers at once, and all of them are closed within the deadline."""
    monkeypatch.setattr(silent_connections, "SILENT_SECONDS", 3.0)
    monkeypatch.setattr(http_json, "BODY_SECONDS", 3.0)
    expected = generate(server)
    sockets = []
    try:
        for what in (HALF_HEADER, HALF_BODY, b"", HALF_WEIGHTS):
            sockets += opened(server, what, 375)
        assert len(sockets) == 1500
        start = time.monotonic()
        assert generate(server) == expected and time.monotonic() - start < 3
        while count_closed(sockets) < 1500 and time.monotonic() - start < 20:
            time.sleep(0.2)
            assert generate(server) == expected
        assert count_closed(sockets) == 1500
    finally:
        for one in sockets:
            one.close()


def test_half_a_second_request_is_closed_when_the_connection_would_be(tmp_path, monkeypatch):
    """A connection that was answered once and then sends half a header is closed as an idle one
    is."""
    folder = make_tiny_checkpoint(tmp_path / "qwen3", "qwen3")
    monkeypatch.setattr(server_module, "KEEPALIVE_SECONDS", 1.0)
    with EngineServerThread(EngineConfig(str(folder))) as server:
        sockets = opened(server, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 50)
        try:
            time.sleep(0.3)
            for one in sockets:
                assert one.recv(4096).startswith(b"HTTP/1.1 200")
                one.sendall(HALF_HEADER)
            deadline = time.monotonic() + 8
            while count_closed(sockets) < 50 and time.monotonic() < deadline:
                time.sleep(0.1)
            assert count_closed(sockets) == 50
        finally:
            for one in sockets:
                one.close()


def test_silent_connections_are_bounded_in_number(server, monkeypatch):
    """Long before the deadline only the youngest 20 of 300 silent connections stay."""
    monkeypatch.setattr(silent_connections, "MAX_SILENT", 20)
    sockets = opened(server, HALF_HEADER, 300)
    try:
        deadline = time.monotonic() + 5
        while count_closed(sockets) < 280 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert count_closed(sockets) == 280
        generate(server)
    finally:
        for one in sockets:
            one.close()


def test_a_slow_client_that_sends_everything_is_answered(server):
    """A client that takes 1.5 s for its header, byte by byte, is no silent one."""
    raw = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as one:
        for byte in raw:
            one.sendall(bytes([byte]))
            time.sleep(1.5 / len(raw))
        assert one.recv(4096).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("header", ["Bearer s\u00e9cret", "Bearer \u6f22", "\udcff", "\x01", ""])
def test_any_authorization_header_but_the_key_is_a_401_on_every_route(server, header):
    """An Authorization header of any bytes is answered with 401 on every route; not with 500."""
    routes = [
        (route.method, route.resource.canonical)
        for route in server._runner.app.router.routes()
        if route.method in ("GET", "POST")
    ]
    assert len(routes) >= 14
    for method, path in routes:
        if path in ("/health", "/ready"):
            continue
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as one:
            head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            one.sendall(
                head.encode()
                + b"Authorization: "
                + header.encode("utf-8", errors="surrogateescape")
                + b"\r\n\r\n"
            )
            status = one.recv(4096).split(b" ")[1]
        assert status == (b"400" if header == "\x01" else b"401"), (method, path)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
