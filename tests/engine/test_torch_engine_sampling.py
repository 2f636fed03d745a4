"""What is drawn, with which log-prob, and which parameters are refused, on small distributions that
a reader can check."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.backends.torch_engine import noise
from slime.backends.torch_engine.kv_cache import PageAllocator
from slime.backends.torch_engine.model_runner import pad_to_width
from slime.backends.torch_engine.prompt_cache import PromptCache, PromptState
from slime.backends.torch_engine.request import Request
from slime.backends.torch_engine.running_batch import RunningBatch
from slime.backends.torch_engine.sampler import SamplingBatch, draw_tokens
from slime.backends.torch_engine.sampling_params import BadRequest, parse_sampling_params
from slime.backends.torch_engine.stop_strings import cut_at_stop, find_stop, held_back
from slime.exceptions import EngineError
from slime.files.wire_arrays import (
    LOG_PROBS_KEY,
    TOKEN_DTYPE,
    TOKEN_IDS_KEY,
    decode_response_arrays,
    encode_array,
)

NUM_GPUS = 0

# Probabilities 0.5, 0.3, 0.15, 0.05 of tokens 0..3, as logits.
FOUR = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))


def draw_many(count: int, logits: torch.Tensor = FOUR, **params) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probs of `count` draws from one distribution through a RunningBatch, as the
    engine does it.
    """
    vocab = logits.shape[1]
    batch = RunningBatch(count, vocab_size=vocab, eos_token_ids=(3,), device=torch.device("cpu"))
    parsed = parse_sampling_params(params, vocab_size=vocab)
    slots = []
    for seed in range(count):
        request = Request(
            "r", np.array([0], dtype=np.int32), parsed, seed=seed, limit=5, pages=np.array([1])
        )
        slots.append(batch.place(request))
    rows = np.array(slots)
    parameters = batch.sampling_batch(rows)
    sampled = draw_tokens(logits.expand(count, -1).contiguous(), parameters)
    batch.append(rows, sampled, parameters)
    return sampled.tokens, sampled.log_probs


def frequencies(tokens: np.ndarray) -> np.ndarray:
    return np.bincount(tokens, minlength=4) / len(tokens)


def test_draws_follow_the_distribution():
    """Over 20000 seeds each frequency is within 4 standard errors (0.014) of its probability."""
    tokens, log_probs = draw_many(20000)
    assert np.abs(frequencies(tokens) - [0.5, 0.3, 0.15, 0.05]).max() < 0.014
    assert np.abs(log_probs - np.log([0.5, 0.3, 0.15, 0.05])[tokens]).max() < 1e-6


def test_temperature_changes_draws_and_the_log_prob():
    """At temperature 0.5 probabilities are squared and renormalized: 0.25, 0.09, 0.0225, 0.0025
    over 0.365.
    """
    expected = np.array([0.25, 0.09, 0.0225, 0.0025]) / 0.365
    tokens, log_probs = draw_many(20000, temperature=0.5)
    assert np.abs(frequencies(tokens) - expected).max() < 0.014
    assert np.abs(log_probs - np.log(expected)[tokens]).max() < 1e-6


