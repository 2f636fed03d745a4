"""Hostile requests: each is refused or served, and the engine serves everybody else afterwards."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dataclasses
import json
import urllib.error
import urllib.request

import pytest
from support.engine_harness import EngineHarness
from support.tiny_models import make_tiny_checkpoint

from slime.backends.torch_engine.engine_config import EngineConfig
from slime.backends.torch_engine.protocol import EngineLimits, parse_generate
from slime.backends.torch_engine.sampling_params import PARSERS, BadRequest, parse_sampling_params
from slime.backends.torch_engine.server_thread import EngineServerThread

NUM_GPUS = 0

DEEP = "[" * 900 + "]" * 900  # as deep as the JSON reader follows
NUMBERS = ("0", "-1", "1", "2147483647", "2147483648", "9223372036854775807", "9223372036854775808", "18446744073709551615",
           "18446744073709551616", "-9223372036854775809", "1e308", "1e-308", "5e-324", "-0.0", "1.5", "1" + "0" * 400)  # fmt: skip
OTHERS = ("null", "true", "NaN", "Infinity", '""', '"x"', '"\\u0000"', '"\\ud800"', "[]", "[[]]", "{}", '{"a": 1}', "[1, null]",
          "[-1]", "[104]", "[9223372036854775808]", '["", 1]', DEEP, '{"a": ' * 900 + "1" + "}" * 900, str(list(range(5000))))  # fmt: skip
VALUES = NUMBERS + OTHERS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("m") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def url(folder):
    with EngineServerThread(
        EngineConfig(str(folder), deterministic=True, max_waiting_requests=4096)
    ) as server:
        yield server.url


def _call(url, path, raw, method=None):
    data = raw if raw is None else raw.encode()
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + path, data, kind, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def _serves(url):
    """The engine still answers, with the same tokens as at any other time."""
    assert _call(url, "/health", None)[0] == 200
    assert _call(url, "/continue_generation", "{}")[0] == 200  # a body without a mode pauses
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3, "sampling_seed": 1}}
    status, answer = _call(url, "/generate", json.dumps(body))
    assert status == 200
    return json.loads(answer)["output_ids"]


def _assert_served_or_refused(url, path, raws):
    before = _serves(url)
    statuses = set()
    for raw in raws:
        status, answer = _call(url, path, raw)
        assert status in (200, 400), (raw[:200], status, answer[:300])
        assert "Traceback" not in answer and len(answer) < 20000, raw[:200]
        statuses.add(status)
    assert _serves(url) == before
    return statuses


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_no_value_of_a_sampling_parameter_ends_the_engine(url, name):
    """No sampling parameter ends the engine or gives a 500: 2**63 in an array of 64 bits, 1e-308 in
    one of float32, a text of 900 brackets in a message."""
    rest = {"max_new_tokens": "2", "n": "1", "min_new_tokens": "0"}
    raws = []
    for value in VALUES:
        fields = {**rest, name: value}
        params = ", ".join(f'"{key}": {text}' for key, text in fields.items())
        raws.append(
            f'{{"input_ids": [5, 6], "return_logprob": true, "sampling_params": {{{params}}}}}'
        )
    assert 400 in _assert_served_or_refused(url, "/generate", raws)


@pytest.mark.parametrize(
    "name",
    [
        "input_ids",
        "text",
        "rid",
        "sampling_params",
        "return_logprob",
        "logprob_start_len",
        "stream",
        "lora_path",
        "unknown",
    ],
)
def test_no_value_of_a_request_field_ends_the_engine(url, name):
    raws = []
    for value in VALUES:
        fields = {
            "input_ids": "[5, 6]",
            "return_logprob": "true",
            "sampling_params": '{"max_new_tokens": 2}',
            name: value,
        }
        if name == "text":
            del fields["input_ids"]
        raws.append("{" + ", ".join(f'"{key}": {text}' for key, text in fields.items()) + "}")
    _assert_served_or_refused(url, "/generate", raws)


@pytest.mark.parametrize(
    "path, fields",
    [
        ("/abort_request", ("rid", "abort_all")),
        ("/pause_generation", ("mode",)),
        ("/update_weights_from_disk", ("model_path", "weight_version", "abort_all_requests")),
    ],
)
def test_no_value_of_a_control_field_ends_the_engine(url, path, fields):
    raws = [f'{{"{name}": {value}}}' for name in fields for value in VALUES] + list(VALUES)
    _assert_served_or_refused(url, path, raws)


@pytest.mark.parametrize(
    "query",
    [
        "",
        "?weight_version=1",
        "?weight_version=1&begin=x",
        "?weight_version=1&checksum=%00",
        "?weight_version=" + "1" * 300,
    ],
)
@pytest.mark.parametrize("raw", ["", "x", "\0" * 64, "{}", '"\\ud800"'])
def test_no_body_of_a_weight_update_ends_the_engine(url, query, raw):
    _assert_served_or_refused(url, "/update_weights_from_tensor" + query, [raw])


def test_a_call_for_millions_of_responses_is_refused_before_one_of_them_is_made():
    """16,384 prompts with n 1024 in a body of 82 kB, 16,777,216 requests, are refused before any of
    them is made."""
    limits = EngineLimits(
        vocab_size=104, context_length=512, longest_response=lambda length: 512, max_responses=65536
    )
    body = {"input_ids": [[5]] * 16384, "sampling_params": {"n": 1024, "max_new_tokens": 1}}

    def seed():
        raise AssertionError("a request was made")

    with pytest.raises(
        BadRequest,
        match="asks for 16777216 responses .16384 prompt.s., n up to 1024.*at most 65536",
    ):
        parse_generate(body, limits, tokenizer=None, next_seed=seed)
    body["sampling_params"] = [{"n": 4, "max_new_tokens": 1}] * 16384
    call = parse_generate(body, limits, tokenizer=None, next_seed=lambda: 0)
    assert len(call.requests) == 65536


def test_a_prompt_far_beyond_the_context_is_refused_without_being_looked_at():
    limits = EngineLimits(
        vocab_size=104, context_length=512, longest_response=lambda length: 512, max_responses=8
    )
    with pytest.raises(BadRequest, match="has 1000 tokens and the context length is 512"):
        parse_generate(
            {"input_ids": ["not a token"] * 1000}, limits, tokenizer=None, next_seed=lambda: 0
        )


def test_a_request_that_cannot_be_placed_fails_alone(folder):
    """A request whose placing raises fails alone, and its slot and pages are free again."""
    with EngineHarness(folder, deterministic=True, max_running_requests=2) as harness:
        alone = harness.run([harness.request([5, 6], seed=1, max_new_tokens=3)])[
            0
        ].output_ids.tolist()
        pages = harness.engine.load()["tokens"]
        for _ in range(3):
            bad = harness.request([5, 6], seed=2, max_new_tokens=3)
            bad.params = dataclasses.replace(bad.params, top_k=2**63)
            good = harness.request([5, 6], seed=1, max_new_tokens=3)
            harness.run([bad, good])
            assert good.output_ids.tolist() == alone and good.error is None
            assert (
                bad.error
                == "the request could not be served: OverflowError. The engine's log has the stack."
            )
        assert harness.engine.failure is None
        assert harness.engine.load() == {
            "running": 0,
            "waiting": 0,
            "cached_prompts": 1,
            "tokens": pages,
        }


def test_health_of_a_failed_engine_shows_no_stack_and_no_path(folder):
    """/health, which answers strangers, shows neither stack nor path; the run's own processes get
    the stack."""
    with EngineServerThread(EngineConfig(str(folder))) as server:

        def fail():
            raise FileNotFoundError(2, "No such file", "/home/somebody/secret.json")

        engine = server.loaded.engine
        engine.runner.prefill = lambda prompts: fail()
        status, answer = _call(
            server.url, "/generate", '{"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}'
        )
        assert status == 500 and "secret" not in answer and __file__ not in answer
        status, answer = _call(server.url, "/health", None)
        assert status == 503 and "FileNotFoundError" in answer
        assert "secret" not in answer and ".py" not in answer and "Traceback" not in answer
        assert "secret.json" in engine.failure_stack and "engine.py" in engine.failure_stack


@pytest.mark.parametrize(
    "value",
    [10**400, -(10**400), float("nan"), float("inf"), 2**63, 2**31],
    ids=["1e400", "-1e400", "nan", "inf", "2**63", "2**31"],
)
def test_values_that_no_array_holds_are_refused_by_name(value):
    """In a call inside the process, where JSON's limits do not hold, values that fit no array are
    refused by name."""
    names = ["max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty",
             "presence_penalty", "n", "stop_token_ids"]  # fmt: skip
    for name in names:
        with pytest.raises(BadRequest, match=f"sampling_params.{name} is"):
            parse_sampling_params({name: value}, vocab_size=10)


def test_stop_token_ids_are_counted_once_each_and_bounded():
    """Stop token ids are counted once each and bounded, because each is a row of an array for every
    token of every sequence."""
    assert parse_sampling_params(
        {"stop_token_ids": [3, 2, 3] * 1000}, vocab_size=10
    ).stop_token_ids == (3, 2)
    with pytest.raises(BadRequest, match="at most 1024 different token ids"):
        parse_sampling_params({"stop_token_ids": list(range(1025))}, vocab_size=5000)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q", *sys.argv[1:]]))
