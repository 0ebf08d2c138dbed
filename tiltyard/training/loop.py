"""The one training loop. Read it top to bottom:

    lock the folder -> build the engine -> restore -> { step, record, save } -> finish, stop or pause
    where an evaluation is due:                       { step, save, evaluate, record both, score the checkpoint }

The loop calls the engine, never the other way round. When things happen is clocks.py, what they do to engine and folder
is attempt.py. A population or a settings schedule adds one call each (pbt.py, settings_check.py).
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Literal

from tiltyard.engines import make_engine
from tiltyard.envs.watchdog import Watchdog
from tiltyard.errors import EXIT_DONE, EXIT_RESUMABLE, UseError
from tiltyard.run.events import log_event
from tiltyard.run.folder import Run
from tiltyard.run.lock import Lock
from tiltyard.run.settings_schedule import PAUSED, Segment
from tiltyard.track.screen import Screen
from tiltyard.track.trackers import Trackers
from tiltyard.training import clocks, failure
from tiltyard.training.attempt import (
    Attempt,
    AttemptSetup,
    evaluate,
    find_start,
    opening_lines,
    record,
    restore,
    save_checkpoint,
    start_attempt,
    write_progress,
)
from tiltyard.training.pbt import PbtSelection
from tiltyard.training.settings_check import check_learned, check_restored
from tiltyard.training.signals import StopSignals
from tiltyard.types import Progress, Report

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
    has_next_segment: bool = False
    """whether only a segment of the settings schedule is over, and another one follows"""

    @property
    def exit_code(self) -> int:
        return EXIT_DONE if self.state == "finished" else EXIT_RESUMABLE


def train_run(run: Run, setup: AttemptSetup, *, screen: Screen) -> Outcome:
    """Train the run in `run.folder` from where it stands until it is finished, stopped or failed."""
    experiment, spec = setup.experiment, setup.spec
    with Lock(run) as lock, StopSignals() as signals, ExitStack() as resources:
        if run.experiment() != setup.stored:
            raise UseError(f"the settings of run {run.id} were changed by another process just now", "try again")
        attempt = None
        deadline = failure.close_deadline()
        resources.callback(deadline.cancel)
        try:
            number = start_attempt(run, setup, screen)
            start = None if setup.from_scratch else find_start(run, experiment)
            continues = start[0].folder if start and start[0] else None
            engine = make_engine(experiment, spec, run.base, continues, same_run=number > 1)
            resources.callback(engine.close)
            state, progress = restore(run, setup, engine, number, screen, start)
            if setup.segment.settings:
                check_restored(experiment, setup.segment.settings, engine)
            trackers = Trackers(run.folder, experiment, state.recorded_to(progress.env_steps))
            resources.callback(lambda: screen.say(*trackers.close()))
            screen.start(opening_lines(run, experiment, spec, engine), progress)
            attempt = Attempt(run, experiment, spec, number, engine, screen, state, progress, trackers)
            on_hang = partial(failure.exit_hung, run, attempt, lock)
            with Watchdog(experiment.env.step_timeout, experiment.env.reset_timeout, on_hang):
                return _loop(attempt, setup.segment, lock, signals)
        except BaseException as error:
            reported = failure.explain(experiment, error, interrupted=signals.interrupted)
            if not lock.taken_over:  # otherwise the folder belongs to another process now
                failure.record(run, attempt, reported)
            deadline.start()
            if reported is error:
                raise
            raise reported from error


def _loop(attempt: Attempt, segment: Segment, lock: Lock, signals: StopSignals) -> Outcome:
    experiment, state, first = attempt.experiment, attempt.state, attempt.progress
    watch = clocks.Stopwatch(first)
    reason = clocks.stop_reason(experiment.stop, first, state)
    complete = _catch_up(attempt, reason, lock, signals, watch)
    reason = clocks.stop_reason(experiment.stop, first, state)
    selection = PbtSelection(attempt, experiment.population) if experiment.population else None
    while reason is None and complete and not signals.received and not clocks.should_pause(segment, attempt.progress):
        before = attempt.progress
        report = _step(attempt, lock)
        if segment.settings and before == first:
            check_learned(experiment, segment.settings, attempt.engine, report.metrics)
        progress = attempt.progress = report.progress
        metrics = state.add(report)
        if selection is not None:
            selection.select(metrics)
        watch.add(report.time_split)
        for message in report.events:
            attempt.log("warning", message)

        reason = clocks.stop_reason(experiment.stop, progress, state)
        evaluation = clocks.should_evaluate(experiment, before, progress)
        evaluation |= clocks.should_evaluate_at_end(experiment, reason, state, progress)
        if evaluation:
            state.unrecorded = metrics  # becomes one record with the evaluation
        elif clocks.should_record(experiment, progress) or reason:
            record(attempt, metrics | watch.metrics(progress))
        if time.monotonic() - attempt.last_status > STATUS_SECONDS:
            write_progress(attempt)

        milestone = clocks.passes_milestone(experiment.save, before, progress)
        due = clocks.should_save(experiment.save, state.saved, progress, time.monotonic() - attempt.last_save)
        if milestone or due or (evaluation and reason):  # before the evaluation, which may take long
            with watch.measuring("save"):
                save_checkpoint(attempt, milestone=milestone)
        if evaluation:
            complete = _evaluate(attempt, lock, signals, watch)
            reason = clocks.stop_reason(experiment.stop, progress, state)

    lock.check()
    if state.saved != attempt.progress:
        save_checkpoint(attempt)
    return _finish(attempt, segment, reason if complete else None, signals, trained=attempt.progress != first)


def _catch_up(attempt: Attempt, reason: str | None, lock: Lock, signals: StopSignals, watch: clocks.Stopwatch) -> bool:
    """Do what an earlier attempt left undone: an evaluation, or only its record. False when a signal interrupted it."""
    experiment, state = attempt.experiment, attempt.state
    missing = clocks.should_evaluate_at_end(experiment, reason, state, attempt.progress)
    if missing or (experiment.eval.every and state.unrecorded is not None):
        return _evaluate(attempt, lock, signals, watch)
    if state.unrecorded is not None:  # evaluations were switched off since
        record(attempt, state.unrecorded)
        state.unrecorded = None
    return True


def _step(attempt: Attempt, lock: Lock) -> Report:
    attempt.stepping = True
    report = attempt.engine.step()
    attempt.stepping = False
    lock.check()
    return report


def _evaluate(attempt: Attempt, lock: Lock, signals: StopSignals, watch: clocks.Stopwatch) -> bool:
    """Evaluate and record. A checkpoint of this moment gets the score; a new best is saved.

    Returns False when a signal interrupted it: nothing of it is kept, and the next attempt evaluates here.
    """
    state, progress = attempt.state, attempt.progress
    with watch.measuring("eval"):
        measured = evaluate(attempt, lambda: signals.received is not None)
    lock.check()
    if measured is None:
        attempt.screen.update(progress, state.unrecorded or {}, {})
        return False
    best = state.improves(attempt.experiment.save, progress.env_steps)
    timing = watch.metrics(progress) if progress != watch.since else {}
    record(attempt, (state.unrecorded or {}) | measured | timing)
    state.unrecorded = None
    if best or state.saved == progress:
        with watch.measuring("save"):
            save_checkpoint(attempt)
    return True


def _finish(attempt: Attempt, segment: Segment, reason: str | None, signals: StopSignals, *, trained: bool) -> Outcome:
    """Write into the folder how it ended: finished, stopped by a signal, or paused at the end of a segment."""
    state: Literal["finished", "stopped"] = "stopped" if reason is None else "finished"
    paused = reason is None and not signals.received
    if reason is None:
        reason = f"received {signals.received}" if signals.received else f"{PAUSED} {segment.end:,} as scheduled"
    progress = attempt.progress
    write_progress(attempt, state=state, reason=reason)
    log_event(attempt.run, state, f"{state} at env step {progress.env_steps:,}: {reason}")
    latest, more = dict(attempt.state.latest), paused and not segment.last
    return Outcome(state, reason, progress, trained, attempt.spec.filmable, latest, more)
