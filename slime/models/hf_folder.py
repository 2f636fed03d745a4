"""What a Hugging Face folder says outside its weights. Read as JSON; no code of it is ever
executed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime.exceptions import ConfigError


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in `path`. ConfigError names the file when it is missing or
    malformed.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist. Give a Hugging Face folder: config.json, *.safetensors, "
            "tokenizer.json."
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a JSON {type(value).__name__}, expected an object.")
    return value


def read_eos_token_ids(folder: str | Path, tokenizer_eos: int | None = None) -> tuple[int, ...]:
    """Returns every id that ends a response: those of generation_config.json, config.json and the
    tokenizer's eos_token together.
    """
    found: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        value = read_json(path).get("eos_token_id") if path.exists() else None
        found += [value] if isinstance(value, int) else list(value or ())
    if tokenizer_eos is not None:
        found.append(tokenizer_eos)
    bad = [value for value in found if not isinstance(value, int) or value < 0]
    if bad:
        raise ConfigError(f"{folder}: eos_token_id has {bad}, expected token ids.")
    return tuple(dict.fromkeys(found))
