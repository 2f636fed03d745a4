"""Reads the files of a Hugging Face folder beside its weights, as JSON. No code of the folder is
ever executed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime.exceptions import ConfigError
from slime.models.config_fields import ConfigFields


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in `path`. ConfigError names the file when it is missing or
    malformed.
    """
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ConfigError(f"{path} is no regular file. Download the folder again.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist. Give a Hugging Face folder: config.json, *.safetensors, "
            "tokenizer.json."
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or absurd numbers or depth
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a JSON {type(value).__name__}, expected an object.")
    return value


def check_regular_files(folder: Path) -> None:
    """ConfigError for a pipe, a socket or a device in the folder: reading it would wait for ever."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ConfigError(f"{path} is no regular file. Download the folder again.")


def read_eos_token_ids(folder: str | Path, tokenizer_eos: int | None = None) -> tuple[int, ...]:
    """Returns every id that ends a response: those of generation_config.json, config.json and the
    tokenizer's eos_token together.
    """
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        if path.exists():
            found += ConfigFields(read_json(path), str(path)).token_ids("eos_token_id")
    if tokenizer_eos is not None:
        found.append(tokenizer_eos)
    return tuple(dict.fromkeys(found))
