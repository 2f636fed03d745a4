"""Upstream's path of slime.prompts.data_source: the same module, so that a patch through either
name acts.
"""

import sys

from slime.prompts.data_source import *  # noqa: F403  # names for readers and type checkers

sys.modules[__name__] = sys.modules["slime.prompts.data_source"]
