"""Rules between options: all broken ones in one message, each with flags, values and a value that
works."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import socket

import pytest
from support.options import upstream_namespace, write_run_inputs

from slime.config.cli import parse_command_line
from slime.config.derive import RankPlace, apply_derived, derive, derived_sizes, process_layout
from slime.config.machine_rules import missing_path
from slime.config.rules import broken_rules
from slime.config.rules.registry import RULES, nearest_divisors
from slime.config.specs import specs_by_name
from slime.exceptions import ConfigError
from slime.utils.arguments import parse_args, slime_validate_args

NUM_GPUS = 0


def problems_of(words: str, tmp_path) -> str:
    """The message for a valid command line with `words` added; fails when there is none."""
    with pytest.raises(ConfigError) as caught:
        parse_args([*write_run_inputs(tmp_path), *words.split()])
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--global-batch-size 5",
            (
                "4 x --n-samples-per-prompt 2 = 8 samples do not divide into steps of "
                "--global-batch-size 5. Use 4 or 8, or --keep-trailing-rollouts."
            ),
        ),
        ("--num-steps-per-rollout 3", "do not divide over --num-steps-per-rollout 3. Use 2 or 4."),
        (
            "--num-steps-per-rollout 2 --global-batch-size 8",
            "make 4 per step, but --global-batch-size is 8. Use --global-batch-size 4",
        ),
        (
            "--over-sampling-batch-size 2",
            "--over-sampling-batch-size 2 is below --rollout-batch-size 4. Use 4 or more",
        ),
        ("--use-dynamic-batch-size", "--use-dynamic-batch-size needs --max-tokens-per-gpu"),
        (
            "--max-tokens-per-gpu 64 --log-probs-max-tokens-per-gpu 128",
            "differs from --max-tokens-per-gpu 64",
        ),
        ("--balance-by-flops", "--balance-by-flops needs --use-dynamic-batch-size"),
        ("--rollout-temperature 0", "--rollout-temperature must be > 0, it is 0.0"),
        ("--rollout-top-k 0", "--rollout-top-k must be >= 1 or -1, it is 0. Use -1."),
        ("--rollout-data-transport nixl", "--rollout-data-transport nixl is not built in"),
        ("--rollout-top-p 1.5", "--rollout-top-p must be in (0, 1], it is 1.5. Use 1.0."),
        ("--rollout-max-prompt-len 9 --rollout-max-context-len 9", "Use 8 or less"),
        ("--eval-interval 2", "--eval-interval 2 needs --eval-prompt-data NAME PATH"),
        ("--eval-prompt-data a b c", "pairs NAME PATH, got 3 words: a b c"),
        (
            "--kl-coef 0.1 --kl-loss-coef 0.2",
            "--kl-coef 0.1 (in the reward) and --kl-loss-coef 0.2 (in the loss) exclude each other",
        ),
        (
            "--advantage-estimator reinforce_plus_plus",
            "reinforce_plus_plus needs --normalize-advantages",
        ),
        (
            "--rollout-external-engine-addrs 127.0.0.1:9",
            "would keep their weights. Use --update-weight-transport disk",
        ),
        (
            "--advantage-estimator ppo --kl-coef 0.1",
            "returns would miss it. Use --use-kl-loss --kl-loss-coef 0.1",
        ),
        (
            "--advantage-estimator ppo --critic-num-gpus-per-node 2",
            "2 differ from the policy's 1 and 1",
        ),
        ("--use-tis --use-rollout-logprobs", "they exclude each other"),
        ("--get-mismatch-metrics", "needs --custom-tis-function-path"),
        ("--use-opd", "--use-opd needs --opd-type"),
        (
            (
                "--use-opd --opd-type sglang --rollout-temperature 0.7 --custom-rm-path "
                "slime.rollout.on_policy_distillation.reward_func"
            ),
            "a server scores given tokens at temperature 1 over its whole vocabulary",
        ),
        (
            (
                "--use-opd --opd-type sglang --custom-rm-path "
                "slime.rollout.on_policy_distillation.reward_func --gate-policy penalize"
            ),
            "Gate policy penalize gives failures a reward",
        ),
        (
            "--keep-old-actor --partial-rollout",
            "the tokens of one rollout are of several versions of the weights",
        ),
        (
            (
                "--keep-old-actor --rollout-function-path "
                "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
            ),
            "--keep-old-actor with --rollout-function-path",
        ),
        ("--rollout-frequency-penalty 0.5", "it edits the logits that tokens are drawn from"),
        ("--loss-type custom_loss", "needs --custom-loss-function-path"),
        ("--eps-clip-c 0.5", "--eps-clip-c must be > 1, it is 0.5: dual-clip PPO"),
        ("--lr -1", "--lr must be >= 0, it is -1.0. Use 1e-06."),
        ("--rollout-batch-size 0", "--rollout-batch-size must be >= 1, it is 0. Use 1."),
        (
            "--actor-num-gpus-per-node 3 --tensor-model-parallel-size 2",
            "3 training ranks do not divide into groups of tensor 2",
        ),
        (
            "--actor-num-gpus-per-node 4 --tensor-model-parallel-size 4",
            "does not divide the model's 4 attention heads and 2 key/value heads",
        ),
        (
            "--context-parallel-size 2 --qkv-format bshd",
            "rows are always packed (thd): context parallelism",
        ),
        ("--bf16 --fp16", "--bf16 and --fp16 exclude each other"),
        ("--num-layers 3", "--num-layers is 3, but the model's config.json says 2"),
        ("--rotary-base 500", "--rotary-base is 500.0, but the model's config.json says 10000.0"),
        (
            "--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2",
            "does not divide into engines of --rollout-num-gpus-per-engine 2. Use 4",
        ),
        ("--save-interval 2", "--save-interval 2 needs --save"),
        (
            "--save-debug-rollout-data /tmp/x --save-debug-train-data /tmp/x",
            "--save-debug-train-data must not be equal",
        ),
        (
            "--custom-rm-path no_such_package.f",
            "there is no module 'no_such_package'. Is its folder on PYTHONPATH?",
        ),
        ("--rm-type remote_rm", "--rm-type remote_rm needs --rm-url"),
        ("--debug-train-only --debug-rollout-only", "exclude each other"),
        (
            "--local --actor-num-gpus-per-node 2",
            (
                "--actor-num-nodes 1 x --actor-num-gpus-per-node 2 = 2. Use "
                "--actor-num-gpus-per-node "
                "1"
            ),
        ),
        ("--local --advantage-estimator ppo", "--local holds one trained model"),
        (
            "--local --use-sglang-router",
            "--local starts no process, and --use-sglang-router is one",
        ),
        (
            "--local --ray-address 10.0.0.1:6379",
            "--local uses no Ray, but --ray-address is 10.0.0.1:6379",
        ),
        ("--num-cpus 1", "The run needs 2 CPU cores, 1 are here"),
        ("--label-key answer", "prompts.jsonl, line 1: the label 'answer' is missing"),
    ],
)
def test_each_rule_names_flags_values_and_a_way_out(tmp_path, words, message):
    """Each broken rule names flags, values and a value that works."""
    assert message in problems_of(words, tmp_path)


def test_a_batch_that_leaves_a_rest_is_accepted_where_the_rest_trains(tmp_path):
    """8 samples in steps of 5 are accepted with --keep-trailing-rollouts, under which they train as
    5 and 3."""
    words = "--global-batch-size 5 --keep-trailing-rollouts"
    args = parse_args([*write_run_inputs(tmp_path), *words.split()])
    assert (args.global_batch_size, args.keep_trailing_rollouts) == (5, True)


def test_a_replay_needs_no_prompts_and_counts_none(tmp_path):
    """A replay needs no prompts, and its number of rollouts does not follow from passes over
    them."""
    words = [
        *write_run_inputs(tmp_path),
        "--load-debug-rollout-data",
        str(tmp_path / "{rollout_id}.jsonl"),
    ]
    at = words.index("--prompt-data")
    words = words[:at] + words[at + 2 :]
    assert parse_args(words).prompt_data is None
    words[words.index("--num-rollout")] = "--num-epoch"
    with pytest.raises(
        ConfigError, match="--load-debug-rollout-data does not read. Use --num-rollout"
    ):
        parse_args(words)


def test_all_broken_rules_are_shown_at_once():
    """Five broken rules are one message."""
    with pytest.raises(ConfigError) as caught:
        parse_args(["--kl-coef", "1", "--kl-loss-coef", "1"])
    text = str(caught.value)
    for part in (
        "--hf-checkpoint is missing",
        "--prompt-data is missing",
        "--rollout-batch-size is missing",
        "--num-rollout is missing",
        "--kl-coef 1.0",
    ):
        assert part in text


def test_missing_files_are_answered_with_the_names_that_exist(tmp_path):
    """A missing file is answered with the names that exist beside it."""
    (tmp_path / "train.jsonl").write_text("{}\n")
    assert missing_path("--prompt-data", str(tmp_path / "trian.jsonl"), "file").endswith(
        f"Did you mean {tmp_path / 'train.jsonl'}?"
    )
    assert "but has no 'deep'" in missing_path(
        "--save", str(tmp_path / "deep" / "er" / "x"), "folder"
    )
    text = problems_of(
        f"--hf-checkpoint {tmp_path / 'modle'} --prompt-data {tmp_path / 'promts.jsonl'}", tmp_path
    )
    assert (
        f"Did you mean {tmp_path / 'model'}?" in text
        and f"Did you mean {tmp_path / 'prompts.jsonl'}" in text
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"input": "a", "label": "1"}\n{"input": "b", "label": \n', "line 2"),
        ('{"input": "a", "label": "1"}\n{"prompt": "b", "label": "2"}\n', "line 2"),
        ("", "no rows"),
        ("[1, 2]\n", "line 1"),
    ],
)
def test_a_bad_dataset_is_named_with_its_line_before_anything_starts(tmp_path, content, message):
    """A bad row of a dataset is refused with its line before anything starts, and not in the second
    epoch."""
    words = write_run_inputs(tmp_path)
    (tmp_path / "prompts.jsonl").write_text(content)
    with pytest.raises(ConfigError) as caught:
        parse_args(words)
    assert "prompts.jsonl" in str(caught.value) and message in str(caught.value)


def test_a_port_in_use_is_found_before_the_start(tmp_path):
    """A port in use is found before the start."""
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        assert f"port {port} is in use" in problems_of(f"--sglang-port {port}", tmp_path)


def test_resuming_from_nothing_is_an_error_but_a_first_start_is_not(tmp_path):
    """A --load folder without a checkpoint is an error, except for the run's own --save folder,
    where the first start begins anew and a later one resumes."""
    assert "holds no published checkpoint" in problems_of(f"--load {tmp_path}", tmp_path)
    assert "no such folder" in problems_of(f"--load {tmp_path / 'ckpt'}", tmp_path)
    words = [
        *write_run_inputs(tmp_path),
        "--load",
        str(tmp_path / "ckpt"),
        "--save",
        str(tmp_path / "ckpt"),
    ]
    assert parse_args(words).start_rollout_id == 0
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("4")
    args = parse_args(words)
    assert (args.load, args.finetune, args.start_rollout_id) == (
        str(tmp_path / "ckpt"),
        False,
        None,
    )


def test_derived_values_follow_and_deriving_twice_changes_nothing():
    """Given values are never overridden by derived ones, and deriving twice changes nothing."""
    args = parse_command_line(
        "--rollout-batch-size 6 --n-samples-per-prompt 1 --num-steps-per-rollout 2 "
        "--max-tokens-per-gpu 512 --balance-by-flops "
        "--dump-details /d --rollout-max-context-len 100 --advantage-estimator ppo --colocate --actor-num-gpus-per-node 2".split()
    ).args
    apply_derived(args, derive(args))
    assert (args.global_batch_size, args.over_sampling_batch_size, args.grpo_std_normalization) == (
        3,
        6,
        False,
    )
    assert (args.log_probs_max_tokens_per_gpu, args.balance_data, args.use_critic) == (
        512,
        True,
        True,
    )
    assert (args.offload_train, args.offload_rollout, args.rollout_num_gpus) == (True, True, 2)
    assert (
        args.eval_max_context_len,
        args.rollout_max_prompt_len,
        args.critic_num_gpus_per_node,
    ) == (100, 99, 2)
    assert args.save_debug_rollout_data.startswith(
        "/d/rollout_data/"
    ) and args.save_debug_train_data.startswith("/d/train_data/")
    assert derive(args) == {}


def test_ranks_are_laid_out_as_megatron_does():
    """Ranks are laid out as in Megatron: TP varies fastest, then CP, DP, PP."""
    args = parse_command_line(
        "--rollout-batch-size 8 --actor-num-nodes 2 --actor-num-gpus-per-node 8 "
        "--tensor-model-parallel-size 2 "
        "--pipeline-model-parallel-size 2 --context-parallel-size 2".split()
    ).args
    apply_derived(args, derive(args))
    sizes = derived_sizes(args)
    assert (sizes.actor_ranks, sizes.data_parallel_size, sizes.samples_per_rank_and_step) == (
        16,
        2,
        4.0,
    )
    places = process_layout(sizes, ranks_per_node=8)
    assert places[0] == RankPlace(rank=0, node=0, tensor=0, context=0, data=0, pipeline=0)
    assert places[1].tensor == 1 and places[2].context == 1 and places[4].data == 1
    assert places[8] == RankPlace(rank=8, node=1, tensor=0, context=0, data=0, pipeline=1)
    assert len({(p.tensor, p.context, p.data, p.pipeline) for p in places}) == 16


def test_rules_read_only_what_they_declare():
    """A rule reads only the options that it declares."""

    class Watching(argparse.Namespace):
        seen: set = set()

        def __getattribute__(self, name):
            if not name.startswith("_") and name != "seen":
                Watching.seen.add(name)
            return super().__getattribute__(name)

    args = parse_command_line([]).args
    apply_derived(args, derive(args))
    names = set(specs_by_name()) | {"update_weight_mode", "update_weight_local_checkpoint_dir"}
    for reads, function in RULES:
        assert reads <= names, reads - names
        Watching.seen.clear()
        function(
            Watching(
                **{
                    **vars(args),
                    "update_weight_mode": "full",
                    "update_weight_local_checkpoint_dir": None,
                }
            )
        )
        assert Watching.seen <= reads, (function.__name__, Watching.seen - reads)


def test_nearest_divisors_lie_on_both_sides():
    """The suggested divisors lie on both sides of the value."""
    assert nearest_divisors(12, 5) == [4, 6]
    assert nearest_divisors(12, 6) == [6, 12]
    assert nearest_divisors(7, 9) == [7]
    assert nearest_divisors(0, 3) == []


# ---- slime_validate_args on upstream's short namespace


def test_colocation_turns_offloading_on_and_keeps_what_was_meant():
    """--colocate turns offloading on and keeps explicit choices, as upstream's tests expect."""
    for given, expected in ((None, 8), (0, 0), (16, 16), (4, 8)):
        args = upstream_namespace(colocate=True, rollout_num_gpus=given)
        slime_validate_args(args)
        assert (args.offload_train, args.offload_rollout, args.rollout_num_gpus) == (
            True,
            True,
            expected,
        )
    args = upstream_namespace(rollout_num_gpus=8)
    slime_validate_args(args)
    assert (args.offload_train, args.offload_rollout) == (False, False)


