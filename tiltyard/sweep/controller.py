"""Whoever carries a sweep out: starts what is due, notices what ended, decides what comes next.

    take the lock -> { hear decisions -> notice ends -> end who falls behind -> start what is due } until all is over

Everything it knows is on the disk before it acts on it: settings in the manifest before a folder, a folder before a
process, a failure before its retry. Killed at any moment, the next controller finds what is finished, what is still at
work (the processes outlive it) and what is to be done, and no trial is made or trained twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from tiltyard.config.dimensions import Point
from tiltyard.config.plans import Plan
from tiltyard.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, TiltyardError, UseError
from tiltyard.run.events import log_event
from tiltyard.run.folder import Run
from tiltyard.run.lock import Lock, read_owner
from tiltyard.signals import StopSignals
from tiltyard.sweep import halving, results, search
from tiltyard.sweep.folder import Sweep, Trial, wanted
from tiltyard.sweep.local import OUTPUT
from tiltyard.sweep.prepare import load_trial, make_trial
from tiltyard.sweep.results import Curve, Row
from tiltyard.sweep.space import fixed_count, fixed_points

PERIOD = 0.2  # seconds between two looks
JUDGE_PERIOD = 2.0  # seconds between two looks at curves
ASK_AGAIN = 5.0  # seconds after which a trial that was asked to end is asked once more

Say = Callable[[str], None]


class Backend(Protocol):
    """Where trials run. Numbers are those of trials."""

    def adopt(self, numbers: Iterable[int]) -> set[int]: ...
    def room(self) -> bool: ...
    def submit(self, number: int, folder: Path) -> bool: ...
    def poll(self) -> dict[int, str]: ...
    def cancel(self, number: int) -> None: ...


def carry_out(sweep: Sweep, backend: Callable[[Sweep, Plan], Backend], say: Say) -> int:
    """Run a sweep until nothing is left to do; the exit code: 0 all finished, 1 some failed, 75 stopped."""
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
        search.require_optuna(plan)
        sweep.stop_file.unlink(missing_ok=True)
        controller = Controller(sweep, plan, backend(sweep, plan), say)
        while not controller.over:
            lock.check()
            controller.step(stop=bool(signals.asked) or sweep.stop_file.exists())
            time.sleep(PERIOD)
        return controller.exit_code()


class Controller:
    """One controller's life. What it remembers can be lost: the disk says the same."""

    def __init__(self, sweep: Sweep, plan: Plan, backend: Backend, say: Say) -> None:
        self.sweep, self.plan, self.backend, self.say = sweep, plan, backend, say
        self.trials = {trial.number: trial for trial in sweep.trials()}
        self.rows: dict[int, Row] = {}
        self.due: dict[int, float] = {}  # trial -> time from which it may be started
        self.asked: dict[int, float] = {}  # trial -> when it was asked to end
        self.stopping = self.over = False
        self._heard = 0
        self._last_start = self._judged = 0.0
        self._curves: dict[int, tuple[tuple[int, int], Curve]] = {}
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

    def exit_code(self) -> int:
        states = [row.state for row in self.rows.values()]
        if self.stopping or any(state not in results.OVER for state in states) or len(states) < len(self.pairs):
            return EXIT_RESUMABLE
        return EXIT_FAILED if "failed" in states else EXIT_DONE

    # -- what is to be done

    def _look_at_all(self) -> None:
        """Every trial as a predecessor left it."""
        at_work = self.backend.adopt(self.trials)
        for row in results.rows(self.sweep, self.plan, self.trials.values()):
            number = row.trial.number
            self.rows[number] = row
            if number in at_work:
                self.say(f"trial {number} is at work still")
            elif row.state == "failed" and not row.trial.refused:
                if not any(each.get("attempt") == row.attempt for each in self._failures(number)):
                    # a predecessor was killed before it could write that down
                    self.sweep.decide("failed", trial=number, attempt=row.attempt, reason=row.reason)
                self._note_failure(number, row.reason)
            elif not row.over:
                self.due[number] = 0.0
        if at_work or any(row.state != "waiting" for row in self.rows.values()):
            done = sum(row.over for row in self.rows.values())
            self._tell("resumed", f"Gone on with: {done} of {len(self.pairs)} trials are over.")

    def _hear(self) -> None:
        """Decisions that others wrote since the last look: extensions and retries."""
        decisions = self.sweep.decisions()
        new, self._heard = decisions[self._heard :], len(decisions)
        if self.pairs and not any(each["kind"] in ("extend", "retry") for each in new):
            return
        self.pairs = wanted(self.plan, fixed_count(self.plan), decisions)
        if not self.plan.adaptive:
            self._fill()
        for each in new:
            if each["kind"] == "retry" and self.rows.get(int(each["trial"])) is not None:
                self.due.setdefault(int(each["trial"]), 0.0)

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
        self.rows[trial.number] = results.look(self.sweep, self.plan, trial)

    def _ask(self) -> None:
        """The next trial of a search that learns."""
        number = len(self.trials) + 1
        point, seed = self.pairs[number - 1]
        known = next((each.settings for each in self.trials.values() if each.point == point), None)
        settings = known or search.ask(self.plan, results.groups(self.rows.values()), point)
        trial = Trial(number, point, seed, settings)
        try:
            if self.plan.program is None:
                load_trial(self.sweep, self.plan, trial)
        except UseError as error:
            trial = Trial(number, point, seed, settings, f"{error.message} {error.details}".strip())
        self._add(trial)

    def _start_next(self) -> None:
        now = time.time()
        if now - self._last_start < self.plan.pause_between or not self.backend.room():
            return
        ready = sorted(number for number, moment in self.due.items() if moment <= now)
        if not ready and len(self.trials) < len(self.pairs):
            self._ask()
            ready = [number for number in self.due if number == len(self.trials)]
        for number in ready[:1]:
            try:
                folder = make_trial(self.sweep, self.plan, self.trials[number])
            except TiltyardError as error:
                del self.due[number]
                self._failed(number, error.message)
                return
            if self.backend.submit(number, folder):
                self._last_start = now
                del self.due[number]
                self._tell("started", f"Trial {number} was started: {folder.name}.")

    # -- what happened

    def _ended(self, number: int, how: str) -> None:
        row = self.rows[number] = self._row(number)
        asked = self.asked.pop(number, None) is not None
        if row.state in ("finished", "ended"):
            results.keep(self.sweep, row)
            shown = "" if row.value is None else f", {self.plan.metric.name} {row.value:.6g}"
            self._tell("finished", f"Trial {number} is over{shown}: {row.reason}")
        elif asked or row.state == "stopped":
            self._tell("stopped", f"Trial {number} was stopped.")
        else:
            self._failed(number, row.reason if row.state == "failed" else f"{how}{self._last_words(number)}")

    def _row(self, number: int) -> Row:
        return results.rows(self.sweep, self.plan, [self.trials[number]])[0]

    def _failed(self, number: int, reason: str) -> None:
        row = self.rows[number]
        self.sweep.decide("failed", trial=number, attempt=row.attempt, reason=reason)
        self._tell("failed", f"Trial {number} failed: {reason}")
        self._note_failure(number, reason)

    def _note_failure(self, number: int, reason: str) -> None:
        """Due again later, or not at all: the failures on record since somebody asked for a retry decide."""
        known = results.failures(self.sweep.decisions()).get(number, [])
        if len(known) > self.plan.retries:
            self.rows[number] = replace(self.rows[number], state="failed", reason=reason)
        else:
            wait = self.plan.back_off * 2 ** (len(known) - 1) if known else 0.0
            self.due[number] = _moment(known[-1]["time"]) + wait if known else 0.0

    def _failures(self, number: int) -> list[dict[str, Any]]:
        """Everything on record, whether somebody asked for a retry since or not."""
        return [each for each in self.sweep.decisions() if each["kind"] == "failed" and each["trial"] == number]

    def _last_words(self, number: int) -> str:
        try:
            said = (self.sweep.folder / OUTPUT / f"{number:04d}.log").read_bytes()[-4000:].decode("utf-8", "replace")
        except OSError:
            return ""
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        return f": {errors[-1].removeprefix('error: ')}" if errors else ""

    # -- ending

    def _cancel(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if time.monotonic() - self.asked.get(number, -ASK_AGAIN) >= ASK_AGAIN:
                self.asked[number] = time.monotonic()
                self.backend.cancel(number)

    def _judge(self, at_work: set[int]) -> None:
        """End those that fall behind; written down first, so that whoever comes next does not start them again."""
        if self.plan.stop is None or time.monotonic() - self._judged < JUDGE_PERIOD:
            return
        self._judged = time.monotonic()
        curves = {number: self._curve(number) for number, row in self.rows.items() if row.state != "waiting"}
        curves |= {number: self._curve(number) for number in at_work}
        ended = {int(each["trial"]) for each in self.sweep.decisions() if each["kind"] == "ended early"}
        for number, why in halving.behind(self.plan, curves, at_work - ended).items():
            self.sweep.decide("ended early", trial=number, why=why)
            self._tell("stopped", f"Trial {number} is ended early: {why}")
            ended.add(number)
        self._cancel(at_work & ended)

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


def _moment(text: Any) -> float:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return time.time()
