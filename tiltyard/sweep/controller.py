"""Whoever carries a sweep out: starts what is due, notices what ended, decides what comes next.

    take the lock -> { hear decisions -> notice ends -> end who falls behind -> start what is due } until all is over

On this machine one controller does that until the end. Where trials are jobs nobody stays: each task that ends takes
one turn (turn.py), which is the same round, once.

Everything it knows is on the disk before it acts on it: settings in the manifest before a folder, a folder before a
process, a failure before its retry. Killed at any moment, the next controller finds what is finished, what is still at
work (the processes outlive it) and what is to be done, and no trial is made or trained twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from tiltyard.config.search_space import Point
from tiltyard.config.sweep_plan import Plan
from tiltyard.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, TiltyardError, UseError
from tiltyard.run.events import log_event
from tiltyard.run.folder import Run
from tiltyard.run.lock import Lock, read_owner
from tiltyard.sweep import early_stopping, optuna_search, results
from tiltyard.sweep.folder import Sweep, Trial, wanted
from tiltyard.sweep.pbt.controller import Population
from tiltyard.sweep.preflight import load_trial, make_trial
from tiltyard.sweep.results import Curve, Row
from tiltyard.sweep.space import fixed_count, fixed_points
from tiltyard.training.signals import StopSignals

PERIOD = 0.2  # seconds between two looks
JUDGE_PERIOD = 2.0  # seconds between two looks at curves
ASK_AGAIN = 5.0  # seconds after which a trial that was asked to end is asked once more
DUMB = 3  # finished trials without the metric after which a search that learns says so

Say = Callable[[str], None]


class Backend(Protocol):
    """Where trials run. Numbers are those of trials."""

    queues: bool
    """whether trials are jobs, which are submitted together and may be told to begin later"""

    def adopt(self, numbers: Iterable[int]) -> set[int]: ...
    def gone(self) -> dict[int, str]: ...
    def job(self, number: int) -> str: ...
    def has_capacity(self, number: int | None) -> bool: ...
    def submit(self, number: int, folder: Path, wait: float) -> bool: ...
    def send(self) -> list[str]: ...
    def poll(self) -> dict[int, str]: ...
    def cancel(self, numbers: Iterable[int]) -> None: ...


def carry_out(sweep: Sweep, backend: Callable[[Sweep, Plan], Backend], say: Say, *, leave_stopped: bool = False) -> int:
    """Run a sweep until nothing is left to do; the exit code: 0 all finished, 1 some failed, 75 stopped. With
    `leave_stopped` that does not include trials that were stopped before."""
    try:
        lock = Lock.acquire(Run(sweep.folder))
    except UseError as error:
        owner = read_owner(sweep.folder)
        if owner is None:
            raise
        raise UseError(
            f"sweep {sweep.id} is carried out by pid {owner.get('pid')} on host {owner.get('host')} already",
            f"tiltyard sweep watch {sweep.typed}",
        ) from error
    with lock, StopSignals() as signals:
        plan = sweep.plan()
        optuna_search.require_optuna(plan)
        sweep.stop_file.unlink(missing_ok=True)
        controller = Controller(sweep, plan, backend(sweep, plan), say, leave_stopped=leave_stopped)
        while not controller.over:
            lock.check()
            controller.step(stop=bool(signals.received) or sweep.stop_file.exists())
            time.sleep(PERIOD)
        return controller.exit_code()


class Controller:
    """One controller's life. What it remembers can be lost: the disk says the same."""

    def __init__(self, sweep: Sweep, plan: Plan, backend: Backend, say: Say, *, leave_stopped: bool = False) -> None:
        self.sweep, self.plan, self.backend, self.say = sweep, plan, backend, say
        self._leave_stopped = leave_stopped
        self.trials = {trial.number: trial for trial in sweep.trials()}
        self.rows: dict[int, Row] = {}
        self.due: dict[int, float] = {}  # trial -> time from which it may be started
        self.asked: dict[int, float] = {}  # trial -> when it was asked to end
        self._forgave: dict[int, str] = {}  # trial -> when the retry was asked for that was last granted
        self.stopping = self.over = False
        self._heard, self._warned = 0, False
        self._last_start = self._judged = 0.0
        self._curves: dict[int, tuple[tuple[int, int], Curve]] = {}
        self.population = Population(sweep, plan) if plan.search == "population" else None
        self.fixed: list[Point] = []
        self.pairs: list[tuple[int, int]] = []
        self._hear()
        self._look_at_all()

    # -- one look

    def step(self, *, stop: bool) -> None:
        """One round. With `stop`, everything at work is asked to save and end, and nothing is started."""
        if stop and not self.stopping:
            self.stopping = True
            self._tell("stopped", "Asked to stop: trials at work save and end.")
        self._hear()
        for number, how in self.backend.poll().items():
            self._ended(number, how)
        at_work = self.backend.adopt(())
        if self.stopping:
            self._cancel(at_work)
        else:
            self._judge(at_work)
            self._start_next()
            at_work = self.backend.adopt(())
        self.over = not at_work and (self.stopping or (not self.due and len(self.trials) >= len(self.pairs)))

    def tick(self, *, stop: bool) -> None:
        """All that can be done now, where nobody stays to do the rest."""
        at_work = self.backend.adopt(())
        if stop:
            self.backend.cancel(at_work)
            return
        self._judge(at_work)
        while self._start_next():
            pass
        for sentence in self.backend.send():
            self._tell("submitted", sentence)

    def exit_code(self) -> int:
        states = [row.state for row in self.rows.values()]
        if self.stopping or any(state not in results.OVER for state in states) or len(states) < len(self.pairs):
            return EXIT_RESUMABLE
        return EXIT_FAILED if "failed" in states else EXIT_DONE

    # -- what is to be done

    def _look_at_all(self) -> None:
        """Every trial as a predecessor left it."""
        at_work = self.backend.adopt(self.trials)
        gone, kept = self.backend.gone(), results.kept(self.sweep)
        paused = self.population.note(set(self.trials) - at_work) if self.population is not None else set()
        for row in results.rows(self.sweep, self.plan, self.trials.values()):
            number = row.trial.number
            self.rows[number] = row
            if number in at_work:
                if not self.backend.queues:
                    self.say(f"trial {number} is at work still")
            elif row.trial.refused:
                continue
            elif row.state == "failed" or number in gone:
                self._look_at_failure(row, gone.get(number) or row.reason)
            elif row.over:
                if kept.get(number) != row.updated:  # nobody was there to write it down
                    self._came_to_its_end(row)
            elif row.state != "stopped" or self._goes_on(row) or number in paused:
                self.due[number] = 0.0
        if not self.backend.queues and (at_work or any(row.state != "waiting" for row in self.rows.values())):
            done = sum(row.over for row in self.rows.values())
            self._tell("resumed", f"Gone on with: {done} of {len(self.pairs)} trials are over.")

    def _goes_on(self, row: Row) -> bool:
        """Whether a trial that somebody stopped does: a person has started the sweep since."""
        if not self.backend.queues:
            return not self._leave_stopped
        started = [str(each["time"]) for each in self.sweep.decisions() if each["kind"] == "start"]
        return row.updated <= max(started, default="")

    def _look_at_failure(self, row: Row, reason: str) -> None:
        """One that failed when nobody looked is written down now, once."""
        number, job = row.trial.number, self.backend.job(row.trial.number)
        every = [each for each in self.sweep.decisions() if each["kind"] == "failed" and each["trial"] == number]
        if self._forgiven(row):
            self.due[number] = 0.0
        elif any(each.get("attempt") == row.attempt and each.get("job", "") == job for each in every):
            self._note_failure(number, reason)
        else:
            self._failed(number, reason)

    def _forgiven(self, row: Row) -> bool:
        """Whether somebody asked for a retry after a failure that nobody had written down yet; once for each time."""
        number = row.trial.number
        asked = [str(each["time"]) for each in self.sweep.decisions() if _asks_for(each, number)]
        newest = max(asked, default="")
        if self.backend.queues or not newest or newest < row.updated or self._forgave.get(number) == newest:
            return False
        self._forgave[number] = newest
        return True

    def _hear(self) -> None:
        """Decisions that others wrote since the last look: extensions and retries."""
        decisions = self.sweep.decisions()
        new, self._heard = decisions[self._heard :], len(decisions)
        if self.pairs and not any(each["kind"] in ("extend", "retry") for each in new):
            return
        self.pairs = wanted(self.plan, fixed_count(self.plan), decisions)
        if not self.plan.adaptive:
            self._fill()
        again = {int(each["trial"]): str(each["time"]) for each in new if each["kind"] == "retry"}
        at_work = self.backend.adopt(()) if again and self.rows else set()
        for number, asked in again.items():
            # Who seems to be at work was tried again already, or has failed and nobody looked yet: see `_forgiven`.
            if number in self.rows and number not in at_work:
                self.due[number] = 0.0
                self._forgave[number] = asked

    def _fill(self) -> None:
        """Trials whose settings follow from the plan: all of them into the manifest."""
        while len(self.trials) < len(self.pairs):
            number = len(self.trials) + 1
            point, seed = self.pairs[number - 1]
            self._add(Trial(number, point, seed, self._fixed_point(point)))

    def _fixed_point(self, point: int) -> Point:
        if len(self.fixed) < point:
            self.fixed = fixed_points(self.plan, max(each for each, _ in self.pairs))
        return self.fixed[point - 1]

    def _add(self, trial: Trial) -> None:
        self.sweep.add_to_manifest(trial)
        self.trials[trial.number] = trial
        if trial.refused:
            self._tell("failed", f"Trial {trial.number} makes no experiment: {trial.refused}")
        else:
            self.due[trial.number] = 0.0
        self.rows[trial.number] = results.read_row(self.sweep, self.plan, trial)

    def _ask(self) -> None:
        """The next trial of a search that learns."""
        number = len(self.trials) + 1
        point, seed = self.pairs[number - 1]
        known = next((each.settings for each in self.trials.values() if each.point == point), None)
        finished = [row for row in self.rows.values() if row.state == "finished"]
        if not self._warned and len(finished) >= DUMB and all(row.value is None for row in finished):
            self._warned = True
            metric = self.plan.metric.name
            self._tell("warning", f"None of {len(finished)} finished trials has recorded {metric}: nothing is learned.")
        settings = known or optuna_search.ask(self.plan, results.groups(self.rows.values()), point)
        trial = Trial(number, point, seed, settings)
        try:
            if self.plan.program is None:
                load_trial(self.sweep, self.plan, trial)
        except UseError as error:
            trial = Trial(number, point, seed, settings, f"{error.message} {error.details}".strip())
        self._add(trial)

    def _start_next(self) -> bool:
        """Start one trial that is due, if there is one and room for it."""
        now, later = time.time(), self.backend.queues
        if not later and now - self._last_start < self.plan.pause_between:
            return False
        ready = sorted(number for number, moment in self.due.items() if later or moment <= now)
        if self.population is not None:
            ready = self.population.order(ready)
        if not ready and len(self.trials) < len(self.pairs) and self.backend.has_capacity(None):
            self._ask()
            ready = [len(self.trials)]
            if ready[0] not in self.due:  # it makes no experiment, and there is room for the next one
                return True
        # One that somebody is at still must not keep the others waiting.
        return any(self._start(number, ready) for number in ready if self.backend.has_capacity(number))

    def _start(self, number: int, ready: list[int]) -> bool:
        """Start a trial, or write down why that cannot be; False when somebody is at it still."""
        now = time.time()
        wait = max(0.0, self.due[number] - now)
        try:
            folder = make_trial(self.sweep, self.plan, self.trials[number])
            for sentence in self.population.set_up(number, ready) if self.population is not None else ():
                self._tell("exploited", sentence)
        except TiltyardError as error:
            del self.due[number]
            self._failed(number, error.message)
            return True
        if not self.backend.submit(number, folder, wait):
            return False
        self._last_start = time.time()  # making its folder may have taken a while
        del self.due[number]
        if not self.backend.queues:
            self._tell("started", f"Trial {number} was started: {folder.name}.")
        return True

    # -- what happened

    def _ended(self, number: int, how: str) -> None:
        self.due.pop(number, None)
        row = self.rows[number] = self._row(number)
        asked = self.asked.pop(number, None) is not None
        if row.state in ("finished", "ended"):
            self._came_to_its_end(row)
        elif self.population is not None and self.population.note([number]):
            self.due[number] = 0.0
        elif asked or row.state == "stopped":
            self._tell("stopped", f"Trial {number} was stopped.")
        elif self._forgiven(row):
            self.due[number] = 0.0
        else:
            self._failed(number, row.reason if row.state == "failed" else how)

    def _came_to_its_end(self, row: Row) -> None:
        results.keep(self.sweep, row)
        shown = "" if row.value is None else f", {self.plan.metric.name} {row.value:.6g}"
        self._tell("finished", f"Trial {row.trial.number} is over{shown}: {row.reason}")

    def _row(self, number: int) -> Row:
        return results.rows(self.sweep, self.plan, [self.trials[number]])[0]

    def _failed(self, number: int, reason: str) -> None:
        row, job = self.rows[number], self.backend.job(number)
        self.sweep.decide("failed", trial=number, attempt=row.attempt, reason=reason, **({"job": job} if job else {}))
        self._note_failure(number, reason)
        wait = max(0.0, self.due.get(number, 0.0) - time.time())
        again = f"; it is started again{f' in {wait:.0f} s' if wait >= 1 else ''}" if number in self.due else ""
        self._tell("failed", f"Trial {number} failed: {reason}{again}")

    def _note_failure(self, number: int, reason: str) -> None:
        """Due again later, or not at all: the failures on record since somebody asked for a retry decide."""
        known = results.failures(self.sweep.decisions()).get(number, [])
        if len(known) > self.plan.retries:
            self.rows[number] = replace(self.rows[number], state="failed", reason=reason)
        else:
            wait = self.plan.back_off * 2 ** (len(known) - 1) if known else 0.0
            self.due[number] = _moment(known[-1]["time"]) + wait if known else 0.0

    # -- ending

    def _cancel(self, numbers: Iterable[int]) -> None:
        now = time.monotonic()
        asked = [number for number in numbers if now - self.asked.get(number, -ASK_AGAIN) >= ASK_AGAIN]
        self.asked |= dict.fromkeys(asked, now)
        self.backend.cancel(asked)

    def _judge(self, at_work: set[int]) -> None:
        """End those that fall behind; written down first, so that whoever comes next does not start them again."""
        if self.plan.stop is None or time.monotonic() - self._judged < JUDGE_PERIOD:
            return
        self._judged = time.monotonic()
        curves = {number: self._curve(number) for number, row in self.rows.items() if row.state != "waiting"}
        curves |= {number: self._curve(number) for number in at_work}
        for number, why in judge(self.sweep, self.plan, curves, at_work).items():
            self._tell("stopped", f"Trial {number} is ended early: {why}")
        self._cancel(at_work & _ended_early(self.sweep))

    def _curve(self, number: int) -> Curve:
        folder = self.sweep.place(number)
        try:
            found = (folder / "metrics.jsonl").stat()
        except OSError:
            return []
        mark = (found.st_size, found.st_mtime_ns)
        if self._curves.get(number, ((0, 0), []))[0] != mark:
            self._curves[number] = (mark, results.curve(folder, self.plan.metric.name))
        return self._curves[number][1]

    def _tell(self, kind: str, sentence: str) -> None:
        log_event(Run(self.sweep.folder), kind, sentence)
        self.say(sentence)


def judge(sweep: Sweep, plan: Plan, curves: Mapping[int, Curve], at_work: set[int]) -> dict[int, str]:
    """Who falls behind from now on, and why; written down."""
    found = early_stopping.behind(plan, curves, at_work - _ended_early(sweep))
    for number, why in found.items():
        sweep.decide("ended early", trial=number, why=why)
    return found


def _asks_for(decision: Mapping[str, Any], number: int) -> bool:
    return decision["kind"] == "retry" and int(decision["trial"]) == number


def _ended_early(sweep: Sweep) -> set[int]:
    return {int(each["trial"]) for each in sweep.decisions() if each["kind"] == "ended early"}


def _moment(text: Any) -> float:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return time.time()
