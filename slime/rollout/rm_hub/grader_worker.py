"""One grader process: reads a request per line from stdin, writes an answer per line to stdout,
both JSON.

    {"id": 7, "grader": "math", "response": "...", "label": "..."} -> {"id": 7, "value": 1} or
    {"id": 7, "error": "..."}
    {"id": 6, "prepare": "math"}                                    -> {"id": 6, "value": null}: its
                                                                    imports are done

`grader` is one of GRADERS, or the dotted path of a function (response, label) that the run's
configuration names. The process ends with its parent, also when the parent is killed or this one is
deep inside C code.
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
        json.dumps(value)
    except MemoryError:
        return {
            "id": request["id"],
            "error": f"more than {MEMORY_LIMIT_BYTES >> 30} GiB of memory are needed",
        }
    except Exception as error:  # noqa: BLE001 - whatever a grader raises is its answer
        return {"id": request["id"], "error": f"{type(error).__name__}: {str(error)[:300]}"}
    return {"id": request["id"], "value": value}


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when its parent ends, and ends now if that has happened
    already.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Serves requests until stdin ends."""
    die_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a grader prints must not look like an answer
    answers.write('{"ready": true}\n')
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(answer_request(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
