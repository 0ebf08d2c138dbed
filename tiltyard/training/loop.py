"""The one training loop, for `tiltyard train` and for scripts that drive it. Read it top to bottom:

    lock the folder -> build the engine -> restore -> { step, record, yield, save } -> finish, stop or pause
    where an evaluation is due:                       { step, yield, save, evaluate, record both, score the checkpoint }

The loop calls the engine, never the other way round. When things happen is clocks.py, what they do to engine and folder
is attempt.py, settings that change on the way are live_settings.py. A population adds one call (pbt.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from tiltyard.config.experiment import Experiment
from tiltyard.config.load import as_overrides
from tiltyard.engines import make_engine
from tiltyard.envs.watchdog import Watchdog
from tiltyard.errors import EXIT_DONE, EXIT_RESUMABLE, DiskError, UseError
from tiltyard.evaluation.statistics import Evaluation
from tiltyard.processes.fork_server import ForkServer
from tiltyard.run.folder import Run
from tiltyard.run.lock import Lock
from tiltyard.run.settings_schedule import PAUSED, SettingsSchedule
from tiltyard.run.writer import RunWriter
from tiltyard.track.console import Screen
from tiltyard.track.trackers import Trackers
from tiltyard.training import clocks, failure, live_settings
from tiltyard.training.attempt import (
    Attempt,
    AttemptSetup,
    evaluate,
    find_start,
    opening_lines,
    record,
    restore,
    start_attempt,
    write_progress,
)
from tiltyard.training.pbt import PbtSelection
from tiltyard.training.saving import Saving, save_checkpoint
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
    continues: bool = False
    """whether it only stopped for scheduled settings that need another engine"""

    @property
    def exit_code(self) -> int:
        return EXIT_DONE if self.state == "finished" else EXIT_RESUMABLE


@contextmanager
def open_training(run: Run, setup: AttemptSetup, server: ForkServer | None, screen: Screen) -> Iterator[Training]:
    """Lock the run in `run.folder`, restore it and save it at the end; an error of the block is the run's failure."""
    experiment, spec = setup.experiment, setup.spec
    with Lock(run) as lock, StopSignals() as signals, ExitStack() as resources:
        if run.experiment() != setup.stored:
            raise UseError(f"the settings of run {run.id} were changed by another process just now", "try again")
        attempt = training = None
        writer = RunWriter(run, screen.say, experiment.save.patience)
        deadline = failure.close_deadline()
        resources.callback(deadline.cancel)
        try:
            number = start_attempt(writer, setup, screen)
            start = None if setup.from_scratch else find_start(run, experiment)
            continues = start[0].folder if start and start[0] else None
            engine = make_engine(
                experiment, spec, run.base, continues, same_run=number > 1, server=server, net=setup.net
            )
            resources.callback(engine.close)
            state, progress = restore(writer, setup, engine, number, start)
            check_restored(experiment, setup.schedule.at(progress.env_steps), engine)
            trackers = Trackers(run.folder, experiment, state.recorded_to(progress.env_steps))
            resources.callback(lambda: screen.say(*trackers.close()))
            screen.start(opening_lines(run, experiment, spec, engine), progress)
            saving = Saving(state, lock.check)
            resources.callback(saving.close)
            attempt = Attempt(run, writer, experiment, spec, number, engine, screen, state, progress, trackers, saving)
            training = Training(attempt, setup.schedule, lock, signals)
            on_hang = partial(failure.exit_hung, attempt, lock)
            with Watchdog(experiment.env.step_timeout, experiment.env.reset_timeout, on_hang):
                try:
                    yield training
                except (SystemExit, GeneratorExit, KeyboardInterrupt):
                    if training.is_busy or signals.interrupted:  # an env or model has called sys.exit(), or a second ^C
                        raise
                    training.finish()
                    raise
                training.finish()
        except BaseException as error:
            if training is not None and training.outcome is not None:
                raise
            outside = signals.interrupted or (training is not None and not training.is_busy)
            reported = error if outside else failure.explain(run, experiment, error, signals.received)
            if not lock.taken_over:  # otherwise the folder belongs to another process now
                failure.record(writer, attempt, reported, stopped=signals.received is not None)
            deadline.start()
            if reported is error:
                raise
            raise reported from error


