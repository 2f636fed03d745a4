"""--config and --print-config: strict keys with file and line, and a round trip for every
option."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import json
import math

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.options import HF_CONFIG, write_run_inputs

from slime.config.cli import parse_command_line
from slime.config.specs import all_specs, specs_by_name
from slime.config.yaml_file import (
    format_entry,
    format_resolved,
    read_option_file,
    resolved_values,
    write_resolved_config,
)
from slime.exceptions import ConfigError
from slime.harness.consistency_report import read_config
from slime.utils.arguments import parse_args

NUM_GPUS = 0

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
SCALARS = {
    int: st.integers(-(2**63), 2**63),
    float: st.floats(allow_nan=False),
    str: TEXT
    | st.sampled_from(
        [
            "null",
            "~",
            "true",
            "off",
            "1e-6",
            "007",
            "a: b",
            "# no",
            "- x",
            "{rollout_id}",
            "[1]",
            "'",
            '"',
            "\x85",
            "\u2028",
            "😀",
        ]
    ),
    bool: st.booleans(),
    dict: st.dictionaries(TEXT, JSON, max_size=3),
}


def values_of(spec):
    value = st.sampled_from(list(spec.choices)) if spec.choices else SCALARS[spec.kind]
    value = st.lists(value, max_size=3) if spec.many else value
    return value | st.none() if spec.optional else value


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_option_survives_the_way_to_a_file_and_back(tmp_path_factory, data):
    """Every option has the same value after it was written to a file and read back."""
    names = [spec.name for spec in all_specs() if not spec.is_secret]
    chosen = data.draw(st.lists(st.sampled_from(names), min_size=20, max_size=20, unique=True))
    values = {name: data.draw(values_of(specs_by_name()[name]), label=name) for name in chosen}
    file = tmp_path_factory.getbasetemp() / "drawn.yaml"
    file.write_text(
        "\n".join(format_entry(specs_by_name()[name], value) for name, value in values.items()),
        encoding="utf-8",
    )
    found = read_option_file(str(file), specs_by_name())
    assert found.problems == []
    assert found.known == values
    assert {name: type(value) for name, value in found.known.items()} == {
        name: type(value) for name, value in values.items()
    }


def test_the_defaults_of_all_options_read_back_as_themselves(tmp_path):
    """All defaults at once read back as themselves from the text of --print-config."""
    args = parse_command_line([]).args
    file = tmp_path / "all.yaml"
    file.write_text(format_resolved(args, all_specs()))
    again = parse_command_line(["--config", str(file)]).args
    assert {spec.name: getattr(again, spec.name) for spec in all_specs()} == {
        spec.name: getattr(args, spec.name) for spec in all_specs()
    }


def test_a_resolved_configuration_is_a_fixed_point(tmp_path, capsys):
    """A run from the file that a run has written resolves to the same configuration."""
    words = [
        *write_run_inputs(tmp_path),
        "--eps-clip-high",
        "0.28",
        "--save",
        str(tmp_path / "ckpt"),
        "--load",
        str(tmp_path / "ckpt"),
    ]
    first = parse_args(words)
    file = tmp_path / "config.yaml"
    write_resolved_config(first, file)
    second = parse_args(["--config", str(file)])
    assert resolved_values(second, all_specs()) == resolved_values(first, all_specs())
    for name in (spec.name for spec in all_specs() if not spec.is_secret):
        assert getattr(second, name) == getattr(first, name), name
    with pytest.raises(SystemExit):
        parse_args(["--config", str(file), "--print-config"])
    assert capsys.readouterr().out == file.read_text()


def test_what_depends_on_the_disk_is_recorded_as_asked_for(tmp_path):
    """What depends on the disk is recorded as given: a first start falls back to fresh weights, and
    from the recorded file a later one resumes."""
    words = [
        *write_run_inputs(tmp_path),
        "--save",
        str(tmp_path / "ckpt"),
        "--load",
        str(tmp_path / "ckpt"),
    ]
    args = parse_args(words)
    assert (args.load, args.finetune, args.no_load_optim, args.start_rollout_id) == (
        None,
        True,
        True,
        0,
    )
    values = resolved_values(args, all_specs())
    assert (values["load"], values["finetune"], values["no_load_optim"]) == (
        str(tmp_path / "ckpt"),
        False,
        False,
    )
    assert "start_rollout_id" not in values


def test_a_flag_beside_a_recorded_file_reaches_what_follows_from_it(tmp_path):
    """A flag beside a recorded file changes the paths derived from it; with the file's, a replay
    would overwrite the dumps that it is compared with."""
    first = parse_args(
        [*write_run_inputs(tmp_path), "--dump-details", str(tmp_path / "old"), "--eps-clip", "0.2"]
    )
    assert first.save_debug_rollout_data == f"{tmp_path}/old/rollout_data/{{rollout_id}}.parquet"
    file = tmp_path / "config.yaml"
    write_resolved_config(first, file)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(
        json.dumps({**HF_CONFIG, "num_hidden_layers": 3})
    )
    flags = [
        "--dump-details",
        str(tmp_path / "new"),
        "--eps-clip",
        "0.3",
        "--rollout-batch-size",
        "8",
    ]
    again = parse_args(["--config", str(file), *flags, "--hf-checkpoint", str(tmp_path / "other")])
    assert again.save_debug_rollout_data == f"{tmp_path}/new/rollout_data/{{rollout_id}}.parquet"
    assert again.save_debug_train_data == f"{tmp_path}/new/train_data/{{rollout_id}}.parquet"
    assert (first.eps_clip_high, again.eps_clip_high) == (0.2, 0.3)
    assert (first.global_batch_size, again.global_batch_size) == (8, 16)
    assert (first.num_layers, again.num_layers) == (2, 3)


def test_a_key_without_effect_is_named_with_its_reason(tmp_path):
    """A key of an earlier version that nothing reads is ignored with a warning that gives the
    reason."""
    (tmp_path / "run.yaml").write_text("lr: 1e-5\nlog_interval: 1\n")
    line = parse_command_line(["--config", str(tmp_path / "run.yaml")])
    assert line.args.lr == 1e-5 and line.counts["honoured"] == 1
    (warning,) = line.warnings
    assert "run.yaml:2: log_interval is ignored: Megatron's own training loop" in warning


def test_a_recorded_file_shows_what_followed_apart_from_what_was_asked_for(tmp_path):
    """A recorded file shows derived values apart from given ones, and a run from it does not take
    them for given."""
    args = parse_args([*write_run_inputs(tmp_path), "--dump-details", str(tmp_path / "d")])
    write_resolved_config(args, tmp_path / "config.yaml")
    content = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert "global_batch_size" not in content and "save_debug_train_data" not in content
    assert content["derived"]["global_batch_size"] == 8 and content["derived"]["num_layers"] == 2
    assert (
        content["derived"]["save_debug_train_data"]
        == f"{tmp_path}/d/train_data/{{rollout_id}}.parquet"
    )
    assert read_config(tmp_path)["global_batch_size"] == 8


@pytest.mark.parametrize("written", ["d", "d/../d", "link"])
def test_a_replay_never_writes_over_the_dump_that_it_reads(tmp_path, written):
    words = write_run_inputs(tmp_path)
    (tmp_path / "d" / "rollout_data").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "d")
    words += [
        "--load-debug-rollout-data",
        str(tmp_path / "d" / "rollout_data" / "{rollout_id}.parquet"),
    ]
    with pytest.raises(
        ConfigError,
        match="dump that --load-debug-rollout-data reads. Give the replay a --dump-details folder",
    ):
        parse_args([*words, "--dump-details", str(tmp_path / written)])
    assert parse_args([*words, "--dump-details", str(tmp_path / "e")]).debug_train_only


def test_a_used_save_folder_is_not_written_over(tmp_path):
    """A second start without --load into a used --save folder is refused."""
    words = [*write_run_inputs(tmp_path), "--save", str(tmp_path / "ckpt")]
    parse_args(words)
    (tmp_path / "ckpt").mkdir()
    parse_args(words)  # empty: nothing to lose
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("9\n")
    with pytest.raises(
        ConfigError,
        match=(
            r"--save .*ckpt holds checkpoints of another run \(the latest is 9\).* Go on from "
            r"them with --load"
        ),
    ):
        parse_args(words)
    with pytest.raises(ConfigError, match="holds checkpoints of another run"):
        parse_args([*words, "--load", str(tmp_path / "model")])
    (tmp_path / "link").symlink_to(tmp_path / "ckpt")
    for same in (tmp_path / "ckpt", tmp_path / "link"):
        assert parse_args([*words, "--load", str(same), "--num-rollout", "20"]).load == str(same)


def test_a_resumed_policy_takes_its_critic_from_where_it_was_saved(tmp_path):
    """A resumed run takes its critic from critic/ in --load, else from --critic-save."""
    words = [
        *write_run_inputs(tmp_path),
        "--advantage-estimator",
        "ppo",
        "--save",
        f"{tmp_path}/s",
        "--critic-save",
        f"{tmp_path}/c",
    ]
    for name, loaded in (("c", None), ("s", f"{tmp_path}/c"), ("s/critic", f"{tmp_path}/s/critic")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "latest_checkpointed_iteration.txt").write_text("7")
        resumed = parse_args([*words, "--load", f"{tmp_path}/s"])
        assert (resumed.critic_save, resumed.critic_load) == (f"{tmp_path}/c", loaded)


def test_a_first_start_takes_the_iteration_of_its_reference(tmp_path):
    """A first start loads the policy from --ref-load at --ref-ckpt-step, so that the first KL is 0;
    another --ckpt-step is refused."""
    words = write_run_inputs(tmp_path)
    for step in (3, 7):
        (tmp_path / "x" / f"iter_000000{step}").mkdir(parents=True)
    (tmp_path / "x" / "latest_checkpointed_iteration.txt").write_text("7")
    words += ["--ref-load", str(tmp_path / "x"), "--use-kl-loss"]
    assert parse_args(words).load == str(tmp_path / "x")
    assert parse_args([*words, "--ref-ckpt-step", "3"]).load == str(tmp_path / "x" / "iter_0000003")
    assert parse_args([*words, "--ref-ckpt-step", "3", "--ckpt-step", "3"]).load == str(
        tmp_path / "x" / "iter_0000003"
    )
    with pytest.raises(
        ConfigError, match="--ckpt-step 7 is an iteration of --load, which has no checkpoint"
    ):
        parse_args([*words, "--ref-ckpt-step", "3", "--ckpt-step", "7"])
    with pytest.raises(
        ConfigError,
        match="starts from --ref-load, its latest iteration. Use --ref-ckpt-step 3 for both",
    ):
        parse_args([*words, "--ckpt-step", "3"])
    resumed = parse_args(
        [*words, "--load", str(tmp_path / "x"), "--ref-ckpt-step", "3", "--ckpt-step", "7"]
    )
    assert (resumed.load, resumed.ckpt_step, resumed.finetune) == (str(tmp_path / "x"), 7, False)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "rolout_batch_size: 4",
            "run.yaml:2: unknown key 'rolout_batch_size'. Did you mean 'rollout_batch_size'?",
        ),
        ("zzqq: 4", "run.yaml:2: unknown key 'zzqq'. `slime train --help`"),
        (
            "rollout_batch_size: four",
            "run.yaml:2: rollout_batch_size: 'four' is not a whole number.",
        ),
        (
            "rollout_batch_size: 1e3",
            "run.yaml:2: rollout_batch_size: '1e3' is not a whole number. Write 1000.",
        ),
        (
            "rollout_batch_size: '4'",
            "run.yaml:2: rollout_batch_size: must be INT, not quoted text '4'.",
        ),
        (
            "rollout_batch_size: [4]",
            "run.yaml:2: rollout_batch_size: must be one INT, not a sequence.",
        ),
        ("rollout_top_k:", "run.yaml:2: rollout_top_k: has no value"),
        ("rollout_stop: a", "run.yaml:2: rollout_stop: must be a list, for instance [a, b]."),
        ("colocate: 1", "run.yaml:2: colocate: '1' is not true or false."),
        ("kl_loss_type: k7", "run.yaml:2: kl_loss_type: 'k7' is not one of k1, k2, k3"),
        ("seed: 2", "run.yaml:2: 'seed' is given twice (first on line 1)."),
        ("optimizer: {lr: 1}", "run.yaml:2: optimizer: must be one TEXT, not a mapping."),
    ],
)
def test_a_mistake_in_a_file_is_named_with_file_and_line(tmp_path, line, message):
    """A mistake in a file is refused with file and line."""
    file = tmp_path / "run.yaml"
    file.write_text(f"seed: 1\n{line}\nlr: 1e-5\n")
    with pytest.raises(ConfigError) as caught:
        parse_command_line(["--config", str(file)])
    assert message in str(caught.value)


def test_numbers_and_words_are_read_by_the_options_type(tmp_path):
    """Values are read by the option's type: YAML reads 1e-6 as text and `off` as false."""
    file = tmp_path / "run.yaml"
    file.write_text(
        "\ufefflr: 1e-6\nrun_name: off\nwandb_group: 007\nclip_grad: 1\nmin_lr: .inf\nload: "
        "null\nrollout_stop_token_ids: [1, 2]\ncolocate: yes\n"
    )
    args = parse_command_line(["--config", str(file)]).args
    assert (args.lr, args.run_name, args.wandb_group, args.clip_grad, args.load) == (
        1e-6,
        "off",
        "007",
        1.0,
        None,
    )
    assert (
        args.min_lr == math.inf and args.rollout_stop_token_ids == [1, 2] and args.colocate is True
    )


