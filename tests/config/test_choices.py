"""Every value with a known set of choices is checked before anything starts, and option names of
other trainers get a hint."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import importlib.util
import json
import os
import re

import pytest
from support.options import HF_CONFIG, write_run_inputs

from slime.config import derive, machine_rules, synonyms
from slime.config.cli import parse_command_line
from slime.config.specs import all_specs, specs_by_name
from slime.exceptions import ConfigError
from slime.utils.arguments import parse_args

NUM_GPUS = 0


def problems_of(words, folder):
    """The message for a valid command line with `words` added; fails when there is none."""
    with pytest.raises(ConfigError) as caught:
        parse_args([*write_run_inputs(folder), *words])
    return str(caught.value)


@pytest.fixture
def no_cuda(monkeypatch):
    """A CPU build of torch, whatever this machine has, and no cluster."""
    derive.why_no_cuda.cache_clear()
    monkeypatch.setattr("importlib.metadata.version", lambda package: "2.13.0+cpu")
    for name in ("SLIME_ACCELERATOR", "RAY_ADDRESS"):
        monkeypatch.setenv(name, "")
    yield monkeypatch
    derive.why_no_cuda.cache_clear()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("mth", "Did you mean math?"),
        ("boxed_mth", "Did you mean boxed_math?"),
        ("Math", "Did you mean math?"),
        ("zzz", "Known: dapo, "),
    ],
)
def test_a_reward_type_that_does_not_exist_is_refused_at_parsing(name, hint, tmp_path):
    """An unknown reward type is refused at parsing, and not by the first scored sample."""
    text = problems_of(["--rm-type", name], tmp_path)
    assert f"--rm-type: '{name}' is not a built-in reward type" in text and hint in text


def test_what_a_reward_type_needs_is_asked_for_at_parsing(tmp_path):
    """A reward of several values without its key, and a reward type whose package is missing, are
    refused at parsing."""
    text = problems_of(["--rm-type", "boxed_dapo"], tmp_path)
    assert (
        "boxed_dapo gives several values (score, acc, pred)" in text
        and "Add --reward-key score." in text
    )
    assert (
        parse_args(
            [*write_run_inputs(tmp_path), "--rm-type", "dapo", "--reward-key", "score"]
        ).reward_key
        == "score"
    )
    if importlib.util.find_spec("ifbench") is None:
        assert "'ifbench' needs the package ifbench, which is not installed" in problems_of(
            ["--rm-type", "ifbench"], tmp_path
        )


def test_an_evaluation_configuration_is_read_before_the_run(tmp_path):
    """A missing or wrong evaluation file is refused before the run."""
    write_run_inputs(tmp_path)
    config, words = (
        tmp_path / "eval.yaml",
        ["--eval-interval", "1", "--eval-config", str(tmp_path / "eval.yaml")],
    )
    entry = (
        "eval:\n  datasets:\n    - name: sums\n      rm_type: math\n      path: "
        f"{tmp_path / 'prompts.jsonl'}"
    )
    config.write_text(entry + "x\n")
    assert (
        f"eval.yaml: sums {tmp_path / 'prompts.jsonl'}x: no such file. Did you mean "
        in problems_of(words, tmp_path)
    )
    for value, said in (("temperature: hot", "'hot'; it must be a number"), ("max_response_len: 2.5", "2.5; it must be a whole number"),
                        ("n_samples_per_eval_prompt: true", "True; it must be a whole number"), ("skip_special_tokens: 1", "1; it must be true or false"),
                        ("label_key: wrong", "the label 'wrong' is missing")):  # fmt: skip
        config.write_text(f"{entry}\n      {value}\n")
        assert said in problems_of(words, tmp_path), value


def test_two_letters_that_changed_places_are_the_nearest_name(tmp_path):
    """A typo of two exchanged letters suggests the right name: "gpro" is grpo and not gspo."""
    assert "Did you mean grpo?" in problems_of(["--advantage-estimator", "gpro"], tmp_path)


@pytest.mark.parametrize("name", ["math", "boxed_math", "random"])
def test_a_reward_type_that_exists_is_accepted(name, tmp_path):
    """Every reward type is accepted, also with the prefix boxed_."""
    assert parse_args([*write_run_inputs(tmp_path), "--rm-type", name]).rm_type == name


def test_the_reward_type_of_an_evaluation_set_is_checked_too(tmp_path):
    """The reward type of an evaluation set is checked at parsing."""
    words = write_run_inputs(tmp_path)
    config = tmp_path / "eval.yaml"
    config.write_text(
        f"eval:\n  datasets:\n    - name: sums\n      path: {tmp_path / 'prompts.jsonl'}\n      "
        "rm_type: exactmatch\n"
    )
    text = problems_of(["--eval-config", str(config), "--eval-interval", "1"], tmp_path)
    assert (
        "sums: rm_type: 'exactmatch' is not a built-in reward type. Did you mean exact_match?"
        in text
    )
    config.write_text("eval:\n  datasets:\n    - name: sums\n      pth: x\n")
    assert "unknown keys ['pth']" in problems_of(
        ["--eval-config", str(config), "--eval-interval", "1"], tmp_path
    )
    assert words


def test_the_reward_type_of_a_row_is_checked_with_its_place(tmp_path):
    """A reward type in a row's metadata is checked and refused with its file and line."""
    write_run_inputs(tmp_path)
    rows = [
        {"input": "1+1=", "label": "2", "metadata": {"rm_type": rm_type}}
        for rm_type in ("math", "mth")
    ]
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = problems_of(["--prompt-data", str(mixed)], tmp_path)
    assert (
        f"{mixed}, line 2: rm_type 'mth' is not a built-in reward type. Did you mean math?" in text
    )


