"""The trackers of a run: copies of metrics.jsonl for other tools. A failing tracker never stops training.

check(track)              before the run folder exists: UseError for a missing package or login
Trackers, record, close   an exception turns that tracker off; the returned messages say so once
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from tiltyard.config.experiment import Experiment
from tiltyard.config.sections import Track
from tiltyard.processes.reaper import unmarked
from tiltyard.track import wandb
from tiltyard.track.tensorboard import TensorBoardTracker


class Tracker(Protocol):
    """One tracker's side of a run."""

    def record(self, record: Mapping[str, Any]) -> None:
        """Add one record of metrics.jsonl."""

    def close(self) -> None:
        """Flush and close."""


def check(track: Track) -> None:
    """UseError for a tracker that cannot work here."""
    if track.wandb.mode != "off":
        wandb.check(track.wandb)


class Trackers:
    """All trackers of one attempt, opened after the rewind line and before the first record of metrics.jsonl.

    `resumed_at` is the env step that the attempt continues from; later values in trackers are superseded.
    """

    def __init__(self, run_folder: Path, experiment: Experiment, resumed_at: int) -> None:
        makers: dict[str, Callable[[], Tracker]] = {}
        if experiment.track.tensorboard:
            makers["TensorBoard"] = lambda: TensorBoardTracker(run_folder / "tb", resumed_at + 1)
        if experiment.track.wandb.mode != "off":
            makers["W&B"] = lambda: wandb.WandbTracker(run_folder, experiment, experiment.track.wandb)
        self._open: dict[str, Tracker] = {}

        def open_one(name: str) -> None:
            self._open[name] = makers[name]()

        self._pending = self._each(list(makers), open_one)

    def record(self, record: Mapping[str, Any]) -> list[str]:
        """Pass on a record that was appended to metrics.jsonl; return messages about trackers that failed."""
        pending, self._pending = self._pending, []
        return pending + self._each(list(self._open), lambda name: self._open[name].record(record))

    def close(self) -> list[str]:
        """Close all trackers; return messages about those that failed."""
        pending, self._pending = self._pending, []
        messages = self._each(list(self._open), lambda name: self._open[name].close())
        self._open.clear()
        return pending + messages

    def _each(self, names: list[str], action: Callable[[str], None]) -> list[str]:
        messages: list[str] = []
        for name in names:
            try:
                with unmarked():  # W&B's helper process must outlive this process
                    action(name)
            except Exception as error:  # noqa: BLE001 -- a tracker may raise anything
                self._open.pop(name, None)
                reason = " ".join(str(error).split()) or "no reason given"
                messages.append(
                    f"{name} is off for the rest of this attempt ({type(error).__name__}: {reason[:300]}); "
                    "training continues and metrics.jsonl is complete"
                )
        return messages
