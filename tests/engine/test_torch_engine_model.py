"""The decoder computes what transformers computes, whatever else is in the batch."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pytest
import torch
from support.engine_harness import EngineHarness
from support.tiny_models import TinyCheckpoints

from slime.exceptions import ConfigError, EngineError
from slime.files.checksum import weights_checksum
from slime.models.shape import model_shape, read_model_shape

NUM_GPUS = 0

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "llama": {"family": "llama"},
    "llama-tied-llama3-rope": {
        "family": "llama",
        "tie_word_embeddings": True,
        "rope_parameters": LLAMA3_ROPE,
    },
    "llama-biases-linear-rope": {
        "family": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
    },
    "qwen2-tied": {"family": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"family": "qwen3"},
    "qwen3-odd-sizes": {
        "family": "qwen3",
        "hidden_size": 24,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "intermediate_size": 40,
        "chars": "0123456789abcdef",
        "vocab_size": 21,
    },
    "qwen3-moe": {"family": "qwen3_moe"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return TinyCheckpoints(tmp_path_factory.mktemp("models"), MODELS)


def hf_log_probs(folder, tokens: list[int]) -> np.ndarray:
    """float32 log-probs [T - 1] of tokens 1..T-1 from transformers, eager attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0]
    return (
        torch.log_softmax(logits.float(), dim=-1)[:-1]
        .gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        .numpy()
    )


@pytest.mark.parametrize("name", list(MODELS))
def test_log_probs_of_prompt_and_response_equal_those_of_transformers(folders, name):
    """Log-probs of the prompt (prefill) and of the response (paged cache) equal those of
    transformers, which a trainer recomputes."""
    with EngineHarness(folders[name]) as harness:
        rng = np.random.default_rng(7)
        prompts = [rng.integers(5, 20, size).tolist() for size in (1, 15, 16, 17, 70)]
        requests = [
            harness.request(p, seed=i, score_from=0, max_new_tokens=40, ignore_eos=True)
            for i, p in enumerate(prompts)
        ]
        harness.run(requests)
    for request in requests:
        expected = hf_log_probs(
            folders[name], request.prompt.tolist() + request.output_ids.tolist()
        )
        assert len(request.output_ids) == len(request.output_log_probs) == 40
        assert np.isnan(request.input_log_probs[0])
        ours = np.concatenate((request.input_log_probs[1:], request.output_log_probs))
        assert np.abs(ours - expected).max() < 1e-4


def mixed_requests(harness, order):
    """Requests 0..23 with lengths, temperatures and truncation of their own, in `order`; request i
    is the same in any order.
    """
    vocab = harness.loaded.decoder.config.vocab_size
    requests = {}
    for i in order:
        rng = np.random.default_rng(100 + i)
        prompt = rng.integers(5, vocab, int(rng.integers(1, 90))).tolist()
        params = {
            "temperature": [1.0, 0.7, 1.3][i % 3],
            "top_p": [1.0, 0.9][i % 2],
            "max_new_tokens": int(rng.integers(1, 40)),
        }
        requests[int(i)] = harness.request(prompt, seed=1000 + i, ignore_eos=True, **params)
    return requests


def is_bit_equal(first, second) -> bool:
    same_bits = np.array_equal(
        first.output_log_probs.view(np.int32), second.output_log_probs.view(np.int32)
    )
    return same_bits and np.array_equal(first.output_ids, second.output_ids)


