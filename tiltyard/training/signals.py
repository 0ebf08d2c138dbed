"""Signals that stop a training: they set a flag, obeyed after the update or after an evaluation's env step."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP)


class StopSignals:
    """While entered, these signals only set `received`; a second SIGINT interrupts at once.

    SIGHUP comes when a terminal is closed; where `nohup` ignores it, it stays ignored.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self.interrupted = False  # by a second SIGINT; any other KeyboardInterrupt was raised by an env or model
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            handled = [each for each in STOPPING if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._handle) for number in handled}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == "SIGINT":
            self.interrupted = True
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
