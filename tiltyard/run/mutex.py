"""A mutex in a file (flock), between the processes of one user on all machines that see the file system.

Every user who may open the file could hold the lock, so only its owner may (mode 0600). Waiting has a deadline. The
error names the holder: on this machine as the kernel reports it, elsewhere as it wrote itself into the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from tiltyard.errors import EXIT_RESUMABLE, UseError

TIMEOUT = 30.0  # seconds; a holder writes one small file, which takes milliseconds
LOCKS = Path("/proc/locks")
_PAUSES = (0.001, 0.1)  # seconds between tries: the first pause, and the longest


class MutexHeld(UseError):
    """Another process did not release the mutex in time; a later attempt may succeed."""

    exit_code = EXIT_RESUMABLE


@contextlib.contextmanager
def hold(path: Path, timeout: float | None = None) -> Iterator[float]:
    """Hold the file's mutex; yields how many seconds it had to be waited for. OSError if the file cannot be opened."""
    handle = open_private(path)
    try:
        waited = _acquire(handle, path, TIMEOUT if timeout is None else timeout)
        try:
            _write_holder(handle)
            yield waited
        finally:
            # Closing is not enough: a process that an env forked meanwhile has the handle, too.
            fcntl.flock(handle, fcntl.LOCK_UN)
    finally:
        os.close(handle)


def open_private(path: Path) -> int:
    """Open a lock file that other users cannot open; also one that an earlier version left open to them."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    found = os.fstat(handle)
    if stat.S_IMODE(found.st_mode) != 0o600 and found.st_uid == os.geteuid():
        with contextlib.suppress(OSError):  # a file system without modes
            os.fchmod(handle, 0o600)
    return handle


def try_lock(handle: int) -> bool:
    """Lock an open file, unless another process has locked it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _acquire(handle: int, path: Path, timeout: float) -> float:
    start, (pause, longest) = time.monotonic(), _PAUSES
    try:
        while not try_lock(handle):
            if time.monotonic() - start >= timeout:
                hint = "wait for that process or end it, and try again"
                raise MutexHeld(f"{path} has been locked by {_holder(handle)} for {timeout:g} s", hint)
            time.sleep(pause)
            pause = min(2 * pause, longest)
    except OSError as error:
        hint = "keep runs on a file system that supports flock (local disks and NFS 4 do)"
        raise UseError(f"{path} cannot be locked: {error.strerror}", hint) from error
    return time.monotonic() - start


def _write_holder(handle: int) -> None:
    text = f"{_describe(os.getpid(), os.geteuid())}\n".encode()
    with contextlib.suppress(OSError):  # a full disk; the name only helps people
        os.pwrite(handle, text, 0)
        os.ftruncate(handle, len(text))


def _holder(handle: int) -> str:
    """The process that holds the lock."""
    found = os.fstat(handle)
    file = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    with contextlib.suppress(OSError):
        for line in LOCKS.read_text().splitlines():
            words = line.split()  # 1: FLOCK ADVISORY WRITE 4711 fe:00:2148828 0 EOF
            if words[1] == "FLOCK" and words[5] == file and int(words[4]) > 0:
                return _describe(int(words[4]), Path(f"/proc/{words[4]}").stat().st_uid)
    last = os.pread(handle, 200, 0).decode(errors="replace").strip()
    known = f" (last known holder: {last})" if last and last.isprintable() else ""
    return f"a process which this machine does not see{known}"


def _describe(pid: int, uid: int) -> str:
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:  # not in the user database
        user = str(uid)
    return f"pid {pid} of user {user} on host {os.uname().nodename}"
