"""Stops a command that copies or converts data: after SIGINT or SIGTERM it ends with one sentence and exit code 75.

A second signal acts as it did before: SIGINT interrupts, SIGTERM ends the process.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from tiltyard.errors import ResumableError

AGAIN = "stopped; type the same command again to complete it"
NOTHING = "stopped; nothing was written"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stoppable(message: str = AGAIN, *, at_once: bool = True) -> Iterator[Callable[[], None]]:
    """Turn SIGINT and SIGTERM into a ResumableError with this message, and put the handlers back at the end.

    Unless `at_once`, the block goes on until it calls the function that it is given.
    """
    received = False
    before: dict[signal.Signals, Any] = {}

    def check() -> None:
        if received:
            raise KeyboardInterrupt  # which no handler of errors takes for one of its own

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = True
        restore()
        if at_once:
            check()

    if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
        wanted = [number for number in _SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
        before = {number: signal.getsignal(number) for number in wanted}
        for number in wanted:
            signal.signal(number, handle)
    try:
        yield check
    except BaseException as error:  # a library may have made another exception of it
        if received:
            raise ResumableError(message) from error
        raise
    finally:
        restore()
