"""Two turns with a tool on the real embedded engine: sampled tokens, added tokens, and what is
logged about them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import json

import pytest
import yaml
from support.rollout_args import fresh_rollout_state, rollout_args
from support.tiny_models import tiny_config

from examples.addition.prepare import build_tokenizer
from examples.calculator import prepare, rollout, run
from slime.data.sample import Sample
from slime.exceptions import ConfigError
from slime.prompts.data_source import RolloutDataSourceWithBuffer
from slime.prompts.masks import MultiTurnLossMaskGenerator
from slime.rollout.sglang_rollout import GenerateState, generate_rollout
from slime.utils.async_utils import run as wait_for

NUM_GPUS = 0

PROBLEMS = [(a, b) for a in range(10, 13) for b in range(10, 13)]


def train_on_conversations(model, tokenizer, steps):
    """Supervised steps in plain torch, until the model calls the tool most of the time."""
    import torch

    pairs = MultiTurnLossMaskGenerator(tokenizer).get_loss_masks(
        [prepare.conversation(p) for p in PROBLEMS]
    )
    width = max(len(ids) for ids, _ in pairs)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in pairs])
    mask = torch.tensor([mask + [0] * (width - len(mask)) for _, mask in pairs])[:, 1:].bool()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(model(ids).logits[:, :-1][mask], ids[:, 1:][mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(engine address, model folder, transformers model): a tiny model that has seen nine
    conversations.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    from slime.backends.torch_engine.engine_config import EngineConfig
    from slime.backends.torch_engine.server_thread import EngineServerThread

    folder = tmp_path_factory.mktemp("calculator")
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    sizes = {
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    model = AutoModelForCausalLM.from_config(
        tiny_config("qwen3", **sizes, initializer_range=0.05), dtype=torch.float32
    )
    train_on_conversations(model, tokenizer, steps=70)
    model.generation_config = GenerationConfig(eos_token_id=[1], pad_token_id=0)
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
    rows = [{"prompt": prepare.conversation(p)[:1], "label": str(p[0] * p[1])} for p in PROBLEMS]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with EngineServerThread(
        EngineConfig(hf_checkpoint=str(folder), device="cpu", deterministic=True)
    ) as server:
        yield server.url, folder, model.eval()


def example_args(folder, **overrides):
    return rollout_args(**{
        "hf_checkpoint": str(folder), "prompt_data": str(folder / "train.jsonl"), "input_key": "prompt", "rm_type": None,
        "custom_generate_function_path": "examples.calculator.rollout.generate",
        "custom_rm_path": "examples.calculator.rollout.exact_answer", "rollout_batch_size": 9, "n_samples_per_prompt": 4,
        "rollout_max_response_len": 20, "sglang_enable_deterministic_inference": True, **overrides,
    })  # fmt: skip


@pytest.fixture(scope="module")
def samples(trained):
    url, folder, _ = trained
    args = example_args(folder)
    with fresh_rollout_state(url):
        output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    found = [sample for group in output.samples for sample in group]
    assert len(found) == 36 and sum(sample.metadata["round_number"] == 2 for sample in found) >= 18
    return found


def response_of(sample):
    return sample.tokens[len(sample.tokens) - sample.response_length :]


def test_ids_masks_and_log_probs_of_two_turns_are_aligned(samples):
    """Exactly the sampled tokens have mask 1 and a log-prob; between them is what the template
    writes."""
    tokenizer = build_tokenizer()
    for sample in samples:
        response, log_probs = response_of(sample), sample.rollout_log_probs
        assert len(response) == len(sample.loss_mask) == len(log_probs) == sample.response_length
        assert sum(sample.loss_mask) < len(response) or sample.metadata["round_number"] == 1
        added = [token for token, mask in zip(response, sample.loss_mask, strict=True) if not mask]
        assert all(
            log_prob == 0
            for log_prob, mask in zip(log_probs, sample.loss_mask, strict=True)
            if not mask
        )
        results = [
            message["content"]
            for message in sample.metadata["messages"]
            if message["role"] == "tool"
        ]
        expected = "".join(f"<|tool|>{result}" for result in results) + "<|assistant|>" * bool(
            results
        )
        assert tokenizer.decode(added) == expected
        assert len(sample.weight_versions) == sample.metadata["round_number"]


def test_an_answered_sample_is_the_render_of_its_conversation(samples):
    """For this append-only template the trained ids are the render of the conversation."""
    tokenizer = build_tokenizer()
    answered = [
        s
        for s in samples
        if s.status is Sample.Status.COMPLETED and s.metadata["round_number"] == 2
    ]
    assert len(answered) >= 10
    for sample in answered:
        messages = [
            *sample.metadata["messages"],
            {"role": "assistant", "content": sample.metadata["answer"]},
        ]
        if sample.metadata["answer"]:
            assert tokenizer.decode(sample.tokens) == tokenizer.apply_chat_template(
                messages, tokenize=False
            )
        assert sample.reward == float(sample.metadata["answer"] == sample.label)
    assert 0 < sum(sample.reward for sample in answered)


def test_the_models_own_log_probs_of_the_row_are_the_engines(samples, trained):
    """The model's own log-probs of the trained row equal the engine's, so mask and context are
    those of sampling."""
    import torch

    for sample in samples[:8]:
        ids = torch.tensor([sample.tokens])
        with torch.no_grad():
            log_probs = (
                trained[2](ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            )
        mask = torch.tensor(sample.loss_mask).bool()
        scored = log_probs[-sample.response_length :][mask]
        assert torch.allclose(scored, torch.tensor(sample.rollout_log_probs)[mask], atol=1e-4)


def test_turns_and_lengths_with_and_without_the_tool_are_logged(samples):
    """--log-multi-turn counts the tool's tokens in the raw length and not in the other."""
    from slime.data.columns import ColumnsConfig, build_train_columns, compute_rewards
    from slime.metrics.train_metrics import TrainMetricsConfig, multi_turn_contributions

    config = ColumnsConfig()
    batch = build_train_columns(samples, compute_rewards(samples, config)[:2], config)
    parts = multi_turn_contributions(batch, config=TrainMetricsConfig(rollout_max_response_len=20))
    rounds = [sample.metadata["round_number"] for sample in samples]
    means = {
        name: part.total / part.count for name, part in parts.items() if name.endswith("_mean")
    }
    assert means["multi_turn_metric/round_number_mean"] == pytest.approx(sum(rounds) / 36)
    assert parts["multi_turn_metric/round_number_max"].extreme == 2
    assert means["raw_response_length/response_length_mean"] == pytest.approx(
        sum(s.response_length for s in samples) / 36
    )
    sampled = sum(sum(sample.loss_mask) for sample in samples)
    assert means["wo_obs_response_length/response_length_mean"] == pytest.approx(sampled / 36)


