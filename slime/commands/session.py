"""Runs a loop from its first actor to its report; an error becomes a message and an exit status."""

from __future__ import annotations

import argparse
import bdb
import logging
import sys
import time
import traceback
from collections.abc import Callable

import ray

from slime.config.derive import has_megatron_checkpoint
from slime.exceptions import ConfigError, NothingLeft
from slime.harness.report import finish_run
from slime.plugins.watched_calls import last_words
from slime.ray.session import interruptible
from slime.ray.utils import plain_text, slime_error_of
from slime.tracking.tracking import log_dir_of
from slime.train import Run, check_ledger, open_run

logger = logging.getLogger("slime")


def run_to_the_end(args: argparse.Namespace, loop: Callable[[Run], None], started: float) -> int:
    """Runs `loop` on the run of these options and returns the exit status; whatever ends it is
    named, and everything is stopped. `started`: `time.monotonic()` at the start of the process.
    """
    status, is_done = 1, False
    with interruptible(to_the_end=True):
        try:
            with open_run(args) as run:
                loop(run)
                check_ledger(run)
            status, is_done = 0, True
        except KeyboardInterrupt as error:
            go_on = (
                f"; continue with --load {args.save}" if has_megatron_checkpoint(args.save) else ""
            )
            print(
                f"interrupted ({str(error) or 'SIGINT'}): everything is stopped{go_on}",
                file=sys.stderr,
            )
            status = 130
        except bdb.BdbQuit:
            print("ended in the debugger: everything is stopped", file=sys.stderr)
            status = 130
        except NothingLeft as sentence:
            print(sentence, file=sys.stderr)
            status = 0
        except Exception as error:  # noqa: BLE001 - whatever it is, it is named, and the run fails
            status = print_failure(error)
            if (words := last_words(log_dir_of(args))) is not None:
                print(f"error: {words}", file=sys.stderr)
        finally:
            problems = finish_run(args)
    if is_done and problems:
        status = 1
    logger.info("finished with status %d after %.0f s", status, time.monotonic() - started)
    return status


def print_failure(error: Exception) -> int:
    """Says on standard error what ended the run, in place of Ray's pages; returns the exit status:
    2 for a ConfigError, else 1.

    An error that slime raised on purpose, in this process or in an actor, is its one message. Of
    any other, the actor that raised it and the end of its stack are shown.
    """

    known = slime_error_of(error)
    if known is not None:
        print(f"error: {known}", file=sys.stderr)
        return 2 if isinstance(known, ConfigError) else 1
    if isinstance(error, ray.exceptions.RayError):
        # Ray's text begins with the actor and ends with the cause.
        lines = plain_text(error).splitlines()
        print("\n".join([f"error in an actor: {lines[0]}", *lines[1:][-12:]]), file=sys.stderr)
    else:
        traceback.print_exception(error)
    print("each process's log is in the run folder, below logs/", file=sys.stderr)
    return 1
