"""A rollout function that only waits, so that the running engines can be inspected."""

from __future__ import annotations

import argparse
import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.prompts.data_source import DataSource

logger = logging.getLogger(__name__)


def sleep(
    args: argparse.Namespace, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> None:
    """Waits until the process is ended."""
    for hours in range(10**6):
        logger.info(
            "rollout %d: the engines are up and nothing is generated (hour %d)", rollout_id, hours
        )
        time.sleep(3600)
