"""Who may talk to an engine: every route asks for the key, and web pages get no answer of use."""

import http.client
import json
import sys
import urllib.parse
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
from support.options import write_run_inputs
from support.tiny_models import make_tiny_checkpoint

from slime.backends.torch_engine.engine_config import EngineConfig, engine_config_from_args
from slime.backends.torch_engine.serve import ServeCommand
from slime.backends.torch_engine.server_thread import EngineServerThread
from slime.config.specs import slime_specs
from slime.config.yaml_file import format_resolved
from slime.exceptions import ConfigError
from slime.tracking.wandb_sink import public_options
from slime.utils.arguments import parse_args
from slime.utils.http_utils import HttpSettings

NUM_GPUS = 0

KEY = "the-key-of-this-test"
WITH_KEY = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("m") / "qwen3", "qwen3"))


@pytest.fixture(scope="module")
def server(folder):
    with EngineServerThread(EngineConfig(folder, api_key=KEY)) as server:
        yield server


def ask(server, method, path, *, headers=None, body=None):
    """(status, text) of a request with exactly these headers; Host is the address by default."""
    place = urllib.parse.urlsplit(server.url).netloc
    connection = http.client.HTTPConnection(place, timeout=20)
    given = dict(headers or {})
    connection.putrequest(method, path, skip_host="Host" in given)
    if body is not None:
        given["Content-Length"] = str(len(body))
    for name, value in given.items():
        connection.putheader(name, value)
    connection.endheaders(body)
    with connection.getresponse() as response:
        status, text = response.status, response.read().decode()
    connection.close()
    return status, text


def routes(server):
    """(method, path) of everything that the server answers."""
    resources = server._runner.app.router.routes()
    return {
        (route.method, route.resource.canonical)
        for route in resources
        if route.method in ("GET", "POST")
    }


def test_every_route_asks_for_the_key_but_health_which_says_nothing(server):
    """Without the key, and with another one, all routes answer 401, unknown ones too. /health has
    an empty body."""
    found = routes(server)
    assert len(found) >= 15
    for method, path in sorted(found - {("GET", "/health")}) + [("GET", "/ready"), ("GET", "/x")]:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            status, text = ask(server, method, path, headers=headers)
            assert status == 401 and "Bearer KEY" in text, (method, path)
    assert ask(server, "GET", "/health") == (200, "")
    assert ask(server, "GET", "/server_info", headers=WITH_KEY)[0] == 200


def test_a_failed_engine_tells_strangers_no_more_than_that(server, monkeypatch):
    """Without the key /health says that the engine has failed, not what failed."""
    engine = server.loaded.engine
    monkeypatch.setattr(type(engine), "failure", property(lambda self: "OSError: /home/me/x"))
    status, text = ask(server, "GET", "/health")
    assert status == 503 and "the engine has failed." in text and "/home/me" not in text
    assert "/home/me" in ask(server, "GET", "/health", headers=WITH_KEY)[1]


@pytest.mark.parametrize(
    "host, is_own",
    [
        ("127.0.0.1:{port}", True),
        ("localhost:{port}", True),
        ("LOCALHOST.", True),
        ("127.0.0.2", True),
        ("[::1]:{port}", True),
        ("attacker.example:{port}", False),
        ("127.0.0.1.attacker.example", False),
        ("localhost.attacker.example", False),
        ("192.0.2.7:{port}", False),
        ("", False),
    ],
)
def test_a_name_that_is_not_this_machine_is_refused(server, host, is_own):
    """A page that made its own name mean 127.0.0.1 sends that name in the Host header."""
    headers = {**WITH_KEY, "Host": host.format(port=server.port)}
    status, text = ask(server, "GET", "/server_info", headers=headers)
    assert status == (200 if is_own else 403)
    assert is_own or "Host header names" in text


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://attacker.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-origin"},
    ],
)
@pytest.mark.parametrize("path", ["/health", "/pause_generation", "/generate"])
def test_what_a_web_page_sends_is_refused(server, headers, path):
    """Browsers add these headers themselves; pages cannot leave them out."""
    method = "GET" if path == "/health" else "POST"
    status, text = ask(server, method, path, headers={**WITH_KEY, **headers})
    assert status == 403 and "web pages" in text
    assert not server.loaded.engine.is_paused


