"""The controller of a sweep: starts trials that are due, notices which ended, decides what comes next.

    lock the sweep -> { read decisions -> see which trials ended -> stop the worst early -> start what is due }

On this machine one controller repeats that until the end. Where trials are jobs, each job that ends runs it once
(tick.py) and no process stays.

Everything is on disk before the controller acts on it: settings in the manifest before a folder, a folder before a
process, a failure before its retry. After a kill at any moment the next controller finds which trials are finished,
running (their processes outlive it) or due, and no trial is made or trained twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from tiltyard.config.sweep_plan import Plan
from tiltyard.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, TiltyardError, UseError
from tiltyard.failures import class_of, retry
from tiltyard.run.events import log_event
from tiltyard.run.folder import Run
from tiltyard.run.lock import Lock, describe, read_owner
from tiltyard.sweep import early_stopping, optuna_search, results
from tiltyard.sweep.damage import repair
from tiltyard.sweep.folder import Sweep, Trial
from tiltyard.sweep.pbt.controller import Population
from tiltyard.sweep.preflight import make_trial
from tiltyard.sweep.results import CurveCache, Row
from tiltyard.sweep.retries import Retries
from tiltyard.sweep.trial_source import TrialSource, missing_metric
from tiltyard.training.signals import StopSignals

POLL_SECONDS = 0.2
EARLY_STOP_SECONDS = 2.0  # between two checks of the learning curves
CANCEL_AGAIN_SECONDS = 5.0  # after which a trial that is still running is asked to stop once more

Echo = Callable[[str], None]


class Backend(Protocol):
    """Where trials run. Numbers are those of trials."""

    queues: bool
    """whether trials are jobs, which are submitted together and may be scheduled to begin later"""
    jobs: dict[int, str]
    """the job that each trial was last submitted as"""
    gone: dict[int, str]
    """trials found dead by `adopt`, with the reason"""

    def adopt(self, numbers: Iterable[int]) -> set[int]:
        """Take over those of the trials that run or wait in a queue; returns all such trials."""

    def has_capacity(self, number: int | None) -> bool:
        """Whether this trial (None: a new one) may start now."""

    def submit(self, number: int, folder: Path, wait: float) -> bool:
        """Start a trial, or select it for submission; False if a process of it is still running."""

    def poll(self) -> dict[int, str]:
        """Trials that ended since the last call, and how."""

    def cancel(self, numbers: Iterable[int]) -> None:
        """Ask trials to save and stop."""


def run_controller(
    sweep: Sweep, backend: Callable[[Sweep, Plan], Backend], echo: Echo, *, leave_stopped: bool = False
) -> int:
    """Run a sweep until nothing is left to do; returns the exit code: 0 all finished, 1 some failed, 75 stopped.

    With `leave_stopped`, trials that were stopped before stay stopped."""
    try:
        lock = Lock.acquire(Run(sweep.folder))
    except UseError as error:
        owner = read_owner(sweep.folder)
        if owner is None:
            raise
        message = f"sweep {sweep.id} is already running ({describe(owner)})"
        raise UseError(message, f"tiltyard sweep watch {sweep.typed}") from error
    with lock, StopSignals() as signals:
        repair(sweep)
        plan = sweep.plan()
        optuna_search.require_optuna(plan)
        sweep.stop_file.unlink(missing_ok=True)
        controller = Controller(sweep, plan, backend(sweep, plan), echo, leave_stopped=leave_stopped)
        while not controller.over:
            lock.check()
            controller.step(stop=bool(signals.received) or sweep.stop_file.exists())
            time.sleep(POLL_SECONDS)
        return controller.exit_code()


class Controller:
    """The state of one controller. It may be lost at any time: the disk has all of it."""

    def __init__(self, sweep: Sweep, plan: Plan, backend: Backend, echo: Echo, *, leave_stopped: bool = False) -> None:
        self.sweep, self.plan, self.backend, self.echo = sweep, plan, backend, echo
        self.source, self.retries = TrialSource(sweep, plan), Retries(sweep, plan)
        self.population = Population(sweep, plan) if plan.search == "population" else None
        self.rows: dict[int, Row] = {}
        self.due: dict[int, float] = {}  # trial -> Unix time from which it may start
        self.cancelled: dict[int, float] = {}  # trial -> when it was asked to stop
        self.stopping = self.over = False
        self._decisions_read, self._warned = 0, False
        self._last_start = self._last_early_stop = 0.0
        self._curves = CurveCache(sweep, plan.metric.name)
        self._read_decisions()
        self._load(leave_stopped)

    # -- rounds

    def step(self, *, stop: bool) -> None:
        """One round. With `stop`, running trials are asked to save and stop, and none is started."""
        if stop and not self.stopping:
            self.stopping = True
            self.log("stopped", "Stop requested: running trials save and stop.")
        self._read_decisions()
        for number, how in self.backend.poll().items():
            self._ended(number, how)
        running = self.backend.adopt(())
        if self.stopping:
            self._cancel(running)
        else:
            self._stop_early(running)
            self._start_next()
            running = self.backend.adopt(())
        self.over = not running and (self.stopping or (not self.due and self.source.exhausted))

    def tick(self, *, stop: bool) -> None:
        """Do all that can be done now, where no process stays to do the rest."""
        running = self.backend.adopt(())
        if stop:
            self.backend.cancel(running)
            return
        self._stop_early(running)
        while self._start_next():
            pass

    def exit_code(self) -> int:
        states = [row.state for row in self.rows.values()]
        if self.stopping or any(state not in results.OVER for state in states) or not self.source.exhausted:
            return EXIT_RESUMABLE
        return EXIT_FAILED if "failed" in states else EXIT_DONE

    # -- state from disk

    def _load(self, leave_stopped: bool) -> None:
        """Read every trial as an earlier controller left it."""
        queues, trials = self.backend.queues, self.source.trials
        running = self.backend.adopt(trials)
        gone, jobs = self.backend.gone, self.backend.jobs
        paused = self.population.record_periods(set(trials) - running) if self.population is not None else set()
        for row in results.rows(self.sweep, self.plan, trials.values()):
            number = row.trial.number
            self.rows[number] = row
            if number in running:
                if not queues:
                    self.echo(f"Trial {number} is still running.")
            elif row.trial.refused:
                continue
            elif row.state == "failed" or number in gone:
                if not queues and self.retries.grant_pending(row):
                    self.due[number] = 0.0
                else:
                    recorded = self.retries.is_recorded(row, jobs.get(number, ""))
                    self._fail(number, gone.get(number) or row.reason, recorded=recorded)
            elif row.over:
                if not row.kept:  # no controller was there to record it
                    self._complete(row)
            elif row.state != "stopped" or number in paused or _continues(self.sweep, row, queues, leave_stopped):
                self.due[number] = 0.0
        if not queues and (running or any(row.state != "waiting" for row in self.rows.values())):
            done = sum(row.over for row in self.rows.values())
            self.log("resumed", f"Resumed: {done} of {len(self.source.pairs)} trials are over.")

    def _read_decisions(self) -> None:
        """Apply extensions and retries that users requested since the last call."""
        decisions = self.sweep.decisions()
        new, self._decisions_read = decisions[self._decisions_read :], len(decisions)
        if self.source.pairs and not any(each["kind"] in ("extend", "retry") for each in new):
            return
        for trial in self.source.extend(decisions):
            self._add(trial)
        requested = {int(each["trial"]): str(each["time"]) for each in new if each["kind"] == "retry"}
        running = self.backend.adopt(()) if requested and self.rows else set()
        for number, moment in requested.items():
            # One that seems to run was restarted already, or its failure is not seen yet: see Retries.grant_pending.
            if number in self.rows and number not in running:
                self.due[number] = 0.0
                self.retries.granted[number] = moment

    def _add(self, trial: Trial) -> None:
        row = self.rows[trial.number] = results.read_row(self.sweep, self.plan, trial)
        if trial.refused:
            self.log("failed", f"Trial {trial.number} has invalid settings: {trial.refused}")
        elif row.state == "waiting":  # else its line in the manifest was damaged, and `_load` sees how far it is
            self.due[trial.number] = 0.0

    # -- starting

    def _start_next(self) -> bool:
        """Start one trial that is due, if the backend has capacity for one."""
        now, queues = time.time(), self.backend.queues
        if not queues and now - self._last_start < self.plan.pause_between:
            return False
        ready = sorted(number for number, moment in self.due.items() if queues or moment <= now)
        if self.population is not None:
            ready = self.population.order(ready)
        if not ready and not self.source.exhausted and self.backend.has_capacity(None):
            if not self._warned and (warning := missing_metric(self.plan, self.rows.values())):
                self._warned = True
                self.log("warning", warning)
            trial = self.source.search(self.rows.values())
            self._add(trial)
            if trial.refused:  # there is still capacity for another
                return True
            ready = [trial.number]
        # A trial whose process has not exited yet must not hold up the others.
        return any(self._start(number, ready) for number in ready if self.backend.has_capacity(number))

    def _start(self, number: int, ready: list[int]) -> bool:
        """Start a trial, or record why it cannot start; False if a process of it is still running."""
        wait = max(0.0, self.due[number] - time.time())
        try:
            folder = make_trial(self.sweep, self.plan, self.source.trials[number])
            for sentence in self.population.set_up(number, ready) if self.population is not None else ():
                self.log("exploited", sentence)
            started = self.backend.submit(number, folder, wait)
        except (TiltyardError, OSError) as error:
            if class_of(error) != "final" and not self.backend.queues:
                self.due[number] = time.time() + self.plan.back_off
                self.log("warning", f"Trial {number} cannot start yet: {error}")
                return True
            if not isinstance(error, TiltyardError):
                raise
            del self.due[number]
            self._fail(number, error.message)
            return True
        if not started:
            return False
        self._last_start = time.time()  # making the folder may have taken a while
        del self.due[number]
        if not self.backend.queues:
            self.log("started", f"Trial {number} started: {folder.name}.")
        return True

    # -- ends

    def _ended(self, number: int, how: str) -> None:
        self.due.pop(number, None)
        row = self.rows[number] = results.rows(self.sweep, self.plan, [self.source.trials[number]])[0]
        cancelled = self.cancelled.pop(number, None) is not None
        if row.state in ("finished", "ended"):
            self._complete(row)
        elif self.population is not None and self.population.record_periods([number]):
            self.due[number] = 0.0
        elif cancelled or row.state == "stopped":
            self.log("stopped", f"Trial {number} stopped.")
        elif not self.backend.queues and self.retries.grant_pending(row):
            self.due[number] = 0.0
        else:
            self._fail(number, row.reason if row.state == "failed" else how)

    def _complete(self, row: Row) -> None:
        results.keep(self.sweep, row)
        value = "" if row.value is None else f", {self.plan.metric.name} {row.value:.6g}"
        self.log("finished", f"Trial {row.trial.number} is over{value}: {row.reason}")

    def _fail(self, number: int, reason: str, *, recorded: bool = False) -> None:
        """Record a failure, unless it is on record, and schedule the retry if one is left."""
        if not recorded:
            self.retries.record(self.rows[number], reason, self.backend.jobs.get(number, ""))
        start = self.retries.next_start(number)
        if start is None:
            self.rows[number] = replace(self.rows[number], state="failed", reason=reason)
        else:
            self.due[number] = start
        if not recorded:
            wait = max(0.0, (start or 0.0) - time.time())
            again = f"; it restarts{f' in {wait:.0f} s' if wait >= 1 else ''}" if start is not None else ""
            self.log("failed", f"Trial {number} failed: {reason}{again}")

    def _cancel(self, numbers: Iterable[int]) -> None:
        now, again = time.monotonic(), CANCEL_AGAIN_SECONDS
        chosen = [number for number in numbers if now - self.cancelled.get(number, -again) >= again]
        self.cancelled |= dict.fromkeys(chosen, now)
        self.backend.cancel(chosen)

    def _stop_early(self, running: set[int]) -> None:
        """Stop trials by the plan's rule; recorded first, so that the next controller does not start them again."""
        if self.plan.stop is None or time.monotonic() - self._last_early_stop < EARLY_STOP_SECONDS:
            return
        self._last_early_stop = time.monotonic()
        started = {number for number, row in self.rows.items() if row.state != "waiting"}
        curves = {number: self._curves.read(number) for number in started | running}
        for number, why in stop_early(self.sweep, early_stopping.behind(self.plan, curves, running)).items():
            self.echo(f"Trial {number} is stopped early: {why}")
        self._cancel(running & _stopped_early(self.sweep))

    def log(self, kind: str, sentence: str) -> None:
        retry(lambda: log_event(Run(self.sweep.folder), kind, sentence))
        self.echo(sentence)


def stop_early(sweep: Sweep, found: Mapping[int, str]) -> dict[int, str]:
    """Record that these trials are stopped, with the reasons; returns those that were not before."""
    known = _stopped_early(sweep)
    new = {number: why for number, why in found.items() if number not in known}
    for number, why in new.items():
        sweep.decide("ended early", trial=number, why=why)
        log_event(Run(sweep.folder), "stopped", f"Trial {number} is stopped early: {why}")
    return new


def _stopped_early(sweep: Sweep) -> set[int]:
    return {int(each["trial"]) for each in sweep.decisions("ended early")}


def _continues(sweep: Sweep, row: Row, queues: bool, leave_stopped: bool) -> bool:
    """Whether a stopped trial continues: for jobs, only if a user started the sweep after it stopped."""
    if not queues:
        return not leave_stopped
    return row.updated <= max((each["time"] for each in sweep.decisions("start")), default="")
