"""The tiny models of slime.testing, under the name by which the tests know them, and many of them
at a time.
"""

from __future__ import annotations

from pathlib import Path

from slime.testing.tiny_models import CHAT_TEMPLATE as CHAT_TEMPLATE
from slime.testing.tiny_models import DEFAULT_CHARS as DEFAULT_CHARS
from slime.testing.tiny_models import FAMILIES as FAMILIES
from slime.testing.tiny_models import SPECIAL_TOKENS as SPECIAL_TOKENS
from slime.testing.tiny_models import make_char_tokenizer as make_char_tokenizer
from slime.testing.tiny_models import make_tiny_checkpoint as make_tiny_checkpoint
from slime.testing.tiny_models import tiny_config as tiny_config


class TinyCheckpoints(dict):
    """Folders below `root` by name, each made when it is asked for: a test of one model does not
    wait for the others.
    """

    def __init__(self, root: Path, fields_by_name: dict[str, dict]) -> None:
        super().__init__()
        self._root, self._fields = root, fields_by_name

    def __missing__(self, name: str) -> Path:
        self[name] = make_tiny_checkpoint(self._root / name, **self._fields[name])
        return self[name]