def test_a_file_that_is_missing_or_not_yaml_is_named(tmp_path):
    """A file that is missing or not YAML is refused by name."""
    (tmp_path / "grpo.yaml").write_text("lr: 1\n")
    with pytest.raises(ConfigError, match=r"Cannot read .*grop.yaml.*there is: grpo.yaml"):
        parse_command_line(["--config", str(tmp_path / "grop.yaml")])
    (tmp_path / "bad.yaml").write_text("lr: [1\nseed: 2\n")
    with pytest.raises(ConfigError, match=r"bad.yaml:\d: not YAML"):
        parse_command_line(["--config", str(tmp_path / "bad.yaml")])
    (tmp_path / "list.yaml").write_text("- lr\n")
    with pytest.raises(ConfigError, match=r"list.yaml:1: expected `option: value` lines"):
        parse_command_line(["--config", str(tmp_path / "list.yaml")])


def test_secrets_are_not_written(tmp_path):
    """Secrets are not written to config.yaml."""
    args = parse_command_line(
        [
            "--wandb-key",
            "k3y-abc",
            "--rm-url",
            "http://me:pa55@host/rm",
            "--sglang-api-key",
            "t0k3n",
        ]
    ).args
    text = format_resolved(args, all_specs())
    assert "k3y-abc" not in text and "pa55" not in text and "t0k3n" not in text
    assert "# wandb_key: (a secret, not written)" in text and "http://me:***@host/rm" in text
    assert [spec.name for spec in all_specs() if spec.is_secret] == ["sglang_api_key", "wandb_key"]


