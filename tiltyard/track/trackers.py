"""The trackers a run asked for, none of which can stop it. metrics.jsonl is the truth; these are copies of it.

check(track)             before the run folder exists: a missing package or login is wrong use
Mirrors, record, close   whatever a tracker raises switches that one off; the sentences returned say so, once
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from tiltyard.config.experiment import Experiment, Track
from tiltyard.processes.reaper import unmarked
from tiltyard.track import wandb
from tiltyard.track.tensorboard import TensorBoardTracker


class Tracker(Protocol):
    """One tracker's side of a run."""

    def record(self, record: Mapping[str, Any]) -> None:
        """Take over one record of metrics.jsonl."""

    def close(self) -> None:
        """Write out what is left."""


def check(track: Track) -> None:
    """Raise UseError for a tracker that cannot work here."""
    wandb.check(track.wandb)


class Trackers:
    """All mirrors of one attempt, opened when metrics.jsonl has its rewind line and before it gets a record.

    `resumed_at` is the env step that the attempt continues from: what mirrors hold beyond it is superseded.
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

        self._unsaid = self._each(list(makers), open_one)

    def record(self, record: Mapping[str, Any]) -> list[str]:
        """Hand on one record after it was appended to metrics.jsonl; returns sentences about mirrors that broke."""
        unsaid, self._unsaid = self._unsaid, []
        return unsaid + self._each(list(self._open), lambda name: self._open[name].record(record))

    def close(self) -> list[str]:
        """End them; returns sentences about mirrors that broke."""
        unsaid, self._unsaid = self._unsaid, []
        said = self._each(list(self._open), lambda name: self._open[name].close())
        self._open.clear()
        return unsaid + said

    def _each(self, names: list[str], action: Callable[[str], None]) -> list[str]:
        said: list[str] = []
        for name in names:
            try:
                with unmarked():  # what W&B starts has to finish its work when this process has gone
                    action(name)
            except Exception as error:  # noqa: BLE001 -- whatever a tracker raises, training goes on
                self._open.pop(name, None)
                reason = " ".join(str(error).split()) or "no reason given"
                said.append(
                    f"{name} is off for the rest of this attempt ({type(error).__name__}: {reason[:300]}); "
                    "training goes on and metrics.jsonl is complete"
                )
        return said
