"""How far collecting is: a bar with the time left on a terminal, a line now and then elsewhere. All on stderr."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import Any, TextIO

from tiltyard.track.console import clock

LINE_SECONDS = (2.0, 60.0)  # between two plain lines: at first, and at most


class ProgressView:
    """Shows episodes of the whole dataset, and the env steps of this command."""

    def __init__(self, total: int, done: int, stream: TextIO | None = None) -> None:
        self._total, self._first = total, done
        self._stream = sys.stderr if stream is None else stream
        self._begun = self._line_at = time.monotonic()
        self._pause = LINE_SECONDS[0]
        self._bar: Any = None

    def __enter__(self) -> ProgressView:
        if self._stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb"):
            self._bar, self._task = _bar(self._stream, self._total, self._first)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, steps: int) -> None:
        """Show the committed episodes of the dataset and the env steps collected by this command."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, steps=f"{steps:,} env steps")
        elif done > self._first and time.monotonic() - self._line_at >= self._pause:
            self._line_at = time.monotonic()
            self._pause = min(2 * self._pause, LINE_SECONDS[1])
            self._stream.write(self.line(done, steps) + "\n")
            self._stream.flush()

    def line(self, done: int, steps: int) -> str:
        """The progress as one line."""
        passed = max(1e-9, time.monotonic() - self._begun)
        speed = (done - self._first) / passed
        left = f", {clock((self._total - done) / speed)} left" if speed > 0 and done < self._total else ""
        rate = f"{steps:,} env steps at {steps / passed:,.0f}/s"
        return f"{done:,} of {self._total:,} episodes, {rate}{left}"


def _bar(stream: TextIO, total: int, done: int) -> tuple[Any, Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = ("collecting", BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[steps]}"))
    console = Console(file=stream, highlight=False, force_jupyter=False)
    bar = Progress(*columns, TimeRemainingColumn(), console=console, redirect_stdout=False, refresh_per_second=4)
    return bar, bar.add_task("", total=total, completed=done, steps="")
