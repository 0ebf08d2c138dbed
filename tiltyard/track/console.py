"""Show the progress of a run: a live panel on a terminal and in a notebook, plain lines everywhere else.

A terminal that goes away (closed window, broken pipe) silences the console but never stops training. Everything goes to
stderr, because stdout is for data; in a notebook to stdout, because notebooks colour stderr. live_panel.py draws the
panel.

    terminal, UTF-8      a panel redrawn four times a second: progress, curve, returns, speed, where the time goes
    Jupyter              the panel as an output of the cell, replaced in place (notebook_panel.py)
    anything else        a line per 1/50 of the budget, evaluation, or ten quiet seconds (a minute in long runs)
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import sys
import termios
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console as RichConsole
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from tiltyard.config.experiment import Experiment
from tiltyard.config.sections import Stop
from tiltyard.processes import reaper
from tiltyard.run import measured
from tiltyard.run import metrics as metrics_file
from tiltyard.run.folder import Run
from tiltyard.run.history import History
from tiltyard.run.status import root_of
from tiltyard.track.bottleneck import bottleneck
from tiltyard.track.terminal_chart import Point, nice_number
from tiltyard.types import Progress

if TYPE_CHECKING:
    from tiltyard.track.notebook_panel import NotebookPanel

_LINES_PER_BUDGET = 50
_QUIET_SECONDS = (10.0, 60.0)  # longest gap between plain lines: at first, and in runs over 20 minutes
_SPEED_WINDOW = 30.0  # seconds of training over which speed and time left are measured
_KEPT_POINTS = 4000  # above this, every second point of the curve is dropped


def clock(seconds: float) -> str:
    """1:02:03, or 3 d 04:05:06 for runs of days."""
    whole = int(max(0.0, seconds))
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, second = divmod(rest, 60)
    return f"{days} d {hours:02}:{minutes:02}:{second:02}" if days else f"{hours}:{minutes:02}:{second:02}"


def budgets(stop: Stop) -> list[tuple[str, float]]:
    """Stop conditions with a measurable progress, as (field of Progress, amount)."""
    found = [(name, getattr(stop, name)) for name in ("env_steps", "frames", "updates", "seconds")]
    return [(name, float(amount)) for name, amount in found if amount is not None]


def nearest_budget(stop: Stop, progress: Progress) -> tuple[str, float, float]:
    """The budget that is nearest to its end: field, amount and fraction used; ("", 0, 0) if there is none."""
    used = [(getattr(progress, name) / amount, name, amount) for name, amount in budgets(stop)]
    if not used:
        return "", 0.0, 0.0
    fraction, name, amount = max(used)
    return name, amount, min(1.0, fraction)


def seconds_left(stop: Stop, earlier: Progress, now: Progress) -> float | None:
    """Seconds until the first budget is used up, at the speed between two moments; None if unknown."""
    passed = now.seconds - earlier.seconds
    if passed <= 0:
        return None
    left: list[float] = []
    for name, amount in budgets(stop):
        speed = (getattr(now, name) - getattr(earlier, name)) / passed
        if speed > 0:
            left.append(max(0.0, amount - getattr(now, name)) / speed)
    return min(left) if left else None


def amount_text(name: str, amount: float) -> str:
    """100,000 env steps; 0:30:00."""
    return clock(amount) if name == "seconds" else f"{int(amount):,} {name.replace('_', ' ')}"


class _Recent:
    """Progress of the last half minute of this attempt, to measure speed and time left."""

    def __init__(self) -> None:
        self._seen: deque[Progress] = deque()

    def saw(self, progress: Progress) -> None:
        if self._seen and progress.env_steps < self._seen[-1].env_steps:
            self._seen.clear()
        self._seen.append(progress)
        while len(self._seen) > 2 and progress.seconds - self._seen[1].seconds > _SPEED_WINDOW:
            self._seen.popleft()

    @property
    def earlier(self) -> Progress:
        return self._seen[0] if self._seen else Progress()

    def per_second(self) -> float:
        if len(self._seen) < 2:
            return 0.0
        first, last = self._seen[0], self._seen[-1]
        passed = last.seconds - first.seconds
        return (last.env_steps - first.env_steps) / passed if passed > 0 else 0.0


class Console:
    """Call `start`, then `update` after every record and `say` for messages, then `finish`."""

    def __init__(
        self,
        experiment: Experiment,
        run_id: str,
        folder: os.PathLike[str] | str,
        *,
        live: bool | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self.experiment = experiment
        self.run_id = run_id
        self.folder = Path(folder)
        self._in_notebook = stream is None and _is_kernel()
        self.stream = stream if stream is not None else sys.stdout if self._in_notebook else sys.stderr
        self.live = (self._in_notebook or _is_live(self.stream)) if live is None else live
        self.progress = Progress()
        self.metrics: dict[str, float] = {}
        self.split: dict[str, float] = {}  # decaying sums of seconds
        self.returns: list[Point] = []
        self.evaluations: list[Point] = []
        self.recent = _Recent()
        self.updated = time.monotonic()  # when progress last came
        self._lines_at = (0.0, -1.0)  # monotonic seconds and fraction of the last plain line
        self._line_steps = 0  # env steps of the last plain line
        self._gone, self._is_log = False, stream is not None
        width = 104 if self._in_notebook else None  # the panel leaves four columns free
        self.rich = RichConsole(file=self.stream, highlight=False, soft_wrap=True, force_jupyter=False, width=width)
        self._live: Live | NotebookPanel | None = None
        self._terminal: _Terminal | None = None

    def start(self, lines: Sequence[str]) -> None:
        """Print the first lines and open the live panel."""
        for line in lines:
            self.say(line)
        self._lines_at = (time.monotonic(), -1.0)
        self.updated = time.monotonic()
        if self.live and not self._gone:
            self._open_panel()

    def update(self, progress: Progress, metrics: Mapping[str, float], time_split: Mapping[str, float]) -> None:
        """Show a record's metrics (`eval/...` with an evaluation) and its shares of time."""
        passed = metrics_file.seconds_covered(self.progress.env_steps, progress.env_steps, metrics)
        self.progress = progress
        self.updated = time.monotonic()
        self.recent.saw(progress)
        self.metrics.update(metrics)
        if time_split:
            parts = self.split | dict(time_split)
            self.split = {part: 0.9 * self.split.get(part, 0.0) + passed * time_split.get(part, 0.0) for part in parts}
        if "train/return" in metrics:
            self.returns.append((progress.env_steps, float(metrics["train/return"])))
            if len(self.returns) > _KEPT_POINTS:
                self.returns = self.returns[::2]
        evaluated = "eval/return" in metrics
        if evaluated:
            self.evaluations.append((progress.env_steps, float(metrics["eval/return"])))
        if self._in_notebook and self._live is not None:
            self._live.refresh()
        elif self._live is None and (evaluated or self._line_is_due()):
            self._lines_at = (time.monotonic(), nearest_budget(self.experiment.stop, progress)[2])
            self._line_steps = progress.env_steps
            self._write(self.plain_line(evaluated=evaluated))

    def say(self, sentence: str) -> None:
        """Print one sentence, above the live panel or as a line."""
        if self._live is None:
            self._write(sentence)
        else:
            self._guarded(lambda: self.rich.print(Text(sentence)))

    @property
    def is_open(self) -> bool:
        """Whether the live panel is shown."""
        return self._live is not None

    def close(self) -> None:
        """Close the live panel and restore the terminal. May be called twice; must be called after a failure."""
        if self._live is not None:
            screen, self._live = self._live, None
            self._guarded(screen.stop)
        if self._terminal is not None:
            terminal, self._terminal = self._terminal, None
            self._guarded(terminal.close)

    def finish(self, state: str, lines: Sequence[str]) -> None:
        """Close the live panel and print how the run ended."""
        if self._live is None and self.progress.env_steps != self._line_steps:
            self._write(self.plain_line())
        self.close()
        bound = self.bound()
        for line in (self._speed(), f"bound   {bound}" if bound else ""):
            if line:
                self._write(line)
        self._write(f"{state} after {self.progress.env_steps:,} env steps in {clock(self.progress.seconds)}")
        for line in lines:
            self._write(line)

    def _open_panel(self) -> None:
        self._load_history()
        if self.stream.isatty():
            with suppress(OSError, ValueError, termios.error):  # then it is not restored after a kill -9
                self._terminal = _Terminal(self.stream.fileno())
        if self._in_notebook:
            from tiltyard.track.notebook_panel import NotebookPanel

            self._live = NotebookPanel(self.render, self.rich.width)
        else:
            self._live = Live(
                get_renderable=self.render,
                console=self.rich,
                refresh_per_second=4,
                # Only if stdout is a terminal too: printing there would tear the panel.
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=True,
                vertical_overflow="crop",
            )
        self._live.start()

    def _load_history(self) -> None:
        """Load the curve of earlier attempts, so that a resumed run shows all of it."""
        history = History(self.folder)
        self.returns += history.curve("train/return").points(_KEPT_POINTS)
        self.evaluations += history.curve("eval/return").points(_KEPT_POINTS)
        self.metrics |= history.newest()

    # ------------------------------------------------------------------------------------------ plain lines

    def _line_is_due(self) -> bool:
        when, at = self._lines_at
        fraction = nearest_budget(self.experiment.stop, self.progress)[2]
        if fraction - at >= 1 / _LINES_PER_BUDGET:
            return True
        quiet = min(_QUIET_SECONDS[1], max(_QUIET_SECONDS[0], self.progress.seconds / 20))
        return time.monotonic() - when >= quiet

    def plain_line(self, *, evaluated: bool = False) -> str:
        """The progress as one line of ASCII."""
        name, _, fraction = nearest_budget(self.experiment.stop, self.progress)
        parts = [f"{self.progress.env_steps:>11,} env steps"]
        if name:
            parts[0] += f" {fraction:4.0%}"
        parts.append(f"{clock(self.progress.seconds)}")
        left = seconds_left(self.experiment.stop, self.recent.earlier, self.progress)
        if left is not None and fraction < 1:
            parts[-1] += f" ({clock(left)} left)"
        if "train/return" in self.metrics:
            parts.append(f"return {nice_number(self.metrics['train/return'])}")
        if evaluated:
            parts.append(f"evaluation {self.evaluation_text()}")
        speed = self.recent.per_second()
        if speed:
            parts.append(f"{speed:,.0f} env steps/s")
        shares = metrics_file.percents(dict(self.shares()))
        if shares:
            parts.append(" ".join(f"{part} {percent}%" for part, percent in shares.items() if percent))
        return " | ".join(parts)

    def render(self) -> Panel:
        """The live panel as it is now; called by the refreshing thread, so it only reads."""
        from tiltyard.track.live_panel import draw

        return draw(self)

    # ------------------------------------------------------------------------------------------ small parts

    def _speed(self) -> str:
        """The speed of the whole run, if `tiltyard bench` has measured the env alone."""
        host = socket.gethostname()
        alone = measured.recall(root_of(self.folder), self.experiment, host)
        text = measured.speed_text(self.progress.env_steps, self.progress.seconds, alone, host) if alone else ""
        return f"speed   {text}" if text else ""

    def bound(self) -> str:
        """What limits the speed, in a sentence."""
        workers = {name.removeprefix("workers/"): x for name, x in self.metrics.items() if name.startswith("workers/")}
        return bottleneck(dict(self.shares()), workers)

    def shares(self) -> list[tuple[str, float]]:
        split = self.split  # replaced as a whole by the training thread
        total = sum(split.values())
        return [(part, amount / total) for part, amount in split.items()] if 0 < total < math.inf else []

    def evaluation_text(self) -> str:
        value = nice_number(self.evaluations[-1][1])
        low, high = self.metrics.get("eval/return_low"), self.metrics.get("eval/return_high")
        return value if low is None or high is None else f"{value} [{nice_number(low)}, {nice_number(high)}]"

    def _write(self, line: str) -> None:
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        safe = line.encode(encoding, "replace").decode(encoding)

        def put() -> None:
            self.stream.write(safe + "\n")
            self.stream.flush()

        self._guarded(put)

    def _guarded(self, action: Any) -> None:
        """Call `action`; if the terminal is gone, print nothing from now on. A log's lines wait for the next call."""
        if self._gone:
            return
        try:
            action()
        except (OSError, ValueError, termios.error) as error:  # ValueError: the stream was closed
            self._gone = not (self._is_log and isinstance(error, OSError))


