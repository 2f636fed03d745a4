"""Upstream's path of slime.metrics.rollout_metrics: the same module, so that a patch through either
name acts.
"""

import sys

from slime.metrics.rollout_metrics import *  # noqa: F403  # names for readers and type checkers

sys.modules[__name__] = sys.modules["slime.metrics.rollout_metrics"]
