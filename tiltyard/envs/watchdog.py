"""A watchdog for envs that run in the driver's own process: a thread that interrupts an env call that hangs.

    main thread   heartbeat[0] += 1 at every env call, heartbeat[1] = the phase
    Watchdog      has heartbeat[0] not changed for env.step_timeout or env.reset_timeout?  ->  TimeoutError over there

A signal delivers the error, so it also ends sleeping and waiting. Code blocked in a native library misses the signal;
then `stuck` is called with the reason and must end this process. A library that also holds the interpreter lock stops
this thread too, and nothing can be done.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

import numpy as np

IDLE, STEPPING, RESETTING = range(3)  # phases of a process that runs envs
PROCESS_HEARTBEAT = np.zeros(2, np.int64)  # of all groups in this process that were given no other
POLL_SECONDS = 0.25
SUSPENDED_SECONDS = 20 * POLL_SECONDS  # a poll this late means that the whole process was suspended
SIGNAL_SECONDS = 5.0  # after this long the main thread will not handle the signal any more
METHODS = {STEPPING: "step", RESETTING: "reset"}


@contextmanager
def calling_envs(phase: int = STEPPING) -> Iterator[None]:
    """While entered, this process calls envs: a call that does not return is a hang."""
    before, PROCESS_HEARTBEAT[1] = PROCESS_HEARTBEAT[1], phase
    try:
        yield
    finally:
        PROCESS_HEARTBEAT[1] = before


class Watchdog:
    """Watches while entered from the main thread. Does nothing in other threads, which get no signals."""

    def __init__(self, step_timeout: float, reset_timeout: float, stuck: Callable[[str], None]) -> None:
        self._timeouts = {STEPPING: step_timeout, RESETTING: reset_timeout}
        self._stuck = stuck
        self._message = ""
        self._ended, self._received = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGUSR1, self._interrupt)
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            signal.signal(signal.SIGUSR1, signal.SIG_DFL if self._before is None else self._before)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._received.set()
        if self._message:
            message, self._message = self._message, ""
            raise TimeoutError(message)
        if callable(self._before):  # the signal is meant for the previous handler
            self._before(number, frame)

    def _watch(self) -> None:
        beat, since, last = -1, time.monotonic(), time.monotonic()
        while not self._ended.wait(POLL_SECONDS):
            now = time.monotonic()
            count, phase = PROCESS_HEARTBEAT.tolist()
            if count != beat or phase == IDLE or now - last > SUSPENDED_SECONDS or _in_debugger():
                beat, since = count, now
            elif now - since > self._timeouts[phase]:
                self._end_hang(METHODS[phase], self._timeouts[phase])
                since = time.monotonic()
            last = time.monotonic()

    def _end_hang(self, method: str, seconds: float) -> None:
        main = threading.main_thread()
        assert main.ident is not None
        self._received.clear()
        self._message = message = f"it did not return from {method}() within {seconds:g} s (env.{method}_timeout)"
        signal.pthread_kill(main.ident, signal.SIGUSR1)
        if not self._received.wait(SIGNAL_SECONDS) and not self._ended.is_set():
            where = traceback.extract_stack(sys._current_frames()[main.ident])[-1]
            self._stuck(f"an env hangs: {message}, in {where.filename}, line {where.lineno}")


def _in_debugger() -> bool:
    """Whether the main thread is in a debugger, such as after `breakpoint()` in an env: the pause is a person's."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_globals.get("__name__") in ("pdb", "bdb"):
            return True
        frame = frame.f_back
    return False
