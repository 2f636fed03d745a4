"""What must hold between options: one function per rule; each names the flags, their values, and a
value that would work.

A rule returns None when it holds, else a sentence (or several). It reads only the options it names
in `@rule(...)` and is skipped where the namespace lacks one of them, so that upstream's short
namespaces can be checked too. Rules run after `derive`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable

from slime.algorithms.table import ESTIMATORS, LOSSES
from slime.config.derive import FULLY_ASYNC
from slime.config.option import flag_of
from slime.config.ranges import range_problems

Rule = Callable[[argparse.Namespace], "str | list[str] | None"]
RULES: list[tuple[frozenset[str], Rule]] = []


def rule(*reads: str) -> Callable[[Rule], Rule]:
    """Registers a rule that reads these options."""

    def register(function: Rule) -> Rule:
        RULES.append((frozenset(reads), function))
        return function

    return register


def broken_rules(args: argparse.Namespace, *, unusable: Iterable[str] = ()) -> list[str]:
    """Returns one message per option out of its range, and one per broken rule, in the order in
    which they are declared. A rule about an option out of its range, or in `unusable`, is skipped.
    """
    out_of_range = range_problems(args)
    messages = list(out_of_range.values())
    skipped = {*out_of_range, *unusable}
    for reads, function in RULES:
        if skipped & reads or not all(hasattr(args, name) for name in reads):
            continue
        found = function(args)
        if found:
            messages += [found] if isinstance(found, str) else found
    return messages


def nearest_divisors(number: int, target: int) -> list[int]:
    """Returns the divisors of `number` next to `target`: the largest below or equal, the smallest
    above; empty for number < 1.
    """
    if number < 1:
        return []
    # beyond 10**12 some divisors are missed, and the answer does not take minutes
    small = [low for low in range(1, min(math.isqrt(number), 10**6) + 1) if number % low == 0]
    divisors = sorted({*small, *(number // low for low in small)})
    below = [divisor for divisor in divisors if divisor <= target]
    above = [divisor for divisor in divisors if divisor > target]
    return [*below[-1:], *above[:1]]


def _either(values: Iterable[int]) -> str:
    return " or ".join(str(value) for value in values)


# ---- what a run cannot do without


@rule("hf_checkpoint")
def hf_checkpoint_is_given(args: argparse.Namespace):
    if args.hf_checkpoint is None:
        return (
            "--hf-checkpoint is missing: give a Hugging Face folder with config.json, tokenizer "
            "and weights."
        )


@rule("prompt_data", "rollout_global_dataset", "debug_train_only", "load_debug_rollout_data")
def prompts_are_given(args: argparse.Namespace):
    needs_prompts = args.rollout_global_dataset and not args.load_debug_rollout_data
    if needs_prompts and args.prompt_data is None:
        return (
            "--prompt-data is missing: give a .jsonl, .parquet, .json or .csv file, or "
            "--disable-rollout-global-dataset if your rollout "
            "function brings its own data."
        )


@rule("rollout_batch_size")
def rollout_batch_size_is_given(args: argparse.Namespace):
    if args.rollout_batch_size is None:
        return (
            "--rollout-batch-size is missing: give the number of prompts per rollout, for "
            "instance 32."
        )


@rule("num_rollout", "num_epoch", "rollout_global_dataset", "load_debug_rollout_data")
def number_of_rollouts_is_given(args: argparse.Namespace):
    if args.num_rollout is None and args.num_epoch is None:
        return "--num-rollout is missing: give it, or --num-epoch."
    if args.num_rollout is None and not args.rollout_global_dataset:
        return (
            "--num-epoch counts passes over --prompt-data, which "
            "--disable-rollout-global-dataset turns off. Use --num-rollout."
        )
    if args.num_rollout is None and args.load_debug_rollout_data:
        return (
            "--num-epoch counts passes over --prompt-data, which --load-debug-rollout-data does "
            "not read. Use --num-rollout, as many as were recorded."
        )


@rule("debug_train_only", "debug_rollout_only")
def only_one_half_is_debugged(args: argparse.Namespace):
    if args.debug_train_only and args.debug_rollout_only:
        return (
            "--debug-train-only and --debug-rollout-only exclude each other "
            "(--load-debug-rollout-data implies the first). Remove one."
        )


@rule("length_penalty", "length_penalty_buffer", "rollout_max_response_len")
def a_length_penalty_has_a_budget_and_is_applied(args: argparse.Namespace):
    name, budget, buffer = (
        args.length_penalty,
        args.rollout_max_response_len,
        args.length_penalty_buffer,
    )
    if name != "none" and (
        args.custom_reward_post_process_path or args.custom_convert_samples_to_train_data_path
    ):
        return (
            f"--length-penalty {name} is not applied beside a custom reward post-process or a "
            "custom converter. Remove one of them."
        )
    if name in ("soft_overlong", "linear") and budget is None:
        return (
            f"--length-penalty {name} is about --rollout-max-response-len, which is missing. "
            "Give it."
        )
    if buffer is not None and (name != "soft_overlong" or not 1 <= buffer <= budget):
        return (
            f"--length-penalty-buffer is {buffer}: soft_overlong alone reads it, from 1 to "
            f"--rollout-max-response-len {budget}."
        )


# ---- batch sizes


@rule("rollout_batch_size", "n_samples_per_prompt", "global_batch_size", "num_steps_per_rollout")
def batches_divide(args: argparse.Namespace):
    if args.rollout_batch_size is None or args.global_batch_size is None:
        return None
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    product = (
        f"--rollout-batch-size {args.rollout_batch_size} x --n-samples-per-prompt "
        f"{args.n_samples_per_prompt} = {samples} samples"
    )
    steps = args.num_steps_per_rollout
    if min(samples, args.global_batch_size) < 1 or (steps is not None and steps < 1):
        return None
    if steps is not None and samples % steps:
        return (
            f"{product} do not divide over --num-steps-per-rollout {steps}. Use "
            f"{_either(nearest_divisors(samples, steps))}."
        )
    if steps is not None and args.global_batch_size * steps != samples:
        return (
            f"{product} in --num-steps-per-rollout {steps} make {samples // steps} per step, but "
            "--global-batch-size is "
            f"{args.global_batch_size}. Use --global-batch-size {samples // steps}, or leave one of the two out."
        )
    if samples % args.global_batch_size and not vars(args).get("keep_trailing_rollouts"):
        fits = _either(nearest_divisors(samples, args.global_batch_size))
        return (
            f"{product} do not divide into steps of --global-batch-size {args.global_batch_size}. "
            f"Use {fits}, or --keep-trailing-rollouts."
        )


@rule("over_sampling_batch_size", "rollout_batch_size")
def over_sampling_is_not_under_sampling(args: argparse.Namespace):
    if (
        None not in (args.over_sampling_batch_size, args.rollout_batch_size)
        and args.over_sampling_batch_size < args.rollout_batch_size
    ):
        return (
            f"--over-sampling-batch-size {args.over_sampling_batch_size} is below "
            f"--rollout-batch-size {args.rollout_batch_size}. "
            f"Use {args.rollout_batch_size} or more, or leave it out."
        )


@rule("use_dynamic_batch_size", "max_tokens_per_gpu")
def dynamic_batches_have_a_cap(args: argparse.Namespace):
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu is None:
        return (
            "--use-dynamic-batch-size needs --max-tokens-per-gpu: the tokens of one micro-batch "
            "on one GPU, for instance 8192."
        )


@rule("max_tokens_per_gpu", "log_probs_max_tokens_per_gpu", "micro_batch_packing")
def one_cap_serves_both_passes(args: argparse.Namespace):
    if args.log_probs_max_tokens_per_gpu != args.max_tokens_per_gpu:
        return (
            f"--log-probs-max-tokens-per-gpu {args.log_probs_max_tokens_per_gpu} differs from "
            f"--max-tokens-per-gpu {args.max_tokens_per_gpu}: "
            "one schedule serves both passes here. Leave the first out."
        )


@rule("use_dynamic_batch_size", "balance_by_flops")
def flops_balance_needs_dynamic_batches(args: argparse.Namespace):
    if args.balance_by_flops and not args.use_dynamic_batch_size:
        return (
            "--balance-by-flops needs --use-dynamic-batch-size (and --max-tokens-per-gpu): "
            "fixed micro-batches cannot be balanced."
        )


# ---- sampling


@rule("rollout_max_prompt_len", "rollout_max_context_len")
def prompt_leaves_room(args: argparse.Namespace):
    if (
        None not in (args.rollout_max_prompt_len, args.rollout_max_context_len)
        and args.rollout_max_prompt_len >= args.rollout_max_context_len
    ):
        return (
            f"--rollout-max-prompt-len {args.rollout_max_prompt_len} leaves no room for a response "
            "within --rollout-max-context-len "
            f"{args.rollout_max_context_len}. Use {args.rollout_max_context_len - 1} or less."
        )


SYNCHRONOUS = "slime.rollout.sglang_rollout.generate_rollout"
SUPERVISED = "slime.rollout.sft_rollout.generate_rollout"
DISTILLATION_REWARD = "slime.rollout.on_policy_distillation.reward_func"
NONZERO_STD = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
SFT_HINT = (
    f" For supervised fine-tuning on given conversations: --rollout-function-path {SUPERVISED}."
)


def _generates(args: argparse.Namespace) -> bool:
    """Whether slime's own rollout functions sample responses in this run: a user's function has its
    own needs.
    """
    return args.rollout_function_path in (SYNCHRONOUS, FULLY_ASYNC) and not args.debug_train_only


@rule(
    "rollout_max_response_len",
    "rollout_max_context_len",
    "debug_train_only",
    "rollout_function_path",
    "loss_type",
)
def responses_end(args: argparse.Namespace):
    if (
        _generates(args)
        and args.rollout_max_response_len is None
        and args.rollout_max_context_len is None
    ):
        hint = SFT_HINT if LOSSES[args.loss_type].is_supervised else ""
        return (
            "--rollout-max-response-len is missing: give it (tokens), or "
            f"--rollout-max-context-len; responses would not end.{hint}"
        )


@rule("rollout_batch_order", "rollout_function_path")
def fully_async_batches_are_filled_in_order_of_completion(args: argparse.Namespace):
    if args.rollout_function_path == FULLY_ASYNC and args.rollout_batch_order == "submission":
        return (
            "--rollout-batch-order submission cannot hold with the fully asynchronous rollout, "
            "whose batches are the first groups to finish. "
            f"Leave it out, or use --rollout-function-path {SYNCHRONOUS}."
        )


@rule(
    "dynamic_sampling_filter_path",
    "n_samples_per_prompt",
    "rollout_function_path",
    "debug_train_only",
)
def the_filter_can_keep_a_group(args: argparse.Namespace):
    if (
        _generates(args)
        and args.dynamic_sampling_filter_path == NONZERO_STD
        and args.n_samples_per_prompt == 1
    ):
        return (
            f"--dynamic-sampling-filter-path {NONZERO_STD} keeps groups whose rewards differ, and "
            "--n-samples-per-prompt 1 makes groups of one: "
            "it would drop every group. Use --n-samples-per-prompt 2 or more, or leave the filter out."
        )


@rule("keep_old_actor", "partial_rollout", "rollout_function_path")
def kept_weights_are_those_of_the_whole_rollout(args: argparse.Namespace):
    spans_versions = args.partial_rollout or "fully_async" in args.rollout_function_path
    if args.keep_old_actor and spans_versions:
        cause = (
            "--partial-rollout"
            if args.partial_rollout
            else f"--rollout-function-path {args.rollout_function_path}"
        )
        return (
            f"--keep-old-actor with {cause}: the tokens of one rollout are of several versions of "
            "the weights, and two are kept, so old log-probs would "
            "be of the wrong one. Remove --keep-old-actor; --use-rollout-logprobs takes each token's log-prob from the engine that sampled it."
        )


@rule("partial_rollout", "mask_offpolicy_in_partial_rollout")
def off_policy_mask_needs_partial_rollout(args: argparse.Namespace):
    if args.mask_offpolicy_in_partial_rollout and not args.partial_rollout:
        return (
            "--mask-offpolicy-in-partial-rollout needs --partial-rollout: without it no token "
            "of an earlier policy is kept."
        )


# ---- reward and evaluation


@rule(
    "rm_type",
    "custom_rm_path",
    "rm_url",
    "rollout_function_path",
    "custom_generate_function_path",
    "debug_train_only",
)
def reward_is_chosen(args: argparse.Namespace):
    # a generate function may set the reward itself; where it does not, scoring says that no reward
    # function was given
    chosen = args.rm_type or args.custom_rm_path or args.custom_generate_function_path
    if _generates(args) and not chosen:
        return (
            "--rm-type is missing: name a built-in scorer, for instance exact_match or math, or "
            "give --custom-rm-path."
        )
    if (
        args.rm_type is not None
        and args.rm_type.split("boxed_")[-1] == "remote_rm"
        and args.rm_url is None
    ):
        return "--rm-type remote_rm needs --rm-url, the address of the reward model."


@rule("eval_interval", "eval_prompt_data", "eval_config")
def evaluation_has_data(args: argparse.Namespace):
    if args.eval_interval is not None and not args.eval_prompt_data and not args.eval_config:
        return (
            f"--eval-interval {args.eval_interval} needs --eval-prompt-data NAME PATH (or "
            "--eval-config FILE.yaml)."
        )
    if args.eval_prompt_data and args.eval_config:
        return (
            "--eval-prompt-data and --eval-config exclude each other. Put the data sets of the "
            "first into the file of the second."
        )


@rule("eval_interval", "eval_function_path", "debug_train_only")
def evaluation_has_a_function(args: argparse.Namespace):
    if (
        args.eval_interval is None
        or args.debug_train_only
        or args.eval_function_path not in (FULLY_ASYNC, SUPERVISED)
    ):
        return None
    return (
        f"--eval-interval {args.eval_interval} asks for evaluations, which "
        f"{args.eval_function_path} does not make. Give --eval-function-path "
        f"{SYNCHRONOUS}, or leave out --eval-interval."
    )


@rule("eval_interval", "eval_prompt_data", "eval_config", "custom_rm_path", "rm_type")
def evaluation_of_a_distilled_policy_has_a_score(args: argparse.Namespace):
    if (
        args.eval_interval is None
        or args.eval_config
        or args.rm_type is not None
        or args.custom_rm_path != DISTILLATION_REWARD
    ):
        return None
    return (
        f"--eval-interval {args.eval_interval} has no score: --custom-rm-path "
        f"{DISTILLATION_REWARD} asks the teacher for log-probs. Give --rm-type, which "
        "scores evaluations then, or an --eval-config with rm_type or custom_rm_path for each data set."
    )


@rule("apply_chat_template", "rollout_function_path")
def supervised_training_renders_conversations_itself(args: argparse.Namespace):
    if args.apply_chat_template and args.rollout_function_path == SUPERVISED:
        return (
            "supervised training renders conversations itself and needs them as they are: "
            "remove --apply-chat-template."
        )


@rule("eval_prompt_data")
def evaluation_sets_are_pairs(args: argparse.Namespace):
    if args.eval_prompt_data and len(args.eval_prompt_data) != 1 and len(args.eval_prompt_data) % 2:
        words = " ".join(args.eval_prompt_data)
        return (
            f"--eval-prompt-data takes pairs NAME PATH, got {len(args.eval_prompt_data)} words: "
            f"{words}. Give each data set a name."
        )


# ---- algorithm


@rule("kl_coef", "kl_loss_coef")
def one_kl(args: argparse.Namespace):
    if args.kl_coef != 0 and args.kl_loss_coef != 0:
        return (
            f"--kl-coef {args.kl_coef} (in the reward) and --kl-loss-coef {args.kl_loss_coef} (in "
            "the loss) exclude each other. "
            "Set one of them to 0."
        )


@rule("kl_coef", "advantage_estimator")
def critic_sees_the_whole_reward(args: argparse.Namespace):
    if args.kl_coef != 0 and ESTIMATORS[args.advantage_estimator].needs_critic:
        return (
            f"--kl-coef {args.kl_coef} puts the KL into the token rewards, which the critic of "
            f"--advantage-estimator {args.advantage_estimator} does not see: its "
            f"returns would miss it. Use --use-kl-loss --kl-loss-coef {args.kl_coef}."
        )


@rule(
    "critic_num_nodes",
    "critic_num_gpus_per_node",
    "actor_num_nodes",
    "actor_num_gpus_per_node",
    "advantage_estimator",
)
def critic_is_laid_out_like_the_policy(args: argparse.Namespace):
    critic = (args.critic_num_nodes, args.critic_num_gpus_per_node)
    policy = (args.actor_num_nodes, args.actor_num_gpus_per_node)
    if ESTIMATORS[args.advantage_estimator].needs_critic and critic != policy:
        return (
            f"--critic-num-nodes {critic[0]} --critic-num-gpus-per-node {critic[1]} differ from "
            f"the policy's {policy[0]} and {policy[1]}: "
            "each critic rank gives its values to the policy rank of the same number. Leave both out."
        )


@rule("advantage_estimator", "normalize_advantages")
def reinforce_needs_normalization(args: argparse.Namespace):
    if ESTIMATORS[args.advantage_estimator].needs_whitening and not args.normalize_advantages:
        return (
            f"--advantage-estimator {args.advantage_estimator} needs --normalize-advantages: "
            "its baseline is the batch mean."
        )


@rule("use_tis", "use_rollout_logprobs")
def one_use_of_rollout_log_probs(args: argparse.Namespace):
    if args.use_tis and args.use_rollout_logprobs:
        return (
            "--use-tis corrects the gap that --use-rollout-logprobs removes: they exclude each "
            "other. Remove one."
        )


@rule("get_mismatch_metrics", "custom_tis_function_path")
def mismatch_metrics_have_a_function(args: argparse.Namespace):
    if args.get_mismatch_metrics and not args.custom_tis_function_path:
        return (
            "--get-mismatch-metrics needs --custom-tis-function-path, the function that "
            "computes them."
        )


@rule("tis_clip", "tis_clip_low")
def tis_range_is_a_range(args: argparse.Namespace):
    if args.tis_clip_low > args.tis_clip:
        return (
            f"--tis-clip-low {args.tis_clip_low} is above --tis-clip {args.tis_clip}. Use 0 and "
            "2.0."
        )


@rule("use_opd", "opd_type", "opd_teacher_load")
def distillation_is_complete(args: argparse.Namespace):
    if args.use_opd and args.opd_type is None:
        return "--use-opd needs --opd-type: where the teacher runs (sglang or megatron)."
    if not args.use_opd and args.opd_type is not None:
        return (
            f"--opd-type {args.opd_type} has no effect without --use-opd. Add it, or remove "
            "--opd-type."
        )
    if args.use_opd and args.opd_type == "megatron" and args.opd_teacher_load is None:
        return "--opd-type megatron needs --opd-teacher-load, the teacher's checkpoint."
    if args.use_opd and args.opd_type == "sglang" and args.opd_teacher_load is not None:
        return (
            "--opd-teacher-load goes with --opd-type megatron; the teacher of --opd-type sglang "
            "is a server (--rm-url)."
        )


@rule(
    "use_opd",
    "opd_type",
    "custom_rm_path",
    "rollout_temperature",
    "rollout_top_p",
    "gate_policy",
    "gate_policies",
)
def a_served_teacher_scores_the_students_distribution(args: argparse.Namespace):
    served = (
        args.use_opd
        and args.opd_type == "sglang"
        and (args.custom_rm_path or "").endswith("on_policy_distillation.reward_func")
    )
    if served and "penalize" in (args.gate_policy, *(args.gate_policies or {}).values()):
        return (
            "Gate policy penalize gives failures a reward, where --opd-type sglang has the "
            "teacher's reply. Use mark, or keep in --gate-policies."
        )
    if served and (args.rollout_temperature != 1.0 or args.rollout_top_p != 1.0):
        return (
            f"--opd-type sglang with --rollout-temperature {args.rollout_temperature} and "
            f"--rollout-top-p {args.rollout_top_p}: a server scores given "
            "tokens at temperature 1 over its whole vocabulary, so student and teacher log-probs "
            "would be of different distributions. Use 1.0 "
            "for both, or --opd-type megatron, whose teacher is computed like the student."
        )


@rule("loss_type", "custom_loss_function_path")
def custom_loss_has_a_function(args: argparse.Namespace):
    if LOSSES[args.loss_type].function is None and args.custom_loss_function_path is None:
        return f"--loss-type {args.loss_type} needs --custom-loss-function-path."


# ---- layout


@rule("bf16", "fp16")
def one_precision(args: argparse.Namespace):
    if args.bf16 and args.fp16:
        return "--bf16 and --fp16 exclude each other. Use --bf16."


@rule("lr_warmup_iters", "lr_warmup_fraction")
def one_warm_up(args: argparse.Namespace):
    if args.lr_warmup_iters and args.lr_warmup_fraction is not None:
        return (
            f"--lr-warmup-iters {args.lr_warmup_iters} and --lr-warmup-fraction "
            f"{args.lr_warmup_fraction} exclude each other. Remove one."
        )


@rule(
    "rollout_num_gpus",
    "rollout_num_gpus_per_engine",
    "debug_train_only",
    "rollout_external_engine_addrs",
)
def engines_divide(args: argparse.Namespace):
    if (
        args.debug_train_only
        or args.rollout_external_engine_addrs
        or not args.rollout_num_gpus
        or args.rollout_num_gpus_per_engine < 1
    ):
        return None
    if args.rollout_num_gpus % args.rollout_num_gpus_per_engine:
        fits = (
            -(-args.rollout_num_gpus // args.rollout_num_gpus_per_engine)
            * args.rollout_num_gpus_per_engine
        )
        return (
            f"--rollout-num-gpus {args.rollout_num_gpus} does not divide into engines of "
            "--rollout-num-gpus-per-engine "
            f"{args.rollout_num_gpus_per_engine}. Use {fits}."
        )


# ---- checkpoints, dumps, weight updates


@rule("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler")
def one_schedule_after_a_resume(args: argparse.Namespace):
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        return (
            "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude "
            "each other. Remove one."
        )


@rule("save", "save_interval")
def saving_has_a_place(args: argparse.Namespace):
    if args.save_interval is not None and args.save is None:
        return f"--save-interval {args.save_interval} needs --save, the folder of checkpoints."


@rule("save_debug_rollout_data", "save_debug_train_data")
def dumps_have_two_paths(args: argparse.Namespace):
    if (
        args.save_debug_train_data is not None
        and args.save_debug_train_data == args.save_debug_rollout_data
    ):
        return (
            "--save-debug-train-data must not be equal to --save-debug-rollout-data "
            f"({args.save_debug_train_data}): one would overwrite the other."
        )


@rule("save_debug_rollout_data", "save_debug_train_data")
def dumps_have_a_file_per_rollout(args: argparse.Namespace):
    problems = []
    for name, others in (("save_debug_rollout_data", {}), ("save_debug_train_data", {"rank": 0})):
        template = getattr(args, name)
        if template is None:
            continue
        known = " and ".join(["{rollout_id}", *(f"{{{other}}}" for other in others)])
        try:
            names = {template.format(rollout_id=rollout_id, **others) for rollout_id in (0, 1)}
        except (KeyError, IndexError, ValueError) as error:
            problems.append(
                f"{flag_of(name)} {template} has a placeholder other than {known} ({error}). Double "
                f"a brace that is meant: {{{{."
            )
            continue
        if len(names) == 1:
            problems.append(
                f"{flag_of(name)} {template} needs {{rollout_id}}, or each rollout overwrites the "
                "one before."
            )
    return problems


@rule("rollout_data_transport")
def rollout_batches_travel_through_the_object_store(args: argparse.Namespace):
    if args.rollout_data_transport != "object-store":
        return (
            f"--rollout-data-transport {args.rollout_data_transport} is not built in: shards "
            "travel through Ray's object store, where ranks of a "
            "node share one copy. Leave the option out."
        )


@rule("update_weight_transport", "update_weight_disk_dir")
def disk_transport_has_a_folder(args: argparse.Namespace):
    if args.update_weight_transport == "disk" and args.update_weight_disk_dir is None:
        return (
            "--update-weight-transport disk needs --update-weight-disk-dir, a folder that all "
            "nodes share."
        )


@rule("train_env_vars")
def environment_of_the_trainers_is_text(args: argparse.Namespace):
    wrong = {
        name: value for name, value in args.train_env_vars.items() if not isinstance(value, str)
    }
    if wrong:
        return f"--train-env-vars: values must be texts, got {wrong!r}. Write numbers in quotes."


@rule("local", "release_train")
def one_process_is_not_ended_between_rollouts(args: argparse.Namespace):
    if args.local and args.release_train:
        return (
            "--release-train ends the trainers' processes while engines generate, and --local "
            "has one process for both. Leave one of them out."
        )


@rule("offload_rollout", "rollout_external_engine_addrs")
def external_engines_keep_their_memory(args: argparse.Namespace):
    if args.offload_rollout and args.rollout_external_engine_addrs:
        return (
            "--offload-rollout frees the memory of engines that the run starts; those of "
            "--rollout-external-engine-addrs are not its own. Leave it out."
        )


@rule(
    "rollout_external_engine_addrs",
    "update_weight_transport",
    "debug_train_only",
    "debug_rollout_only",
)
def external_engines_get_weights(args: argparse.Namespace):
    trains_and_generates = not (args.debug_train_only or args.debug_rollout_only)
    if (
        args.rollout_external_engine_addrs
        and args.update_weight_transport != "disk"
        and trains_and_generates
    ):
        return (
            f"--update-weight-transport {args.update_weight_transport} reaches only engines that "
            "the run starts; those of "
            "--rollout-external-engine-addrs would keep their weights. Use --update-weight-transport disk --update-weight-disk-dir FOLDER."
        )


@rule(
    "update_weight_mode",
    "update_weight_transport",
    "colocate",
    "update_weight_local_checkpoint_dir",
)
def delta_updates_are_possible(args: argparse.Namespace):
    if args.update_weight_mode != "delta":
        return None
    problems = []
    if args.update_weight_transport != "disk":
        problems.append("--update-weight-mode=delta requires --update-weight-transport=disk.")
    if args.colocate:
        problems.append("--update-weight-mode=delta is not supported with --colocate.")
    if args.update_weight_local_checkpoint_dir is None:
        problems.append("--update-weight-mode=delta requires --update-weight-local-checkpoint-dir.")
    return problems


@rule("kl_coef", "use_kl_loss", "ref_load", "hf_checkpoint")
def reference_exists(args: argparse.Namespace):
    if (
        (args.kl_coef != 0 or args.use_kl_loss)
        and args.ref_load is None
        and args.hf_checkpoint is None
    ):
        return (
            "A KL term needs a reference model: give --ref-load (or --hf-checkpoint, whose "
            "weights are then the reference)."
        )


@rule(
    "local",
    "actor_num_nodes",
    "actor_num_gpus_per_node",
    "advantage_estimator",
    "use_sglang_router",
    "ray_address",
    "debug_rollout_only",
)
def one_process_holds_the_run(args: argparse.Namespace):
    if not args.local:
        return None
    problems = []
    ranks = args.actor_num_nodes * (args.actor_num_gpus_per_node or 1)
    if ranks > 1 and not args.debug_rollout_only:
        problems.append(
            f"--local trains on one rank, but --actor-num-nodes {args.actor_num_nodes} x "
            "--actor-num-gpus-per-node "
            f"{args.actor_num_gpus_per_node} = {ranks}. Use --actor-num-gpus-per-node 1."
        )
    if ESTIMATORS[args.advantage_estimator].needs_critic:
        problems.append(
            "--local holds one trained model, and --advantage-estimator "
            f"{args.advantage_estimator} trains a critic too. "
            "Leave --local out."
        )
    if args.use_sglang_router:
        problems.append(
            "--local starts no process, and --use-sglang-router is one. Leave one of them out."
        )
    if args.ray_address is not None:
        problems.append(
            f"--local uses no Ray, but --ray-address is {args.ray_address}. Leave one of them out."
        )
    return problems
