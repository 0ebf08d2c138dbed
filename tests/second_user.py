"""A second user for tests of shared machines: files given to it, and code that runs as it. Needs root."""

import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

STRANGER = 4321  # needs no entry in /etc/passwd, so its name is the number
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as a second user")


def give(path: Path, uid: int = STRANGER) -> Path:
    """Give a file, link or folder with all that it contains to the second user."""
    for item in (path, *(path.rglob("*") if path.is_dir() and not path.is_symlink() else ())):
        os.chown(item, uid, uid, follow_symlinks=False)
    return path


def as_stranger(function: Callable[[], object], uid: int = STRANGER) -> None:
    """Call `function` in a child process that belongs to the second user; fail if it raises.

    Modules that it needs have to be imported before: the second user may be unable to read this Python's folder.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            function()
            code = 0
        except BaseException:  # noqa: BLE001 - pytest of the parent must not continue in the child
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter and write to, as /tmp; pytest's own folders are for one user."""
    folder = Path(tempfile.mkdtemp(prefix="tiltyard-open-"))
    folder.chmod(0o1777)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
