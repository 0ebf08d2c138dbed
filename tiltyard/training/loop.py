"""The one training loop. Read it top to bottom:

    lock the folder -> build the engine -> restore -> { step, record, save } -> stop, or pause where a stretch ends
    where an evaluation is due:                     { step, save, evaluate, record both, give the checkpoint its score }

The loop calls the engine, never the other way round. It owns when things happen and what the run folder says about
them; how a batch is collected and learned from is the engine's, what a metric means is run.metrics'.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Literal

from tiltyard.config.experiment import Experiment, Save, Stop
from tiltyard.engines import make_engine
from tiltyard.envs.watchdog import Watchdog
from tiltyard.errors import EXIT_DONE, EXIT_RESUMABLE, TiltyardError, UseError, raised
from tiltyard.evaluation.evaluate import Evaluator
from tiltyard.evaluation.rollouts import can_record
from tiltyard.plugins.resolve import user_traceback
from tiltyard.run.events import log_event
from tiltyard.run.folder import Run
from tiltyard.run.lock import Lock
from tiltyard.run.settings_schedule import PAUSED, Segment
from tiltyard.track.screen import Screen
from tiltyard.track.trackers import Trackers
from tiltyard.training.attempt import (
    Attempt,
    AttemptSetup,
    begin,
    closing_deadline,
    end_stuck,
    keep,
    measure,
    opening_lines,
    record,
    record_failure,
    restore,
    starting_point,
    write_progress,
)
from tiltyard.training.loop_state import LoopState, Stopwatch
from tiltyard.training.pbt import selection_of
from tiltyard.training.settings_check import check_learned, check_restored
from tiltyard.training.signals import StopSignals
from tiltyard.types import Progress

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
    goes_on: bool = False
    """whether it only came to the end of a stretch, and the next one follows"""

    @property
    def exit_code(self) -> int:
        return EXIT_DONE if self.state == "finished" else EXIT_RESUMABLE


def train_run(run: Run, plan: AttemptSetup, *, screen: Screen) -> Outcome:
    """Train the run in `run.folder` as planned, from where it stands until it is done, stopped or failed."""
    experiment, spec = plan.settings, plan.spec
    with Lock(run) as lock, StopSignals() as signals, ExitStack() as closing:
        if run.experiment() != plan.found:
            raise UseError(f"the settings of run {run.id} were changed by somebody else just now", "try again")
        attempt = None
        deadline = closing_deadline()
        closing.callback(deadline.cancel)
        try:
            number = begin(run, plan, screen)
            start = None if plan.afresh else starting_point(run, experiment)
            continues = start[0].folder if start and start[0] else None
            engine = make_engine(experiment, spec, run.base, continues, same_run=number > 1)
            closing.callback(engine.close)
            evaluator = Evaluator(experiment, spec, run.base)
            ledger, progress = restore(run, plan, engine, number, screen, start)
            check_restored(experiment, plan.stretch.settings, engine)
            mirrors = Trackers(run.folder, experiment, ledger.recorded_to(progress.env_steps))
            closing.callback(lambda: screen.say(*mirrors.close()))
            screen.start(opening_lines(run, experiment, spec, engine), progress)
            attempt = Attempt(
                run, experiment, number, engine, evaluator, screen, ledger, progress, mirrors, can_record(spec)
            )
            stuck = partial(end_stuck, run, attempt, lock)
            with Watchdog(experiment.env.step_timeout, experiment.env.reset_timeout, stuck):
                return _loop(attempt, plan.stretch, lock, signals)
        except BaseException as error:
            told = error if signals.interrupted or isinstance(error, Exception) else _foreign_end(experiment, error)
            if not lock.taken_over:  # else the folder is somebody else's now, and going well
                record_failure(run, attempt, told)
            deadline.start()
            if told is error:
                raise
            raise told from error


def _foreign_end(experiment: Experiment, error: BaseException) -> TiltyardError:
    """What would end this process and is nobody's wish: raised by the env, the model or something that they use."""
    return TiltyardError(
        f"env {experiment.env.id} or model {experiment.model.id} {raised(error)}, which no signal asked for",
        "the traceback shows where",
        user_traceback(error),
    )


