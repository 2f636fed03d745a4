"""Upstream's path of slime.data.flops: the same module, so that a patch through
either name acts.
"""

import sys

from slime.data.flops import *  # noqa: F403  # names for readers and type checkers

sys.modules[__name__] = sys.modules["slime.data.flops"]
