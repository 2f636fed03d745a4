"""Users' functions are checked before the run: they exist, and can be called as slime calls
them."""

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
from support.options import write_run_inputs

from slime.commands.dry_run import dry_run
from slime.config.extension_points import EXTENSION_POINTS, Mode, problem_of
from slime.config.specs import all_specs
from slime.data.sample import Sample
from slime.exceptions import ConfigError
from slime.plugins.loading import load_hook
from slime.rollout.rm_hub import async_rm
from slime.rollout.sglang_rollout import _call_generate
from slime.utils.arguments import parse_args
from slime.utils.misc import load_function

NUM_GPUS = 0

GAME = """
async def generate(args, sample, sampling_params):
    return sample

async def reward(args, sample, **kwargs):
    return 1.0

def blocking_reward(args, sample):
    return 1.0

async def rollout_shaped(args, rollout_data):
    return rollout_data

def keep_all(args, samples):
    return True

async def keep_none(args, samples):
    return False

LIMIT = 3
"""


@pytest.fixture
def game(tmp_path, monkeypatch):
    """A user's module `hooks_game` on the path."""
    (tmp_path / "hooks_game.py").write_text(GAME)
    (tmp_path / "hooks_broken.py").write_text("import json\nvalue = 1 / 0\n")
    (tmp_path / "hooks_needs.py").write_text("import hooks_not_installed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("hooks_game", "hooks_broken", "hooks_needs"):
        sys.modules.pop(name, None)
    load_function.cache_clear()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--custom-generate-function-path hooks_game.genrate", "no 'genrate'. Did you mean hooks_game.generate?"),
        ("--custom-generate-function-path hooks_gaem.generate", "no module 'hooks_gaem'. Did you mean 'hooks_game'?"),
        ("--custom-generate-function-path slime.rolout.sglang_rollout.generate", "Did you mean 'slime.rollout'?"),
        (
            "--custom-generate-function-path hooks_game.rollout_shaped",
            "rollout_shaped(args, rollout_data) cannot be called with (args, sample, sampling_params, evaluation=False)",
        ),
        (
            "--custom-rm-path hooks_game.blocking_reward",
            "blocking_reward is not async, but its result is awaited. Write: async def blocking_reward(args, sample)",
        ),
        ("--custom-rm-path hooks_game.LIMIT", "it is an int and cannot be called"),
        ("--custom-rm-path hooks_broken.reward", "importing hooks_broken fails: ZeroDivisionError: division by zero ("),
        ("--custom-rm-path hooks_needs.reward", "ModuleNotFoundError: No module named 'hooks_not_installed'"),
        ("--custom-rm-path reward", "it is not a dotted path"),
        ("--dynamic-sampling-filter-path hooks_game.keep_none", "keep_none is async, but its result is not awaited"),
        ("--rollout-sample-hook-path hooks_game.reward --rollout-sample-hook-path hooks_game.rewrad", "hooks_game.reward?"),
        ("--data-source-path slime.data.sample.Sample", "class Sample has no get_samples, no add_samples, no save"),
        ("--custom-tis-function-path hooks_game.keep_all", "cannot be called with (*, args, pg_loss, train_log_probs"),
    ],
)  # fmt: skip
def test_a_function_that_cannot_be_called_is_refused_before_the_run(words, message, game):
    """A function that does not exist or has a wrong signature is refused before the run."""
    with pytest.raises(ConfigError) as caught:
        parse_args([*write_run_inputs(game), *words.split()])
    assert message in str(caught.value) and words.split()[-2] in str(caught.value)


def test_every_wrong_function_is_named_in_one_message(game):
    """All wrong functions, those of evaluation datasets included, are in one message."""
    (game / "eval.yaml").write_text(
        f"eval:\n  datasets:\n    - {{name: held_out, path: {game / 'prompts.jsonl'}, "
        f"custom_rm_path: hooks_game.rewad}}\n"
    )
    words = "--custom-rm-path hooks_game.rewrad --buffer-filter-path hooks_game.keep_all --eval-config".split()
    with pytest.raises(ConfigError) as caught:
        parse_args([*write_run_inputs(game), *words, str(game / "eval.yaml")])
    text = str(caught.value)
    assert "--custom-rm-path hooks_game.rewrad" in text
    assert (
        "keep_all(args, samples) cannot be called with (args, rollout_id, buffer, num_samples)"
        in text
    )
    assert "held_out: custom_rm_path hooks_game.rewad" in text


