"""Requests and tokens per second of the embedded engine through HTTP, deterministic and not, as
lists and one by one.

    python tools/bench/engine_throughput.py                       # a random 2-layer, 128-wide model
                                                                  made for the occasion
    python tools/bench/engine_throughput.py --hf-checkpoint DIR --num-requests 256 --response-length
    64

The engine runs in its own process (`slime serve`), the client in this one, so two cores are in use.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import orjson
import tyro

START_TIMEOUT_SECONDS = 120.0
URL = re.compile(r" at (http://\S+?),")


@dataclasses.dataclass(frozen=True)
class BenchCommand:
    """What is measured. A group is one list request: n siblings of one prompt."""

    hf_checkpoint: str | None = None
    """Model to serve; the default is a random one of the size of the main example."""
    num_requests: int = 1024
    """Responses per round."""
    group_size: int = 8
    """Responses of one prompt, sent as one list request."""
    prompt_length: int = 10
    """Tokens of a prompt."""
    response_length: int = 5
    """Tokens of a response (end tokens are ignored)."""
    rounds: int = 4
    """Rounds per setting; the fastest and the median are shown."""
    concurrency: int = 256
    """HTTP requests in flight."""


def make_model(folder: Path) -> None:
    """Writes a random Qwen3 of 2 layers, hidden 128, vocabulary 20 into `folder`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=20,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=256,
        eos_token_id=1,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


async def run_round(
    url: str, command: BenchCommand, *, as_list: bool, arrays: bool, seed: int
) -> float:
    """Returns the seconds that one round of `num_requests` responses takes."""
    rng = random.Random(seed)
    num_groups = command.num_requests // command.group_size
    prompts = [
        [rng.randrange(2, 20) for _ in range(command.prompt_length)] for _ in range(num_groups)
    ]
    params = {"max_new_tokens": command.response_length, "ignore_eos": True, "temperature": 1.0}
    options = {"return_logprob": True, "return_arrays": arrays}
    bodies = []
    for prompt in prompts:
        seeded = [{**params, "sampling_seed": index} for index in range(command.group_size)]
        if as_list:
            bodies.append(
                {"input_ids": [prompt] * command.group_size, "sampling_params": seeded, **options}
            )
        else:
            bodies.extend(
                {"input_ids": prompt, "sampling_params": one, **options} for one in seeded
            )
    limit = asyncio.Semaphore(command.concurrency)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=command.concurrency)
    ) as session:

        async def post(body: dict) -> int:
            async with limit, session.post(f"{url}/generate", data=orjson.dumps(body)) as response:
                answer = orjson.loads(await response.read())
                if response.status != 200:
                    raise SystemExit(f"the engine answered {response.status}: {answer}")
                return sum(
                    one["meta_info"]["completion_tokens"]
                    for one in (answer if as_list else [answer])
                )

        # Prompts of an earlier setting must not be in the cache.
        async with session.post(f"{url}/flush_cache") as response:
            response.raise_for_status()
        started = time.perf_counter()
        counts = await asyncio.gather(*(post(body) for body in bodies))
        elapsed = time.perf_counter() - started
    expected = num_groups * command.group_size * command.response_length
    if sum(counts) != expected:
        raise SystemExit(f"{sum(counts)} tokens came, expected {expected}.")
    return elapsed


def measure(folder: str, command: BenchCommand, *, deterministic: bool) -> None:
    """Starts an engine on `folder`, runs every setting and prints one line each."""
    arguments = [
        sys.executable,
        "-m",
        "slime.backends.torch_engine.serve",
        "--hf-checkpoint",
        folder,
        "--port",
        "0",
        "--no-api-key",
    ]
    arguments += ["--deterministic"] if deterministic else []
    engine = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        url = _read_url(engine)
        for as_list, arrays in ((True, True), (True, False), (False, False)):
            times = [
                asyncio.run(run_round(url, command, as_list=as_list, arrays=arrays, seed=index))
                for index in range(command.rounds)
            ]
            best, median = min(times), sorted(times)[len(times) // 2]
            print(
                f"{'deterministic' if deterministic else 'fast':14}"
                f"{f'lists of {command.group_size}' if as_list else 'one by one':14}{'arrays' if arrays else 'JSON':8}"
                f"{command.num_requests / best:8.0f} requests/s best "
                f"{command.num_requests / median:8.0f} median"
                f"{command.num_requests * command.response_length / median:10.0f} tokens/s"
            )
    finally:
        engine.terminate()
        engine.wait(timeout=30)


def _read_url(engine: subprocess.Popen) -> str:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    for line in engine.stdout:
        found = URL.search(line)
        if found:
            return found.group(1)
        if time.monotonic() > deadline:
            break
    raise SystemExit("the engine did not start; its message is above.")


def main() -> int:
    """Measures fast and deterministic decoding."""
    command = tyro.cli(BenchCommand)
    with tempfile.TemporaryDirectory(prefix="slime-bench-") as folder:
        if command.hf_checkpoint is None:
            make_model(Path(folder))
        for deterministic in (False, True):
            measure(command.hf_checkpoint or folder, command, deterministic=deterministic)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
