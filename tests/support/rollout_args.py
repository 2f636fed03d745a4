"""Options, prompts and a tokenizer for tests of the rollout side, and the reset of what it keeps per process."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_checkpoints: dict[str, str] = {}


def rollout_args(**overrides: Any) -> argparse.Namespace:
    """Every option of slime with its default, the required ones with small values, and then `overrides`."""
    from slime.config.specs import slime_specs

    values = {spec.name: spec.default for spec in slime_specs()}
    values.update(
        rollout_batch_size=4,
        n_samples_per_prompt=2,
        rollout_max_response_len=8,
        rollout_num_engines=1,
        rm_type="exact_match",
        vocab_size=None,
        prompt_data=None,
        label_key="label",
        load=None,
        save=None,
        run_dir=None,
    )
    unknown = set(overrides) - set(values)
    assert not unknown, f"not options: {unknown}"
    return argparse.Namespace(**{**values, **overrides})


def write_prompts(path: Path, count: int, **extra: Any) -> str:
    """`count` rows {"input": "p<i>=", "label": "<i>"}: a prompt's text names its number."""
    rows = [{"input": f"p{number}=", "label": str(number), **extra} for number in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def tokenizer_folder(folder: Path) -> str:
    """A folder with the character tokenizer of tiny_models (config and weights are not needed here)."""
    from support.tiny_models import make_char_tokenizer

    make_char_tokenizer().save_pretrained(folder)
    return str(folder)


@contextlib.contextmanager
def fresh_rollout_state(*urls: str, is_router: bool = False) -> Iterator[None]:
    """Engines at `urls` and no state left of earlier rollouts in this process, nor after it."""
    from slime.rollout import engine_client
    from slime.utils.misc import SingletonMeta

    SingletonMeta.clear_instances()
    engine_client.set_engines(urls, is_router=is_router)
    try:
        yield
    finally:
        SingletonMeta.clear_instances()
        engine_client._engines = None