def test_temperature_zero_is_greedy_and_its_log_prob_is_that_of_temperature_one():
    """Temperature 0 is greedy, and its log-prob is that of temperature 1, which a trainer can
    recompute."""
    tokens, log_probs = draw_many(8, temperature=0)
    assert tokens.tolist() == [0] * 8
    assert np.abs(log_probs - np.log(0.5)).max() < 1e-6
    # also beside a row with a temperature of its own
    mixed = SamplingBatch(uniforms=np.zeros(2), temperatures=np.array([0.0, 0.5], dtype=np.float32))
    sampled = draw_tokens(FOUR.expand(2, -1).contiguous(), mixed)
    assert sampled.tokens.tolist() == [0, 0] and sampled.log_probs == pytest.approx(
        np.log([0.5, 0.25 / 0.365]), abs=1e-6
    )


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"top_k": 2}, [0.625, 0.375, 0, 0]),
        ({"top_p": 0.79}, [0.625, 0.375, 0, 0]),
        ({"top_p": 0.81}, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        ({"min_p": 0.25}, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0]),
        # 0.5 and 0.3 are left by top_k; top_p 0.6 of what is left keeps the first alone (0.625 >=
        # 0.6).
        ({"top_k": 2, "top_p": 0.6}, [1, 0, 0, 0]),
        ({"top_k": 99}, [0.5, 0.3, 0.15, 0.05]),
    ],
)
def test_truncation_limits_the_draw_but_not_the_log_prob(params, expected):
    """Truncation limits the draw, and the log-prob stays that of the whole policy."""
    tokens, log_probs = draw_many(20000, **params)
    assert np.abs(frequencies(tokens) - expected).max() < 0.014
    assert np.all(frequencies(tokens)[np.array(expected) == 0] == 0)
    assert np.abs(log_probs - np.log([0.5, 0.3, 0.15, 0.05])[tokens]).max() < 1e-6


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_p": 0.79}, [0.625, 0.375, 0, 0]),
        ({"top_p": 0.45}, [1, 0, 0, 0]),
        ({"top_k": 2}, [0.625, 0.375, 0, 0]),
        ({"top_p": 0.99, "min_p": 0.25}, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        ({}, [0.5, 0.3, 0.15, 0.05]),
    ],
)
def test_with_the_kept_ids_the_log_prob_is_normalized_over_them(params, kept):
    """The trainer replays the ids it is given: its log-prob of token 0 among {0, 1} is ln 0.625,
    and the engine's must be the same.
    """
    tokens, log_probs = draw_many(200, custom_params={"return_top_p_token_ids": True}, **params)
    with np.errstate(divide="ignore"):
        assert np.abs(log_probs - np.log(kept)[tokens]).max() < 1e-6
    greedy_token, greedy = draw_many(
        1, custom_params={"return_top_p_token_ids": True}, **{**params, "temperature": 0}
    )
    assert greedy_token.tolist() == [0] and greedy[0] == pytest.approx(np.log(kept[0]), abs=1e-6)


def test_kept_ids_of_a_penalized_draw_hold_the_drawn_token_and_leave_the_log_prob_the_policys():
    """Logits 2, 1, 0, repetition penalty 2 on token 0: 1, 1, 0 are drawn from. top_k 2 keeps 0 and
    1; ln p(0 | 0, 1) = -ln(1 + e^-1).
    """
    logits = torch.tensor([[2.0, 1.0, 0.0, -9.0]])
    tokens, log_probs = draw_many(
        50, logits, top_k=2, repetition_penalty=2.0, custom_params={"return_top_p_token_ids": True}
    )
    expected = np.array([0.0, -1.0]) - np.log(1 + np.exp(-1.0))
    assert set(tokens.tolist()) == {0, 1} and np.abs(log_probs - expected[tokens]).max() < 1e-6


def test_log_probs_over_a_real_vocabulary_have_no_bias():
    """49,152 logits: float32 log_softmax on the CPU is 7.6e-6 too high on average, 96 % of tokens
    positive. Half and half is right.
    """
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(256, 49152, generator=generator)
    seeds = np.arange(256, dtype=np.uint64)

    def drawn(rows: slice):
        count = len(seeds[rows])
        uniforms = noise.uniform(seeds[rows], np.zeros(count, np.int64))
        return draw_tokens(logits[rows], SamplingBatch(uniforms, np.ones(count, np.float32)))

    sampled = drawn(slice(None))
    exact = (
        torch.log_softmax(logits.double(), dim=-1)
        .gather(1, torch.from_numpy(sampled.tokens)[:, None])[:, 0]
        .numpy()
    )
    error = sampled.log_probs - exact
    assert abs(error.mean()) < 5e-7 and 0.3 < (error > 0).mean() < 0.7
    # a row's number depends on the row alone: batch-invariant decoding stands on it
    for rows in (slice(0, 1), slice(3, 5), slice(7, 70)):
        alone = drawn(rows)
        assert (
            alone.tokens.tolist() == sampled.tokens[rows].tolist()
            and alone.log_probs.tolist() == sampled.log_probs[rows].tolist()
        )


@pytest.mark.parametrize("first", [True, False])
def test_one_row_that_truncates_leaves_the_others_alone(first):
    """Parameters are per row: one row that truncates does not change the others, wherever it is in
    the batch."""
    order = 1 if first else -1
    batch = SamplingBatch(
        uniforms=np.array([0.97, 0.97]),
        temperatures=np.ones(2, dtype=np.float32),
        top_ks=np.array([2, -1])[::order].copy(),
        top_ps=np.ones(2),
        min_ps=np.zeros(2),
        keep_rows=np.array([0, 1]),
    )
    sampled = draw_tokens(FOUR.expand(2, -1).contiguous(), batch)
    assert sampled.tokens.tolist()[::order] == [1, 3]
    assert [kept.tolist() for kept in sampled.kept][::order] == [[0, 1], [0, 1, 2, 3]]


