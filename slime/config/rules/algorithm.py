"""Rules of the algorithm: one KL, a complete correction, a teacher."""

from __future__ import annotations

import argparse

from slime.algorithms.table import ESTIMATORS, LOSSES
from slime.config.rules.registry import rule


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
