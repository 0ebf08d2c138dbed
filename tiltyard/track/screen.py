"""The console and the attempt's log file, which get the same messages while a run trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TextIO

from tiltyard.config.experiment import Experiment
from tiltyard.run.folder import Run
from tiltyard.track.console import Console
from tiltyard.types import Progress


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
            self.log.close()
