"""Upstream's path of slime.accelerator.memory: the same module, so that a patch through either name
acts.
"""

import sys

from slime.accelerator.memory import *  # noqa: F403  # names for readers and type checkers

sys.modules[__name__] = sys.modules["slime.accelerator.memory"]
