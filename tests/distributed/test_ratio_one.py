"""On the first on-policy step the importance ratio is 1 and the KL to the policy itself 0, whatever
tokens were sampled with and wherever the old log-probs come from. Real engine, real client, real
actor. The whole table (192 cells): make test-layouts.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import asyncio

import pytest
from support.ratio_matrix import LAYOUTS, OLD_LOG_PROBS, SAMPLING, CellResult, RatioMatrix, judged
from support.rollout_args import fresh_rollout_state, rollout_args, tokenizer_folder

from slime.exceptions import ConfigError

NUM_GPUS = 0

OLD = tuple(OLD_LOG_PROBS)
ONE_PROCESS = [("dense", sampling, OLD[number % 3]) for number, sampling in enumerate(SAMPLING)] + [
    ("moe", sampling, OLD[number % 3])
    for number, sampling in enumerate(
        ("top_p", "turns", "fan-out, top_p", "partial rollout, top_p")
    )
]
TWO_PROCESSES = [
    (layout, sampling, OLD[number % 3])
    for layout in ("tp2", "cp2")
    for number, sampling in enumerate(("top_p and top_k", "turns, top_p", "fan-out"))
]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    return RatioMatrix(tmp_path_factory.mktemp("ratio"))


def check(cells):
    wrong = [
        f"{cell.layout} x {cell.sampling} x {cell.old}: {cell.problem}"
        for cell in cells
        if cell.problem
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.timeout(300)
def test_the_ratio_is_one_for_every_way_to_sample_dense_and_moe(matrix):
    """The ratio is 1 for temperature, truncation, stops, special tokens, partial rollout, turns and
    fan-out, each with one source of old log-probs."""
    check(matrix.run(ONE_PROCESS))


@pytest.mark.timeout(300)
def test_the_ratio_is_one_where_vocabulary_or_sequence_are_split(matrix):
    """The ratio is 1 where a token's nucleus lies on two tensor ranks or the response on two
    context ranks."""
    check(matrix.run(TWO_PROCESSES))


@pytest.mark.slow_layouts
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layouts", (("dense", "moe"), ("tp2", "cp2")))
def test_the_whole_table(layouts, matrix):
    """The ratio is 1 for every sampling option, source of old log-probs and layout."""
    assert {LAYOUTS[name].ranks for name in layouts} <= {1, 2}
    check(
        matrix.run(
            [(layout, sampling, old) for layout in layouts for sampling in SAMPLING for old in OLD],
            timeout=800,
        )
    )


@pytest.mark.timeout(300)
def test_a_gap_to_the_engine_is_looked_at_before_the_weights_change(matrix):
    """With engine log-probs 0.5 nats too low and --logprob-diff-stop 0.2 no weight moves, whatever
    the source of old log-probs; with a limit of 5 all do."""
    results = matrix.run_far_rollout(0.5)
    assert set(results) == {(old, stop) for old in OLD for stop in (0.2, 5.0)}
    for (old, stop), (words, moved) in results.items():
        if stop == 0.2:
            assert (
                "disagree by 0.5 nats" in words
                and "--logprob-diff-stop 0.2" in words
                and moved == 0
            ), old
        else:
            assert words == "" and moved > 1e-3, old


def test_a_cell_with_one_wrong_number_is_a_problem():
    """A cell with one wrong number is reported."""
    good = {
        f"train/{name}": 0.0
        for name in (
            "ppo_kl",
            "pg_clipfrac",
            "kl_loss",
            "train_rollout_logprob_abs_diff",
            "tis_abs",
            "tis_clipfrac",
        )
    }
    cell = ("dense", "plain", "recomputed")
    assert judged(cell, [CellResult(1e-6, 50)], good).problem == ""
    for change in (
        {"train/ppo_kl": -0.1},
        {"train/pg_clipfrac": 0.01},
        {"train/kl_loss": 0.01},
        {"train/tis_abs": 0.2},
    ):
        assert list(change)[0] in judged(cell, [CellResult(1e-6, 50)], good | change).problem
    assert "apart" in judged(cell, [CellResult(2e-4, 50)], good).problem
    assert "only 3 tokens" in judged(cell, [CellResult(0.0, 3)], good).problem


# --- what cannot hold is refused ------------------------------------------------------------------

EDITS = {
    "frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.1, "min_new_tokens": 4, "logit_bias": {"5": 2.0},
    "json_schema": "{}", "regex": "a+", "ebnf": "root ::= 'a'", "structural_tag": "{}",
}  # fmt: skip


async def edited(args, sample, sampling_params):
    """A generate function that adds the parameter which the sample's prompt names."""
    from slime.rollout.sglang_rollout import generate

    return await generate(args, sample, {**sampling_params, **sample.metadata["add"]})


def ask(tmp_path, add, *, evaluation, monkeypatch, **overrides):
    """The request bodies that one group of a generate function with `add` to its
    parameters sends.
    """
    from slime.data.sample import Sample
    from slime.rollout import sglang_rollout

    monkeypatch.setitem(sys.modules, "ratio_plugin", sys.modules[__name__])
    args = rollout_args(
        hf_checkpoint=tokenizer_folder(tmp_path / "model"),
        custom_generate_function_path="ratio_plugin.edited",
        **overrides,
    )
    sent = []

    async def reply(args, body, **kwargs):
        sent.append(body)
        return {
            "text": "a",
            "meta_info": {
                "finish_reason": {"type": "stop"},
                "output_token_logprobs": [[-0.5, 9, None]],
            },
        }

    monkeypatch.setattr(sglang_rollout, "request_generate", reply)
    group = [Sample(index=0, group_index=0, prompt="p=", label="1", metadata={"add": add})]

    async def run():
        params = dict(sglang_rollout.GenerateState(args).sampling_params)
        return await sglang_rollout.generate_and_rm_group(
            args, group, params, evaluation=evaluation
        )

    with fresh_rollout_state("http://127.0.0.1:1"):
        asyncio.run(run())
    return sent


@pytest.mark.parametrize("name", EDITS)
def test_what_edits_the_logits_is_refused_in_training_and_served_in_evaluation(
    name, tmp_path, monkeypatch
):
    """Parameters that edit the logits, such as penalties and grammars, are refused in training,
    where the trainer could not recompute the distribution, and accepted in evaluation."""
    with pytest.raises(
        ConfigError, match=f"{name} .* changes the logits .* Leave them to evaluation"
    ):
        ask(tmp_path, {name: EDITS[name]}, evaluation=False, monkeypatch=monkeypatch)
    (body,) = ask(tmp_path, {name: EDITS[name]}, evaluation=True, monkeypatch=monkeypatch)
    assert body["sampling_params"][name] == EDITS[name]


def test_another_temperature_than_the_trainers_is_refused_and_truncation_is_not(
    tmp_path, monkeypatch
):
    """A request with another temperature than the trainer's is refused; top_p, top_k and min_p are
    accepted, because they leave the log-prob alone."""
    with pytest.raises(ConfigError, match=r"temperature 0.5 is not --rollout-temperature 1.0"):
        ask(tmp_path, {"temperature": 0.5}, evaluation=False, monkeypatch=monkeypatch)
    assert ask(tmp_path, {"temperature": 0.5}, evaluation=True, monkeypatch=monkeypatch)
    neutral = {
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "logit_bias": {},
        "regex": None,
    }
    for add in (neutral, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}, {"stop": ["a"]}):
        assert len(ask(tmp_path, add, evaluation=False, monkeypatch=monkeypatch)) == 1


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
