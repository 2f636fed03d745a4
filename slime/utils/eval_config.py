"""Upstream's path of slime.prompts.eval_config: the same module, so that a patch through either
name acts.
"""

import sys

from slime.prompts.eval_config import *  # noqa: F403  # names for readers and type checkers

sys.modules[__name__] = sys.modules["slime.prompts.eval_config"]
