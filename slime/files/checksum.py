"""A checksum of model weights that trainer and engine compute alike, tensor by tensor and in any
order.

digest of one tensor  = blake2b-128 over  name NUL dtype NUL d0,d1,... NUL  and then the
little-endian bytes in C order. checksum of a model   = hex of blake2b-128 over  name NUL digest  of
every tensor, sorted by name.

Buckets can be digested as they come; the order of arrival does not matter. dtype is the torch name
without "torch." (float32, bfloat16, ...). A bfloat16 tensor held by numpy is a uint16 array with
dtype_name="bfloat16".
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from slime.typing import Array

DIGEST_BYTES = 16


def tensor_digest(name: str, array: Array, *, dtype_name: str | None = None) -> bytes:
    """Returns the 16-byte digest of one tensor. `array` is a numpy array or a torch tensor (moved
    to CPU if needed).
    """
    if dtype_name is None:
        dtype_name = str(array.dtype).replace("torch.", "")
    shape = ",".join(str(size) for size in array.shape)
    digest = hashlib.blake2b(f"{name}\0{dtype_name}\0{shape}\0".encode(), digest_size=DIGEST_BYTES)
    buffer = _contiguous_bytes(array)
    if buffer is not None:
        digest.update(buffer)
    return digest.digest()


def combine_digests(digests: Mapping[str, bytes]) -> str:
    """Returns the model checksum (32 hex digits) of `digests` by tensor name. Independent of the
    mapping's order.
    """
    combined = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name in sorted(digests):
        combined.update(name.encode() + b"\0" + digests[name])
    return combined.hexdigest()


def weights_checksum(
    named: Mapping[str, Any], *, dtype_names: Mapping[str, str] | None = None
) -> str:
    """Returns the model checksum of arrays or tensors by name. `dtype_names` overrides the dtype of
    single names.
    """
    dtype_names = dtype_names or {}
    return combine_digests(
        {
            name: tensor_digest(name, array, dtype_name=dtype_names.get(name))
            for name, array in named.items()
        }
    )


def _contiguous_bytes(array: Array) -> memoryview | None:
    if 0 in array.shape:
        return None  # an empty buffer cannot be cast
    if hasattr(array, "detach"):
        import torch

        # numpy has no bfloat16: look at the bytes.
        flat = array.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return flat.numpy().data
    import numpy as np

    contiguous = np.ascontiguousarray(array)
    if contiguous.dtype.byteorder == ">":
        contiguous = contiguous.astype(contiguous.dtype.newbyteorder("<"))
    return contiguous.data.cast("B")
