"""Types that several folders share: a tokenizer's, a processor's, an actor's; stdlib only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import torch

Array: TypeAlias = "np.ndarray | torch.Tensor"
Numbers: TypeAlias = "Sequence[float] | np.ndarray | torch.Tensor"


class Tokenizer(Protocol):
    """A Hugging Face tokenizer, or anything with its methods."""

    chat_template: Any
    eos_token: str | None
    vocab_size: int

    def __call__(self, text: str | list[str], **options: object) -> Mapping[str, Any]:
        """`input_ids` and more, of one text or of each."""

    def __len__(self) -> int:
        """Tokens, added ones included."""

    def get_vocab(self) -> dict[str, int]:
        """Token -> id, added ones included."""

    def decode(self, ids: Sequence[int], **options: object) -> str:
        """The text of ids."""

    def apply_chat_template(self, messages: list[dict], **options: object) -> Any:
        """The rendered text, or its ids with `tokenize=True`."""


class Processor(Protocol):
    """A Hugging Face processor: text and media to model inputs."""

    def __call__(self, *, text: str, **media: object) -> Mapping[str, Any]:
        """`input_ids`, `attention_mask` and what the media become."""


class ActorHandle(Protocol):
    """A Ray actor's handle, or the object that stands for it in one process."""

    def __getattr__(self, name: str) -> Any:
        """The remote method of that name; its `.remote(...)` returns a reference."""