@pytest.mark.parametrize(
    "words", ["--accelerator cuda", "--rollout-engine-device cuda", "--distributed-backend nccl"]
)
def test_cuda_where_torch_has_none_is_refused_at_parsing(words, tmp_path, no_cuda):
    """--accelerator cuda is refused at parsing where torch has no CUDA."""
    text = problems_of(words.split(), tmp_path)
    assert (
        f"{words}: torch cannot use CUDA here, torch 2.13.0+cpu is a CPU build. Leave it out to "
        "run on the CPU." in text
    )


def test_a_refused_accelerator_does_not_stay_in_the_environment(tmp_path, no_cuda):
    """A refused accelerator does not stay in the environment for the next command line of the
    process."""
    problems_of(["--accelerator", "cuda"], tmp_path)
    assert parse_args(write_run_inputs(tmp_path)).accelerator == "auto"
    parse_args([*write_run_inputs(tmp_path), "--accelerator", "cpu"])
    assert os.environ["SLIME_ACCELERATOR"] == "cpu"


def test_the_environments_accelerator_is_checked_too(tmp_path, no_cuda):
    """SLIME_ACCELERATOR, the second way to choose, is checked as well."""
    no_cuda.setenv("SLIME_ACCELERATOR", "cuda")
    assert "SLIME_ACCELERATOR=cuda in the environment: torch cannot use CUDA here" in problems_of(
        [], tmp_path
    )
    no_cuda.setenv("SLIME_ACCELERATOR", "gpu")
    assert (
        "SLIME_ACCELERATOR='gpu' in the environment is not known. Use cpu or cuda"
        in problems_of([], tmp_path)
    )
    no_cuda.setenv("SLIME_ACCELERATOR", "cpu")
    assert parse_args(write_run_inputs(tmp_path)).accelerator == "auto"


