"""The embedded engine through a real socket: SGLang's endpoints and fields, refusals, aborts,
weight updates, start and end.
"""

import concurrent.futures
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import urllib.error
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save
from support.tiny_models import make_tiny_checkpoint

from slime.backends.torch_engine import ray_actor
from slime.backends.torch_engine.engine_config import EngineConfig
from slime.backends.torch_engine.protocol import ResponseOptions
from slime.backends.torch_engine.ray_actor import EngineActor
from slime.backends.torch_engine.request import Request
from slime.backends.torch_engine.sampling_params import SamplingParams
from slime.backends.torch_engine.server_thread import EngineServerThread
from slime.backends.torch_engine.streaming import ResponseStream
from slime.exceptions import ConfigError, EngineError
from slime.files.checksum import weights_checksum
from slime.files.wire_arrays import decode_response_arrays

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("m") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory):
    """The same weights with a context of 60000 tokens: a response that goes on until it
    is aborted.
    """
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("m") / "long", "qwen3", max_position_embeddings=60000
    )


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("m") / "other", "qwen3", seed=5)


@pytest.fixture(scope="module")
def url(folder):
    with EngineServerThread(EngineConfig(str(folder), deterministic=True)) as server:
        yield server.url


def call(url: str, path: str, body=None, *, method=None, headers=None, raw: bytes | None = None):
    """(status, decoded JSON or text)."""
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    kind = {} if data is None else {"Content-Type": "application/json"}
    request = urllib.request.Request(url + path, data, {**kind, **(headers or {})}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            status, text = response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text


def generate(url: str, **body):
    status, answer = call(url, "/generate", body)
    assert status == 200, answer
    return answer


def refusal(url: str, path: str = "/generate", **body) -> str:
    status, answer = call(url, path, body)
    assert status == 400 and set(answer) == {"error"}, answer
    return answer["error"]["message"]


def test_a_response_has_every_field_of_the_contract(url):
    """A response has every field that the client reads."""
    params = {"max_new_tokens": 6, "sampling_seed": 3, "ignore_eos": True}
    answer = generate(
        url, input_ids=[6, 7, 77], sampling_params=params, return_logprob=True, rid="my-rid"
    )
    meta = answer["meta_info"]
    assert meta["id"] == "my-rid" and meta["weight_version"] == "0"
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 6)
    assert meta["cached_tokens"] in (0, 3) and meta["e2e_latency"] > 0
    assert meta["queue_time"] + meta["inference_time"] == pytest.approx(meta["e2e_latency"])
    decode_time = meta["inference_time"] - meta["prefill_launch_latency"]
    assert min(meta["queue_time"], meta["prefill_launch_latency"], decode_time) > 0
    assert meta["decode_throughput"] == pytest.approx(6 / decode_time)
    triples = meta["output_token_logprobs"]
    assert [token for _, token, _ in triples] == answer["output_ids"] and len(triples) == 6
    assert all(log_prob < 0 and text is None for log_prob, _, text in triples)
    assert "input_token_logprobs" not in meta and len(answer["text"]) >= 1
    without = generate(url, input_ids=[6, 7, 77], sampling_params=params)
    assert (
        "output_token_logprobs" not in without["meta_info"]
        and without["output_ids"] == answer["output_ids"]
    )


def test_text_and_its_ids_are_the_same_request(url):
    """A text is encoded with the model's tokenizer: '12+' is the request of ids 6, 7, 77."""
    params = {"max_new_tokens": 5, "temperature": 0}
    by_text = generate(url, text="12+", sampling_params=params)
    by_ids = generate(url, input_ids=[6, 7, 77], sampling_params=params)
    assert (
        by_text["output_ids"] == by_ids["output_ids"] and by_text["meta_info"]["prompt_tokens"] == 3
    )


def test_lists_are_answered_in_order_each_with_its_own_parameters_and_rid(url):
    """A list request is answered in order, each member with its own parameters and rid, and equal
    single requests agree bit for bit."""
    prompts = [[5 + i, 9] for i in range(12)]
    params = [{"max_new_tokens": 1 + i, "sampling_seed": i, "ignore_eos": True} for i in range(12)]
    rids = [f"r{i}" for i in range(12)]
    answers = generate(
        url, input_ids=prompts, sampling_params=params, rid=rids, return_logprob=True
    )
    assert [a["meta_info"]["id"] for a in answers] == rids
    assert [a["meta_info"]["completion_tokens"] for a in answers] == list(range(1, 13))
    for index in (0, 7, 11):
        alone = generate(
            url, input_ids=prompts[index], sampling_params=params[index], return_logprob=True
        )
        assert (
            alone["meta_info"]["output_token_logprobs"]
            == answers[index]["meta_info"]["output_token_logprobs"]
        )


