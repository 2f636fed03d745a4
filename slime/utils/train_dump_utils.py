"""Upstream's path of slime.files.train_dump_utils: the same module, so that a patch through either
name acts.
"""

import sys

from slime.files.train_dump_utils import *  # noqa: F403  # names for readers and type checkers

sys.modules[__name__] = sys.modules["slime.files.train_dump_utils"]
