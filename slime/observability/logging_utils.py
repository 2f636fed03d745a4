"""Upstream's path of slime.tracking.tracking: the same module, so that a patch through either name
acts.
"""

import sys

from slime.tracking.tracking import *  # noqa: F403  # names for readers and type checkers

sys.modules[__name__] = sys.modules["slime.tracking.tracking"]
