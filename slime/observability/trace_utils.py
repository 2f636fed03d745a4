"""Upstream's path of slime.tracking.tracing: the same module, so that a patch through either name
acts.
"""

import sys

from slime.tracking.tracing import *  # noqa: F403  # names for readers and type checkers

sys.modules[__name__] = sys.modules["slime.tracking.tracing"]