def test_n_gives_n_different_responses_the_first_being_that_of_the_seed(url):
    """n siblings of one seed differ, and sibling 0 is the response of n = 1."""
    params = {"max_new_tokens": 12, "sampling_seed": 4, "ignore_eos": True}
    siblings = generate(url, input_ids=[5, 6], sampling_params={**params, "n": 4})
    assert len({tuple(a["output_ids"]) for a in siblings}) == 4
    assert (
        siblings[0]["output_ids"]
        == generate(url, input_ids=[5, 6], sampling_params=params)["output_ids"]
    )
    assert len(generate(url, input_ids=[[5], [6]], sampling_params={**params, "n": 3})) == 6


def test_arrays_hold_the_same_numbers_as_json(url):
    """return_arrays gives the numbers of JSON, with float32 bit for bit both ways."""
    body = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": 9, "sampling_seed": 1},
        "return_logprob": True,
    }
    as_json, as_arrays = generate(url, **body), generate(url, **body, return_arrays=True)
    ids, log_probs = decode_response_arrays(as_arrays["meta_info"])
    assert ids.tolist() == as_json["output_ids"] and ids.dtype == np.int32
    triples = as_json["meta_info"]["output_token_logprobs"]
    assert log_probs.tolist() == [log_prob for log_prob, _, _ in triples]
    assert "output_ids" not in as_arrays and "output_token_logprobs" not in as_arrays["meta_info"]


def test_a_prompt_is_scored_from_logprob_start_len_on(url):
    """With max_new_tokens 0 a prompt is scored: one entry per token from the start, null where
    nothing comes before."""
    body = {
        "input_ids": [5, 6, 7, 8],
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
    }
    whole = generate(url, **body, logprob_start_len=0)["meta_info"]
    assert [token for _, token, _ in whole["input_token_logprobs"]] == [5, 6, 7, 8]
    assert whole["input_token_logprobs"][0][0] is None and whole["output_token_logprobs"] == []
    part = generate(url, **body, logprob_start_len=2, return_text_in_logprobs=True)["meta_info"][
        "input_token_logprobs"
    ]
    assert [(lp, token) for lp, token, _ in part] == [
        (lp, token) for lp, token, _ in whole["input_token_logprobs"][2:]
    ]
    assert [text for _, _, text in part] == ["2", "3"]


class Letters:
    """A byte-level tokenizer that counts what it decodes."""

    num_decoded = 0

    def decode(self, ids, *, skip_special_tokens):
        self.num_decoded += len(ids)
        return bytes(ids).decode("utf-8", errors="replace")


def stream_of(ids, *, stop=(), step=1):
    """(events, tokenizer) of a response that grows by `step` tokens between two looks."""
    params = SamplingParams(stop=stop, skip_special_tokens=True, no_stop_trim=False)
    request = Request("r", np.zeros(1, dtype=np.int32), params, seed=0, limit=len(ids), stream=True)
    request.note_version("1", 0)
    tokenizer, events = Letters(), []
    options = ResponseOptions(
        return_logprob=True, return_arrays=False, return_text_in_logprobs=False, stream=True
    )
    stream = ResponseStream(request, options, tokenizer)
    for start in range(0, len(ids), step):
        request.live_tokens += ids[start : start + step]
        request.live_log_probs += [-0.5] * len(ids[start : start + step])
        if stream.is_due():
            events.append(stream.event(now=0.0))
    return events, tokenizer


