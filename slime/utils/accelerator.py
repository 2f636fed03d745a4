"""Upstream's path of slime.accelerator: the same module, so that a patch through
either name acts.
"""

import sys

from slime.accelerator import *  # noqa: F403  # names for readers and type checkers

sys.modules[__name__] = sys.modules["slime.accelerator"]