class Training:
    """A run that is being trained. Iterate over it for a report after each update; the training continues with the next
    iteration. A checkpoint or an evaluation that is due is made after the body of the loop, so that a run which is
    killed and continued repeats what the body did."""

    def __init__(self, attempt: Attempt, schedule: SettingsSchedule, lock: Lock, signals: StopSignals) -> None:
        self._attempt, self._schedule, self._lock, self._signals = attempt, schedule, lock, signals
        self._first = self._before = attempt.progress  # before all updates, and before the newest until it is saved
        self._watch = clocks.Stopwatch(attempt.progress)
        self._scheduled = schedule.at(attempt.progress.env_steps)  # those in effect
        self._new_settings = set(self._scheduled)  # not used by an update yet
        self._reports = self._loop()
        self._stop_reason: str | None = None  # why it stops before it is finished
        self._finished: str | None = None  # the stop condition that was reached
        self._save_due = self._milestone_due = self._continues = False
        self.is_busy = False
        """whether it is training, and not the body of the user's loop that runs"""
        self.outcome: Outcome | None = None

    @property
    def run(self) -> Run:
        return self._attempt.run

    @property
    def experiment(self) -> Experiment:
        """The settings in effect."""
        return self._attempt.experiment

    @property
    def progress(self) -> Progress:
        return self._attempt.progress

    def __iter__(self) -> Iterator[Report]:
        return self

    def __next__(self) -> Report:
        self._require_open()
        self.is_busy = True
        report = next(self._reports, None)
        self.is_busy = False
        if report is None:
            raise StopIteration
        return report

    # ------------------------------------------------------------------------------------------ for the loop's body

    def set(self, changes: Mapping[str, Any]) -> None:
        """Change settings from here on: `training.set({"algo.lr": 1e-4, "env.options.level": 3})`.

        Written to the run folder before it takes effect; a resume uses the settings of its checkpoint's env step.
        """
        self._require_open()
        changes = {key: value.item() if isinstance(value, np.generic) else value for key, value in changes.items()}
        live_settings.require_live(self._attempt, changes)
        new, before = live_settings.differences(self.experiment, changes)
        if not new:
            return
        experiment = live_settings.with_settings(self.run, self.experiment, as_overrides(new))
        self._scheduled = {**self._scheduled, **new}
        self._schedule = self._schedule.changed(self.progress.env_steps, self._scheduled, before)
        self._schedule.write(self.run.folder)
        self._change(experiment, new)
        if self._attempt.state.saved == self.progress:  # that checkpoint's loop state is of the former settings
            self._save()

    def evaluate(self) -> Evaluation | None:
        """Evaluate the policy now and record it, with the update that waits for an evaluation. A checkpoint of this
        moment gets the score, and a new best is saved.

        None when a signal interrupted it: nothing of it is kept. The next attempt makes an evaluation that was due.
        """
        self._require_open()
        attempt, state, progress = self._attempt, self._attempt.state, self.progress
        with self._watch.measuring("eval"):
            found = evaluate(attempt, lambda: self._signals.received is not None)
        self._lock.check()
        if found is None:
            attempt.screen.update(progress, state.unrecorded or {}, {})
            return None
        result, measured = found
        self._save_due |= state.improves(self.experiment.save, progress.env_steps) or state.saved == progress
        timing = self._watch.metrics(progress) if progress != self._watch.since else {}
        record(attempt, (state.unrecorded or {}) | measured | timing)
        state.unrecorded = None
        return result

    def save(self) -> None:
        """Write a checkpoint, unless there is one of this moment; it is complete afterwards."""
        self._require_open()
        try:
            self._attempt.saving.wait()
        except DiskError as error:
            self._save_again(error)
        milestone = clocks.passes_milestone(self.experiment.save, self._before, self.progress)
        if milestone or self._save_due or self._attempt.state.saved != self.progress:
            self._save(milestone=milestone, background=False)
        while self._save_due:
            self._attempt.saving.back_off.wait()
            self._lock.check()
            self._save(background=False)

    def stop(self) -> None:
        """End the loop after this body; `resume` continues the run."""
        self._stop_reason = self._stop_reason or "stop() was called"

    def _require_open(self) -> None:
        if not self._lock.held:
            raise UseError("this training has ended", "continue it with tiltyard.iterate(training.run)")

    # ------------------------------------------------------------------------------------------ the loop

    def _loop(self) -> Iterator[Report]:
        attempt, state, watch = self._attempt, self._attempt.state, self._watch
        self._catch_up()
        population = self.experiment.population
        selection = PbtSelection(attempt, population) if population else None
        while not self._is_over():
            before = self._before = attempt.progress
            report = self._step()
            progress = attempt.progress = report.progress
            metrics = state.add(report)
            if selection is not None:
                selection.select(metrics)
            watch.add(report.time_split)
            for message in report.events:
                attempt.writer.log("warning", message)

            reason = clocks.stop_reason(self.experiment.stop, progress, state)
            if clocks.should_evaluate(self.experiment, before, progress) or self._misses_last_evaluation(reason):
                state.unrecorded = metrics  # becomes one record with the evaluation
            elif clocks.should_record(self.experiment, progress) or reason:
                record(attempt, metrics | watch.metrics(progress))
            if time.monotonic() - attempt.last_status > STATUS_SECONDS:
                write_progress(attempt)
            yield replace(report, metrics=metrics)

            self._apply_schedule()
            save, since = self.experiment.save, time.monotonic() - attempt.last_save
            milestone = clocks.passes_milestone(save, before, progress)
            last = reason is not None and state.unrecorded is not None
            if milestone or last or self._save_due or clocks.should_save(save, state.saved, progress, since):
                self._save(milestone=milestone)  # before the evaluation, which may take long
            if state.unrecorded is not None:
                self.evaluate()
            if self._save_due:
                self._save()

    def _is_over(self) -> bool:
        """Whether training ends here: finished, stopped or paused."""
        progress, state, until = self.progress, self._attempt.state, self._schedule.until
        self._finished = clocks.stop_reason(self.experiment.stop, progress, state)
        if state.unrecorded is not None:  # its evaluation was interrupted
            self._finished = None
        if self._signals.received:
            self._stop_reason = f"received {self._signals.received}"
        elif until is not None and progress.env_steps >= until:
            self._stop_reason = f"{PAUSED} {until:,} as scheduled"
        return self._finished is not None or self._stop_reason is not None

    def _step(self) -> Report:
        attempt = self._attempt
        try:
            attempt.saving.poll()
        except DiskError as error:
            self._save_again(error)
        attempt.stepping = True
        report = attempt.engine.step()
        attempt.stepping = False
        self._lock.check()
        if self._new_settings:
            check_learned(self.experiment, self._new_settings, attempt.engine, report.metrics)
            self._new_settings = set()
        return report

    def _apply_schedule(self) -> None:
        """Change to the settings that are scheduled from here on."""
        env_steps = self.progress.env_steps
        scheduled = self._schedule.at(env_steps)
        if scheduled == self._scheduled:
            return
        self._scheduled = scheduled
        new, _ = live_settings.differences(self.experiment, scheduled)
        if new and not live_settings.are_live(self.experiment, new):
            self._stop_reason, self._continues = f"{PAUSED} {env_steps:,} as scheduled", True
        elif new:
            self._change(live_settings.with_settings(self.run, self.experiment, as_overrides(new)), new)

    def _change(self, experiment: Experiment, new: Mapping[str, Any]) -> None:
        live_settings.apply(self._attempt, experiment, list(new))
        self._new_settings |= set(new)
        text, at = ", ".join(f"{key} = {value}" for key, value in new.items()), self.progress.env_steps
        self._attempt.writer.event("changed", f"{text} from env step {at:,} on", settings=dict(new), env_steps=at)

    def _misses_last_evaluation(self, reason: str | None) -> bool:
        return clocks.should_evaluate_at_end(self.experiment, reason, self._attempt.state, self.progress)

    def _catch_up(self) -> None:
        """Do what an earlier attempt left undone: an evaluation, or only its record."""
        attempt, state = self._attempt, self._attempt.state
        if self._misses_last_evaluation(clocks.stop_reason(self.experiment.stop, self.progress, state)):
            state.unrecorded = state.unrecorded or {}
        elif state.unrecorded is not None and not self.experiment.eval.every:  # switched off since
            record(attempt, state.unrecorded)
            state.unrecorded = None
        if state.unrecorded is not None:
            self.evaluate()
        if self._save_due:
            self._save()

    def _save(self, *, milestone: bool = False, background: bool = True) -> None:
        """Write a checkpoint. While the disk refuses it, training continues and tries again, for `save.patience`."""
        self._save_due, self._before = True, self.progress
        self._milestone_due |= milestone
        if not self._attempt.saving.back_off.is_due:
            return
        try:
            with self._watch.measuring("save"):
                save_checkpoint(self._attempt, milestone=self._milestone_due, background=background)
        except DiskError as error:
            self._save_again(error)
        else:
            self._save_due = self._milestone_due = False

    def _save_again(self, error: DiskError) -> None:
        """A checkpoint could not be written, now or in the background: one is due, unless that lasts too long."""
        self._save_due = True
        self._milestone_due |= self._attempt.saving.milestone
        failure.check_patience(self._attempt, error)

    def finish(self) -> None:
        """Save, and write into the folder how it ended: finished, or stopped by a signal, the schedule or the user."""
        attempt, progress = self._attempt, self.progress
        self._lock.check()
        self.save()
        state: Literal["finished", "stopped"] = "finished" if self._finished else "stopped"
        reason = self._finished or self._stop_reason or "the loop was left"
        write_progress(attempt, state=state, reason=reason)
        attempt.writer.event(state, f"{state} at env step {progress.env_steps:,}: {reason}", reason=reason)
        if left := attempt.writer.close():
            state, reason = "stopped", left  # status.json still calls it running: a resume completes it
        latest, trained = dict(attempt.state.latest), progress != self._first
        self.outcome = Outcome(state, reason, progress, trained, attempt.spec.filmable, latest, self._continues)
