"""Files that options name, read without waiting for what is no file: a pipe, a socket, a device."""

from __future__ import annotations

from pathlib import Path


def read_regular(path: str | Path) -> str:
    """The text of a file without its byte order mark. OSError for what is no regular file, too: a
    pipe would be waited for.
    """
    if Path(path).exists() and not Path(path).is_file():
        raise OSError(f"it is no regular file but {kind_of(Path(path))}")
    return Path(path).read_text(encoding="utf-8-sig")


def kind_of(path: Path) -> str:
    """What stands at a path that exists, or is a link that leads nowhere."""
    kinds = (
        (path.is_fifo, "a pipe"),
        (path.is_dir, "a folder"),
        (path.is_file, "a file"),
        (path.is_socket, "a socket"),
        (path.is_char_device, "a device"),
        (path.is_block_device, "a device"),
    )
    try:
        return next((kind for is_kind, kind in kinds if is_kind()), "a link that leads nowhere")
    except OSError:  # a link to itself
        return "a link that leads nowhere"
