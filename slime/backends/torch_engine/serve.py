"""`slime serve`: one embedded engine on a port, until SIGTERM or Ctrl-C. Also `python -m
slime.backends.torch_engine.serve`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import signal
import sys
from typing import Annotated, Literal

import tyro

from slime.backends.torch_engine.engine_config import EngineConfig
from slime.backends.torch_engine.process_tuning import tune_process
from slime.backends.torch_engine.server import EngineServer
from slime.exceptions import ConfigError, SlimeError
from slime.models.shape import read_model_shape

API_KEY_VARIABLE = "SLIME_API_KEY"


@dataclasses.dataclass(frozen=True)
class ServeCommand:
    """Serve a Hugging Face checkpoint over SGLang's HTTP API (docs/engine.md)."""

    hf_checkpoint: str
    """Folder with config.json, *.safetensors and tokenizer.json."""
    port: int = 30000
    """Port to listen on; 0 lets the system choose."""
    host: str = "127.0.0.1"
    """Address to bind to; anything but loopback needs a key."""
    api_key: str | None = None
    """Key that clients send as `Authorization: Bearer KEY`; the default is a new, printed one. SLIME_API_KEY gives one unseen by `ps`."""
    no_api_key: bool = False
    """Ask clients for no key; on loopback only."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto takes CUDA where there is any."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and KV cache; auto is the checkpoint's own."""
    deterministic: Annotated[bool, tyro.conf.arg(aliases=["--enable-deterministic-inference"])] = (
        False
    )
    """Results of a request with a sampling_seed do not depend on what else is in the batch."""
    random_seed: int = 42
    """Seed for requests without a sampling_seed."""
    context_length: int | None = None
    """Prompt plus response tokens, at most; the default is the model's."""
    max_running_requests: int | None = None
    """Sequences generated at once; the default is 1024."""
    max_total_tokens: int | None = None
    """Tokens of the KV cache; the default follows from free memory."""
    mem_fraction: float | None = None
    """Part of free memory for the KV cache; the default is 0.8 on a GPU and 0.2 on a CPU."""
    threads: int = 1
    """Torch threads on a CPU; deterministic inference needs 1."""
    served_model_name: str | None = None
    """Name to report; the default is the folder."""
    weight_version: str = "0"
    """Label of the weights in the folder."""

    def _key(self) -> str | None:
        given = self.api_key or os.environ.get(API_KEY_VARIABLE) or None
        if self.no_api_key and given is not None:
            raise ConfigError(
                f"--no-api-key and a key (--api-key, {API_KEY_VARIABLE}) exclude each other."
            )
        return given if self.no_api_key or given is not None else secrets.token_urlsafe(32)

    def engine_config(self) -> EngineConfig:
        """Returns the engine's configuration. ConfigError names a value that cannot work."""
        return EngineConfig(
            hf_checkpoint=self.hf_checkpoint,
            host=self.host,
            port=self.port,
            api_key=self._key(),
            device=self.device,
            dtype=self.dtype,
            deterministic=self.deterministic,
            random_seed=self.random_seed,
            context_length=self.context_length,
            max_running_requests=self.max_running_requests,
            max_total_tokens=self.max_total_tokens,
            mem_fraction=self.mem_fraction,
            num_threads=self.threads,
            served_model_name=self.served_model_name,
            weight_version=self.weight_version,
        )


def serve(command: ServeCommand) -> int:
    """Serves until SIGTERM or SIGINT and returns the exit status: 0 after a clean end, 2 if it
    cannot start (the reason is printed).
    """
    try:
        config = command.engine_config()
        # JSON only: a wrong folder is reported before torch is loaded.
        read_model_shape(config.hf_checkpoint)
        return asyncio.run(_serve(config, command))
    except SlimeError as error:
        print(f"slime serve: {error}", file=sys.stderr)
        return 2


async def _serve(config: EngineConfig, command: ServeCommand) -> int:
    # Imported late, so that a wrong option is reported before torch is loaded.
    tune_process()
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    server = EngineServer(config)
    await server.start()
    loaded = server.loaded
    is_own = config.api_key not in (None, command.api_key, os.environ.get(API_KEY_VARIABLE))
    print(
        f"serving {server.served_name} ({loaded.decoder.config.model_type}, {loaded.dtype_name}, "
        f"{loaded.decoder.device}) at {server.url},"
        f" context {loaded.context_length}, up to {loaded.max_running} sequences,"
        f" deterministic {'on' if config.deterministic else 'off'}"
        + (f", key {config.api_key}" if is_own else ""),
        flush=True,
    )
    await stopped.wait()
    print("stopping: running requests are answered as aborted", flush=True)
    await server.stop()
    return 0


def main() -> int:
    """Parses the command line and serves."""
    return serve(tyro.cli(ServeCommand, prog="slime serve"))


if __name__ == "__main__":
    raise SystemExit(main())
