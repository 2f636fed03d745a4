"""What a unit test of a reward, a generate function or a hook needs; no run imports it.

    from slime.testing import FakeEngine, call, engines_at, make_args, make_sample

    def test_my_reward():
        assert call(my_reward, make_args(), make_sample(response="4", label="4")) == 1.0

    def test_my_generate(tmp_path):
        args = make_args(hf_checkpoint=make_tiny_tokenizer(tmp_path))
        with FakeEngine(lambda prompt: [5, 6]) as engine, engines_at(engine.url):
            sample = call(my_generate, args, make_sample(prompt="1+1="), {"max_new_tokens": 4})

Fixtures for pytest (a tiny model and a real engine that serves it) are in slime.testing.fixtures.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from slime.config.specs import nearest_names, slime_specs
from slime.data.sample import Sample
from slime.exceptions import ConfigError
from slime.rollout import engine_client
from slime.testing.fake_engine import FakeEngine, Fault, Prompt, log_prob_of, make_reply
from slime.testing.tiny_models import make_char_tokenizer, make_tiny_checkpoint
from slime.typing import Tokenizer
from slime.utils.async_utils import run
from slime.utils.misc import SingletonMeta

__all__ = [
    "FakeEngine", "Fault", "Prompt", "call", "engines_at", "log_prob_of", "make_args", "make_char_tokenizer", "make_reply", "make_sample",
    "make_tiny_checkpoint", "make_tiny_tokenizer",
]  # fmt: skip

# Values for the options that a run must be given, small enough for a test.
SMALL = {
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 2,
    "rollout_max_response_len": 8,
    "rollout_num_engines": 1,
    # a scripted engine's text is what a test says, not what a tokenizer makes of the ids
    "gate_compare_text": "off",
}


def make_args(**overrides: object) -> argparse.Namespace:
    """Every option of slime with its default, the required ones with small values, then
    `overrides`.

    Nothing is derived or checked, and a model's own options (megatron-core's) are not among them.
    ConfigError for a name that is no option, with the nearest.
    """
    values = {spec.name: spec.default for spec in slime_specs()} | SMALL
    for name in overrides:
        if name not in values:
            near = nearest_names(name, values)
            raise ConfigError(
                f"unknown option {name!r}." + (f" Did you mean {near[0]!r}?" if near else "")
            )
    return argparse.Namespace(**{**values, **overrides})


def make_sample(
    prompt: str | list[dict] = "",
    response: str = "",
    *,
    tokenizer: Tokenizer | None = None,
    log_probs: Sequence[float] | None = None,
    loss_mask: Sequence[int] | None = None,
    **fields: Any,
) -> Sample:
    """A sample as it stands after generation: ids, lengths and masks fit the texts; without a
    response one that is still to be generated.

    tokenizer: gives the ids; without one, each character is its code point. log_probs: the
    engine's, one per response token; default -0.5. fields: further fields of Sample (label,
    metadata, index, group_index, reward, status, ...).
    """
    if not response:
        return Sample(prompt=prompt, **{"index": 0, "group_index": 0, **fields})

    def ids_of(text: object) -> list[int]:
        if not isinstance(text, str):
            raise ConfigError(
                f"make_sample takes the text of the prompt, got {type(text).__name__}; render "
                "messages first."
            )
        return (
            list(tokenizer(text, add_special_tokens=False)["input_ids"])
            if tokenizer
            else list(map(ord, text))
        )

    response_ids = ids_of(response)
    for name, given in (("log_probs", log_probs), ("loss_mask", loss_mask)):
        if given is not None and len(given) != len(response_ids):
            raise ConfigError(
                f"make_sample: {len(given)} {name} for {len(response_ids)} response tokens."
            )
    values: dict[str, Any] = {
        "index": 0,
        "group_index": 0,
        "status": Sample.Status.COMPLETED,
        "tokens": ids_of(prompt) + response_ids,
        "response_length": len(response_ids),
        "rollout_log_probs": [-0.5] * len(response_ids) if log_probs is None else list(log_probs),
        "loss_mask": None if loss_mask is None else list(loss_mask),
    }
    return Sample(prompt=prompt, response=response, **(values | fields))


def call(function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """The result of a function, awaited where it is async. Samples that it was given are changed as
    in a run.
    """

    async def result_of() -> Any:
        result = function(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    return run(result_of())


def make_tiny_tokenizer(folder: str | Path) -> str:
    """`folder`, now holding a tokenizer of one id per character, with a chat template (no weights):
    enough for a scripted engine.
    """
    make_char_tokenizer().save_pretrained(folder)
    return str(folder)


@contextlib.contextmanager
def engines_at(*urls: str, is_router: bool = False) -> Iterator[None]:
    """Inside, generation goes to the engines at `urls`, and nothing is left of earlier rollouts in
    this process, nor after it.
    """
    SingletonMeta.clear_instances()
    engine_client.set_engines(urls, is_router=is_router)
    try:
        yield
    finally:
        SingletonMeta.clear_instances()
        engine_client.set_engines(())