@pytest.mark.parametrize(
    "name", ["llama-biases-linear-rope", "qwen2-tied", "qwen3-odd-sizes", "qwen3-moe"]
)
def test_deterministic_results_are_bit_identical_in_any_company_and_order(folders, name):
    """In deterministic mode a result is bit-identical whether its request is sent alone, in small
    groups, or together with others in any order."""
    with EngineHarness(folders[name], deterministic=True) as harness:
        together = mixed_requests(harness, range(24))
        harness.run(list(together.values()))
        harness.engine.between_steps(harness.engine.flush_cache).result()
        shuffled = mixed_requests(harness, np.random.default_rng(1).permutation(24))
        waiting = list(shuffled.values())
        for start in range(0, 24, 5):
            harness.engine.submit(waiting[start : start + 5])
            # Let the first ones get ahead.
            harness.engine.between_steps(lambda: None).result()
        harness.wait(waiting)
        assert [i for i in range(24) if not is_bit_equal(together[i], shuffled[i])] == []
        alone = mixed_requests(harness, range(0, 24, 5))
        for request in alone.values():
            harness.run([request])
        assert [i for i in alone if not is_bit_equal(together[i], alone[i])] == []


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_deterministic_row_attends_over_its_own_width_and_no_neighbours(folders, deterministic):
    """In deterministic mode a row attends over its own width: three rows of 1, 3 and 9 pages are
    not padded to each other's, because a row's sums would depend on the others."""
    from slime.backends.torch_engine.model_runner import PAGE_SIZE, pad_to_width

    lengths = np.array([1, 2 * PAGE_SIZE + 1, 8 * PAGE_SIZE + 1])
    widths = pad_to_width(lengths // PAGE_SIZE + 1)
    with EngineHarness(folders["qwen3"], deterministic=deterministic) as harness:
        groups = harness.engine.runner._decode_groups(lengths, np.zeros((3, 16), dtype=np.int64))
    assert [group.pages.shape[1] for group in groups] == (
        widths.tolist() if deterministic else [widths.max()]
    )


def test_without_deterministic_mode_results_agree_within_rounding(folders):
    """Without deterministic mode results agree within rounding: the same greedy tokens, log-probs
    within 1e-4."""
    with EngineHarness(folders["qwen3"]) as harness:
        rng = np.random.default_rng(3)
        prompts = [rng.integers(5, 100, int(n)).tolist() for n in rng.integers(1, 60, 20)]
        together = [
            harness.request(p, temperature=0, max_new_tokens=5 + i, ignore_eos=True)
            for i, p in enumerate(prompts)
        ]
        harness.run(together)
        for index, prompt in enumerate(prompts):
            alone = harness.request(
                prompt, temperature=0, max_new_tokens=5 + index, ignore_eos=True
            )
            harness.run([alone])
            assert alone.output_ids.tolist() == together[index].output_ids.tolist()
            assert np.abs(alone.output_log_probs - together[index].output_log_probs).max() < 1e-4


def test_a_prompt_seen_before_is_cached_and_changes_no_bit(folders):
    """A cached prompt changes no bit of the result, and cached_tokens is what was saved: 18 tokens
    span a full and a partial page."""
    prompt = list(range(5, 23))
    with EngineHarness(folders["qwen3"], deterministic=True) as harness:
        siblings = harness.run(
            [harness.request(prompt, seed=i, max_new_tokens=30, ignore_eos=True) for i in range(4)]
        )
        assert [request.cached_tokens for request in siblings] == [0, 18, 18, 18]
        later = harness.run([harness.request(prompt, seed=2, max_new_tokens=30, ignore_eos=True)])[
            0
        ]
        assert later.cached_tokens == 18 and is_bit_equal(later, siblings[2])
        harness.engine.between_steps(harness.engine.flush_cache).result()
        fresh = harness.run([harness.request(prompt, seed=2, max_new_tokens=30, ignore_eos=True)])[
            0
        ]
        assert fresh.cached_tokens == 0 and is_bit_equal(fresh, siblings[2])
        other = harness.run(
            [harness.request(prompt[::-1], seed=2, max_new_tokens=30, ignore_eos=True)]
        )[0]
    # and what is shared is what the model would have computed, for this prompt and not for its
    # length
    for request in (later, other):
        expected = hf_log_probs(
            folders["qwen3"], request.prompt.tolist() + request.output_ids.tolist()
        )[17:]
        assert np.abs(request.output_log_probs - expected).max() < 1e-4


def test_a_prompts_pages_outlive_the_first_of_its_siblings(folders):
    """A page shared by siblings stays until the last of them ends; other requests do not write into
    it."""
    prompt, long = list(range(5, 23)), {"seed": 1, "max_new_tokens": 40, "ignore_eos": True}
    with EngineHarness(folders["qwen3"], deterministic=True, max_total_tokens=14 * 16) as harness:
        alone = harness.run([harness.request(prompt, **long)])[0]
        harness.engine.between_steps(harness.engine.flush_cache).result()
        short = harness.request(prompt, seed=2, max_new_tokens=1, ignore_eos=True)
        strangers = [
            harness.request([30 + i, 31, 32], seed=i, max_new_tokens=14, ignore_eos=True)
            for i in range(12)
        ]
        sibling = harness.request(prompt, **long)
        harness.run([short, sibling, *strangers])
        assert is_bit_equal(sibling, alone)


def test_a_stop_string_does_not_end_a_response_before_its_minimum(folders):
    """With min_new_tokens 4 a stop string at the first token does not end the response before the
    fourth."""
    with EngineHarness(folders["qwen3"]) as harness:
        first = harness.run(
            [harness.request([5, 6], temperature=0, max_new_tokens=1, ignore_eos=True)]
        )[0].output_ids
        stop = harness.engine._decode_for_stops(first)
        lengths = [
            len(
                harness.run(
                    [
                        harness.request(
                            [5, 6],
                            temperature=0,
                            max_new_tokens=9,
                            ignore_eos=True,
                            stop=[stop],
                            **minimum,
                        )
                    ]
                )[0].output_ids
            )
            for minimum in ({}, {"min_new_tokens": 4})
        ]
    assert lengths[0] == 1 and lengths[1] >= 4


def test_a_prompt_is_run_again_after_the_weights_have_changed(folders):
    """After a weight update a cached prompt is run again, because its keys, values and first
    distribution are of the old weights."""
    from slime.backends.torch_engine.weight_update import WeightUpdater

    prompt, params = list(range(5, 23)), {"seed": 2, "max_new_tokens": 4, "ignore_eos": True}
    with EngineHarness(folders["qwen3"], deterministic=True) as harness:
        harness.run([harness.request(prompt, **params)])
        updater = WeightUpdater(harness.loaded)
        updater.begin("1")
        updater.add(
            {name: value.numpy() * 1.5 for name, value in harness.loaded.decoder.weights.items()}
        )
        updater.end("1")
        assert harness.engine.load()["cached_prompts"] == 0
        after = harness.run([harness.request(prompt, **params)])[0]
        assert after.cached_tokens == 0 and after.version_segments(4) == [["1", 4]]
        harness.engine.between_steps(harness.engine.flush_cache).result()
        assert is_bit_equal(harness.run([harness.request(prompt, **params)])[0], after)


def test_the_prompt_cache_can_be_switched_off(folders):
    """--sglang-disable-radix-cache keeps nothing between two steps; siblings that start together
    still share a prompt."""
    with EngineHarness(folders["qwen3"], prompt_cache=False) as harness:
        for _ in range(2):
            (request,) = harness.run(
                [harness.request([5, 6, 7], max_new_tokens=2, ignore_eos=True)]
            )
            assert request.cached_tokens == 0 and harness.engine.load()["cached_prompts"] == 0


def test_more_requests_than_slots_and_pages_all_finish_and_give_their_pages_back(folders):
    """12 pages and 4 slots serve 40 requests, and every page is free afterwards."""
    with EngineHarness(
        folders["qwen3"], max_total_tokens=12 * 16, max_running_requests=4
    ) as harness:
        requests = [
            harness.request([5 + i, 6, 7], seed=i, max_new_tokens=1 + i, ignore_eos=True)
            for i in range(40)
        ]
        harness.run(requests)
        assert [len(request.output_ids) for request in requests] == [1 + i for i in range(40)]
        assert [request.finish_reason for request in requests] == [
            {"type": "length", "length": 1 + i} for i in range(40)
        ]
        harness.engine.between_steps(harness.engine.flush_cache).result()
        assert harness.engine.load() == {
            "running": 0,
            "waiting": 0,
            "cached_prompts": 0,
            "tokens": 0,
        }


def test_an_engine_gives_its_caches_memory_back_and_generates_the_same_afterwards(folders):
    """With --offload-rollout an idle engine frees its cache, requests that come meanwhile wait, and
    it generates the same afterwards; a busy engine keeps its cache."""
    with EngineHarness(folders["qwen3"], deterministic=True) as harness:
        engine, cache = harness.engine, harness.engine.runner.cache

        def ask():
            return harness.request([5, 6, 7], seed=3, max_new_tokens=8, ignore_eos=True)

        before = harness.run([ask()])[0].output_ids.tolist()
        assert engine.between_steps(engine.release_memory).result() is True
        assert cache.keys == cache.values == [] and engine.is_paused
        waiting = ask()
        engine.submit([waiting])
        assert engine.between_steps(engine.release_memory).result() is False
        engine.between_steps(engine.resume_memory).result()
        assert harness.wait([waiting])[0].output_ids.tolist() == before
        assert waiting.cached_tokens == 0  # the cached prompt's pages were among those given back


def test_an_interrupted_response_resumed_as_a_longer_prompt_draws_the_same_tokens(folders):
    """Noise is by absolute position, so a response resumed as a longer prompt draws the same
    tokens, up to rounding of the logits."""
    with EngineHarness(folders["qwen3"]) as harness:
        whole = harness.run(
            [harness.request([5, 6, 7], seed=9, max_new_tokens=20, ignore_eos=True)]
        )[0]
        resumed_prompt = [5, 6, 7, *whole.output_ids[:8].tolist()]
        rest = harness.run(
            [harness.request(resumed_prompt, seed=9, max_new_tokens=12, ignore_eos=True)]
        )[0]
        assert rest.output_ids.tolist() == whole.output_ids[8:].tolist()


def test_weights_that_are_not_finite_fail_the_request_and_poison_no_later_one(folders):
    """Weights with NaN fail the request, and neither its pages nor the prompt's cached distribution
    affect later requests."""
    with EngineHarness(folders["qwen3"], max_total_tokens=8 * 16) as harness:
        weight = harness.loaded.decoder.weights["model.layers.0.self_attn.v_proj.weight"]
        good = weight.clone()
        harness.engine.between_steps(lambda: weight.fill_(float("nan"))).result()
        broken = harness.run([harness.request([5, 6] * 7, max_new_tokens=60, ignore_eos=True)])[0]
        assert "not finite" in broken.error
        harness.engine.between_steps(lambda: weight.copy_(good)).result()
        after = harness.run(
            [harness.request([5, 6, 7 + i], max_new_tokens=40, ignore_eos=True) for i in range(6)]
        )
        after += harness.run([harness.request([5, 6] * 7, max_new_tokens=40, ignore_eos=True)])
        assert all(request.error is None and len(request.output_ids) == 40 for request in after)


def test_a_request_that_fails_leaves_its_siblings_pages_alone(folders):
    """A request that fails leaves the page that it shares, and its sibling has the response that it
    has alone."""
    params = {"seed": 1, "max_new_tokens": 6, "ignore_eos": True}
    responses = []
    for has_sibling in (False, True):
        harness = EngineHarness(folders["qwen3"], deterministic=True)
        request, sibling = (
            harness.request(list(range(5, 23)), **params),
            harness.request(list(range(5, 23)), max_new_tokens=6, ignore_eos=True),
        )
        harness.engine.submit([request, sibling] if has_sibling else [request])
        harness.engine._step()
        if has_sibling:
            sibling.error = "log-probs are not finite"
            harness.engine._finish({sibling.slot: {"type": "abort"}})
        while request.finish_reason is None:
            harness.engine._step()
        responses.append(request)
    assert is_bit_equal(*responses)


def test_an_abort_ends_the_named_request_alone_with_all_its_tokens(folders):
    """An abort ends the named request with all its tokens, which partial rollout continues, and no
    other."""
    harness = EngineHarness(folders["qwen3"])
    named, other = (
        harness.request([5, 6 + i], seed=i, max_new_tokens=9, ignore_eos=True) for i in range(2)
    )
    harness.engine.submit([named, other])
    for _ in range(4):
        harness.engine._step()
    harness.engine.abort("r0")
    harness.engine._take_aborts()
    assert (
        named.finish_reason["type"] == "abort"
        and len(named.output_ids) == len(named.output_log_probs) == 5
    )
    assert other.finish_reason is None
    while other.finish_reason is None:
        harness.engine._step()
    assert other.finish_reason["type"] == "length" and len(other.output_ids) == 9


def test_a_finished_response_does_not_change_when_its_slot_is_used_again(folders):
    """A finished response does not change when the next request writes into its slot."""
    with EngineHarness(folders["qwen3"], max_running_requests=1) as harness:
        first = harness.run([harness.request([5, 6], seed=1, max_new_tokens=8, ignore_eos=True)])[0]
        ids, log_probs = first.output_ids.tolist(), first.output_log_probs.tolist()
        harness.run([harness.request([9, 9, 9], seed=2, max_new_tokens=8, ignore_eos=True)])
        assert (first.output_ids.tolist(), first.output_log_probs.tolist()) == (ids, log_probs)


def test_more_requests_than_may_wait_are_refused_together(folders):
    """A list request that exceeds the queue is refused as a whole."""
    harness = EngineHarness(folders["qwen3"], max_waiting_requests=2)
    harness.engine.submit([harness.request([5])])
    with pytest.raises(EngineError, match="1 requests wait already, at most 2 may"):
        harness.engine.submit([harness.request([6]), harness.request([7])])
    assert harness.engine.load()["waiting"] == 1


def test_an_error_between_two_steps_is_raised_where_its_result_is_awaited(folders):
    """An error between two steps, such as a refused weight update, is raised at its sender, and the
    engine goes on."""
    with EngineHarness(folders["qwen3"]) as harness:
        with pytest.raises(ZeroDivisionError):
            harness.engine.between_steps(lambda: 1 // 0).result(30)
        assert (
            harness.engine.between_steps(lambda: 7).result(30) == 7
            and harness.engine.failure is None
        )


def test_the_longest_response_is_what_the_whole_cache_has_room_for(folders):
    """The longest response fills the cache: with 8 pages of 16 tokens and a prompt of 20, 7 pages
    are left for 4 + 108 tokens."""
    harness = EngineHarness(folders["qwen3"], max_total_tokens=8 * 16)
    assert harness.engine.total_pages == 8
    longest = harness.engine.longest_response(20)
    assert longest == (8 - 2 + 1) * 16 - 20 == 92
    request = harness.request([5] * 20, max_new_tokens=longest, ignore_eos=True)
    harness.engine.submit([request])
    for _ in range(longest):
        harness.engine._step()
    assert len(request.output_ids) == longest


def config_of(folder, **changes) -> dict:
    return {**json.loads((folder / "config.json").read_text()), **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            "rope_parameters.rope_type 'yarn' is not supported",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 64,
                "max_window_layers": 1,
                "layer_types": None,
            },
            "sliding_window 64",
        ),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
    ],
)
def test_a_feature_the_decoder_lacks_is_refused_by_name(folders, changes, message):
    """A model feature that the decoder lacks is refused by name."""
    with pytest.raises(ConfigError, match=message):
        model_shape(config_of(folders["qwen3"], **changes))


