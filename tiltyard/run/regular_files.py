"""Open and copy regular files only: no link is followed, no FIFO is waited for, no device is read.

In a folder that another user can write, a link may stand for a private file of the user who copies it, and opening a
FIFO waits for ever. Folders are walked by their handles, so that one replaced by a link meanwhile is not entered.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path


class NotRegularError(OSError):
    """A link, FIFO, socket or device where a file was expected."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(f"{path} is not a regular file")


def open_regular(path: str | Path, *, follow: bool = False, inside: int | None = None) -> BufferedReader:
    """Open a regular file to read; NotRegularError or another OSError if it is none. `follow` accepts links; `inside`
    is the handle of the folder that a relative path starts from."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    handle = os.open(path, flags, dir_fd=inside)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise NotRegularError(path)
    return os.fdopen(handle, "rb")


def each_file(folder: Path) -> Iterator[tuple[str, BufferedReader]]:
    """The files below a folder, open, by relative path; NotRegularError for anything else."""
    top = Path(os.path.realpath(folder))
    for place, folders, names, handle in os.fwalk(top, onerror=_fail):
        folders.sort()
        for name in (*folders, *sorted(names)):
            relative = Path(place, name).relative_to(top).as_posix()
            mode = os.stat(name, dir_fd=handle, follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode):
                continue
            if not stat.S_ISREG(mode):
                raise NotRegularError(relative)
            with open_regular(name, inside=handle) as file:
                yield relative, file


def _fail(error: OSError) -> None:
    raise error


def copy_files(source: Path, target: Path, *, link: bool = False, wanted: Callable[[str], bool] | None = None) -> None:
    """Copy the files below a folder, or those whose relative path is `wanted`; with `link`, as hard links if possible.

    A copy is never more readable than its source.
    """
    for name, file in each_file(source):
        if wanted is not None and not wanted(name):
            continue
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if link:
            with contextlib.suppress(OSError):
                os.link(source / name, place, follow_symlinks=False)
                continue
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o666 | 0o600
        with os.fdopen(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as copy:
            shutil.copyfileobj(file, copy, 1 << 20)
