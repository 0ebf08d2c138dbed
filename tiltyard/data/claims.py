"""Which process plays which episode: a lock on one byte of the file `.claims` for each number.

The kernel releases the locks of a process that dies, on all machines that see the file system, so that no claim is ever
stale. The locks belong to the process (POSIX), not to the open file: claims of two objects in one process do not
exclude each other.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path
from types import TracebackType

from tiltyard.errors import UseError

NAME = ".claims"
_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, pid


class Claims:
    """The claims of this process on episodes of a dataset."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        try:
            self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise UseError(f"cannot write to {folder}: {error.strerror}", "choose another folder") from error

    def take(self, number: int) -> bool:
        """Claim an episode; False if another process has it."""
        return self._lock(1, number)

    def _lock(self, length: int, start: int) -> bool:
        try:
            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            hint = "keep datasets on a file system that supports locks (local disks and NFS 4 do)"
            raise UseError(f"{self._path} cannot be locked: {error.strerror}", hint) from error
        return True

    def take_all(self) -> bool:
        """Claim every episode, also those of the future; False if another process has one."""
        return self._lock(0, 0)

    def release(self, number: int) -> None:
        fcntl.lockf(self._handle, fcntl.LOCK_UN, 1, number)

    def __enter__(self) -> Claims:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._handle)


def holder(folder: Path, number: int | None = None) -> int | None:
    """The id of another process that has claimed an episode (default: any of them), or None. Writes nothing.

    Not for a process with claims of its own: closing the file would release them.
    """
    try:
        handle = os.open(folder / NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        length, start = (0, 0) if number is None else (1, number)
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(handle, fcntl.F_GETLK, asked))
    except OSError:  # a file system without locks, on which no process could claim anything
        return None
    finally:
        os.close(handle)
    return None if kind == fcntl.F_UNLCK else int(pid)
