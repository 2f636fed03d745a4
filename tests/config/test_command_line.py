"""Flags, files and their order; every typo is answered with the nearest flag."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse

import pytest
from support.options import write_run_inputs

from slime.config.cli import format_help, parse_command_line
from slime.config.specs import all_specs
from slime.exceptions import ConfigError
from slime.utils.arguments import parse_args, parse_megatron_role_args, reset_arg

NUM_GPUS = 0

TYPOS = {
    "--n-sample-per-prompt": "--n-samples-per-prompt",
    "--n_samples_per_prompt": "--n-samples-per-prompt",
    "--num-samples-per-prompt": "--n-samples-per-prompt",
    "--rollout-batchsize": "--rollout-batch-size",
    "--rollout-batch_size": "--rollout-batch-size",
    "--rolout-batch-size": "--rollout-batch-size",
    "--globl-batch-size": "--global-batch-size",
    "--global-batchsize": "--global-batch-size",
    "--microbatch-size": "--micro-batch-size",
    "--hf-checkpont": "--hf-checkpoint",
    "--hf-chekpoint": "--hf-checkpoint",
    "--prompt-dta": "--prompt-data",
    "--promt-data": "--prompt-data",
    "--num-rollouts": "--num-rollout",
    "--tensor-model-paralel-size": "--tensor-model-parallel-size",
    "--tensor-parallel-size": "--tensor-model-parallel-size",
    "--pipline-model-parallel-size": "--pipeline-model-parallel-size",
    "--advantage-estimatr": "--advantage-estimator",
    "--kl-loss-coeff": "--kl-loss-coef",
    "--klcoef": "--kl-coef",
    "--eps-clip-hi": "--eps-clip-high",
    "--Use-Tis": "--use-tis",
    "--use-dynamic-batchsize": "--use-dynamic-batch-size",
    "--max-token-per-gpu": "--max-tokens-per-gpu",
    "--rollout-temprature": "--rollout-temperature",
    "--rollout-max-responselen": "--rollout-max-response-len",
    "--evalinterval": "--eval-interval",
    "--save-intervall": "--save-interval",
    "--colocated": "--colocate",
    "--weight-decy": "--weight-decay",
    "--adam-beta-1": "--adam-beta1",
}


@pytest.mark.parametrize("typo", sorted(TYPOS))
def test_a_typo_is_answered_with_the_flag_that_was_meant(typo):
    """An unknown flag is refused with the nearest one; ignored, it would train with a default."""
    with pytest.raises(ConfigError) as caught:
        parse_command_line([typo, "4"])
    assert f"Unknown flag {typo}. Did you mean {TYPOS[typo]}?" in str(caught.value)


def test_all_problems_of_a_command_line_are_shown_at_once():
    """All problems of a command line are in one message."""
    with pytest.raises(ConfigError) as caught:
        parse_command_line(
            "--rollout-batch-size 1e3 --lr quick --kl-loss-type k9 --nope 3 --also-nope stray".split()
        )
    text = str(caught.value)
    assert text.startswith("5 problems:")
    for part in (
        "Write 1000.",
        "'quick' is not a number",
        "'k9' is not one of k1, k2, k3",
        "Unknown flag --nope",
        "Unknown flag --also-nope",
    ):
        assert part in text


def test_a_prefix_of_a_flag_is_not_the_flag():
    """A prefix of a flag is not accepted; its meaning would change when an option is added."""
    with pytest.raises(
        ConfigError, match="Unknown flag --rollout-batch. Did you mean --rollout-batch-size"
    ):
        parse_command_line(["--rollout-batch", "4"])
    with pytest.raises(ConfigError, match="Unexpected word 'stray'"):
        parse_command_line(["stray", "--lr", "1"])


def test_values_reach_the_namespace_with_their_types():
    """Values reach the namespace with their types."""
    args = parse_command_line(
        "--rollout-batch-size 4 --lr 1e-6 --rollout-top-k -1 --kl-coef -1e-3 --rollout-stop a b "
        "--rollout-stop-token-ids 1 2 --colocate "
        "--disable-rewards-normalization --rollout-sample-hook-path a.b --rollout-sample-hook-path "
        "c.d --no-offload-train "
        '--moe-layer-freq 0 1 1 --window-attn-skip-freq 4 --no-bias-dropout-fusion --apply-chat-template-kwargs {"enable_thinking":false}'.split()
    ).args
    assert (args.rollout_batch_size, args.lr, args.rollout_top_k, args.kl_coef) == (
        4,
        1e-6,
        -1,
        -1e-3,
    )
    assert (args.rollout_stop, args.rollout_stop_token_ids, args.colocate) == (
        ["a", "b"],
        [1, 2],
        True,
    )
    assert (args.rewards_normalization, args.offload_train, args.offload_rollout) == (
        False,
        False,
        None,
    )
    assert args.rollout_sample_hook_path == ["a.b", "c.d"]
    assert (args.moe_layer_freq, args.window_attn_skip_freq) == ([0, 1, 1], 4)
    assert (args.bias_dropout_fusion, args.bias_activation_fusion) == (False, None)
    assert args.apply_chat_template_kwargs == {"enable_thinking": False}


def test_defaults_are_upstreams():
    """Defaults are upstream's, so that a script that leaves an option out means the same here."""
    args = parse_command_line([]).args
    expected = {
        "lr": 1e-6, "seed": 1234, "clip_grad": 1.0, "micro_batch_size": 1, "distributed_timeout_minutes": 10, "eval_interval": None,
        "save_interval": None, "n_samples_per_prompt": 1, "global_batch_size": None, "input_key": "input", "metadata_key": "metadata",
        "tool_key": "tools", "rollout_seed": 42, "rollout_temperature": 1.0, "rollout_top_p": 1.0, "rollout_top_k": -1,
        "n_samples_per_eval_prompt": 1, "loss_type": "policy_loss", "advantage_estimator": "grpo", "kl_coef": 0.0, "kl_loss_coef": 0.0,
        "kl_loss_type": "k1", "eps_clip": 0.2, "value_clip": 0.2, "entropy_coef": 0.0, "gamma": 1.0, "lambd": 1.0, "tis_clip": 2.0,
        "tis_clip_low": 0.0, "opsm_delta": 1e-4, "opd_kl_coef": 1.0, "log_probs_chunk_size": -1, "data_pad_size_multiplier": 128,
        "loss_mask_type": "qwen", "ci_train_rollout_logprob_abs_diff_threshold": 0.1, "rewards_normalization": True,
        "grpo_std_normalization": True, "compute_advantages_and_returns": True, "rollout_global_dataset": True,
        "rollout_data_transport": "object-store",
    }  # fmt: skip
    assert {name: getattr(args, name) for name in expected} == expected


