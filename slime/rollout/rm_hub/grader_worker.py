"""One grader process: reads a request per line from one descriptor, writes an answer per line to
another.

    {"secret": S, "grader": "math", "response": "...", "label": "..."} -> S {"value": 1} or
                                                                          S {"error": "..."}
    {"secret": S, "prepare": "math"}                  -> S {"value": null}: its imports are done

S is new for each request; the pool believes no line without it. Processes that a grader starts,
forked ones too, have neither descriptor, and cannot open them through /proc unless they are root's.
`grader` is one of GRADERS, or the dotted path of a function (response, label) that the run's
configuration names. The process ends with its guard (`grader_guard`), also when the guard is killed
or this one is deep inside C code.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
from typing import Any

from slime.rollout.rm_hub import math_value
from slime.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward
from slime.rollout.rm_hub.labels import label_answers
from slime.rollout.rm_hub.math_dapo_utils import compute_score
from slime.rollout.rm_hub.math_utils import grade_answer_verl

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
# Longest answer: a value is a number or a small dictionary.
MAX_ANSWER_BYTES = 1 << 20
MEMORY_LIMIT_BYTES = 4 * 2**30
# math-verify searches the whole text that it is given; the answer stands at its end.
LAST_CHARS = 20_000


def grade_math(response: str, label: object) -> int:
    """1 where the boxed answer is right, else 0."""
    return int(grade_answer_verl(response, label))


def grade_deepscaler(response: str, label: object) -> int:
    """DeepScaleR's rule."""
    return get_deepscaler_rule_based_reward(response, label)


def grade_dapo(response: str, label: object) -> dict[str, Any]:
    """DAPO's rule: a score with its parts."""
    return compute_score(response, label)


def grade_math_value(response: str, label: object) -> int:
    """By value, whatever the spelling."""
    return math_value.grade_math_value(response, label)


def grade_math_verify(response: str, label: object) -> int:
    """1 where math-verify finds the response equal to the label, else 0. Its own time limits are
    off: the pool has one.
    """
    from math_verify import parse, verify

    answer = parse(response[-LAST_CHARS:], parsing_timeout=None, raise_on_error=True)
    golds = [
        parse(f"${truth}$", parsing_timeout=None, raise_on_error=True)
        for truth in label_answers(label)
    ]
    return int(
        any(verify(gold, answer, timeout_seconds=None, raise_on_error=True) for gold in golds)
    )


GRADERS = {
    "math": grade_math,
    "deepscaler": grade_deepscaler,
    "dapo": grade_dapo,
    "math_verify": grade_math_verify,
    "math_value": grade_math_value,
}


def find_grader(name: str) -> Any:
    """The grader of that name or dotted path."""
    if name in GRADERS:
        return GRADERS[name]
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(module), function)


def prepare_grader(name: str) -> None:
    """Imports what a grader needs, so that its first call is not slower than the others."""
    grader = find_grader(name)
    if name in GRADERS:
        grader("</think>Answer: \\boxed{x+1}", "1+x")


def answer_request(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request; an exception of the grader becomes its text."""
    try:
        if "prepare" in request:
            prepare_grader(request["prepare"])
            value = None
        else:
            value = find_grader(request["grader"])(request["response"], request["label"])
        size = len(json.dumps(value))
    except MemoryError:
        return {"error": f"more than {MEMORY_LIMIT_BYTES >> 30} GiB of memory are needed"}
    except Exception as error:  # noqa: BLE001 - whatever a grader raises is its answer
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    if size > MAX_ANSWER_BYTES:
        return {"error": f"the value has {size} bytes as JSON; at most {MAX_ANSWER_BYTES}"}
    return {"value": value}


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when its parent ends, and ends now if that has happened
    already. Processes of the same user, those of a grader among them, cannot read its memory or
    open its descriptors through /proc.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Serves requests until they end."""
    parent, requests, answers = map(int, sys.argv[1:4])
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the pool's business
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for fd in (requests, answers):
        os.set_inheritable(fd, False)
    os.register_at_fork(after_in_child=lambda: _close(requests, answers))
    write_answer(answers, "start", {"value": os.getpid()})
    with os.fdopen(requests, encoding="utf-8") as lines:
        for line in lines:
            request = json.loads(line)
            secret = request.pop("secret")
            write_answer(answers, secret, answer_request(request))


def write_answer(fd: int, secret: str, answer: dict[str, Any]) -> None:
    """Writes one line; what else stands in the pipe is another line."""
    data = f"\n{secret} {json.dumps(answer)}\n".encode()
    while data:
        data = data[os.write(fd, data) :]


def _close(*fds: int) -> None:
    for fd in fds:
        try:
            os.close(fd)
        except OSError:
            continue


if __name__ == "__main__":
    main()
