"""The one training loop. Read it top to bottom:

    lock the folder -> probe the env -> build the engine -> restore -> { step, evaluate, record, save } -> stop

The loop calls the engine, never the other way round. It owns when things happen and what the run folder says about
them; how a batch is collected and learned from is the engine's, what a metric means is run.metrics'.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from tiltyard.attempt import (
    Attempt,
    begin,
    keep,
    measure,
    opening_lines,
    record,
    record_failure,
    restore,
    write_progress,
)
from tiltyard.config.experiment import Save, Stop
from tiltyard.engines import make_engine
from tiltyard.envs.probe import probe
from tiltyard.errors import EXIT_DONE, EXIT_RESUMABLE
from tiltyard.evaluation.measure import Evaluator
from tiltyard.evaluation.play import can_be_filmed
from tiltyard.ledger import Ledger, Stopwatch
from tiltyard.run.events import log_event
from tiltyard.run.folder import Run
from tiltyard.run.lock import Lock
from tiltyard.signals import StopSignals
from tiltyard.track.mirrors import Mirrors
from tiltyard.track.screen import Screen
from tiltyard.types import EnvSpec, Progress

STATUS_SECONDS = 1.0  # status.json is written at most this often while training


@dataclass(frozen=True)
class Outcome:
    """How a training ended: exit 0 done, 75 stopped and resumable. Failures are exceptions."""

    state: Literal["finished", "stopped"]
    reason: str
    progress: Progress
    trained: bool
    """whether there was anything left to train"""
    filmable: bool
    latest: dict[str, float]

    @property
    def exit_code(self) -> int:
        return EXIT_DONE if self.state == "finished" else EXIT_RESUMABLE


def train_run(run: Run, *, screen: Screen, spec: EnvSpec | None = None) -> Outcome:
    """Train the run in `run.folder` from where it stands until it is done, stopped or failed.

    `spec` is the env's, if it was probed a moment ago.
    """
    with Lock(run) as lock, StopSignals() as signals, ExitStack() as closing:
        try:
            experiment = run.experiment()
            number = begin(run, experiment, screen)
            if spec is None:
                spec = probe(experiment.env, base=run.base, previous=experiment.model.previous)
            engine = make_engine(experiment, spec, run.base)
            closing.callback(engine.close)
            evaluator = Evaluator(experiment, spec, run.base)
            ledger, progress = restore(run, experiment, engine, number, screen)
            mirrors = Mirrors(run.folder, experiment, progress.env_steps)
            closing.callback(lambda: screen.say(*mirrors.close()))
            screen.start(opening_lines(run, experiment, spec, engine), progress)
            attempt = Attempt(
                run, experiment, number, engine, evaluator, screen, ledger, progress, mirrors, can_be_filmed(spec)
            )
            return _loop(attempt, lock, signals)
        except BaseException as error:
            if not lock.taken_over:  # else the folder is somebody else's now, and going well
                record_failure(run, error)
            raise


def _loop(attempt: Attempt, lock: Lock, signals: StopSignals) -> Outcome:
    experiment, engine, ledger, run = attempt.experiment, attempt.engine, attempt.ledger, attempt.run
    save, every, first = experiment.save, experiment.eval.every, attempt.progress
    last_save, last_status = time.monotonic(), 0.0
    watch = Stopwatch(first)
    reason = stop_reason(experiment.stop, first, ledger)

    while reason is None and not signals.asked:
        before = attempt.progress
        report = engine.step()
        lock.check()
        progress = attempt.progress = report.progress
        found = ledger.absorb(report)
        watch.add(report.time_split)
        for sentence in report.events:
            attempt.say("warning", sentence)

        best = False
        if every and progress.env_steps // every > before.env_steps // every:
            with watch.measuring("eval"):
                found |= measure(attempt)
            best = ledger.improves(save, progress.env_steps)
        reason = stop_reason(experiment.stop, progress, ledger)

        if progress.updates % experiment.track.every == 0 or "eval/return" in found or reason:
            record(attempt, found | watch.metrics(progress))
            watch = Stopwatch(progress)
        if time.monotonic() - last_status > STATUS_SECONDS:
            write_progress(attempt)
            last_status = time.monotonic()

        milestone = any(before.env_steps < stone <= progress.env_steps for stone in save.milestones)
        if milestone or best or save_due(save, ledger.saved, progress, time.monotonic() - last_save):
            with watch.measuring("save"):
                keep(attempt, milestone=milestone)
            last_save = time.monotonic()

    lock.check()
    progress = attempt.progress
    if ledger.saved != progress:
        keep(attempt)
    if reason is not None and experiment.eval.at_end and ledger.evaluated_at != progress.env_steps:
        found = measure(attempt)
        ledger.improves(save, progress.env_steps)
        record(attempt, found)
        keep(attempt)
    state: Literal["finished", "stopped"] = "stopped" if reason is None else "finished"
    reason = reason or f"asked by {signals.asked}"
    write_progress(attempt, state=state, reason=reason)
    log_event(run, state, f"{state} at env step {progress.env_steps:,}: {reason}")
    return Outcome(state, reason, progress, progress != first, attempt.filmable, dict(ledger.latest))


# ------------------------------------------------------------------------------------------------ decisions


def stop_reason(stop: Stop, progress: Progress, ledger: Ledger) -> str | None:
    """The first stop condition that is met, in words."""
    reached = (
        ("env_steps", stop.env_steps, progress.env_steps),
        ("frames", stop.frames, progress.frames),
        ("seconds", stop.seconds, progress.seconds),
        ("updates", stop.updates, progress.updates),
        ("return", stop.return_, ledger.latest.get("eval/return")),
        ("train_return", stop.train_return, ledger.train_return),
    )
    for name, wanted, now in reached:
        if wanted is not None and now is not None and now >= wanted:
            return f"stop.{name}={wanted:,} reached ({now:,.6g})"
    return None


def save_due(save: Save, saved: Progress, now: Progress, seconds: float) -> bool:
    """Whether an interval has passed since the last checkpoint. Env steps and updates count from zero, not from it."""
    return bool(
        (save.env_steps and now.env_steps // save.env_steps > saved.env_steps // save.env_steps)
        or (save.updates and now.updates // save.updates > saved.updates // save.updates)
        or (save.seconds and seconds >= save.seconds)
    )
