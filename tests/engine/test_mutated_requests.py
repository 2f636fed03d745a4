"""Requests that nobody should send, drawn from a grammar by the hundred, and the smallest of those
that once ended the engine, held up everybody else, or were answered with 500.
"""

import gzip
import json
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests")]

from chaos import engine_http  # noqa: E402
from chaos.http_client import take_answer  # noqa: E402
from chaos.http_grammar import KINDS, ROUTES  # noqa: E402
from support.tiny_models import make_tiny_checkpoint  # noqa: E402

from slime.backends.torch_engine.engine_config import EngineConfig  # noqa: E402
from slime.backends.torch_engine.server_thread import EngineServerThread  # noqa: E402
from slime.backends.torch_engine.tokenizer import EngineTokenizer  # noqa: E402

NUM_GPUS = 0

KEY = "mutation-test-key"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("m") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def server(folder):
    config = EngineConfig(str(folder), api_key=KEY, deterministic=True, context_length=128)
    with EngineServerThread(config) as started:
        yield started


def ask(server, path, body, **headers):
    """(status, text) of a POST."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}", **headers}
    request = urllib.request.Request(server.url + path, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def target_of(server, folder):
    """The engine in this process, as the tool sees one."""
    (loop,) = [one for one in threading.enumerate() if one.name == "slime-engine-http"]
    victim = engine_http.victim_of("127.0.0.1", server.port, KEY, folder)
    return engine_http.Target(
        "127.0.0.1", server.port, victim, engine_http.os.getpid(), loop.native_id
    )


def test_hundreds_of_mutated_requests_leave_the_engine_as_it_was(server, folder):
    """No 5xx, nothing served without the key, no stall, no descriptor, and the same bits."""
    report = engine_http.attack_engine(target_of(server, folder), requests=400, seed=7)
    assert not report.faults, report.faults[:3]
    assert report.num_requests >= 400 and len(report.counts) > len(KINDS) / 2
    statuses = {name for counts in report.counts.values() for name in counts}
    assert {"2xx", "4xx", "closed", "left"} <= statuses


def test_the_grammar_knows_every_route(server):
    found = {}
    for route in server._runner.app.router.routes():
        if route.method != "HEAD":
            found.setdefault(route.resource.canonical, set()).add(route.method)
    assert found == {path: set(methods) for path, methods in ROUTES.items()}


def test_the_tool_finds_faults(server, folder, monkeypatch):
    """A 500, a route that is open, another answer to the good request, and a stall are found."""
    target = target_of(server, folder)

    def broken(rid, *, all_requests=False):
        raise RuntimeError("planted")

    monkeypatch.setattr(server.loaded.engine, "abort", broken)
    monkeypatch.setattr(server._guard, "_key", None)
    report = engine_http.attack_engine(target, requests=150, seed=1)
    found = "\n".join(report.faults)
    assert "status 500" in found and "without the key" in found
    judge = engine_http.Judge(report, ("length", [1], []))
    judge.name_stalls([(time.monotonic(), 0.7)])
    assert "/health took 0.70 s" in report.faults[-1]
    with pytest.raises(ValueError, match="not a status line"):
        take_answer(b"oops\r\n\r\n", is_head=False, at_end=True)


def test_a_client_that_leaves_before_its_command_runs_does_not_end_the_engine(server):
    """The future of a command was cancelled; to set its result ended the engine's thread."""
    engine, gate = server.loaded.engine, threading.Event()
    engine.between_steps(lambda: gate.wait(10))
    left = engine.between_steps(lambda: 1)
    assert left.cancel()
    gate.set()
    assert engine.between_steps(lambda: 2).result(10) == 2
    assert engine.failure is None


@pytest.mark.parametrize(
    "path, body, headers, said",
    [
        ("/generate", gzip.compress(b"{}")[:9] + b"x" * 9, {"Content-Encoding": "gzip"}, "cannot be read"),
        ("/abort_request", b'{"abort_all":true,"rid":[104]}', {}, "rid is"),
        (
            "/update_weights_from_disk",
            json.dumps({"model_path": "/d" * 3000}).encode(),
            {},
            "is not a folder",
        ),
        ("/generate", b'{"input_ids":[' + b"[]," * 600_000 + b"5]}", {}, "of '[', and this server reads"),
        ("/generate", b'{"text":"' + b"a" * 3_000_000 + b'"}', {}, "has at least"),
        (
            "/generate",
            b'{"input_ids":[' + b"[5]," * 63 + b'[5]],"sampling_params":{"n":1024}}',
            {},
            "asks for 65536 responses",
        ),
    ],
    ids=["broken gzip", "rid of another type", "long path", "many lists", "long text", "many responses"],
)  # fmt: skip
def test_what_was_a_500_or_held_up_everybody_is_a_400_with_its_reason(
    server, path, body, headers, said
):
    status, text = ask(server, path, body, **headers)
    assert status == 400 and said in json.loads(text)["error"]["message"], text


def test_abort_all_takes_the_empty_name_that_clients_send(server):
    assert ask(server, "/abort_request", b'{"abort_all": true, "rid": ""}')[0] == 200


def test_of_a_long_text_only_the_beginning_is_encoded(folder):
    """20 MB held the interpreter's lock for half a minute and took four gigabytes."""
    tokenizer = EngineTokenizer.from_folder(folder)
    assert 20 < len(tokenizer.encode("a" * 100_000, longest=10)) <= 160
    assert tokenizer.encode("ab" * 10, longest=20) == tokenizer.encode("ab" * 10)


def test_a_call_for_many_responses_is_made_and_answered_beside_the_event_loop(server, monkeypatch):
    """65,536 responses held up all other clients for seconds; so did their answers."""
    threads = []
    parse, answer = server._parse, server._answer
    monkeypatch.setattr(
        server,
        "_parse",
        lambda body: threads.append(threading.current_thread().name) or parse(body),
    )
    monkeypatch.setattr(server, "_answer", lambda call: threads.append(threading.current_thread().name) or answer(call))  # fmt: skip
    for prompts, n in ((1, 1), (1100, 4)):
        body = {
            "input_ids": [[5]] * prompts,
            "sampling_params": {"n": n, "max_new_tokens": 0 if n > 1 else 1},
        }
        assert ask(server, "/generate", json.dumps(body).encode())[0] == 200
    body["sampling_params"]["n"] = 9
    assert ask(server, "/generate", json.dumps({**body, "input_ids": [5]}).encode())[0] == 200
    in_loop = [name == "slime-engine-http" for name in threads]
    assert in_loop == [True, True, True, False, False, True]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q", *sys.argv[1:]]))