def test_a_rollout_that_is_aborted_between_turns_goes_on_where_it_was(trained, monkeypatch):
    """A rollout aborted between turns goes on with its turns, adds none twice, and ends as one that
    was not aborted."""
    url, folder, _ = trained
    args = example_args(folder, rollout_temperature=0.0)
    params = {"max_new_tokens": 20, "temperature": 0.0}

    def question():
        return Sample(index=0, prompt=prepare.conversation((11, 12))[:1], label="132")

    with fresh_rollout_state(url):
        state = GenerateState(args)
        whole = wait_for(rollout.generate(args, question(), params))
        assert whole.metadata["round_number"] == 2
        answer = rollout.call_calculator

        def stop_after_the_call(call):
            state.aborted = True
            return answer(call)

        monkeypatch.setattr(rollout, "call_calculator", stop_after_the_call)
        part = wait_for(rollout.generate(args, question(), params))
        assert (
            part.status is Sample.Status.ABORTED
            and 0 < part.response_length < whole.response_length
        )
        state.aborted = False
        wait_for(rollout.generate(args, part, params))
    assert params == {"max_new_tokens": 20, "temperature": 0.0}
    for name in ("tokens", "loss_mask", "response", "metadata", "status", "weight_versions"):
        assert getattr(part, name) == getattr(whole, name), name
    assert part.rollout_log_probs == pytest.approx(whole.rollout_log_probs, abs=1e-5)


def test_a_rendered_prompt_is_refused_with_the_option_to_remove(trained):
    """A prompt rendered to text, to which no turn could be added, is refused with the option to
    remove."""
    url, folder, _ = trained
    args = example_args(folder)
    with fresh_rollout_state(url), pytest.raises(ConfigError, match="remove --apply-chat-template"):
        wait_for(rollout.generate(args, Sample(prompt="<|user|>1*1=<|assistant|>"), {}))


@pytest.mark.parametrize(
    ("expression", "result"),
    [("47*38", "1786"), ("5-12", "-7"), ("2+2", "4"), ("", "error"), ("2**9", "error"), ("9999999*1", "error"), ("a", "error")],
)  # fmt: skip
def test_the_calculator_reads_numbers_and_evaluates_nothing(expression, result):
    """The calculator reads numbers and evaluates no code; a malformed call gets an answer."""
    assert rollout.call_calculator(rollout.read_expression(expression)) == result


def test_recipes_use_known_options_and_held_out_problems_are_held_out(tmp_path):
    """Every key of the recipes is an option, and held-out problems are in no training data."""
    from slime.config.specs import all_specs

    known = {spec.name for spec in all_specs()}
    for stage in ("sft", "grpo"):
        recipe = yaml.safe_load((run.HERE / f"{stage}.yaml").read_text())
        assert (
            set(recipe) <= known
            and recipe["rollout_batch_size"]
            * recipe["n_samples_per_prompt"]
            % recipe["global_batch_size"]
            == 0
        )
    train, held_out = prepare.make_problems()
    assert len(held_out) == 128 and len({*train, *held_out}) == 8100
    assert [message["content"] for message in prepare.conversation((47, 38))] == [
        "47*38=",
        "[47*38]",
        "1786",
        "1786",
    ]


def write_records(folder, accuracies, turns):
    metrics = [("eval/step", {"eval/calculator": value}) for value in accuracies]
    ledger = {"rollout/ledger/sampled": 8, "rollout/ledger/trained": 8, "train/weight_delta": 0.1}
    metrics += [
        ("rollout/step", {run.TURNS: value, "rollout/raw_reward": value, **ledger})
        for value in turns
    ]
    lines = [
        json.dumps({"time": 1.0, "step_key": key, "step": n, "metrics": m})
        for n, (key, m) in enumerate(metrics)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_the_last_line_says_accuracy_and_turns(tmp_path, capsys):
    """The last line has accuracy and turns, and without both the exit status is not 0."""
    write_records(tmp_path, [0.25, 0.75], [1.5, 2.0])
    assert run.conclude(tmp_path, started=0.0) == 0
    assert capsys.readouterr().out.startswith("accuracy: 0.25 -> 0.75 with 2.00 turns in ")
    write_records(tmp_path, [0.25], [1.5, 2.0])
    assert run.conclude(tmp_path, started=0.0) == 1
    assert "eval/calculator was logged 1 times" in capsys.readouterr().err


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