@pytest.mark.parametrize("count", [1000, 2000, 4000])
def test_a_stream_costs_a_constant_per_token(count):
    """Twice the tokens cost twice the work in a stream: ids decoded and ids sent."""
    events, tokenizer = stream_of(list(b"abcdefgh" * (count // 8)))
    assert tokenizer.num_decoded <= 4 * count
    assert sum(len(event["output_ids"]) for event in events) <= 72 * count
    assert [len(event["output_ids"]) for event in events[:64]] == list(range(1, 65))
    gaps = [len(b["output_ids"]) - len(a["output_ids"]) for a, b in itertools.pairwise(events)]
    assert max(gaps) <= count // 64 + 1


@pytest.mark.parametrize("step", [1, 2, 5])
def test_the_text_of_a_stream_grows_by_whole_characters_to_the_text_of_all_ids(step):
    """A stream's text grows by whole characters to the text of all ids: characters of one to four
    bytes, a broken one, and a stop string that begins but does not end."""
    data = "aé你🙂b".encode() + b"\xff" + b"cSTx" + b"\xe4" * 20 + b"d"
    events, _ = stream_of(list(data), stop=("STOP",), step=step)
    whole = data.decode("utf-8", errors="replace")
    texts = [event["text"] for event in events]
    assert texts[-1] == whole
    assert all(whole.startswith(text) for text in texts) and texts == sorted(texts, key=len)
    assert all(
        event["meta_info"]["completion_tokens"] == len(event["output_ids"]) for event in events
    )
    assert all(
        len(event["meta_info"]["output_token_logprobs"]) == len(event["output_ids"])
        for event in events
    )
    assert not any(text.endswith("cST") for text in texts)


def test_the_stream_cumulates_and_ends_with_the_same_response(url):
    """As SGLang's SSE, every chunk holds all tokens so far, the last one is the whole response,
    then [DONE]."""
    body = {
        "input_ids": [5, 6],
        "sampling_params": {"max_new_tokens": 400, "sampling_seed": 2, "ignore_eos": True},
        "return_logprob": True,
    }
    plain = generate(url, **body)
    status, text = call(url, "/generate", {**body, "stream": True})
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert status == 200 and events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert len(chunks) > 1 and all(
        chunk["meta_info"]["finish_reason"] is None for chunk in chunks[:-1]
    )
    for chunk in chunks:
        count = chunk["meta_info"]["completion_tokens"]
        assert chunk["output_ids"] == plain["output_ids"][:count] and plain["text"].startswith(
            chunk["text"]
        )
        assert (
            chunk["meta_info"]["output_token_logprobs"]
            == plain["meta_info"]["output_token_logprobs"][:count]
        )
    assert (
        chunks[-1]["text"] == plain["text"]
        and chunks[-1]["meta_info"]["finish_reason"]["type"] == "length"
    )


def forced(url: str, **params):
    """A response whose tokens are known: the greedy one of a fixed prompt, 30 tokens long without
    end tokens.
    """
    return generate(
        url,
        input_ids=[5, 6, 7],
        sampling_params={"temperature": 0, "max_new_tokens": 30, "ignore_eos": True, **params},
    )


def test_a_stop_string_over_several_tokens_ends_the_response_and_is_cut_unless_asked_for(url):
    """A stop string over several tokens ends the response: the text loses it unless asked
    otherwise, and the tokens stay as sampled."""
    free = forced(url)
    stop = free["text"][3:6]
    place = free["text"].find(stop)
    stopped = forced(url, stop=stop)
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stopped["text"] == free["text"][:place]
    assert stopped["output_ids"] == free["output_ids"][: len(stopped["output_ids"])]
    kept = forced(url, stop=[stop, "never-there"], no_stop_trim=True)
    assert kept["text"] == free["text"][: place + 3] and kept["output_ids"] == stopped["output_ids"]


def test_stop_token_ids_end_the_response_and_are_part_of_the_ids(url):
    """The token that ended the response has an id and a log-prob, and the text loses it unless
    no_stop_trim is set."""
    free = forced(url)
    token = free["output_ids"][4]
    end = free["output_ids"].index(token)
    stopped = forced(url, stop_token_ids=[token])
    assert stopped["output_ids"] == free["output_ids"][: end + 1]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    assert forced(url, stop_token_ids=[token], no_stop_trim=True)["text"].startswith(
        stopped["text"]
    )
    later = forced(url, stop_token_ids=[token], min_new_tokens=end + 2)
    assert len(later["output_ids"]) >= end + 2


def test_every_end_token_of_the_generation_config_ends_a_response(folder, tmp_path):
    """Each end token of generation_config.json, here 4 and 2, ends a response."""
    weights = load_file(folder / "model.safetensors")
    for token in (4, 2):
        changed = dict(weights)
        head = changed["lm_head.weight"].clone()
        hidden = torch.nn.functional.normalize(weights["model.norm.weight"], dim=0)
        head[token] = 0
        head[token] += 50 * hidden
        changed["lm_head.weight"] = head
        target = tmp_path / str(token)
        target.mkdir()
        for name in (
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ):
            (target / name).write_bytes((folder / name).read_bytes())
        (target / "model.safetensors").write_bytes(save(changed))
        with EngineServerThread(EngineConfig(str(target))) as server:
            info = call(server.url, "/get_model_info")[1]
            assert info["eos_token_ids"] == [4, 2]
            ended = []
            for prompt in range(5, 45):
                params = {
                    "temperature": 0,
                    "max_new_tokens": 30,
                    "no_stop_trim": True,
                    "skip_special_tokens": False,
                }
                answer = generate(server.url, input_ids=[prompt], sampling_params=params)
                if answer["meta_info"]["finish_reason"]["type"] == "stop":
                    ended.append(answer)
            assert any(a["meta_info"]["finish_reason"]["matched"] == token for a in ended)
            assert all(
                a["output_ids"][-1] == a["meta_info"]["finish_reason"]["matched"] for a in ended
            )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "exactly one of input_ids"),
        ({"input_ids": [5], "text": "a"}, "exactly one of input_ids"),
        ({"input_ids": []}, "at least one token"),
        ({"input_ids": [[5], []]}, "at least one token"),
        ({"input_ids": [5, 104]}, "token id 104, the vocabulary is 0..103"),
        ({"input_ids": [5, -1]}, "token id -1"),
        ({"input_ids": [5, 6.5]}, "has 6.5, expected token ids"),
        ({"input_ids": [5, True]}, "has True, expected token ids"),
        (
            {"input_ids": [5] * 512},
            "512 tokens and the context length is 512; with a response it may have at most 511",
        ),
        (
            {"input_ids": [5], "sampling_params": {"max_tokens": 3}},
            "max_tokens is not a sampling parameter",
        ),
        ({"input_ids": [[5], [6]], "sampling_params": [{}]}, "list of 1 for 2 prompt"),
        ({"input_ids": [[5], [6]], "rid": ["a", "a"]}, "same text twice"),
        ({"input_ids": [[5], [6]], "stream": True}, "stream one response per request"),
        ({"input_ids": [5], "return_logprob": "yes"}, "return_logprob is 'yes'"),
        (
            {"input_ids": [5], "return_logprob": True, "logprob_start_len": 9},
            "logprob_start_len is 9",
        ),
        ({"input_ids": [5], "image_data": "x"}, "image_data is not supported"),
    ],
)
def test_a_bad_request_gets_a_400_that_names_field_and_value(url, body, message):
    """A bad request gets a 400 with field and value; the client does not retry it."""
    assert message in refusal(url, **body)


