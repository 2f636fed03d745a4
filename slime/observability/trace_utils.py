"""Upstream's later path of slime.utils.trace_utils."""

from slime.utils.trace_utils import *  # noqa: F403
from slime.utils.trace_utils import __all__  # noqa: F401
