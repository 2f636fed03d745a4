"""The main job's data, tokenizer, model, reward and verdict."""

import asyncio
import hashlib
import json
import signal
import time
from pathlib import Path

import pytest
import yaml

from examples.addition import prepare, run
from examples.addition.reward import exact_sum
from slime.data.sample import Sample

NUM_GPUS = 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepare.prepare(tmp_path_factory.mktemp("addition"))


def read(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_no_held_out_problem_is_in_any_training_data(folder):
    """The 512 held-out problems of 3240 are in neither the warm-up nor the GRPO data."""
    train = {row["prompt"][0]["content"] for row in read(folder, "train")}
    held_out = {row["prompt"][0]["content"] for row in read(folder, "eval")}
    warm_up = {row["messages"][0]["content"] for row in read(folder, "sft")}
    assert (len(train), len(held_out)) == (3240 - 512, 512)
    assert not held_out & train and not held_out & warm_up and warm_up == train


def test_labels_and_conversations_are_right(folder):
    """Labels and conversations hold the right sums."""
    for row in read(folder, "train") + read(folder, "eval"):
        a, b = row["prompt"][0]["content"].rstrip("=").split("+")
        assert row["label"] == str(int(a) + int(b))
    for row in read(folder, "sft"):
        a, b = row["messages"][0]["content"].rstrip("=").split("+")
        assert row["messages"][1] == {"role": "assistant", "content": str(int(a) + int(b))}


def test_everything_is_the_same_bytes_each_time_and_made_once(folder, tmp_path):
    """The same seed makes the same bytes, and existing data is not made again."""
    again = prepare.prepare(tmp_path)
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert Path("model/model.safetensors") in files
    for file in files:
        first, second = ((root / file).read_bytes() for root in (folder, again))
        assert hashlib.sha256(first).digest() == hashlib.sha256(second).digest(), file
    before = (again / "train.jsonl").stat().st_mtime_ns
    assert (
        prepare.prepare(tmp_path) == again and (again / "train.jsonl").stat().st_mtime_ns == before
    )


def test_half_written_data_is_made_again(tmp_path):
    """Data of an interrupted first run is made again."""
    (tmp_path / "train.jsonl").write_text("half a li")
    prepare.prepare(tmp_path)
    assert len(read(tmp_path, "train")) == 2728


def test_tokenizer_is_one_token_per_character_and_comes_back_exactly(folder):
    """ids -> text -> ids is the identity for any printable text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    text = "".join(map(chr, range(32, 127))) + "\n  <|end|>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == 95 + 1 + 2 + 1 and ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == 104 and tokenizer.is_fast


def test_chat_template_only_appends(folder):
    """A conversation that goes on keeps its earlier ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    messages = [{"role": "user", "content": "47+38="}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt == "<|user|>47+38=<|assistant|>"
    messages.append({"role": "assistant", "content": "85"})
    assert tokenizer.apply_chat_template(messages, tokenize=False) == prompt + "85<|end|>"
    messages.append({"role": "tool", "content": "ok"})
    assert tokenizer.apply_chat_template(messages, tokenize=False) == prompt + "85<|end|><|tool|>ok"


def test_model_folder_is_what_its_readers_expect(folder):
    """Engine and trainer can read the model folder: every EOS id of the generation config, and the
    shape of config.json."""
    config = json.loads((folder / "model" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    # splits over two tensor-parallel ranks
    assert config["vocab_size"] == 104 and config["vocab_size"] % 2 == 0
    assert json.loads((folder / "model" / "generation_config.json").read_text())[
        "eos_token_id"
    ] == [1]


@pytest.mark.parametrize(
    ("response", "reward"),
    [("85", 1.0), ("85<|end|>", 1.0), ("86<|end|>", 0.0), ("", 0.0), ("8 5", 0.0), ("085", 0.0)],
)
def test_reward_is_one_for_the_exact_sum_only(response, reward):
    """The reward is 1 for the exact sum alone, with or without the end mark."""
    assert asyncio.run(exact_sum(None, Sample(response=response, label="85"))) == reward


def test_recipe_uses_known_options_and_its_batches_divide():
    """Every key of the recipe is an option, and its batch sizes divide."""
    from slime.config.specs import all_specs

    known = {spec.name for spec in all_specs()}
    for stage in ("sft", "grpo"):
        recipe = yaml.safe_load((run.HERE / f"{stage}.yaml").read_text())
        assert set(recipe) <= known, set(recipe) - known
        samples = recipe["rollout_batch_size"] * recipe["n_samples_per_prompt"]
        assert samples % recipe["global_batch_size"] == 0
        assert recipe["global_batch_size"] % recipe["actor_num_gpus_per_node"] == 0


def write_run(folder, accuracies, **changes):
    records = []
    for step, accuracy in enumerate(accuracies):
        ledger = {
            "rollout/ledger/sampled": 128,
            "rollout/ledger/trained": 120,
            "rollout/ledger/dropped/zero_std": 8,
        }
        metrics = {"rollout/raw_reward": 0.1 * step, **ledger, "train/weight_delta": 0.1, **changes}
        records.append({"time": 1.0, "step_key": "rollout/step", "step": step, "metrics": metrics})
        records.append(
            {
                "time": 1.0,
                "step_key": "eval/step",
                "step": step,
                "metrics": {"eval/addition": accuracy},
            }
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.mark.parametrize(
    ("accuracies", "changes", "is_recipe", "status", "said"),
    [
        ([0.31, 0.5, 0.78], {}, True, 0, "accuracy: 0.31 -> 0.78 (x2.5) in 281 s"),
        ([0.31, 0.5], {}, True, 1, "did not reach x2"),
        ([0.31, 0.5], {}, False, 0, "accuracy: 0.31 -> 0.50 (x1.6) in 281 s"),
        ([0.31, 0.78], {"rollout/ledger/trained": 119}, True, 1, "vanished without a reason"),
        ([0.31, 0.78], {"train/weight_delta": 0.0}, True, 1, "weights never changed"),
        ([0.31, 0.78], {"rollout/raw_reward": 0.5}, True, 1, "reward did not move"),
        ([0.31], {}, True, 1, "before and after are needed"),
    ],
    ids=[
        "doubles",
        "does not",
        "own options",
        "lost sample",
        "zero learning rate",
        "constant reward",
        "one evaluation",
    ],
)
def test_last_line_and_exit_status_say_how_it_went(
    tmp_path, capsys, accuracies, changes, is_recipe, status, said
):
    """The last line gives the accuracies; the exit status is 1 where the recipe did not double
    them, or where samples, weights or rewards do not add up."""
    started = time.monotonic() - 281
    assert (
        run.conclude(
            write_run(tmp_path, accuracies, **changes), started=started, is_recipe=is_recipe
        )
        == status
    )
    captured = capsys.readouterr()
    assert said in captured.out + captured.err
    if len(accuracies) > 1:
        assert captured.out.splitlines()[-1].startswith("accuracy: 0.31 -> ")


def test_failed_stage_ends_the_job_with_its_status(monkeypatch, folder, tmp_path, capsys):
    """A failed stage ends the job with its status, and no old run's numbers are reported."""
    monkeypatch.setattr(
        run, "grpo_command", lambda *rest: [run.sys.executable, "-c", "raise SystemExit(3)"]
    )
    monkeypatch.setattr(run, "warm_up", lambda *rest, **options: folder / "model")
    assert run.main(["--run-dir", str(tmp_path), "--data", str(folder)]) == 3
    assert "GRPO ended with status 3" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_signal_to_the_job_reaches_the_stage_once_and_its_status_comes_back(tmp_path, number):
    """A signal to the job reaches the stage once, and the job ends with the stage's status after it
    has stopped its Ray session."""
    script = (
        "import os, pathlib, signal, sys, time\n"
        "def stop(number, frame):\n"
        "    with open(sys.argv[1], 'a') as file: file.write(str(number) + ' ')\n"
        "    time.sleep(0.3); sys.exit(130)\n"
        "signal.signal(signal.SIGINT, stop); signal.signal(signal.SIGTERM, stop)\n"
        "os.kill(os.getppid(), int(sys.argv[2])); time.sleep(30)\n"
    )
    with pytest.raises(run.StageFailed) as failure:
        run.run_stage(
            "the stage", [run.sys.executable, "-c", script, str(tmp_path / "got"), str(int(number))]
        )
    assert failure.value.status == 130
    assert (tmp_path / "got").read_text().split() == [str(int(number))]


def test_interrupted_warm_up_is_not_reused_and_a_finished_one_is(monkeypatch, tmp_path, capsys):
    """A second `make train` reuses a finished warm-up and not an interrupted one."""
    script = (
        "import pathlib, sys; p = pathlib.Path(sys.argv[1]); p.mkdir(); (p / "
        "'config.json').write_text('{}'); sys.exit(int(sys.argv[2]))"
    )

    def command(status):
        return lambda data, run_dir, result: [
            run.sys.executable,
            "-c",
            script,
            str(result),
            str(status),
        ]

    monkeypatch.setattr(run, "warm_up_command", command(1))
    with pytest.raises(run.StageFailed):
        run.warm_up(tmp_path, tmp_path / "run", redo=False)
    monkeypatch.setattr(run, "warm_up_command", command(0))
    result = run.warm_up(tmp_path, tmp_path / "run", redo=False)
    assert result.name == f"warm-up-{run.warm_up_key()}" and (result / "config.json").exists()
    monkeypatch.setattr(run, "warm_up_command", command(1))
    assert run.warm_up(tmp_path, tmp_path / "run", redo=False) == result
    assert "reusing" in capsys.readouterr().out
    with pytest.raises(run.StageFailed):
        run.warm_up(tmp_path, tmp_path / "run", redo=True)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
