"""Kill a function at each of its file system operations in a forked child, as kill -9 would."""

import itertools
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator

from tests.counts import LONG

CHANGES = {"os.rename", "os.remove", "os.link", "os.mkdir", "os.truncate"}


def _run_until(work: Callable[[], object], operation: int) -> None:
    left = operation

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in CHANGES or writes:
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.addaudithook(watch)
    work()
    os._exit(0)


def killed_at(work: Callable[[], object], operation: int) -> bool:
    """Run `work` in a child that is killed before it changes a file for the n-th time; False if it was done first."""
    child = multiprocessing.get_context("fork").Process(target=_run_until, args=(work, operation))
    child.start()
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0


def operations() -> Iterator[int]:
    """0, 1, 2, ..., or every third in a short run: break the loop when the work is done before."""
    return itertools.count(0, 1 if LONG else 3)