def test_end_tokens_cannot_be_drawn_before_min_new_tokens():
    """Before min_new_tokens end tokens and stop token ids cannot be drawn: of 4 tokens, 0 and 1 are
    left."""
    tokens, log_probs = draw_many(20000, min_new_tokens=1, stop_token_ids=[2])
    assert np.abs(frequencies(tokens) - [0.625, 0.375, 0, 0]).max() < 0.014
    assert np.abs(log_probs - np.log([0.5, 0.3, 0.15, 0.05])[tokens]).max() < 1e-6
    ignoring, _ = draw_many(2000, min_new_tokens=1, ignore_eos=True)
    assert frequencies(ignoring)[3] > 0


def test_penalties_count_prompt_and_response_as_documented():
    """With logits ln 2 and 0.5 and prompt token 0, repetition 2 halves token 0's logit; frequency
    and presence count response tokens only."""
    logits = torch.tensor([[float(np.log(2.0)), 0.5, -1.0, -9.0]])
    tokens, _ = draw_many(4, logits=logits, temperature=0)
    assert tokens.tolist() == [0] * 4
    tokens, _ = draw_many(4, logits=logits, temperature=0, repetition_penalty=2.0)
    assert tokens.tolist() == [1] * 4
    # a negative logit is multiplied: -1 becomes -2 and loses to -1.5, where halved it would win all
    # the more
    tokens, _ = draw_many(
        4, logits=torch.tensor([[-1.0, -1.5, -9.0, -9.0]]), temperature=0, repetition_penalty=2.0
    )
    assert tokens.tolist() == [1] * 4
    batch = RunningBatch(1, vocab_size=4, eos_token_ids=(), device=torch.device("cpu"))
    params = parse_sampling_params(
        {"temperature": 0, "frequency_penalty": 0.1, "presence_penalty": 0.15}, vocab_size=4
    )
    rows = np.array(
        [
            batch.place(
                Request("r", np.array([3], np.int32), params, seed=0, limit=9, pages=np.array([1]))
            )
        ]
    )
    drawn = []
    for _ in range(5):
        parameters = batch.sampling_batch(rows)
        sampled = draw_tokens(logits, parameters)
        batch.append(rows, sampled, parameters)
        drawn.append(int(sampled.tokens[0]))
    # ln 2 = 0.693; after one 0: 0.443 < 0.5; after one 1: 0.25 < 0.443; then 0.343 > 0.25; 0.243 <
    # 0.25.
    assert drawn == [0, 1, 0, 0, 1]


def test_rows_keep_their_own_counts_and_their_own_nucleus():
    """Each request's counts and kept ids are of its own draw, also where only the second row asks
    for them."""
    batch = RunningBatch(2, vocab_size=4, eos_token_ids=(), device=torch.device("cpu"))
    raw = {
        "temperature": 0,
        "top_k": 2,
        "presence_penalty": 0.1,
        "custom_params": {"return_top_p_token_ids": True},
    }
    requests, slots = [], []
    for keeps in (False, True):
        params = parse_sampling_params(
            {**raw, "custom_params": {"return_top_p_token_ids": keeps}}, vocab_size=4
        )
        requests.append(
            Request("r", np.array([3], np.int32), params, seed=0, limit=9, pages=np.array([1]))
        )
        slots.append(batch.place(requests[-1]))
    logits = torch.tensor([[4.0, 3.0, 0.0, 0.0], [0.0, 0.0, 4.0, 3.0]])
    rows = np.array(slots)
    parameters = batch.sampling_batch(rows)
    sampled = draw_tokens(logits, parameters)
    batch.append(rows, sampled, parameters)
    assert sampled.tokens.tolist() == [0, 2]
    assert [batch._counts[slot][0].tolist() for slot in slots] == [[1, 0, 0, 0], [0, 0, 1, 0]]
    assert [[ids.tolist() for ids in request.kept_token_ids] for request in requests] == [
        [],
        [[2, 3]],
    ]


