"""Whether a name is one of the built-in reward types, said before anything is generated."""

from __future__ import annotations

import argparse
import importlib.util

from slime.config.specs import nearest_names
from slime.rollout.rm_hub import BOXED_PREFIX, RM_TYPES

# Types that need a package: (its module, what to do).
_PACKAGES = {
    "ifbench": (
        "ifbench",
        "Put the IFBench checkers of allenai/IFBench on PYTHONPATH, or use --custom-rm-path.",
    ),
    "math_verify": (
        "math_verify",
        "Install slime-rl[math], or use --rm-type math_value, which does without.",
    ),
}
# Types whose verdict is a dictionary: (its keys, the one to train on).
_DICTIONARIES = {"dapo": ("score, acc, pred", "score")}


def missing_key_problem(args: argparse.Namespace) -> str | None:
    """Returns what is wrong where --rm-type gives a dictionary and nothing says which of its values
    is the reward.
    """
    name = (args.rm_type or "").strip().removeprefix(BOXED_PREFIX)
    own = (
        args.custom_rm_path,
        args.custom_generate_function_path,
        args.custom_reward_post_process_path,
    )
    if (
        name not in _DICTIONARIES
        or args.reward_key is not None
        or any(own)
        or not str(args.rollout_function_path).startswith("slime.")
    ):
        return None
    keys, key = _DICTIONARIES[name]
    return (
        f"{args.rm_type} gives several values ({keys}), and --reward-key does not say which is "
        f"the reward. Add --reward-key {key}."
    )


def rm_type_problem(rm_type: object) -> str | None:
    """Returns what is wrong with a reward type, and the nearest known one; None for a known type or
    none at all.
    """
    if rm_type is None or (
        isinstance(rm_type, str) and rm_type.strip().removeprefix(BOXED_PREFIX) in RM_TYPES
    ):
        return _package_problem(rm_type)
    name = str(rm_type).strip()
    prefix = BOXED_PREFIX if name.startswith(BOXED_PREFIX) else ""
    near = nearest_names(name.removeprefix(BOXED_PREFIX), RM_TYPES)
    hint = f" Did you mean {prefix}{near[0]}?" if near else ""
    known = ", ".join(sorted(RM_TYPES))
    return (
        f"{rm_type!r} is not a built-in reward type.{hint} Known: {known}, each also with the "
        f"prefix {BOXED_PREFIX}; "
        "a function of yours goes into --custom-rm-path."
    )


def _package_problem(rm_type: str | None) -> str | None:
    package, remedy = _PACKAGES.get((rm_type or "").strip().removeprefix(BOXED_PREFIX), (None, ""))
    if package is None or importlib.util.find_spec(package) is not None:
        return None
    return f"{rm_type!r} needs the package {package}, which is not installed. {remedy}"