def test_fields_that_a_router_adds_are_ignored_and_malformed_bodies_refused(url):
    """Fields that sglang-router adds are ignored, and malformed bodies are refused."""
    generate(
        url,
        input_ids=[5],
        sampling_params={"max_new_tokens": 1},
        model=None,
        return_entropy=False,
        background=False,
    )
    assert call(url, "/generate", raw=b'{"input_ids": [5')[0] == 400
    assert call(url, "/generate", raw=b"[1]")[0] == 400
    assert call(url, "/nowhere")[0] == 404
    assert "error" in call(url, "/generate", method="GET")[1]


def test_a_response_ends_at_the_context_length(url):
    """509 prompt tokens of 512 leave room for 3, whatever was requested."""
    params = {"max_new_tokens": 100, "ignore_eos": True}
    meta = generate(url, input_ids=[5] * 509, sampling_params=params)["meta_info"]
    assert (meta["completion_tokens"], meta["finish_reason"]) == (
        3,
        {"type": "length", "length": 3},
    )


def wait_for(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def running(url: str) -> int:
    return call(url, "/get_load")[1][0]["num_reqs"]


ENDLESS = {"max_new_tokens": 50000, "ignore_eos": True}


def test_an_aborted_request_answers_with_what_it_has(long_folder):
    """An aborted request answers with its tokens, log-probs and version, and one that never ran
    with none."""
    with (
        EngineServerThread(EngineConfig(str(long_folder), max_running_requests=1)) as server,
        concurrent.futures.ThreadPoolExecutor(4) as pool,
    ):
        body = {"input_ids": [5, 6], "sampling_params": ENDLESS, "return_logprob": True}
        first = pool.submit(generate, server.url, **body, rid="first")
        wait_for(lambda: call(server.url, "/server_info")[1]["total_generated_tokens"] > 3)
        call(server.url, "/pause_generation", {})
        second = pool.submit(generate, server.url, **body, rid="second")
        wait_for(lambda: running(server.url) == 2)
        assert not first.done()
        assert call(server.url, "/abort_request", {"rid": "first"})[0] == 200
        answer = first.result(TIMEOUT)
        meta = answer["meta_info"]
        assert meta["finish_reason"]["type"] == "abort" and meta["weight_version"] == "0"
        assert (
            3
            < len(answer["output_ids"])
            == len(meta["output_token_logprobs"])
            == meta["completion_tokens"]
            < 50000
        )
        assert not second.done()
        call(server.url, "/abort_request", {"abort_all": True})
        meta = second.result(TIMEOUT)["meta_info"]
        assert (
            meta["completion_tokens"],
            meta["output_token_logprobs"],
            meta["weight_version"],
        ) == (0, [], "0")
        assert call(server.url, "/health_generate")[0] == 503
        call(server.url, "/continue_generation", {})
        assert call(server.url, "/health_generate")[0] == 200
        assert "rid is None" in refusal(server.url, "/abort_request")


def test_a_client_that_goes_away_leaves_nothing_running(folder):
    """The requests of a client that disconnects are ended."""
    with EngineServerThread(EngineConfig(str(folder), max_running_requests=2)) as server:
        call(server.url, "/pause_generation", {})
        body = json.dumps(
            {"input_ids": [5], "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}
        ).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection((server.host, server.port)) as client:
            client.sendall(head + body)
            wait_for(lambda: running(server.url) == 1)
        wait_for(lambda: running(server.url) == 0)


def test_weights_come_from_disk_and_the_version_with_them(long_folder, other_folder):
    """Weights and version come from disk: a running request goes on with its tokens and records the
    version of each."""
    with (
        EngineServerThread(EngineConfig(str(long_folder))) as server,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):

        def num_tokens() -> int:
            return call(server.url, "/server_info")[1]["total_generated_tokens"]

        crossing = pool.submit(generate, server.url, input_ids=[5, 6], sampling_params=ENDLESS)
        wait_for(lambda: num_tokens() > 3)
        call(server.url, "/pause_generation", {})
        update = {"model_path": str(other_folder), "weight_version": "1"}
        status, answer = call(server.url, "/update_weights_from_disk", update)
        assert (status, answer["success"], answer["weight_version"]) == (200, True, "1")
        assert answer["checksum"] == weights_checksum(load_file(other_folder / "model.safetensors"))
        assert call(server.url, "/weights_checksum")[1] == {
            "checksum": answer["checksum"],
            "weight_version": "1",
        }
        num_old = num_tokens()
        call(server.url, "/continue_generation", {})
        wait_for(lambda: num_tokens() > num_old)
        call(server.url, "/abort_request", {"abort_all": True})
        meta = crossing.result(TIMEOUT)["meta_info"]
        assert meta["finish_reason"]["type"] == "abort" and meta["weight_version"] == "0"
        num_new = meta["completion_tokens"] - num_old
        assert num_new > 0 and meta["weight_versions"] == [["0", num_old], ["1", num_new]]
        assert generate(server.url, input_ids=[5])["meta_info"]["weight_version"] == "1"


def test_an_update_from_disk_that_does_not_fit_is_refused_and_changes_nothing(url, tmp_path):
    """An update from a wrong folder is refused, and the engine keeps all of its weights."""
    before = call(url, "/weights_checksum")[1]
    small = make_tiny_checkpoint(tmp_path / "small", "qwen3", intermediate_size=48)
    assert "has shape" in refusal(url, "/update_weights_from_disk", model_path=str(small))
    llama = make_tiny_checkpoint(tmp_path / "llama", "llama")
    assert "has model_type llama" in refusal(
        url, "/update_weights_from_disk", model_path=str(llama)
    )
    assert "is not a folder" in refusal(
        url, "/update_weights_from_disk", model_path=str(tmp_path / "nowhere")
    )
    assert "model_path is None" in refusal(url, "/update_weights_from_disk")
    assert call(url, "/weights_checksum")[1] == before


def test_weights_come_as_safetensors_bytes_in_parts_and_only_as_a_whole(folder, other_folder):
    """Buckets make one version: until the last one the old weights answer, and a damaged bucket is
    refused."""
    new = load_file(other_folder / "model.safetensors")
    names = sorted(new)
    first, second = ({n: new[n] for n in part} for part in (names[:5], names[5:]))
    with EngineServerThread(EngineConfig(str(folder))) as server:

        def send(tensors, query):
            return call(
                server.url,
                f"/update_weights_from_tensor?weight_version=9&{query}",
                raw=save(tensors) if tensors else b"",
            )

        before = call(server.url, "/weights_checksum")[1]
        assert send(first, f"begin=true&end=false&checksum={weights_checksum(first)}")[0] == 200
        assert call(server.url, "/weights_checksum")[1] == before
        status, answer = send(second, f"begin=false&end=false&checksum={weights_checksum(first)}")
        assert status == 400 and "bucket's checksum is" in answer["error"]["message"]
        status, answer = send(
            second, f"begin=false&end=true&total_checksum={weights_checksum(new)}"
        )
        assert (status, answer["weight_version"], answer["checksum"]) == (
            200,
            "9",
            weights_checksum(new),
        )
        after = call(server.url, "/weights_checksum")[1]
        assert after == {"checksum": weights_checksum(new), "weight_version": "9"}
        status, answer = send(first, "begin=true&end=true")
        assert status == 400 and "missing" in answer["error"]["message"]
        status, answer = call(
            server.url, "/update_weights_from_tensor?weight_version=9", raw=b"\x80\x04pickle"
        )
        assert status == 400 and "not safetensors" in answer["error"]["message"]
        assert call(server.url, "/weights_checksum")[1] == after


def test_information_endpoints_answer_what_the_router_asks(url, folder):
    """/health, /server_info and /model_info answer what the router asks to register a worker."""
    assert call(url, "/health")[0] == 200 and call(url, "/health_generate")[0] == 200
    assert call(url, "/model_info")[1] == call(url, "/get_model_info")[1]
    assert call(url, "/model_info")[1]["served_model_name"] == str(folder)
    info = call(url, "/server_info")[1]
    assert (info["dtype"], info["context_length"], info["enable_deterministic_inference"]) == (
        "float32",
        512,
        True,
    )
    assert call(url, "/v1/models")[1]["data"][0]["max_model_len"] == 512
    assert call(url, "/flush_cache", {})[0] == 200


def test_the_key_is_asked_for_and_is_needed_beyond_loopback(folder):
    """Requests need the key, and an engine beyond loopback does not start without one."""
    with EngineServerThread(EngineConfig(str(folder), api_key="s3cret")) as server:
        assert call(server.url, "/health")[0] == 200
        assert call(server.url, "/server_info")[0] == 401
        assert (
            call(
                server.url,
                "/generate",
                {"input_ids": [5]},
                headers={"Authorization": "Bearer wrong"},
            )[0]
            == 401
        )
        assert (
            call(server.url, "/server_info", headers={"Authorization": "Bearer s3cr\u00e9t"})[0]
            == 401
        )
        assert (
            call(server.url, "/server_info", headers={"Authorization": "Bearer s3cret"})[0] == 200
        )
    with pytest.raises(ConfigError, match="--sglang-api-key"):
        EngineConfig(str(folder), host="192.0.2.1")
    assert "s3cret" not in repr(EngineConfig(str(folder), api_key="s3cret"))


def test_a_body_over_the_bound_is_refused(folder):
    """A body above the size limit is refused."""
    with EngineServerThread(EngineConfig(str(folder), max_request_bytes=10_000)) as server:
        status, answer = call(server.url, "/generate", {"input_ids": [5] * 20_000})
        assert status == 413 and "larger" in answer["error"]["message"]


def test_an_engine_whose_step_does_not_end_says_what_it_did_not_do(monkeypatch):
    """Its thread hangs in a step: what waits for the step's end is given up by name."""
    engine = types.SimpleNamespace(
        pause=lambda: None, between_steps=lambda action: concurrent.futures.Future()
    )
    actor = EngineActor({"hf_checkpoint": "x"}, 3)
    loaded = types.SimpleNamespace(engine=engine)
    actor._thread = types.SimpleNamespace(server=types.SimpleNamespace(loaded=loaded))
    monkeypatch.setattr(ray_actor, "STEP_TIMEOUT_S", 0.05)
    for call, what in {
        "pause": "pause",
        "flush_cache": "forget its cache",
        "release_memory": "free its memory",
        "resume_memory": "take its memory",
    }.items():
        with pytest.raises(EngineError, match=f"engine 3 did not {what} within 0 s: its step does"):
            getattr(actor, call)()


def test_the_actor_takes_weights_as_arrays_and_stops_listening_after_shutdown(folder, other_folder):
    """The Ray actor takes weights as read-only arrays in buckets, returns the common checksum, and
    stops listening after shutdown."""
    new = {
        name: tensor.numpy()
        for name, tensor in load_file(other_folder / "model.safetensors").items()
    }
    for array in new.values():
        array.flags.writeable = False
    actor = EngineActor({"hf_checkpoint": str(folder)}, 3)
    with pytest.raises(EngineError, match="engine 3 is not started"):
        actor.health()
    place = actor.start()
    assert place["pid"] == os.getpid() and actor.health()
    names = list(new)
    actor.pause()
    actor.begin_weight_update(4)
    actor.update_weights({name: new[name] for name in names[:7]})
    with pytest.raises(EngineError, match="missing"):
        actor.end_weight_update(4)
    actor.begin_weight_update(4)
    for name in names:
        actor.update_weights({name: new[name]})
    assert (
        actor.end_weight_update(4, weights_checksum(new))
        == actor.weights_checksum()
        == weights_checksum(new)
    )
    actor.flush_cache()
    actor.resume()
    assert actor.weight_version() == "4"
    assert generate(place["url"], input_ids=[5])["meta_info"]["weight_version"] == "4"
    actor.shutdown()
    actor.shutdown()
    with pytest.raises(OSError):
        socket.create_connection((place["host"], place["port"]), timeout=5).close()


def test_many_clients_at_once_share_the_steps(folder):
    """64 requests of 20 tokens from 16 threads take far fewer model steps than 64 * 20."""
    with (
        EngineServerThread(EngineConfig(str(folder))) as server,
        concurrent.futures.ThreadPoolExecutor(16) as pool,
    ):
        body = {"sampling_params": {"max_new_tokens": 20, "ignore_eos": True}}
        call(server.url, "/pause_generation", {})
        answers = [
            pool.submit(
                generate, server.url, input_ids=[[5 + i % 50, j] for j in range(5, 9)], **body
            )
            for i in range(16)
        ]
        wait_for(lambda: running(server.url) == 64)
        call(server.url, "/continue_generation", {})
        assert all(
            len(one["output_ids"]) == 20 for answer in answers for one in answer.result(TIMEOUT)
        )
        assert call(server.url, "/server_info")[1]["total_steps"] < 40


def serve_process(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "slime.backends.torch_engine.serve", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )


def test_slime_serve_says_where_it_listens_ends_on_sigterm_and_names_a_port_in_use(folder):
    """`slime serve` prints its address, answers running requests and returns 0 after SIGTERM, and
    returns 2 with the reason when it cannot start."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = serve_process("--hf-checkpoint", str(folder), "--port", str(port))
        serving = serve_process("--hf-checkpoint", str(folder), "--port", "0")
        _, message = refused.communicate(timeout=TIMEOUT)
        assert refused.returncode == 2 and f"port {port}" in message and "choose another" in message
    line = serving.stdout.readline()
    url = next(word for word in line.split() if word.startswith("http://")).rstrip(",")
    key = {"Authorization": f"Bearer {line.rsplit('key ', 1)[1].strip()}"}
    answers: list = []
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}
    assert call(url, "/pause_generation", {})[0] == 401
    assert call(url, "/pause_generation", {}, headers=key)[0] == 200
    client = threading.Thread(
        target=lambda: answers.append(call(url, "/generate", body, headers=key)[1])
    )
    client.start()
    wait_for(lambda: call(url, "/get_load", headers=key)[1][0]["num_reqs"] == 1)
    serving.send_signal(signal.SIGTERM)
    assert serving.wait(timeout=TIMEOUT) == 0
    client.join(TIMEOUT)
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"
    serving.communicate()


def test_slime_serve_refuses_a_folder_that_is_no_checkpoint(tmp_path):
    """`slime serve` with a wrong folder names the missing file."""
    process = serve_process("--hf-checkpoint", str(tmp_path))
    _, message = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 2 and "config.json does not exist" in message


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