def test_flags_win_over_the_file_and_the_custom_file_wins_over_all(tmp_path):
    """Flags precede the --config file, and the custom config file, for plug-ins' own keys, precedes
    both."""
    base, custom = tmp_path / "base.yaml", tmp_path / "custom.yaml"
    base.write_text("lr: 1e-5\nrollout-batch-size: 8\nrollout_sample_hook_path: [a.b]\n")
    custom.write_text("seed: 7\nmy_plugin_depth: 3\n")
    line = parse_command_line(
        (
            f"--config {base} --lr 1e-4 --rollout-sample-hook-path c.d --custom-config-path "
            f"{custom} "
            "--seed 1"
        ).split()
    )
    assert (
        line.args.lr,
        line.args.rollout_batch_size,
        line.args.seed,
        line.args.my_plugin_depth,
    ) == (1e-4, 8, 7, 3)
    assert line.args.rollout_sample_hook_path == ["c.d"], (
        "a repeatable flag replaces the file's list"
    )
    assert line.given["lr"] == "command line" and line.given["rollout_batch_size"] == str(base)


def test_plug_ins_add_options_and_change_defaults(tmp_path):
    """parse_args(add_custom_arguments) adds options and changes defaults, as upstream's callers use
    it."""

    def add_custom_arguments(parser):
        parser.add_argument("--my-depth", type=int, default=2)
        reset_arg(parser, "--lr", default=3e-4)
        reset_arg(parser, "--my-mode", choices=["x", "y"], default="x")
        return parser

    line = parse_command_line(["--my-depth", "5"], add_custom_arguments)
    assert (line.args.my_depth, line.args.lr, line.args.my_mode) == (5, 3e-4, "x")
    file = tmp_path / "run.yaml"
    file.write_text("my_depth: 9\n")
    assert parse_command_line(["--config", str(file)], add_custom_arguments).args.my_depth == 9
    with pytest.raises(ConfigError, match="Unknown flag --my-dept. Did you mean --my-depth?"):
        parse_command_line(["--my-dept", "5"], add_custom_arguments)


