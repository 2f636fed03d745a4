"""Puts an engine together from a checkpoint folder and a configuration."""

from __future__ import annotations

import dataclasses

import torch

from slime.backends.torch_engine.engine import Engine, Notify
from slime.backends.torch_engine.engine_config import EngineConfig
from slime.backends.torch_engine.kv_cache import PAGE_SIZE, KvCache, bytes_per_token, num_pages
from slime.backends.torch_engine.model import Decoder
from slime.backends.torch_engine.model_runner import ModelRunner
from slime.backends.torch_engine.running_batch import RunningBatch
from slime.backends.torch_engine.tokenizer import EngineTokenizer
from slime.backends.torch_engine.weights import dtype_name, load_checkpoint
from slime.exceptions import ConfigError
from slime.models.hf_folder import read_eos_token_ids
from slime.models.shape import read_model_shape
from slime.utils.misc import free_host_bytes

DEFAULT_MAX_RUNNING = 1024
DEFAULT_FRACTION = {"cpu": 0.2, "cuda": 0.8}
MAX_CACHE_TOKENS = 2**22


@dataclasses.dataclass(frozen=True)
class LoadedEngine:
    """An engine, not started yet, and what it was made from. allowed_dtypes: those that a weight
    update may have.
    """

    engine: Engine
    decoder: Decoder
    tokenizer: EngineTokenizer | None
    eos_token_ids: tuple[int, ...]
    context_length: int
    max_running: int
    allowed_dtypes: tuple[torch.dtype, ...]

    @property
    def dtype_name(self) -> str:
        """The dtype of the weights in use."""
        return dtype_name(self.decoder.dtype)


def load_engine(config: EngineConfig, *, notify: Notify) -> LoadedEngine:
    """Returns an engine with the weights of config.hf_checkpoint. ConfigError names what does not
    fit.
    """
    shape = read_model_shape(config.hf_checkpoint)
    device = resolve_device(config.device)
    if device.type == "cpu":
        torch.set_num_threads(config.num_threads)
    if config.deterministic and device.type == "cpu" and config.num_threads != 1:
        raise ConfigError(
            f"deterministic inference on CPU needs one torch thread, not {config.num_threads}: "
            "with more, sums are split differently."
        )
    name = shape.checkpoint_dtype if config.dtype == "auto" else config.dtype
    dtype = getattr(torch, name, None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(
            f"the checkpoint's dtype is {name!r}; give the engine one of float32, bfloat16, "
            "float16."
        )
    context_length = config.context_length or shape.max_position_embeddings
    if context_length > shape.max_position_embeddings:
        raise ConfigError(
            f"context length {context_length} is more than the model's max_position_embeddings "
            f"{shape.max_position_embeddings}."
        )
    decoder = Decoder(shape, device=device, dtype=dtype)
    source_dtype = load_checkpoint(decoder, config.hf_checkpoint)
    if config.deterministic:
        decoder.make_deterministic()
    tokenizer = EngineTokenizer.from_folder(config.hf_checkpoint)
    eos_token_ids = read_eos_token_ids(
        config.hf_checkpoint, None if tokenizer is None else tokenizer.eos_token_id
    )
    max_running = config.max_running_requests or DEFAULT_MAX_RUNNING
    pages = 1 + num_pages(
        _cache_tokens(config, decoder, context_length=context_length, max_running=max_running)
    )
    runner = ModelRunner(
        decoder,
        KvCache(shape, pages, device=device, dtype=dtype),
        max_prefill_tokens=config.max_prefill_tokens,
    )
    engine = Engine(
        runner,
        RunningBatch(
            max_running,
            vocab_size=shape.vocab_size,
            eos_token_ids=eos_token_ids,
            device=device,
        ),
        tokenizer=tokenizer,
        weight_version=config.weight_version,
        prompt_cache=config.prompt_cache,
        max_waiting=config.max_waiting_requests,
        notify=notify,
    )
    allowed = tuple(dict.fromkeys((dtype, source_dtype)))
    return LoadedEngine(
        engine, decoder, tokenizer, eos_token_ids, context_length, max_running, allowed
    )


def resolve_device(name: str) -> torch.device:
    """Returns the device called `name`; auto is CUDA where there is any. ConfigError if CUDA is
    asked for and missing.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "the engine's device is cuda, but torch finds no CUDA device. Use cpu, or install a "
            "CUDA build of torch."
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return (
        torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device("cpu")
    )


def _cache_tokens(
    config: EngineConfig, decoder: Decoder, *, context_length: int, max_running: int
) -> int:
    """Returns the tokens that the cache is made for: what was asked, else what memory and the
    running requests can use.
    """
    token_bytes = bytes_per_token(decoder.config, decoder.dtype)
    if config.max_total_tokens is not None:
        return max(config.max_total_tokens, PAGE_SIZE)
    fraction = config.mem_fraction or DEFAULT_FRACTION[decoder.device.type]
    budget = fraction * _free_bytes(decoder.device)
    # Twice, because the prompt cache holds prompts besides the running sequences.
    useful = min(2 * max_running * (context_length + PAGE_SIZE), MAX_CACHE_TOKENS)
    tokens = min(int(budget // token_bytes), useful)
    if tokens < 4 * PAGE_SIZE:
        raise ConfigError(
            f"the KV cache would hold {tokens} tokens: {fraction:.0%} of free memory is "
            f"{budget / 2**20:.0f} MiB and a token takes"
            f" {token_bytes} bytes. Free memory, raise --sglang-mem-fraction-static, or give --sglang-max-total-tokens."
        )
    return tokens


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = free_host_bytes()
    return 4 * 2**30 if free is None else free