def test_penalties_are_subtracted_before_the_temperature():
    """At temperature 0.001 the larger logit is drawn: 1.0 once, then 1.0 - 0.15 < 0.9. Subtracted
    from 1000 the 0.15 would be nothing.
    """
    batch = RunningBatch(1, vocab_size=4, eos_token_ids=(), device=torch.device("cpu"))
    params = parse_sampling_params({"temperature": 0.001, "presence_penalty": 0.15}, vocab_size=4)
    rows = np.array(
        [
            batch.place(
                Request("r", np.array([3], np.int32), params, seed=0, limit=9, pages=np.array([1]))
            )
        ]
    )
    drawn = []
    for _ in range(2):
        parameters = batch.sampling_batch(rows)
        sampled = draw_tokens(torch.tensor([[1.0, 0.9, -9.0, -9.0]]), parameters)
        batch.append(rows, sampled, parameters)
        drawn.append(int(sampled.tokens[0]))
    assert drawn == [0, 1]


def test_noise_is_a_function_of_seed_and_position_and_is_uniform():
    """Noise depends on seed and position alone, differs between siblings, and is uniform: 100000
    numbers in 10 bins (chi-square, 9 df, < 33)."""
    seeds = np.arange(100_000, dtype=np.uint64)
    numbers = noise.uniform(seeds, np.full(100_000, 17))
    assert np.array_equal(numbers[5:6], noise.uniform(seeds[5:6], np.array([17])))
    counts = np.bincount((numbers * 10).astype(int), minlength=10)
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 33
    along = noise.uniform(np.full(100_000, 3, dtype=np.uint64), np.arange(100_000))
    assert abs(np.corrcoef(along[:-1], along[1:])[0, 1]) < 0.02
    assert len({noise.sibling_seed(7, index) for index in range(1000)}) == 1000
    assert noise.sibling_seed(-1, 0) == 2**64 - 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-30, 30), min_size=2, max_size=40), st.floats(0, 1, exclude_max=True))
def test_every_drawn_token_has_probability(logits, uniform):
    """No token of probability 0 is drawn, whatever the random number: -inf is added as a first and
    last token."""
    row = torch.tensor([[float("-inf"), *logits, float("-inf")]], dtype=torch.float32)
    batch = SamplingBatch(uniforms=np.array([uniform]), temperatures=np.ones(1, dtype=np.float32))
    sampled = draw_tokens(row, batch)
    assert np.isfinite(sampled.log_probs[0])


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"temperature": -1}, r"temperature is -1, expected a number >= 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0}, r"top_p is 0, expected a number in \(0, 1\]"),
        ({"top_k": 0}, "top_k is 0, expected -1"),
        ({"top_k": True}, "top_k is True"),
        ({"max_new_tokens": 1.5}, "max_new_tokens is 1.5"),
        (
            {"min_new_tokens": 9, "max_new_tokens": 8},
            "min_new_tokens is 9, more than max_new_tokens 8",
        ),
        ({"stop": [""]}, "stop is"),
        ({"stop_token_ids": [99]}, r"stop_token_ids has \[99\], the vocabulary is 0..9"),
        ({"stop_token_ids": [9, 10]}, r"stop_token_ids has \[10\], the vocabulary is 0..9"),
        ({"n": 0}, "n is 0"),
        ({"sampling_seed": 2**64}, "sampling_seed is"),
        ({"max_tokens": 5}, "max_tokens is not a sampling parameter. Known are: .*max_new_tokens"),
        ({"regex": "a+"}, "regex is 'a.'; the embedded engine does not support it"),
        ({"custom_params": {"x": 1}}, "custom_params is"),
        ([], r"sampling_params is \[\], expected an object"),
    ],
)
def test_a_parameter_that_cannot_be_honoured_is_refused_by_name(raw, message):
    """An unknown or unsupported sampling parameter is refused by name."""
    with pytest.raises(BadRequest, match=message):
        parse_sampling_params(raw, vocab_size=10)


def test_null_parameters_mean_the_default():
    """null means the default, and for max_new_tokens no limit."""
    params = parse_sampling_params(
        {"stop": None, "top_p": None, "regex": None, "sampling_seed": None}, vocab_size=10
    )
    assert params == parse_sampling_params(None, vocab_size=10) and params.max_new_tokens == 128
    assert parse_sampling_params({"max_new_tokens": None}, vocab_size=10).max_new_tokens is None


def decode_pieces(pieces: dict[int, str]):
    return lambda ids: "".join(pieces[int(token)] for token in ids)