def test_a_checkpoint_that_does_not_fit_its_config_is_refused(folders, tmp_path):
    """A missing, extra or misshapen tensor is refused by name; no weight stays at its random
    start."""
    (tmp_path / "config.json").write_text(
        json.dumps(config_of(folders["qwen3"], num_hidden_layers=3))
    )
    (tmp_path / "model.safetensors").write_bytes(
        (folders["qwen3"] / "model.safetensors").read_bytes()
    )
    with pytest.raises(ConfigError, match="11 missing: model.layers.2.input_layernorm.weight"):
        EngineHarness(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps(config_of(folders["qwen3"], intermediate_size=60))
    )
    with pytest.raises(
        ConfigError, match=r"down_proj.weight has shape \[32, 64\], the model's is \[32, 60\]"
    ):
        EngineHarness(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(
        (folders["qwen3"] / "model.safetensors").read_bytes()[:-100]
    )
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        EngineHarness(tmp_path)


def test_an_update_is_complete_and_right_or_nothing_changes(folders):
    """An incomplete or wrong update changes no weight."""
    from slime.backends.torch_engine.weight_update import WeightUpdater

    with EngineHarness(folders["qwen3"]) as harness:
        updater = WeightUpdater(harness.loaded)
        old = updater.checksum()
        new = {
            name: (value.numpy() + 1.0) for name, value in harness.loaded.decoder.weights.items()
        }
        assert old == weights_checksum(
            {name: value.numpy() for name, value in harness.loaded.decoder.weights.items()}
        )
        names = list(new)
        updater.begin("5")
        updater.add({name: new[name] for name in names[:3]})
        with pytest.raises(EngineError, match="nope is not a weight of this model"):
            updater.add({"nope": new[names[0]], names[3]: new[names[3]]})
        with pytest.raises(EngineError, match="came twice"):
            updater.add({names[0]: new[names[0]]})
        with pytest.raises(EngineError, match="float64, allowed is float32"):
            updater.add({names[3]: new[names[3]].astype(np.float64)})
        head = "lm_head.weight"  # as many numbers in another shape are another matrix
        assert head not in names[:3] and new[head].shape[0] != new[head].shape[1]
        with pytest.raises(EngineError, match=f"{head} has shape"):
            updater.add({head: np.ascontiguousarray(new[head].T)})
        with pytest.raises(EngineError, match="open update is to '5'"):
            updater.end("6")
        with pytest.raises(EngineError, match=f"{len(names) - 3} missing"):
            updater.end("5")
        assert updater.checksum() == old and harness.engine.weight_version == "0"
        with pytest.raises(EngineError, match="no weight update is open"):
            updater.end("5")
        updater.begin("5")
        updater.add(new)
        with pytest.raises(EngineError, match="received weights' checksum"):
            updater.end("5", checksum="0" * 32)
        assert updater.checksum() == old
        updater.begin("5")
        for name in reversed(names):
            sent = torch.from_numpy(new[name].copy())
            updater.add({name: sent})
            sent.zero_()  # the sender's buffer takes the next bucket
        assert (
            updater.end("5", checksum=weights_checksum(new))
            == updater.checksum()
            == weights_checksum(new)
        )
        assert harness.engine.weight_version == "5"


def test_an_update_ends_what_runs_only_when_asked(folders, monkeypatch):
    """An update aborts running requests only if its sender asks for it."""
    from slime.backends.torch_engine.weight_update import WeightUpdater

    with EngineHarness(folders["qwen3"]) as harness:
        calls = []
        monkeypatch.setattr(harness.engine, "abort", lambda **options: calls.append(options))
        updater = WeightUpdater(harness.loaded)
        weights = {
            name: value.numpy().copy() for name, value in harness.loaded.decoder.weights.items()
        }
        for version, abort_running, expected in (
            ("1", False, []),
            ("2", True, [{"all_requests": True}]),
        ):
            updater.begin(version)
            updater.add(weights)
            updater.end(version, abort_running=abort_running)
            assert calls == expected


def test_the_first_position_beyond_the_rotary_table_makes_it_grow():
    """A table of 64 positions grows to 128 when position 64 is needed."""
    from slime.backends.torch_engine.rope import RotaryTable
    from slime.models.shape import RopeConfig

    table = RotaryTable(RopeConfig(theta=100.0), 2, device=torch.device("cpu"), dtype=torch.float32)
    for position in (63, 64):
        cos, _ = table.lookup(torch.tensor([position]), max_position=position)
        assert cos.tolist() == [pytest.approx([np.cos(position)] * 2, abs=1e-5)], (
            "head_dim 2 turns by one radian per position"
        )


def test_an_index_names_files_of_its_own_folder(folders, tmp_path):
    """An index that names a file outside its folder is refused."""
    from slime.backends.torch_engine.weights import weight_files

    inside = tmp_path / "inside"
    inside.mkdir()
    for folder in (tmp_path, inside):
        (folder / "model.safetensors").write_bytes(b"")
    (inside / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": "../model.safetensors"}})
    )
    assert weight_files(inside) == [inside / "model.safetensors"]


def test_tokens_sampled_across_an_update_are_labelled_by_segment(folders):
    """Tokens are labelled with the version that sampled them: 5 under version 0 and 395 under
    version 1."""
    harness = EngineHarness(folders["qwen3"])
    request = harness.request([5, 6], max_new_tokens=400, ignore_eos=True)
    harness.engine.submit([request])
    # Steps by hand: the first one draws two tokens, one after the prompt and one more.
    for _ in range(4):
        harness.engine._step()
    harness.engine.set_weight_version("1")
    while request.finish_reason is None:
        harness.engine._step()
    assert request.version_segments(400) == [["0", 5], ["1", 395]]


def test_config_reads_llama3_rope_and_head_dim(folders):
    """head_dim and llama3's rope scaling are read from the config."""
    config = read_model_shape(folders["llama-tied-llama3-rope"])
    assert (
        config.rope.rope_type,
        config.rope.factor,
        config.rope.original_max_position_embeddings,
    ) == (
        "llama3",
        4.0,
        64,
    )
    assert read_model_shape(folders["qwen3-odd-sizes"]).head_dim == 8


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
