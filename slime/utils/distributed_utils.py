"""Upstream's path of slime.accelerator.process_groups: the same module, so that a patch through
either name acts.
"""

import sys

from slime.accelerator.process_groups import *  # noqa: F403  # names for readers and type checkers

sys.modules[__name__] = sys.modules["slime.accelerator.process_groups"]
