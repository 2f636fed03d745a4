"""Upstream's path of slime.metrics.statistics: the same module, so that a patch through either name acts."""

import sys

from slime.metrics import statistics
from slime.metrics.statistics import *  # noqa: F403  # names for readers and type checkers

sys.modules[__name__] = statistics