def test_functions_that_can_be_called_pass_and_the_dry_run_lists_them(game, capsys):
    """The dry run lists the functions with file and line, so that the wrong one of two modules of a
    name shows."""
    words = "--custom-generate-function-path hooks_game.generate --custom-rm-path hooks_game.reward --dry-run".split()
    assert dry_run(parse_args([*write_run_inputs(game), *words])) == 1, (
        "the folder has no tokenizer"
    )
    assert (
        f"✓ --custom-rm-path hooks_game.reward ({game / 'hooks_game.py'}:5)"
        in capsys.readouterr().out
    )


def test_a_samples_own_function_gives_the_same_sentence(game):
    """A function that a sample names, which is met during the run, gives the same message as a
    ConfigError that ends it."""
    sample = Sample(
        index=4,
        generate_function_path="hooks_game.rollout_shaped",
        custom_rm_path="hooks_game.rewad",
    )
    with pytest.raises(
        ConfigError,
        match=r"sample 4: generate_function_path hooks_game.rollout_shaped: rollout_shaped\(args",
    ):
        asyncio.run(_call_generate(None, sample, {}, False))
    with pytest.raises(
        ConfigError,
        match="sample 4: custom_rm_path hooks_game.rewad: .* Did you mean hooks_game.reward?",
    ):
        asyncio.run(async_rm(None, sample))


def test_what_slime_brings_fits_its_own_table():
    """Every function of slime's that a user may name fits the table of signatures."""
    for option, path in (
        ("rollout_function_path", "slime.rollout.sglang_rollout.generate_rollout"),
        ("rollout_function_path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async"),
        ("rollout_function_path", "slime.rollout.sft_rollout.generate_rollout"),
        ("data_source_path", "slime.prompts.data_source.RolloutDataSourceWithBuffer"),
        (
            "custom_generate_function_path",
            "slime.rollout.sglang_streaming_rollout.generate_streaming",
        ),
        ("custom_generate_function_path", "examples.calculator.rollout.generate"),
        ("custom_rm_path", "slime.rollout.on_policy_distillation.reward_func"),
        (
            "custom_reward_post_process_path",
            "slime.rollout.on_policy_distillation.post_process_rewards",
        ),
        (
            "dynamic_sampling_filter_path",
            "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
        ),
        ("buffer_filter_path", "slime.prompts.data_source.pop_first"),
    ):
        load_hook(option, path, where=option)


def test_the_table_has_every_option_that_names_a_function():
    """Every option that names a function is in the table."""
    paths = {
        spec.name for spec in all_specs() if spec.source == "slime" and spec.name.endswith("_path")
    }
    # files of options
    assert paths - set(EXTENSION_POINTS) == {"custom_config_path", "megatron_config_path"}
    assert set(EXTENSION_POINTS) <= paths
    assert {spec.help for spec in all_specs() if spec.name in EXTENSION_POINTS} == {
        p.help for p in EXTENSION_POINTS.values()
    }


def test_a_generate_function_may_set_the_reward_itself(game):
    """--rm-type is required only where nothing else can score."""
    words = [word for word in write_run_inputs(game) if word not in ("--rm-type", "exact_match")]
    with pytest.raises(ConfigError, match="--rm-type is missing"):
        parse_args(words)
    parse_args([*words, "--custom-generate-function-path", "hooks_game.generate"])
    with pytest.raises(NotImplementedError, match="or set sample.reward in your generate function"):
        asyncio.run(async_rm(None, Sample(index=0)))


class Callable:
    async def __call__(self, args, sample):
        return 1.0


def wrapper(args, sample) -> "Awaitable[float]":  # noqa: F821
    return Callable()(args, sample)


def test_an_awaitable_is_accepted_where_it_can_be_seen():
    """Objects with an async __call__, and functions annotated to return an awaitable, count as
    async."""
    point = EXTENSION_POINTS["custom_rm_path"]
    assert point.mode is Mode.ASYNC
    assert problem_of(point, Callable()) is None and problem_of(point, wrapper) is None
    assert "is not async" in problem_of(point, lambda args, sample: 1.0)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