def test_an_address_typed_into_a_browser_is_answered(server):
    """Sec-Fetch-Site: none is a person, not a page."""
    headers = {**WITH_KEY, "Sec-Fetch-Site": "none"}
    assert ask(server, "GET", "/model_info", headers=headers)[0] == 200


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_of_a_form_is_refused(server, kind):
    """A form can be sent to another site without asking it; JSON cannot."""
    body = json.dumps({"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}).encode()
    headers = {**WITH_KEY, **({} if kind is None else {"Content-Type": kind})}
    status, text = ask(server, "POST", "/generate", headers=headers, body=body)
    assert status == 415 and "application/json" in text
    headers["Content-Type"] = "application/json; charset=utf-8"
    assert ask(server, "POST", "/generate", headers=headers, body=body)[0] == 200
    assert ask(server, "POST", "/flush_cache", headers=WITH_KEY)[0] == 200, "no body, no type"


def test_a_run_makes_a_key_that_nothing_records(tmp_path):
    """Each run has a key of its own, which reaches engines and clients and no file, list of options
    or text of an object."""
    words = write_run_inputs(tmp_path)
    args, other = parse_args(words), parse_args(words)
    key = args.sglang_api_key
    assert len(key) >= 43 and key != other.sglang_api_key
    config = engine_config_from_args(args, 0)
    assert config.api_key == key and key not in repr(config)
    assert key not in repr(HttpSettings(api_key=key))
    assert key not in format_resolved(args, slime_specs())
    assert key not in str(public_options(args))
    given = parse_args([*words, "--sglang-api-key", "given-by-hand"])
    assert given.sglang_api_key == "given-by-hand"
    assert "given-by-hand" not in format_resolved(given, slime_specs())
    assert "given-by-hand" not in str(public_options(given))


def test_keys_can_be_switched_off_and_external_engines_have_none(tmp_path):
    """--no-api-key and an empty key ask for none; engines that somebody else started have the key
    that was given, or none."""
    words = write_run_inputs(tmp_path)
    for off in (["--no-api-key"], ["--sglang-api-key", ""]):
        assert not engine_config_from_args(parse_args([*words, *off]), 0).api_key
    with pytest.raises(ConfigError, match="exclude each other"):
        parse_args([*words, "--no-api-key", "--sglang-api-key", "x"])
    external = [*words, "--rollout-external-engine-addrs", "http://127.0.0.1:1"]
    external += ["--update-weight-transport", "disk", "--update-weight-disk-dir", str(tmp_path)]
    assert parse_args(external).sglang_api_key is None
    with pytest.raises(ConfigError, match="without a key"):
        engine_config_from_args(parse_args([*words, "--no-api-key"]), 0, host="0.0.0.0")


def test_serve_makes_a_key_takes_one_or_has_none(folder, monkeypatch):
    """slime serve: a new key, --api-key, SLIME_API_KEY, or --no-api-key."""
    monkeypatch.delenv("SLIME_API_KEY", raising=False)
    keys = {ServeCommand(folder).engine_config().api_key for _ in range(2)}
    assert len(keys) == 2 and all(len(key) >= 43 for key in keys)
    assert ServeCommand(folder, api_key="k").engine_config().api_key == "k"
    assert ServeCommand(folder, no_api_key=True).engine_config().api_key is None
    monkeypatch.setenv("SLIME_API_KEY", "from the environment")
    assert ServeCommand(folder).engine_config().api_key == "from the environment"
    with pytest.raises(ConfigError, match="exclude each other"):
        ServeCommand(folder, no_api_key=True).engine_config()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