def test_engines_that_are_not_the_runs_own_are_not_told_to_free_memory():
    """--colocate leaves external engines alone, and offloading them by name is refused with the
    reason."""
    external = {
        "rollout_external_engine_addrs": ["127.0.0.1:1"],
        "update_weight_transport": "disk",
        "update_weight_disk_dir": "/tmp/w",
    }
    args = upstream_namespace(colocate=True, rollout_num_gpus=None, **external)
    slime_validate_args(args)
    assert (args.offload_train, args.offload_rollout) == (True, False)
    args = upstream_namespace(offload_rollout=True, **external)
    with pytest.raises(
        ConfigError, match="--offload-rollout frees the memory of engines that the run starts"
    ):
        slime_validate_args(args)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"update_weight_transport": "disk"}, "update-weight-disk-dir"),
        ({"update_weight_mode": "delta"}, "requires --update-weight-transport=disk"),
        (
            {
                "update_weight_mode": "delta",
                "update_weight_transport": "disk",
                "update_weight_disk_dir": "/d",
                "colocate": True,
            },
            "not supported with --colocate",
        ),
        (
            {
                "update_weight_mode": "delta",
                "update_weight_transport": "disk",
                "update_weight_disk_dir": "/d",
            },
            "requires --update-weight-local-checkpoint-dir",
        ),
        (
            {"save_debug_train_data": "/x", "save_debug_rollout_data": "/x"},
            "--save-debug-train-data must not be equal",
        ),
        ({"rollout_temperature": 0.0}, "--rollout-temperature must be > 0"),
        ({"rollout_temperature": -1.0}, "--rollout-temperature must be > 0"),
    ],
)
def test_upstreams_errors_keep_their_words(overrides, message):
    """Messages that upstream's users match keep their words."""
    with pytest.raises(ValueError, match=message):
        slime_validate_args(upstream_namespace(**overrides))


def test_a_start_that_was_asked_for_is_kept():
    """An explicit --start-rollout-id is kept; without it and a checkpoint the start is 0."""
    for given, expected in ((None, 0), (7, 7)):
        args = upstream_namespace(start_rollout_id=given)
        slime_validate_args(args)
        assert (args.start_rollout_id, args.finetune, args.no_load_optim, args.no_load_rng) == (
            expected,
            True,
            True,
            True,
        )


def test_a_group_of_one_is_not_divided_by_its_deviation():
    """With one sample per prompt rewards are not divided by their deviation, which is zero."""
    args = upstream_namespace(n_samples_per_prompt=1, global_batch_size=4)
    slime_validate_args(args)
    assert args.grpo_std_normalization is False and broken_rules(args) == []


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
