"""Upstream's path of slime.metrics.train_metrics: the same module, so that a patch through either
name acts.
"""

import sys

from slime.metrics.train_metrics import *  # noqa: F403  # names for readers and type checkers

sys.modules[__name__] = sys.modules["slime.metrics.train_metrics"]
