"""What the training loop remembers from update to update, and where the time goes.

The Ledger is everything a resume needs beyond the engine's own state: it travels with every checkpoint as loop.*.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from tiltyard.config.experiment import Save
from tiltyard.types import Progress, Report, Tree

WINDOW = 100  # training episodes that train/return is the mean of


@dataclass
class Ledger:
    """What the loop remembers from update to update; saved with every checkpoint, so that a resume forgets nothing."""

    returns: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    lengths: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    extras: dict[str, deque[float]] = field(default_factory=dict)
    latest: dict[str, float] = field(default_factory=dict)
    evaluated_at: int = -1
    best: float | None = None
    saved: Progress = field(default_factory=Progress)

    def absorb(self, report: Report) -> dict[str, float]:
        """The record's metrics after an engine step."""
        for episode in report.episodes:
            self.returns.append(episode.total)
            self.lengths.append(episode.length)
            for name, value in episode.metrics.items():
                self.extras.setdefault(name, deque(maxlen=WINDOW)).append(value)
        found = dict(report.metrics)
        if self.returns:
            found["train/return"] = sum(self.returns) / len(self.returns)
            found["train/return_min"], found["train/return_max"] = min(self.returns), max(self.returns)
            found["train/length"] = sum(self.lengths) / len(self.lengths)
        found |= {f"episode/{name}": sum(values) / len(values) for name, values in self.extras.items()}
        self.latest |= found
        return found

    def score(self, save: Save, env_steps: int) -> float | None:
        """The metric that ranks checkpoints; an evaluation counts only for the very weights it measured."""
        if save.metric.startswith("eval/") and self.evaluated_at != env_steps:
            return None
        return self.latest.get(save.metric)

    def improves(self, save: Save, env_steps: int) -> bool:
        """Whether the policy as just measured is the best so far, which makes it worth a checkpoint."""
        score = self.score(save, env_steps)
        if score is None or save.best == 0:
            return False
        better = self.best is None or (score > self.best if save.mode == "max" else score < self.best)
        self.best = score if better else self.best
        return better

    def dump(self) -> Tree:
        lists = {name: list(values) for name, values in self.extras.items()}
        plain = {"returns": list(self.returns), "lengths": list(self.lengths), "extras": lists}
        kept = {"latest": self.latest, "evaluated_at": self.evaluated_at, "best": self.best}
        return {**plain, **kept, "saved": asdict(self.saved)}

    @staticmethod
    def read(tree: Tree) -> Ledger:
        windows = {name: deque(values, maxlen=WINDOW) for name, values in tree["extras"].items()}
        return Ledger(
            deque(tree["returns"], maxlen=WINDOW),
            deque(tree["lengths"], maxlen=WINDOW),
            windows,
            dict(tree["latest"]),
            tree["evaluated_at"],
            tree["best"],
            Progress(**tree["saved"]),
        )


class Stopwatch:
    """Where the wall time went since the last record, and how far training came in it."""

    def __init__(self, since: Progress) -> None:
        self.since, self.began = since, time.monotonic()
        self.spent: dict[str, float] = {}

    def add(self, split: Mapping[str, float]) -> None:
        for part, seconds in split.items():
            self.spent[part] = self.spent.get(part, 0.0) + seconds

    @contextmanager
    def measuring(self, part: str) -> Iterator[None]:
        mark = time.monotonic()
        try:
            yield
        finally:
            self.add({part: time.monotonic() - mark})

    def metrics(self, progress: Progress) -> dict[str, float]:
        elapsed = max(time.monotonic() - self.began, 1e-9)
        # What nobody measured (records, status, the screen) is other too: the shares add up to one.
        self.add({"other": max(0.0, elapsed - sum(self.spent.values()))})
        return {
            "speed/env_steps_per_second": (progress.env_steps - self.since.env_steps) / elapsed,
            "speed/frames_per_second": (progress.frames - self.since.frames) / elapsed,
            **{f"time/{part}": seconds / elapsed for part, seconds in self.spent.items()},
        }