def test_keys_inside_of_other_values_are_neither_written_nor_used_without_their_value(tmp_path):
    """A password in a URL and a key in an environment are *** in config.yaml; a run from it names
    both options with their lines, and takes the values that stand on its command line."""
    first = [
        *write_run_inputs(tmp_path),
        "--rm-url",
        "http://host/rm?api_key=k3y-abc&n=2",
        "--train-env-vars",
        '{"OPENAI_API_KEY": "s3cr3t-abc", "NCCL_DEBUG": "INFO"}',
        "--rollout-stop",
        "***",
    ]
    file = tmp_path / "config.yaml"
    write_resolved_config(parse_args(first), file)
    text = file.read_text()
    assert "k3y-abc" not in text and "s3cr3t-abc" not in text
    assert "http://host/rm?api_key=***&n=2" in text and "NCCL_DEBUG" in text
    with pytest.raises(ConfigError) as refused:
        parse_command_line(["--config", str(file)])
    for name in ("rm_url", "train_env_vars"):
        line = next(i for i, one in enumerate(text.splitlines(), 1) if one.startswith(f"{name}:"))
        flag = "--" + name.replace("_", "-")
        assert f"config.yaml:{line}: {name} has *** in place of a key" in str(refused.value)
        assert f"Give the whole value with {flag}." in str(refused.value)
    assert "2 problems" in str(refused.value)  # three stars by themselves are a text
    again = parse_command_line(["--config", str(file), *first[-6:-2]]).args
    assert again.rm_url == first[-5] and again.train_env_vars["OPENAI_API_KEY"] == "s3cr3t-abc"
    assert again.rollout_stop == ["***"]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
