"""Signals that ask a training to end: noticed by a flag, obeyed after the update, or after an evaluation's env step."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP)


class StopSignals:
    """While entered, these signals only set `asked`; a second SIGINT interrupts at once.

    SIGHUP comes when a terminal is closed; under `nohup` it is ignored, and stays so.
    """

    def __init__(self) -> None:
        self.asked: str | None = None
        self.interrupted = False  # by a second SIGINT; a KeyboardInterrupt without one is not the user's
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            heard = [each for each in ASKING if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._note) for number in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.asked == "SIGINT":
            self.interrupted = True
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name
