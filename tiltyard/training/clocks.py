"""When the loop does something, as plain conditions; and where the time between two records went."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tiltyard.config.experiment import Experiment
from tiltyard.config.sections import Save, Stop
from tiltyard.training.loop_state import LoopState
from tiltyard.types import Progress


def stop_reason(stop: Stop, progress: Progress, state: LoopState) -> str | None:
    """The first stop condition that is met, as text."""
    reached = (
        ("env_steps", stop.env_steps, progress.env_steps),
        ("frames", stop.frames, progress.frames),
        ("seconds", stop.seconds, progress.seconds),
        ("updates", stop.updates, progress.updates),
        ("return", stop.return_, state.latest.get("eval/return")),
        ("train_return", stop.train_return, state.train_return),
    )
    for name, wanted, now in reached:
        if wanted is not None and now is not None and now >= wanted:
            return f"stop.{name}={wanted:,} reached ({now:,.6g})"
    return None


def should_evaluate(experiment: Experiment, before: Progress, now: Progress) -> bool:
    """Whether a multiple of `eval.every` was passed."""
    every = experiment.eval.every
    return bool(every and now.env_steps // every > before.env_steps // every)


def should_evaluate_at_end(experiment: Experiment, reason: str | None, state: LoopState, now: Progress) -> bool:
    """Whether training is over and the last evaluation is missing."""
    return reason is not None and experiment.eval.at_end and state.evaluated_at != now.env_steps


def should_record(experiment: Experiment, now: Progress) -> bool:
    return now.updates % experiment.track.every == 0


def should_save(save: Save, saved: Progress, now: Progress, seconds: float) -> bool:
    """Whether a save interval has passed; `seconds` is the time since the last checkpoint. Env steps and updates count
    from the start of the run."""
    return bool(
        (save.env_steps and now.env_steps // save.env_steps > saved.env_steps // save.env_steps)
        or (save.updates and now.updates // save.updates > saved.updates // save.updates)
        or (save.seconds and seconds >= save.seconds)
    )


def passes_milestone(save: Save, before: Progress, now: Progress) -> bool:
    return any(before.env_steps < milestone <= now.env_steps for milestone in save.milestones)


class Stopwatch:
    """Seconds per activity, env steps and frames since the last record."""

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
        """Speeds and shares of time for a record, then start again from zero."""
        elapsed = max(time.monotonic() - self.began, 1e-9)
        self.add({"other": max(0.0, elapsed - sum(self.spent.values()))})  # so that the shares add up to one
        found = {
            "speed/env_steps_per_second": (progress.env_steps - self.since.env_steps) / elapsed,
            "speed/frames_per_second": (progress.frames - self.since.frames) / elapsed,
            **{f"time/{part}": seconds / elapsed for part, seconds in self.spent.items()},
        }
        self.since, self.began, self.spent = progress, time.monotonic(), {}
        return found
