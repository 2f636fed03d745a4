"""Options of the reward: which function scores a response, and the pool of processes for graders
that may hang.
"""

from __future__ import annotations

import dataclasses

from slime.config.extension_points import help_of
from slime.config.option import LONGEST_WAIT, option


@dataclasses.dataclass(frozen=True)
class RewardOptions:
    """Reward: how responses are scored."""

    rm_type: str | None = option(
        None,
        "Built-in scorer: exact_match, math_value, math, math_verify, dapo, deepscaler, f1, gpqa, "
        "ifbench, remote_rm, random "
        "(docs/rewards.md says what each accepts); deepscaler scores 0 without </think> or "
        "###Response in the response. The "
        "prefix boxed_ extracts the \\boxed answer first. A row's metadata may name its own rm_type.",
    )
    custom_rm_path: str | None = option(None, help_of("custom_rm_path"))
    reward_timeout: float = option(
        60.0,
        "Seconds that one call of --custom-rm-path may take; the sample then has no reward, with "
        "the reason. A call that "
        "holds the event loop for so long ends the run; the message names function, sample and "
        "line.",
        above=0,
        maximum=LONGEST_WAIT,
    )
    rm_url: str | None = option(
        None, "Address of the remote reward model for remote_rm and on-policy distillation."
    )
    rm_timeout: float = option(
        600.0,
        "Seconds after which one call of the remote reward model is given up and tried again.",
        above=0,
        maximum=LONGEST_WAIT,
    )
    group_rm: bool = option(
        False, "Score the members of a group together, once all of them are generated."
    )
    reward_key: str | None = option(
        None, "Key of the number to train on where a scorer returns a dictionary."
    )
    eval_reward_key: str | None = option(None, "The same for evaluation; default: --reward-key.")
    custom_reward_post_process_path: str | None = option(
        None, help_of("custom_reward_post_process_path")
    )
    reward_is_random: bool = option(
        False,
        "The custom reward is random, or asks a judge that is: equal responses of a group may "
        "score differently, and "
        "rollout/reward/conflict_count is not counted.",
    )
    length_penalty: str = option(
        "none",
        "Penalty on the length of a response, added to its reward before the group's baseline: "
        "soft_overlong (linear over the last part of "
        "--rollout-max-response-len, as in DAPO), linear (over all of it), group_relative (among "
        "the group's lengths, as in Kimi k1.5). "
        "rollout/raw_reward stays as scored.",
        choices=("none", "soft_overlong", "linear", "group_relative"),
    )
    length_penalty_weight: float = option(1.0, "Largest size of that penalty.", minimum=0)
    length_penalty_buffer: int | None = option(
        None,
        (
            "Tokens at the end of --rollout-max-response-len over which soft_overlong grows; "
            "default: "
            "a fifth of it."
        ),
        minimum=1,
    )
    grader_workers: int = option(
        2,
        (
            "Processes for scorers that evaluate mathematics (math, deepscaler, dapo, math_verify, "
            "math_value); started when first needed."
        ),
        minimum=1,
    )
    grader_timeout: float = option(
        10.0,
        (
            "Seconds after which one such scoring is killed; the sample then has no reward, with "
            "the "
            "reason."
        ),
        above=0,
        maximum=LONGEST_WAIT,
    )
    grader_max_length: int = option(
        2000,
        (
            "Longest expression in characters that such a scorer is given; longer ones get no "
            "reward, "
            "with the reason."
        ),
        minimum=1,
    )
