"""Switches off colours and libraries' progress bars where output is not a terminal (a file, a
pipe, CI).
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

# What each library reads: tqdm (transformers, datasets), the hub's client, Ray's lines about its
# processes.
PLAIN = {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "RAY_COLOR_PREFIX": "0"}


def keep_output_plain(
    environment: MutableMapping[str, str] = os.environ, *, is_terminal: bool | None = None
) -> None:
    """Sets `PLAIN` in the environment, before the libraries read it, where output is no terminal or
    NO_COLOR is set; what is set stays.
    """
    if is_terminal is None:
        is_terminal = sys.stdout.isatty() and sys.stderr.isatty()
    if is_terminal and not environment.get("NO_COLOR"):
        return
    for name, value in PLAIN.items():
        environment.setdefault(name, value)
