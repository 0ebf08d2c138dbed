"""Which process plays which episode: a lock on one byte of the file `.claims` for each number.

The kernel releases the locks of a process that dies, on all machines that see the file system, so that no claim is ever
stale. The locks belong to the process (POSIX), not to the open file: claims of two objects in one process do not
exclude each other.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from types import TracebackType

from tiltyard.errors import UseError

NAME = ".claims"


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
        try:
            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            hint = "keep datasets on a file system that supports locks (local disks and NFS 4 do)"
            raise UseError(f"{self._path} cannot be locked: {error.strerror}", hint) from error
        return True

    def release(self, number: int) -> None:
        fcntl.lockf(self._handle, fcntl.LOCK_UN, 1, number)

    def __enter__(self) -> Claims:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._handle)
