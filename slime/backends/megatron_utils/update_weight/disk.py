"""Publishing through a folder that trainer and engines both see: for servers that are not our Ray
actors, SGLang's among them.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slime.backends.megatron_utils.hf_checkpoint_saver import save_hf_model_direct_to_path
from slime.backends.megatron_utils.update_weight.gather import iter_hf_weight_buckets
from slime.backends.megatron_utils.update_weight.manager import ask_manager
from slime.exceptions import EngineError
from slime.models.shape import ModelShape
from slime.ray.servers import PublishedWeights
from slime.ray.utils import TRAINING_RANKS, held
from slime.tracking.spans import span
from slime.typing import ActorHandle
from slime.utils.async_utils import run
from slime.utils.http_utils import (
    init_http_client,
    is_worth_retrying,
    post,
    request_once,
    send_key_to,
)
from slime.utils.misc import load_function

if TYPE_CHECKING:
    from slime.backends.megatron_utils.update_weight.publish import Fingerprint


def update_problem(reply: object, *, expected: str | None) -> str | None:
    """Why a server's reply to a weight update does not mean that it has the weights; None where it
    does. `expected`: their checksum.
    """
    told = reply if isinstance(reply, dict) else {}
    if not told.get("success"):
        return f"it answered {str(reply)[:300]}"
    if expected is not None and told.get("checksum") != expected:
        found = told.get("checksum")
        return (
            "it reports no checksum, which --check-weight-update-equal needs; leave that out with "
            "this server"
            if found is None
            else f"its checksum is {found}, the trainer's {expected}"
        )
    return None


def publish_through_disk(
    args: argparse.Namespace,
    model: Sequence[torch.nn.Module],
    shape: ModelShape,
    rollout_manager: ActorHandle,
    version: int,
    fingerprint: Fingerprint,
) -> str | None:
    """The fingerprint, on the main rank: the weights are written to <dir>/weight_v<version>, every
    server loads them, older folders go unless they are to be kept.
    """
    root = Path(args.update_weight_disk_dir)
    folder = root / f"weight_v{version}"
    with span("save_hf"):
        save_hf_model_direct_to_path(args, folder, model)
    for bucket in iter_hf_weight_buckets(args, model, shape):
        fingerprint.add(bucket)
    if fingerprint.value() is None:
        return None
    lock = ask_manager(args, rollout_manager.get_updatable_engines_and_lock)[1]
    with held(lock, timeout_s=args.step_timeout, holder=TRAINING_RANKS):
        _load_everywhere(args, rollout_manager, version, folder, fingerprint)
        if args.custom_update_weight_post_write_path is not None:
            engines = ask_manager(args, rollout_manager.get_updatable_engines_and_lock)[0]
            load_function(args.custom_update_weight_post_write_path)(args, str(folder), engines)
        ask_manager(args, rollout_manager.clear_updatable_num_new_engines, version)
    for old in () if args.update_weight_disk_keep_files else root.glob("weight_v*"):
        if old != folder:
            shutil.rmtree(old, ignore_errors=True)
    return fingerprint.value()


def _load_everywhere(
    args: argparse.Namespace,
    rollout_manager: ActorHandle,
    version: int,
    folder: Path,
    fingerprint: Fingerprint,
) -> None:
    """Every server has loaded the folder, or, with --use-fault-tolerance, is known to be lost."""
    outlives = args.use_fault_tolerance
    addresses = (
        ask_manager(args, rollout_manager.begin_weight_update)[1]
        if outlives
        else dict(enumerate(ask_manager(args, rollout_manager.get_engine_urls)))
    )
    init_http_client(args)  # the servers' key
    send_key_to(addresses.values())
    expected = fingerprint.value() if args.check_weight_update_equal else None
    checksum: str | None = None
    taken: list[int] = []
    for rank, url in addresses.items():
        try:
            if outlives:
                wait = args.rollout_health_check_timeout
                run(request_once("GET", f"{url}/health", timeout_s=wait))
            with span("send_weights", engine=url):
                reply = run(post(f"{url}/update_weights_from_disk", _body(folder, version), 2))
        except EngineError as error:
            if not outlives or not is_worth_retrying(error):
                raise
            ask_manager(args, rollout_manager.lose_engine, rank, str(error))
            continue
        problem = update_problem(reply, expected=expected)
        if problem is not None:
            raise EngineError(
                f"the engine at {url} did not load the weights of version {version}: {problem}"
            )
        checksum = checksum or reply.get("checksum")
        taken.append(rank)
    if outlives:
        published = PublishedWeights(str(version), checksum, folder=str(folder.resolve()))
        ask_manager(args, rollout_manager.keep_published, published, taken)


def _body(folder: Path, version: int) -> dict[str, Any]:
    return {
        "model_path": str(folder.resolve()),
        "weight_version": str(version),
        "flush_cache": True,
    }
