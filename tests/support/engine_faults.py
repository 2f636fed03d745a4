"""A reward that breaks an engine in the middle of a rollout, for real runs: as users' functions it
runs in the rollout manager's process.

    SLIME_TEST_FAULTS="1:9,2:19"    SIGKILL in rollout 1, SIGSTOP in rollout 2, at the first reward
"""

from __future__ import annotations

import json
import os
import time

from support.small_run import ends_in_time

from slime.rollout.engine_client import get_engines
from slime.rollout.sample_hooks import get_current_rollout_id
from slime.utils import http_utils

VARIABLE = "SLIME_TEST_FAULTS"
_done: set[int] = set()


async def engine_url(args) -> str:
    """The address of an engine, also behind the router."""
    engines = get_engines(args)
    if not engines.is_router:
        return engines.urls[0]
    url = (await http_utils.get(f"{engines.urls[0]}/workers"))["workers"][0]["url"]
    http_utils.send_key_to([url])
    return url


async def reward(args, sample, **kwargs) -> float:
    """The reward of support.small_run; the first one of a rollout with a fault is its moment."""
    planned = dict(pair.split(":") for pair in os.environ.get(VARIABLE, "").split(",") if pair)
    rollout = get_current_rollout_id()
    signal = planned.get(str(rollout))
    if signal is not None and rollout not in _done:
        _done.add(rollout)
        info = await http_utils.get(f"{await engine_url(args)}/get_server_info")
        load = info["internal_states"][0]["load"]
        os.kill(info["pid"], int(signal))
        note = {"rollout": rollout, "pid": info["pid"], "at": time.time(), "load": load}
        with open(f"{args.run_dir}/faults.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(note) + "\n")
    return await ends_in_time(args, sample)