def test_the_reason_without_cuda_is_the_right_one(monkeypatch):
    """The message tells a hidden device from a CPU build, because their remedies differ."""
    monkeypatch.setattr("importlib.metadata.version", lambda package: "2.13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    derive.why_no_cuda.cache_clear()
    assert derive.why_no_cuda() == "CUDA_VISIBLE_DEVICES='-1' hides every device"
    derive.why_no_cuda.cache_clear()


def test_an_optional_package_is_missed_at_parsing(tmp_path, monkeypatch):
    """A missing optional package is refused at parsing; its import comes minutes later in another
    process."""
    found = machine_rules.importlib.util.find_spec
    hidden = ("wandb", "sglang_router", "math_verify", "pyarrow")
    monkeypatch.setattr(
        machine_rules.importlib.util,
        "find_spec",
        lambda name: None if name in hidden else found(name),
    )
    text = problems_of(
        ["--use-wandb", "--use-sglang-router", "--rm-type", "boxed_math_verify"], tmp_path
    )
    assert "--use-wandb needs the package wandb: pip install 'slime-rl[wandb]'" in text
    assert (
        "pip install 'slime-rl[router]'" in text
        and "pip install 'slime-rl[math]'" in text
        and "pyarrow" not in text
    )


@pytest.mark.parametrize(
    ("word", "flag"),
    [
        ("--learning-rate", "--lr"),
        ("--beta", "--use-kl-loss --kl-loss-coef"),
        ("--tp", "--tensor-model-parallel-size"),
        ("--output-dir", "--save"),
        ("--num-generations", "--n-samples-per-prompt"),
        ("--clip-range", "--eps-clip"),
        ("--max_completion_length", "--rollout-max-response-len"),
    ],
)
def test_a_word_of_another_trainer_is_answered_with_the_option_of_the_same_meaning(
    word, flag, tmp_path
):
    """An option name of another trainer is answered with our option of the same meaning."""
    with pytest.raises(ConfigError) as caught:
        parse_command_line([word, "1"])
    assert str(caught.value) == f"Unknown flag {word}. Did you mean {flag}?"
    key = word.lstrip("-").replace("-", "_")
    (tmp_path / "run.yaml").write_text(f"{key}: 1\n")
    with pytest.raises(ConfigError, match=rf"unknown key '{key}'\. Did you mean {flag}\?"):
        parse_command_line(["--config", str(tmp_path / "run.yaml")])


def test_the_table_of_synonyms_names_only_flags_that_exist():
    """The table of synonyms leads to existing options only and contains none of ours."""
    declared = {flag for spec in all_specs() for flag in spec.flags}
    named = {
        flag
        for text in (*synonyms.OPTION_WORDS, *synonyms.EXPLAINED_WORDS.values())
        for flag in re.findall(r"--[a-z][\w-]*", text)
    }
    assert named - declared == set()
    words = [
        word
        for words in (*synonyms.OPTION_WORDS.values(), *synonyms.EXPLAINED_WORDS)
        for word in words.split()
    ]
    assert len(words) == len(set(words)) > 150
    assert {f"--{word}" for word in words} & declared == set()
    assert synonyms.synonym_hint("--nobody-says-this") is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[0]*1+[1]*27", [0] + [1] * 27),
        ("([0]*3+[1]*1)*2", [0, 0, 0, 1, 0, 0, 0, 1]),
        ("2*[1, 0]", [1, 0, 1, 0]),
        ("[0,1,1]", [0, 1, 1]),
        ("[1]", [1]),
        ("2", 2),
    ],
)
def test_a_list_that_is_written_as_megatron_writes_it_is_read_without_eval(text, value, tmp_path):
    """A list as Megatron writes it ('[0]*1+[1]*27') is read by a parser and never evaluated."""
    assert parse_command_line(["--moe-layer-freq", text]).args.moe_layer_freq == value
    (tmp_path / "run.yaml").write_text(
        f"moe_layer_freq: '{text}'\n" if "[" in text else f"moe_layer_freq: {text}\n"
    )
    assert parse_command_line(["--config", str(tmp_path / "run.yaml")]).args.moe_layer_freq == value


@pytest.mark.parametrize(
    "text",
    [
        "[0]*1+[1",
        "[x]*3",
        "[1.5]",
        "[1]*99999999999",
        "__import__('os').system('id')",
        "[f()]",
        "[1]+1",
        "[[1]]",
        "[1]*[2]",
        "(1)*2",
    ],
)
def test_a_list_that_is_none_is_refused(text):
    """A text that is no list is refused: nothing of it is run, and it cannot grow without bound."""
    with pytest.raises(ConfigError, match="--moe-layer-freq"):
        parse_command_line(["--moe-layer-freq", text])


def test_lists_of_words_and_of_several_arguments_keep_their_meaning():
    """Stop strings may begin with a bracket, and numbers may be separate arguments."""
    args = parse_command_line(
        [
            "--rollout-stop",
            "[0]",
            "x",
            "--moe-layer-freq",
            "0",
            "1",
            "--rollout-stop-token-ids",
            "[7,8]",
            "9",
        ]
    ).args
    assert (args.rollout_stop, args.moe_layer_freq, args.rollout_stop_token_ids) == (
        ["[0]", "x"],
        [0, 1],
        [7, 8, 9],
    )
    assert specs_by_name()["rollout_stop"].kind is str


def test_a_pattern_of_expert_layers_is_compared_by_layers(tmp_path):
    """A list of ones equals the 1 that follows from config.json, and another pattern contradicts
    it."""
    words = write_run_inputs(tmp_path)
    moe = {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "num_experts_per_tok": 2,
    }
    (tmp_path / "model" / "config.json").write_text(json.dumps({**HF_CONFIG, **moe}))
    assert parse_args([*words, "--moe-layer-freq", "[1]*2"]).moe_layer_freq == [1, 1]
    with pytest.raises(
        ConfigError, match=r"--moe-layer-freq is \[0, 1\], but the model's config.json says 1"
    ):
        parse_args([*words, "--moe-layer-freq", "[0]*1+[1]*1"])


def test_sequence_parallel_with_one_tensor_rank_warns_and_goes_on(tmp_path, capsys):
    """--sequence-parallel with one tensor rank warns and goes on, as in Megatron."""
    args = parse_args([*write_run_inputs(tmp_path), "--sequence-parallel"])
    assert args.sequence_parallel is False
    assert (
        "--sequence-parallel has no effect with --tensor-model-parallel-size 1"
        in capsys.readouterr().err
    )
    two = "--sequence-parallel --tensor-model-parallel-size 2 --actor-num-gpus-per-node 2"
    assert parse_args([*write_run_inputs(tmp_path), *two.split()]).sequence_parallel is True
    assert "no effect" not in capsys.readouterr().err


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
