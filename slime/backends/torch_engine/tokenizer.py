"""Text to ids and back, and which ids end a response. Read from the checkpoint folder; no code of
it is ever executed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.exceptions import ConfigError
from slime.models.hf_folder import read_json

if TYPE_CHECKING:
    import tokenizers

FIRST_CHARACTERS = 8  # for each id that is allowed: so much of a text is encoded first


@dataclasses.dataclass(frozen=True)
class EngineTokenizer:
    """A `tokenizers` tokenizer with the few facts the engine needs. Stateless; safe to call from
    one thread at a time.
    """

    backend: Any
    eos_token_id: int | None
    bos_token_id: int | None

    @staticmethod
    def from_folder(folder: str | Path) -> EngineTokenizer | None:
        """Returns the folder's tokenizer, None if it has none. ConfigError if tokenizer.json is
        damaged.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.exists():
            return None
        from tokenizers import Tokenizer

        try:
            backend = Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - the binding raises bare Exception
            raise ConfigError(f"{path} is not a readable tokenizer: {error}") from None
        backend.no_truncation()
        backend.no_padding()
        config_path = Path(folder) / "tokenizer_config.json"
        config = read_json(config_path) if config_path.exists() else {}
        return EngineTokenizer(
            backend=backend,
            eos_token_id=_token_id(backend, config.get("eos_token")),
            bos_token_id=_token_id(backend, config.get("bos_token")),
        )

    def encode(self, text: str, *, longest: int | None = None) -> list[int]:
        """Returns the ids of `text`, with the beginning-of-sequence token once if the tokenizer
        adds one. Of a text that has far more than `longest` ids, those of its beginning: more than
        twice `longest`.
        """
        size = len(text) if longest is None else max(1, FIRST_CHARACTERS * longest)
        while True:
            # the interpreter's lock is free meanwhile, which it is not in `encode`
            ids = self.backend.encode_batch_fast([text[:size]])[0].ids
            if size >= len(text) or (longest is not None and len(ids) > 2 * longest):
                break
            size *= 2
        # A rendered chat template has written the token already, and the tokenizer adds it again.
        if len(ids) > 1 and ids[0] == ids[1] == self.bos_token_id:
            return ids[1:]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Returns the text of `ids`."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def decode_batch(self, batch: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
        """Returns one text per list of ids."""
        return self.backend.decode_batch(batch, skip_special_tokens=skip_special_tokens)


def _token_id(backend: tokenizers.Tokenizer, token: object) -> int | None:
    text = token.get("content") if isinstance(token, dict) else token
    return backend.token_to_id(text) if isinstance(text, str) else None
