"""Files that appear whole: written under a temporary name, flushed to the disk, then renamed. Knows
no format.

A reader sees the earlier file or the new one, never half of one, and the new one outlives a power
failure. The temporary file, `.NAME.PID`, lies beside the file, because a rename is atomic only
within one file system. A symbolic link at the path is replaced, not followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path


class PendingFile:
    """A file under its temporary name, for a writer that outlives one function. Write to
    `temporary`, then `commit` or `abandon`.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        """Makes the folder where it is missing, and removes what a process that was killed has left
        of the same file; writes nothing.
        """
        self.path = Path(path)
        self.temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(self.path)

    def commit(self) -> None:
        """Gives the closed file its name. Raises `OSError` where the disk refuses it; the earlier
        file then stays.
        """
        with open(self.temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(self.temporary, self.path)
        sync_folder(self.path.parent)

    def abandon(self) -> None:
        """Removes what was written. Does nothing after `commit`."""
        self.temporary.unlink(missing_ok=True)


def _remove_abandoned(path: Path) -> None:
    """Removes the temporary files, or folders, of `path` whose processes have ended. A file has one
    writer at a time, so that those of another machine have ended too.
    """
    prefix = f".{path.name}."
    with contextlib.suppress(OSError):  # the write that follows meets the disk's error itself
        for name in os.listdir(path.parent):
            owner = name.removeprefix(prefix)
            if owner != name and owner.isdecimal() and not os.path.exists(f"/proc/{owner}"):
                left = path.with_name(name)
                if left.is_dir() and not left.is_symlink():
                    shutil.rmtree(left)
                else:
                    left.unlink()


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """Yields the temporary path, for a library that writes to a path. The file gets its name at
    the end of the block; an error in the block leaves the earlier file and no temporary one.
    """
    pending = PendingFile(path)
    try:
        yield pending.temporary
        pending.commit()
    finally:
        pending.abandon()


@contextlib.contextmanager
def new_folder(path: str | os.PathLike) -> Iterator[Path]:
    """Yields an empty folder beside `path`, which gets that name at the end of the block; an error
    in the block leaves none. Removes what processes that were killed have left of the same folder.
    `FileExistsError` where `path` exists.
    """
    path = Path(path)
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that had this one's number
    temporary.mkdir()
    try:
        yield temporary
        temporary.rename(path)
        sync_folder(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_bytes(
    path: str | os.PathLike, content: bytes | Iterable[bytes], *, mode: int = 0o666
) -> None:
    """Writes the bytes, or the pieces one after the other. `mode` is the new file's permissions
    before the umask. Raises `OSError` where the disk takes no more.
    """
    pieces = (content,) if isinstance(content, bytes) else content
    with (
        replacing(path) as temporary,
        open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file,
    ):
        file.writelines(pieces)


def write_text(path: str | os.PathLike, text: str, *, mode: int = 0o666) -> None:
    """Writes the text as UTF-8, as `write_bytes` does."""
    write_bytes(path, text.encode(), mode=mode)


def sync_descriptor(descriptor: int) -> None:
    """Forces what was written to an open file to the disk."""
    os.fsync(descriptor)


def sync_folder(folder: str | os.PathLike) -> None:
    """Forces the names in a folder to the disk, so that a rename outlives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that keeps no folders to sync
            raise
    finally:
        os.close(descriptor)