def test_stop_strings_are_found_across_token_borders_and_cut_where_they_start():
    """A stop string 'END' that arrives as 'xE', 'N', 'Dy' is found with the last token, and the
    text keeps 'abx'."""
    decode = decode_pieces({1: "ab", 2: "xE", 3: "N", 4: "Dy"})
    assert find_stop([1, 2, 3], ("END",), decode=decode) is None
    assert find_stop([1, 2, 3, 4], ("y", "END"), decode=decode) == "END"
    assert cut_at_stop([1, 2, 3, 4], "END", decode=decode) == 3


def test_a_stop_string_that_min_new_tokens_let_pass_does_not_cut():
    """A stop string completed before min_new_tokens stays in the text, and the one in the last
    token ends the response."""
    assert cut_at_stop([1, 2, 1], ".", decode=decode_pieces({1: "a.", 2: "b"})) == 4


def test_streamed_text_holds_back_what_may_still_change():
    """A stream holds back half a character and the beginning of a stop string."""
    assert held_back("abc", ()) == 0
    assert held_back("ab\ufffd", ()) == 1
    assert held_back("abEN", ("END", "Nx")) == 2


def test_arrays_round_trip_and_a_cut_reply_is_an_error():
    """Arrays round-trip, and a truncated buffer is an error."""
    meta = {TOKEN_IDS_KEY: encode_array([7, 8, 9], TOKEN_DTYPE), "completion_tokens": 3}
    meta[LOG_PROBS_KEY] = encode_array(
        np.array([-0.5, -1.5, -2.5], dtype=np.float32), np.dtype("<f4")
    )
    ids, log_probs = decode_response_arrays(meta)
    assert ids.tolist() == [7, 8, 9] and log_probs.tolist() == [-0.5, -1.5, -2.5]
    with pytest.raises(
        EngineError, match="3 token ids and 2 log-probs, but completion_tokens is 3"
    ):
        decode_response_arrays({**meta, LOG_PROBS_KEY: encode_array([-0.5, -1.5], np.dtype("<f4"))})
    with pytest.raises(EngineError, match="not a multiple of 4"):
        decode_response_arrays({**meta, TOKEN_IDS_KEY: "AAA="})


def test_a_page_is_free_when_its_last_holder_lets_go():
    """A shared page is free when its last holder releases it."""
    allocator = PageAllocator(6)
    pages = allocator.allocate(3)
    allocator.share(pages[:2])
    allocator.release(pages)
    assert allocator.num_free == 3
    allocator.release(pages[:2])
    assert allocator.num_free == 5
    assert sorted(allocator.allocate(5).tolist()) == [1, 2, 3, 4, 5]


def prompts_of_one_page(num_pages, names):
    """A cache that holds a prompt of one page per name, and its allocator."""
    allocator = PageAllocator(num_pages + 1)
    cache = PromptCache(allocator, vocab_size=2**40)
    for name in names:
        cache.put(name, PromptState(np.array([0]), allocator.allocate(1)))
    return allocator, cache


def test_prompts_are_forgotten_oldest_first_and_those_in_use_never():
    """Cached prompts are evicted oldest first, and never while they are in use."""
    allocator, cache = prompts_of_one_page(3, [b"a", b"b", b"c"])
    cache.get(b"a")
    assert cache.free_pages(1, protected=set()) and [
        cache.get(name) is None for name in (b"a", b"b", b"c")
    ] == [False, True, False]
    allocator, cache = prompts_of_one_page(2, [b"a", b"b"])
    assert not cache.free_pages(2, protected={b"a"})
    assert cache.get(b"a") is not None and cache.get(b"b") is None and allocator.num_free == 1


def test_the_prompt_cache_keeps_to_its_capacity():
    """The cache of prompts is trimmed to its capacity, oldest first: of 20 prompts of one page 16
    stay."""
    allocator, cache = prompts_of_one_page(20, [bytes([i]) for i in range(20)])
    cache.trim()
    assert len(cache) == 16 and allocator.num_free == 4
    assert cache.get(bytes([3])) is None and cache.get(bytes([4])) is not None


def test_attention_widths_follow_from_the_length_alone():
    """1, 2, 3, 4, 6, 8, 12, 16, ... pages: at most a third is padding."""
    assert pad_to_width(np.array([1, 2, 3, 4, 5, 6, 7, 9, 13, 17, 25])).tolist() == [
        1,
        2,
        3,
        4,
        6,
        6,
        8,
        12,
        16,
        24,
        32,
    ]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
