"""Whether a name is one of the built-in reward types, said before anything is generated."""

from __future__ import annotations

from typing import Any

from slime.config.specs import nearest_names
from slime.rollout.rm_hub import BOXED_PREFIX, RM_TYPES


def rm_type_problem(rm_type: Any) -> str | None:
    """Returns what is wrong with a reward type, and the nearest known one; None for a known type or none at all."""
    if rm_type is None or (isinstance(rm_type, str) and rm_type.strip().removeprefix(BOXED_PREFIX) in RM_TYPES):
        return None
    name = str(rm_type).strip()
    prefix = BOXED_PREFIX if name.startswith(BOXED_PREFIX) else ""
    near = nearest_names(name.removeprefix(BOXED_PREFIX), RM_TYPES)
    hint = f" Did you mean {prefix}{near[0]}?" if near else ""
    known = ", ".join(sorted(RM_TYPES))
    return (
        f"{rm_type!r} is not a built-in reward type.{hint} Known: {known}, each also with the prefix {BOXED_PREFIX}; "
        "a function of yours goes into --custom-rm-path."
    )
