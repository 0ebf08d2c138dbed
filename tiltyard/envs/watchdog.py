"""Envs in the driver's own process, which no other process watches: a thread does, as long as training goes on.

    main thread   beats[0] += 1 at every env call, beats[1] = what is going on (vector.py)
    Watch         has beats[0] stood still for env.step_timeout or env.reset_timeout?  ->  TimeoutError over there

A signal brings it there, so that it ends sleeping and waiting, too. Who is in a library that never comes back to Python
does not hear it; then `stuck` is called with the reason, and is to end this process. A library that keeps the
interpreter's lock meanwhile cannot be helped: no thread of this process does anything any more.
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

from tiltyard.envs.vector import HERE, IDLE, RESETTING, STEPPING

POLL_SECONDS = 0.25  # seconds between two looks
SUSPENDED = 20 * POLL_SECONDS  # a look that took this long was held up together with what it looks at
DEAF = 5.0  # seconds after which nobody will hear a signal any more
DOING = {STEPPING: "step", RESETTING: "reset"}


@contextmanager
def calling_envs(doing: int = STEPPING) -> Iterator[None]:
    """While entered, the envs in this process are at work: one that does not come back is a hang."""
    before, HERE[1] = HERE[1], doing
    try:
        yield
    finally:
        HERE[1] = before


class Watchdog:
    """While entered, from the main thread. Elsewhere nobody watches: only there signals are heard."""

    def __init__(self, step_timeout: float, reset_timeout: float, stuck: Callable[[str], None]) -> None:
        self._seconds = {STEPPING: step_timeout, RESETTING: reset_timeout}
        self._stuck = stuck
        self._sentence = ""
        self._heard, self._ended = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGUSR1, self._interrupt)
            self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
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
        self._heard.set()
        if self._sentence:
            sentence, self._sentence = self._sentence, ""
            raise TimeoutError(sentence)
        if callable(self._before):  # it is somebody else's signal
            self._before(number, frame)

    def _look(self) -> None:
        beat, since, last = -1, time.monotonic(), time.monotonic()
        while not self._ended.wait(POLL_SECONDS):
            now = time.monotonic()
            count, phase = HERE.tolist()
            if count != beat or phase == IDLE or now - last > SUSPENDED or _debugged():
                beat, since = count, now
            elif now - since > self._seconds[phase]:
                self._end_hang(DOING[phase], self._seconds[phase])
                since = time.monotonic()
            last = time.monotonic()

    def _end_hang(self, doing: str, seconds: float) -> None:
        main = threading.main_thread()
        assert main.ident is not None
        self._heard.clear()
        self._sentence = sentence = f"it did not come back from {doing}() within {seconds:g} s (env.{doing}_timeout)"
        signal.pthread_kill(main.ident, signal.SIGUSR1)
        if not self._heard.wait(DEAF) and not self._ended.is_set():
            where = traceback.extract_stack(sys._current_frames()[main.ident])[-1]
            self._stuck(f"an env hangs: {sentence}, in {where.filename}, line {where.lineno}")


def _debugged() -> bool:
    """Whether the main thread is in a debugger, as by `breakpoint()` in an env: then a person takes the time."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_globals.get("__name__") in ("pdb", "bdb"):
            return True
        frame = frame.f_back
    return False
