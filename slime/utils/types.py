"""Upstream's path of slime.data.sample: the same module, so that a patch through
either name acts.
"""

import sys

from slime.data.sample import *  # noqa: F403  # names for readers and type checkers

sys.modules[__name__] = sys.modules["slime.data.sample"]
