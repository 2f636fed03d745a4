"""The frozen configuration of one engine process, and how it is made from the command line's
namespace.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

from slime.exceptions import ConfigError
from slime.utils.misc import is_loopback

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """One embedded engine. `port` 0 lets the system choose; None for a limit means: from the model
    or from free memory.
    """

    hf_checkpoint: str
    host: str = "127.0.0.1"
    port: int = 0
    api_key: str | None = dataclasses.field(default=None, repr=False)
    device: str = "auto"
    dtype: str = "auto"
    deterministic: bool = False
    random_seed: int = 42
    context_length: int | None = None
    max_running_requests: int | None = None
    max_waiting_requests: int = 65536
    max_total_tokens: int | None = None
    max_prefill_tokens: int = 4096
    mem_fraction: float | None = None
    prompt_cache: bool = True
    num_threads: int = 1
    served_model_name: str | None = None
    weight_version: str = "0"
    max_request_bytes: int = 32 * 2**20

    def __post_init__(self) -> None:
        _require(
            self.device in DEVICES,
            f"engine device {self.device!r}: use one of {', '.join(DEVICES)}.",
        )
        _require(
            self.dtype in DTYPES, f"engine dtype {self.dtype!r}: use one of {', '.join(DTYPES)}."
        )
        _require(
            0 <= self.port <= 65535, f"engine port {self.port}: use 0 (any free one) to 65535."
        )
        for name in ("context_length", "max_running_requests", "max_total_tokens"):
            value = getattr(self, name)
            _require(
                value is None or value >= 1,
                f"engine {name} {value}: use at least 1, or leave it out.",
            )
        for name in (
            "max_prefill_tokens",
            "num_threads",
            "max_request_bytes",
            "max_waiting_requests",
        ):
            _require(
                getattr(self, name) >= 1, f"engine {name} {getattr(self, name)}: use at least 1."
            )
        fraction = self.mem_fraction
        _require(
            fraction is None or 0 < fraction <= 1,
            f"engine mem_fraction {fraction}: use a number in (0, 1].",
        )
        _require(
            bool(self.api_key) or is_loopback(self.host),
            f"the engine would listen on {self.host}, which other machines can reach, without a "
            "key. Pass --sglang-api-key (slime serve:"
            " --api-key), or bind to 127.0.0.1.",
        )


def engine_config_from_args(
    args: argparse.Namespace, rank: int, *, host: str | None = None
) -> EngineConfig:
    """Returns the configuration of engine `rank` from the flat options namespace. `host` overrides
    --sglang-host (multi-node).

    Without a --sglang-dtype the engine computes in the trainer's type, in which its weights arrive,
    whatever the checkpoint's is.
    """
    trainer_dtype = "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32"
    return EngineConfig(
        hf_checkpoint=args.hf_checkpoint,
        host=host or args.sglang_host,
        port=0 if args.sglang_port is None else args.sglang_port + rank,
        api_key=None if args.no_api_key else args.sglang_api_key or None,
        device=args.rollout_engine_device,
        dtype=trainer_dtype if args.sglang_dtype == "auto" else args.sglang_dtype,
        deterministic=args.sglang_enable_deterministic_inference,
        # Engines must not draw the same numbers for requests that bring no seed.
        random_seed=args.sglang_random_seed + rank,
        context_length=args.sglang_context_length,
        max_running_requests=args.sglang_max_running_requests,
        max_total_tokens=args.sglang_max_total_tokens,
        max_prefill_tokens=args.sglang_max_prefill_tokens,
        mem_fraction=args.sglang_mem_fraction_static,
        prompt_cache=not args.sglang_disable_radix_cache,
        num_threads=args.rollout_engine_threads,
        served_model_name=args.sglang_served_model_name,
    )


def engine_config_from(options: EngineConfig | Mapping[str, Any]) -> EngineConfig:
    """Returns `options` as an EngineConfig; a mapping has its fields as keys. ConfigError names an
    unknown key.
    """
    if isinstance(options, EngineConfig):
        return options
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    unknown = sorted(set(options) - known)
    _require(not unknown, f"unknown engine options {unknown}; known are {sorted(known)}.")
    return EngineConfig(**options)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
