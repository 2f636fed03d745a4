"""Upstream's helpers around the memory of this process's device, over the accelerator."""

from __future__ import annotations

import gc
import logging

from slime.accelerator import get_accelerator

logger = logging.getLogger(__name__)


def clear_memory(clear_host_memory: bool = False) -> None:
    """Gives unused device memory back; with `clear_host_memory` also collects Python's garbage
    first.
    """
    if clear_host_memory:
        gc.collect()
    get_accelerator().empty_cache()


def available_memory() -> dict[str, float]:
    """Returns the memory of this process's device in GB: `allocated`, `peak`, `free`, `total`."""
    return get_accelerator().memory_stats()


def print_memory(msg: str) -> dict[str, float]:
    """Logs the device's memory under `msg` and returns it."""
    memory = available_memory()
    logger.info(
        "%s: %s", msg, ", ".join(f"{name} {value:.2f} GB" for name, value in memory.items())
    )
    return memory
