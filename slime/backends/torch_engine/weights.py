"""Weights into the decoder: from a Hugging Face folder, or in buckets that become one version all
at once or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from slime.backends.torch_engine.model import Decoder
from slime.exceptions import ConfigError, EngineError
from slime.files.checksum import combine_digests, tensor_digest
from slime.models.families import is_derived_tensor
from slime.models.safetensors_header import weight_files

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_NAMES_SHOWN = 5
TIED_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the torch name without "torch."."""
    return str(dtype).removeprefix("torch.")


def read_weights(folder: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, CPU tensor) of every weight in the folder's safetensors files. ConfigError names
    a damaged file.
    """
    for path in weight_files(folder):
        try:
            with safe_open(str(path), framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    if is_derived_tensor(name):
                        continue
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} is not a readable safetensors file: {error}") from None


def load_checkpoint(decoder: Decoder, folder: str | Path) -> torch.dtype:
    """Fills `decoder` from `folder`, casting to its dtype, and returns the dtype of the files.

    ConfigError if a tensor is missing, unknown or has another shape: a decoder is never left with
    random weights.
    """
    staged = StagedWeights(decoder, allowed_dtypes=FLOAT_DTYPES, copy=False)
    source_dtype = None
    try:
        for name, tensor in read_weights(folder):
            staged.add({name: tensor})
            source_dtype = source_dtype or tensor.dtype
        staged.check()
        staged.apply()
    except EngineError as error:
        raise ConfigError(f"{folder} does not fit its config.json: {error}") from None
    return source_dtype or decoder.dtype


class StagedWeights:
    """One new version on its way: checked bucket by bucket against the decoder, applied only when
    it is complete.

    allowed_dtypes: what a tensor may have besides; the decoder casts to its own. copy: keep a copy
    of what `add` is given (the caller's memory may be reused).
    """

    def __init__(
        self, decoder: Decoder, *, allowed_dtypes: Iterable[torch.dtype], copy: bool
    ) -> None:
        self._decoder = decoder
        self._allowed = tuple(dict.fromkeys(allowed_dtypes))
        self._copy = copy
        self._tensors: dict[str, torch.Tensor] = {}
        self._digests: dict[str, bytes] = {}
        self._tied_head: torch.Tensor | None = None

    def add(self, named: Mapping[str, Any], *, checksum: str | None = None) -> None:
        """Takes tensors or numpy arrays by Hugging Face name; `checksum` is that of this bucket.

        EngineError, with nothing taken, if a name is unknown or came before, if a shape or dtype
        does not fit, or if the checksum differs.
        """
        tensors = {name: _as_tensor(value, copy=self._copy) for name, value in named.items()}
        problems = [
            problem for name, tensor in tensors.items() for problem in self._problems(name, tensor)
        ]
        if problems:
            raise EngineError(f"{_shortened(problems, '; ')}.")
        digests = {name: tensor_digest(name, tensor) for name, tensor in tensors.items()}
        received = combine_digests(digests)
        if checksum is not None and checksum != received:
            raise EngineError(f"the bucket's checksum is {received}, expected {checksum}.")
        for name, tensor in tensors.items():
            if self._is_tied_head(name):
                self._tied_head = tensor
            else:
                self._tensors[name] = tensor
            self._digests[name] = digests[name]

    def _is_tied_head(self, name: str) -> bool:
        return name == TIED_HEAD and self._decoder.config.tie_word_embeddings

    def _problems(self, name: str, tensor: torch.Tensor) -> Iterator[str]:
        target = self._decoder.weights.get(EMBEDDING if self._is_tied_head(name) else name)
        if target is None:
            yield f"{name} is not a weight of this model"
            return
        if name in self._tensors:
            yield f"{name} came twice"
        if tensor.shape != target.shape:
            yield f"{name} has shape {list(tensor.shape)}, the model's is {list(target.shape)}"
        if tensor.dtype not in self._allowed:
            yield f"{name} is {dtype_name(tensor.dtype)}, allowed is {' or '.join(dtype_name(dtype) for dtype in self._allowed)}"

    def check(self, checksum: str | None = None) -> str:
        """Returns the checksum of all tensors that came. EngineError if a weight is missing or
        `checksum` is another one.
        """
        missing = [name for name in self._decoder.weights if name not in self._tensors]
        if missing:
            raise EngineError(f"{len(missing)} missing: {_shortened(missing, ', ')}.")
        if self._tied_head is not None and not torch.equal(
            self._tied_head, self._tensors[EMBEDDING]
        ):
            raise EngineError(f"{TIED_HEAD} differs from {EMBEDDING}, but the model ties them.")
        received = combine_digests(self._digests)
        if checksum is not None and checksum != received:
            raise EngineError(f"the received weights' checksum is {received}, expected {checksum}.")
        return received

    def apply(self) -> None:
        """Copies all tensors into the decoder. `check` comes first."""
        with torch.inference_mode():
            for name, tensor in self._tensors.items():
                self._decoder.weights[name].copy_(tensor)


def decoder_checksum(decoder: Decoder) -> str:
    """Returns the checksum of the weights as the decoder holds them (its dtype, Hugging Face names,
    no tied lm_head).
    """
    return combine_digests(
        {name: tensor_digest(name, tensor) for name, tensor in decoder.weights.items()}
    )


def _as_tensor(value: object, *, copy: bool) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if copy else value.detach()
    # Ray's arrays are read-only views of shared memory, which torch does not take: numpy input is
    # always copied.
    tensor = torch.from_numpy(np.array(value, order="C", copy=True))
    # numpy has no bfloat16: its bits travel as uint16.
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


def _shortened(items: list[str], separator: str) -> str:
    more = len(items) - MAX_NAMES_SHOWN
    return separator.join(items[:MAX_NAMES_SHOWN]) + (
        f"{separator}and {more} more" if more > 0 else ""
    )