def test_help_is_grouped_and_can_be_searched(capsys):
    """--help groups the options and can be searched."""
    with pytest.raises(SystemExit) as stopped:
        parse_args(["--help"])
    assert stopped.value.code == 0
    page = capsys.readouterr().out
    assert (
        "--rollout-batch-size INT  [required, >= 1]" in page
        and "Algorithm: advantages, losses, corrections\n----" in page
    )
    assert (
        "--hidden-dropout" not in page
        and "more options are fields of megatron-core's configs" in page
    )
    assert max(map(len, page.splitlines())) <= 160
    found = format_help(all_specs(), "dropout")
    assert "--hidden-dropout" in found and "--rollout-batch-size" not in found
    assert "No option matches 'rolout_temperature'. Near: --rollout-temperature" in format_help(
        all_specs(), "rolout_temperature"
    )


def test_a_valid_command_line_gives_a_complete_namespace(tmp_path):
    """A valid command line gives the model's shape from its folder, sizes from each other, and
    where each value came from."""
    args = parse_args(write_run_inputs(tmp_path))
    assert (
        args.global_batch_size,
        args.over_sampling_batch_size,
        args.rollout_num_gpus,
        args.actor_num_gpus_per_node,
    ) == (8, 4, 1, 1)
    assert (
        args.num_layers,
        args.hidden_size,
        args.num_query_groups,
        args.qk_layernorm,
        args.seq_length,
    ) == (
        2,
        32,
        2,
        True,
        128,
    )
    assert args.distributed_backend == "gloo" and args.eps_clip_high == 0.2
    assert (
        args.given_options["rollout_batch_size"] == "command line"
        and "lr" not in args.given_options
    )
    assert args.dry_run is False and isinstance(args, argparse.Namespace)


@pytest.mark.parametrize(
    ("flags", "said"),
    (
        (
            ["--gate-min-response-tokens", "50", "--gate-max-response-tokens", "20"],
            "minimum 50 exceeds maximum 20",
        ),
        (
            ["--gate-min-response-tokens", "9", "--rollout-max-response-len", "4"],
            "9 exceeds --rollout-max-response-len 4",
        ),
        (["--gate-snapshots", "-1"], "--gate-snapshots must be >= 0, it is -1. Use 0."),
        (["--gate-policies", '{"emty": "drop"}'], "names the reason 'emty'"),
        (["--gate-levels", '{"truncated": "harsh"}'], "'harsh' is not one of"),
        (["--gate-schedule", "soon:lenient"], "'soon:lenient' is not understood"),
    ),
)
def test_a_gate_that_cannot_be_built_is_said_before_anything_starts(tmp_path, flags, said):
    """Gate options that contradict each other are refused at parsing, and not by an actor once Ray,
    engines and model run."""
    with pytest.raises(ConfigError, match=said):
        parse_args([*write_run_inputs(tmp_path), *flags])


def test_without_megatron_core_the_message_says_so(tmp_path, monkeypatch):
    """Without megatron-core the message names the package; otherwise --hidden-size would look like
    a typo."""
    from slime.config import megatron, specs

    caches = (megatron.megatron_fields, specs.all_specs, specs.specs_by_name)
    monkeypatch.setattr(megatron, "megatron_core_folder", lambda: None)
    try:
        for cache in caches:
            cache.cache_clear()
        with pytest.raises(
            ConfigError, match="megatron-core is not installed, so none of its flags is known"
        ):
            parse_command_line(["--hidden-size", "8"])
        with pytest.raises(ConfigError, match="megatron-core is not installed"):
            parse_args(write_run_inputs(tmp_path))
    finally:
        monkeypatch.undo()
        for cache in caches:
            cache.cache_clear()


def test_a_role_overrides_options_by_name(tmp_path):
    """A role, such as the critic, overrides options by name."""
    args = parse_args(write_run_inputs(tmp_path))
    file = tmp_path / "roles.yaml"
    file.write_text(
        "megatron:\n  - role: critic\n    overrides: {lr: 1e-5, load: /critic}\n  - role: actor\n  "
        "  overrides: {}\n"
    )
    critic = parse_megatron_role_args(args, str(file), "critic")
    assert (critic.lr, critic.load, args.lr) == (1e-5, "/critic", 1e-6)
    assert parse_megatron_role_args(args, str(file), "actor").lr == 1e-6
    file.write_text("megatron:\n  - role: critic\n    overrides: {lrr: 1}\n")
    with pytest.raises(ConfigError, match="role critic: unknown option 'lrr'. Did you mean 'lr'"):
        parse_megatron_role_args(args, str(file), "critic")
    file.write_text("megatron:\n  - role: critic\n    overrides: {seed: many}\n")
    with pytest.raises(ConfigError, match="--seed is 'many', must be INT"):
        parse_megatron_role_args(args, str(file), "critic")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