def _loop(attempt: Attempt, stretch: Segment, lock: Lock, signals: StopSignals) -> Outcome:
    experiment, engine, ledger = attempt.experiment, attempt.engine, attempt.ledger
    save, every, first = experiment.save, experiment.eval.every, attempt.progress
    last_save, last_status = time.monotonic(), 0.0
    watch = Stopwatch(first)
    reason, whole = stop_reason(experiment.stop, first, ledger), True
    if final_due(experiment, reason, ledger, first) or (every and ledger.unrecorded is not None):
        whole = _evaluate(attempt, lock, signals, watch)  # an earlier attempt was ended before it came to that
        reason = stop_reason(experiment.stop, first, ledger)
    elif ledger.unrecorded is not None:  # and evaluations were switched off since
        record(attempt, ledger.unrecorded)
        ledger.unrecorded = None

    selection = selection_of(attempt)
    while reason is None and whole and not signals.asked and not pause_due(stretch, attempt.progress):
        before = attempt.progress
        attempt.stepping = True
        report = engine.step()
        attempt.stepping = False
        lock.check()
        if before == first:
            check_learned(experiment, stretch.settings, engine, report.metrics)
        progress = attempt.progress = report.progress
        found = ledger.absorb(report)
        if selection is not None:
            selection.turn(found)
        watch.add(report.time_split)
        for sentence in report.events:
            attempt.say("warning", sentence)

        reason = stop_reason(experiment.stop, progress, ledger)
        evaluation = bool(every and progress.env_steps // every > before.env_steps // every)
        evaluation |= final_due(experiment, reason, ledger, progress)
        if evaluation:
            ledger.unrecorded = found
        elif progress.updates % experiment.track.every == 0 or reason:
            record(attempt, found | watch.metrics(progress))
        if time.monotonic() - last_status > STATUS_SECONDS:
            write_progress(attempt)
            last_status = time.monotonic()

        milestone = any(before.env_steps < stone <= progress.env_steps for stone in save.milestones)
        due = save_due(save, ledger.saved, progress, time.monotonic() - last_save)
        if milestone or due or (evaluation and reason):  # before the evaluation, which may be long, or the last thing
            with watch.measuring("save"):
                keep(attempt, milestone=milestone)
            last_save = time.monotonic()
        if evaluation:
            whole = _evaluate(attempt, lock, signals, watch)
            reason = stop_reason(experiment.stop, progress, ledger)
            last_save = time.monotonic() if ledger.saved == progress else last_save

    lock.check()
    if ledger.saved != attempt.progress:
        keep(attempt)
    return _ended(attempt, stretch, reason if whole else None, signals, trained=attempt.progress != first)


def _ended(attempt: Attempt, stretch: Segment, reason: str | None, signals: StopSignals, *, trained: bool) -> Outcome:
    """Say in the folder how it ended: finished for a reason, asked to, or at the end of a stretch."""
    state: Literal["finished", "stopped"] = "stopped" if reason is None else "finished"
    paused = reason is None and not signals.asked
    if reason is None:
        reason = f"asked by {signals.asked}" if signals.asked else f"{PAUSED} {stretch.end:,} as it was told"
    progress = attempt.progress
    write_progress(attempt, state=state, reason=reason)
    log_event(attempt.run, state, f"{state} at env step {progress.env_steps:,}: {reason}")
    latest, goes_on = dict(attempt.ledger.latest), paused and not stretch.last
    return Outcome(state, reason, progress, trained, attempt.filmable, latest, goes_on)


def _evaluate(attempt: Attempt, lock: Lock, signals: StopSignals, watch: Stopwatch) -> bool:
    """Evaluate and record; a checkpoint of this moment gets the score, a new best becomes one.

    False when a signal asked: then nothing of it is kept, and the next attempt evaluates here.
    """
    ledger, progress = attempt.ledger, attempt.progress
    with watch.measuring("eval"):
        measured = measure(attempt, lambda: signals.asked is not None)
    lock.check()
    if measured is None:
        attempt.screen.update(progress, ledger.unrecorded or {}, {})
        return False
    best = ledger.improves(attempt.experiment.save, progress.env_steps)
    timing = watch.metrics(progress) if progress != watch.since else {}
    record(attempt, (ledger.unrecorded or {}) | measured | timing)
    ledger.unrecorded = None
    if best or ledger.saved == progress:
        with watch.measuring("save"):
            keep(attempt)
    return True


# ------------------------------------------------------------------------------------------------ decisions


def stop_reason(stop: Stop, progress: Progress, ledger: LoopState) -> str | None:
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


def pause_due(stretch: Segment, progress: Progress) -> bool:
    """Whether the part of the run that was to be trained now is over."""
    return stretch.end is not None and progress.env_steps >= stretch.end


def final_due(experiment: Experiment, reason: str | None, ledger: LoopState, progress: Progress) -> bool:
    """Whether training is over and its last evaluation is not."""
    return reason is not None and experiment.eval.at_end and ledger.evaluated_at != progress.env_steps


def save_due(save: Save, saved: Progress, now: Progress, seconds: float) -> bool:
    """Whether an interval has passed since the last checkpoint. Env steps and updates count from zero, not from it."""
    return bool(
        (save.env_steps and now.env_steps // save.env_steps > saved.env_steps // save.env_steps)
        or (save.updates and now.updates // save.updates > saved.updates // save.updates)
        or (save.seconds and seconds >= save.seconds)
    )
