"""The real sglang-router in front of two real engines."""

import argparse
import io
import json
import os
import socket
import subprocess
import sys
import time
import types
import urllib.error
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
from support.tiny_models import make_tiny_checkpoint

import slime.backends.sglang_utils.router as router_module
from slime.backends.sglang_utils.router import RouterConfig, SglangRouter, start_router
from slime.backends.torch_engine.engine_config import EngineConfig
from slime.backends.torch_engine.server_thread import EngineServerThread
from slime.exceptions import ConfigError, EngineError

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]
KEY = "router-test-key"

needs_router = pytest.mark.skipif(
    not router_module.importlib.util.find_spec("sglang_router"),
    reason="the extra `router` is not installed",
)


def post(url: str, path: str, body):
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = str(make_tiny_checkpoint(tmp_path_factory.mktemp("m") / "qwen3", "qwen3"))
    configs = [
        EngineConfig(
            folder, deterministic=True, served_model_name="tiny", api_key=KEY, random_seed=i
        )
        for i in (1, 2)
    ]
    with (
        EngineServerThread(configs[0]) as first,
        EngineServerThread(configs[1]) as second,
        SglangRouter(RouterConfig(policy="round_robin", api_key=KEY)) as router,
    ):
        assert router.workers() == {}
        for engine in (first, second):
            router.add_worker(engine.url, api_key=KEY)
        yield router, (first, second)


@needs_router
def test_requests_reach_both_engines_and_results_do_not_depend_on_which(cluster):
    """12 seeded requests, sent twice, reach both engines with the same answers."""
    router, engines = cluster
    assert set(router.workers()) == {engine.url for engine in engines}
    before = [engine.loaded.engine.total_generated for engine in engines]

    def ask(seed: int):
        params = {"max_new_tokens": 8, "sampling_seed": seed, "ignore_eos": True}
        body = {
            "input_ids": [5, 6, seed + 7],
            "sampling_params": params,
            "return_logprob": True,
            "rid": f"r{seed}",
        }
        status, answer = post(router.url, "/generate", body)
        assert status == 200 and answer["meta_info"]["id"] == f"r{seed}"
        return answer["output_ids"], answer["meta_info"]["output_token_logprobs"]

    first_pass = [ask(seed) for seed in range(12)]
    # One request more moves round robin by one: now the other engine gets each seed.
    ask(40)
    assert [ask(seed) for seed in range(12)] == first_pass
    after = [engine.loaded.engine.total_generated for engine in engines]
    assert all(new - old >= 8 * 12 for new, old in zip(after, before, strict=True))


@needs_router
def test_lists_and_refusals_pass_through_the_router(cluster):
    """A group's list request passes the router, and a 400 keeps its reason, so that the client can
    tell a mistake from a retry."""
    router, _ = cluster
    body = {
        "input_ids": [[5, 6], [7, 8], [9]],
        "sampling_params": {"max_new_tokens": 3, "ignore_eos": True},
        "return_logprob": True,
    }
    status, answers = post(router.url, "/generate", body)
    assert status == 200 and [len(answer["output_ids"]) for answer in answers] == [3, 3, 3]
    status, text = post(
        router.url, "/generate", {"input_ids": [5], "sampling_params": {"top_p": 0.0}}
    )
    assert status == 400 and "top_p" in text
    assert post(router.url, "/flush_cache", {})[0] == 200


@needs_router
def test_a_removed_engine_gets_no_more_requests_and_can_come_back(cluster):
    """A removed engine gets no more requests, and can be added again."""
    router, (first, second) = cluster
    router.remove_worker(first.url)
    assert set(router.workers()) == {second.url}
    before = first.loaded.engine.total_generated
    for _ in range(4):
        assert (
            post(
                router.url,
                "/generate",
                {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}},
            )[0]
            == 200
        )
    assert first.loaded.engine.total_generated == before
    with pytest.raises(EngineError, match="the router has no worker"):
        router.remove_worker(first.url)
    router.add_worker(first.url, api_key=KEY)
    assert set(router.workers()) == {first.url, second.url}


def test_an_engine_that_the_router_found_dead_can_be_taken_out(monkeypatch):
    """A worker that is registered and not healthy is no worker for requests, and can be removed."""
    dead = {"url": "http://a:1/", "id": "w1", "is_healthy": False}
    workers, asked = [dead], []

    def request(self, method, path, body=None):
        asked.append((method, path))
        if method == "DELETE":
            workers.clear()
        return 200, {"workers": list(workers)}

    monkeypatch.setattr(SglangRouter, "_request", request)
    router = SglangRouter()
    assert router.workers() == {}
    router.remove_worker("http://a:1")
    assert ("DELETE", "/workers/w1") in asked


