"""What must hold between options, one function per rule; a rule only reads options.

Each module holds the rules of one concern. A broken rule names the flags, their values, and a value
that would work. A rule returns None when it holds, else a sentence (or several). It reads only the options it names
in `@rule(...)` and is skipped where the namespace lacks one of them, so that upstream's short
namespaces can be checked too. Rules run after `derive`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from slime.config.ranges import range_problems

# Importing a module registers its rules; this is the order of their messages.
# isort: off
from slime.config.rules import required  # noqa: F401
from slime.config.rules import batching  # noqa: F401
from slime.config.rules import rollout  # noqa: F401
from slime.config.rules import reward  # noqa: F401
from slime.config.rules import evaluation  # noqa: F401
from slime.config.rules import algorithm  # noqa: F401
from slime.config.rules import megatron  # noqa: F401
from slime.config.rules import engine  # noqa: F401
from slime.config.rules import files  # noqa: F401
from slime.config.rules import cluster  # noqa: F401

# isort: on
from slime.config.rules.registry import RULES


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