class _Terminal:
    """Restores the terminal's mode in `close`, or by a reaper if this process is killed: an env may change the mode."""

    def __init__(self, fd: int) -> None:
        self._fd, self._mode, self._guard = fd, reaper.terminal_mode(fd), reaper.Reaper(terminal=fd)

    def close(self) -> None:
        self._guard.close()
        if reaper.terminal_mode(self._fd) != self._mode and reaper.foreground_group(self._fd) in (0, os.getpgrp()):
            reaper.set_terminal_mode(self._fd, self._mode)


def _is_kernel() -> bool:
    """Whether this process is a Jupyter kernel."""
    return "IPython" in sys.modules and hasattr(sys.modules["IPython"].get_ipython(), "kernel")


def _is_live(stream: TextIO) -> bool:
    """Whether the stream is a terminal that can move its cursor and show the chart's characters."""
    encoding = (getattr(stream, "encoding", None) or "").lower().replace("-", "")
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb") and encoding == "utf8"


class Screen:
    """The console on stderr and, from `begin` on, plain lines in logs/attempt-N.log."""

    def __init__(self, run: Run, experiment: Experiment, *, live: bool | None = None) -> None:
        self.run, self.experiment = run, experiment
        self.log: TextIO | None = None
        self.consoles = [Console(experiment, run.id, run.folder, live=live)]

    def begin(self, attempt: int) -> None:
        """Open the attempt's log. The caller holds the run's lock."""
        logs = self.run.folder / "logs"
        logs.mkdir(exist_ok=True)
        self.log = (logs / f"attempt-{attempt:03d}.log").open("a", encoding="utf-8", errors="replace")
        self.consoles.append(Console(self.experiment, self.run.id, self.run.folder, live=False, stream=self.log))

    def start(self, lines: Sequence[str], progress: Progress) -> None:
        """Print what will be trained, and where it continues."""
        for console in self.consoles:
            console.progress = progress
            console.start(lines)

    def update(self, progress: Progress, metrics: Mapping[str, float], time_split: Mapping[str, float]) -> None:
        for console in self.consoles:
            console.update(progress, metrics, time_split)

    def say(self, *sentences: str) -> None:
        for console in self.consoles:
            for sentence in sentences:
                console.say(sentence)

    def finish(self, state: str, lines: Sequence[str]) -> None:
        for console in self.consoles:
            console.finish(state, lines)

    def close(self) -> None:
        """Restore the terminal and close the log."""
        for console in self.consoles:
            console.close()
        if self.log is not None:
            with contextlib.suppress(OSError):  # its last lines are on the terminal too
                self.log.close()
