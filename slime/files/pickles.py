"""Recognizes a pickle, so that whoever is given one can say why it is not loaded. Loads none."""

from __future__ import annotations

import os

_NEEDED = 256  # bytes of a file's beginning
_PROTOCOLS = range(2, 6)


def is_pickle(beginning: bytes) -> bool:
    """Whether a file that begins so is a pickle, or an archive of torch.save, which holds one."""
    if beginning.startswith(b"PK\x03\x04"):
        return b"/data.pkl" in beginning[:_NEEDED]
    return beginning[:1] == b"\x80" and len(beginning) > 1 and beginning[1] in _PROTOCOLS


def pickle_problem(path: str | os.PathLike) -> str | None:
    """Why a file is not read, and what reads it; None where it is no pickle. `OSError` where it
    cannot be opened.
    """
    with open(path, "rb") as file:
        beginning = file.read(_NEEDED)
    if not is_pickle(beginning):
        return None
    return (
        f"{path} is a pickle, which slime never loads: loading runs what it names. `slime audit` "
        "reads the .pt dumps of upstream slime and miles as plain data; the dumps and recordings of "
        "this version are .parquet, .safetensors, .json and .jsonl files."
    )