@needs_router
def test_a_router_that_runs_already_is_used_and_left_running(cluster):
    """With --sglang-router-ip our engines join the running router and leave it at the end, and it
    stays up."""
    router, (first, second) = cluster
    options = {"sglang_router_policy": "round_robin", "sglang_api_key": KEY}
    address = {"sglang_router_ip": "127.0.0.1", "sglang_router_port": router.port}
    router.remove_worker(second.url)
    attached = start_router(argparse.Namespace(**options, **address), [second.url])
    assert attached.url == router.url and set(router.workers()) == {first.url, second.url}
    attached.stop()
    wait_for(lambda: set(router.workers()) == {first.url})
    router.add_worker(second.url, api_key=KEY)
    with pytest.raises(ConfigError, match="--sglang-router-port"):
        start_router(
            argparse.Namespace(**options, sglang_router_ip="127.0.0.1", sglang_router_port=None), []
        )


@needs_router
def test_a_worker_that_does_not_answer_is_an_error_with_its_url(cluster):
    """An engine that does not answer is an error with its URL, and not waited for without end."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        dead = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with (
        SglangRouter() as router,
        pytest.raises(EngineError, match=f"find the engine {dead} healthy within 2 s"),
    ):
        router.add_worker(dead, timeout=2)


@needs_router
def test_the_router_dies_with_its_parent():
    """The router ends when the driver is killed."""
    script = (
        "import os, time\n"
        "from slime.backends.sglang_utils.router import SglangRouter\n"
        "router = SglangRouter().start()\n"
        "print(router._process.pid, router.port, flush=True)\n"
        "os._exit(9)\n"
    )
    parent = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert parent.returncode == 9, parent.stderr
    pid, port = (int(word) for word in parent.stdout.split())
    wait_for(lambda: not is_alive(pid) and not is_listening(port))


def wait_for(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def is_alive(pid: int) -> bool:
    """False also for a zombie, which holds nothing."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_without_the_extra_the_error_says_what_to_install(monkeypatch):
    """Without the optional package the error tells what to install."""
    monkeypatch.setattr(router_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EngineError, match=r"pip install 'slime-rl\[router\]'"):
        SglangRouter().start()


@needs_router
def test_the_key_is_on_no_command_line(cluster):
    """The router's process has the key, and its command line, which every user of the machine can
    read, has not. Requests without it are refused."""
    router, _ = cluster
    # the router gives itself another title later
    for command in (
        " ".join(router._process.args),
        Path(f"/proc/{router._process.pid}/cmdline").read_text(),
    ):
        assert "router" in command and KEY not in command and "--api-key" not in command
    body = b'{"text": "a", "input_ids": [5], "sampling_params": {}}'
    for method, path in (("POST", "/generate"), ("GET", "/workers"), ("POST", "/workers")):
        headers = {"Content-Type": "application/json"}
        data = body if method == "POST" else None
        request = urllib.request.Request(router.url + path, data, headers, method=method)
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(request, timeout=20)
        assert error.value.code == 401, path


def test_a_key_that_begins_with_a_dash_reaches_the_router(monkeypatch):
    """As one of 64 that a run makes does."""
    from slime.backends.sglang_utils import router_child

    parser = argparse.ArgumentParser()
    parser.add_argument("--api-key")
    parser.add_argument("--port")
    seen = []
    launcher = types.SimpleNamespace(main=lambda: seen.append(parser.parse_args(sys.argv[1:])))
    monkeypatch.setitem(sys.modules, "sglang_router", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "sglang_router.launch_router", launcher)
    monkeypatch.setattr(
        router_child.sys, "platform", "other"
    )  # leaves this process's signals alone
    monkeypatch.setattr(sys, "argv", ["router_child", str(os.getppid()), "--port", "7"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("-key\n"))
    router_child.main()
    assert vars(seen[0]) == {"api_key": "-key", "port": "7"}


def test_a_port_in_use_is_named():
    """A port in use is named in the error, while the router itself logs `address in use`."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=f"port {port}"):
            SglangRouter(RouterConfig(port=port)).start()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
