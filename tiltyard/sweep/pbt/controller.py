"""Population-based training over the trials of a sweep: which members ended a period, and how each continues.

    a member pauses       -> its checkpoint is pinned, its score recorded
    before it continues   -> is it among the worst, and far behind? the decision is recorded, either way
                          -> if so: the source's pinned checkpoint becomes its newest, with new settings
                          -> it trains to the end of its next period

The decision about a member is made as late as possible: when it, or another that has trained as far, can continue. By
then the members that wait with it can be compared with it.
After a kill at any moment, the next controller carries out decisions that are recorded, and makes the others from the
same records and random numbers. All of it needs the sweep's lock.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from tiltyard.algos import pb2
from tiltyard.algos.pbt import rules_of, source_for
from tiltyard.algos.tunables import perturb
from tiltyard.config.sweep_plan import Plan
from tiltyard.errors import UseError
from tiltyard.run import checkpoint
from tiltyard.run.events import log_event, read_events
from tiltyard.run.folder import Run
from tiltyard.run.history import History
from tiltyard.run.lock import Lock
from tiltyard.run.settings_schedule import PAUSED, SettingsSchedule
from tiltyard.run.settings_schedule import read as read_schedule
from tiltyard.run.status import STATUS, write_status
from tiltyard.sweep import results
from tiltyard.sweep.damage import lost_history, require_whole_history
from tiltyard.sweep.folder import Sweep
from tiltyard.sweep.pbt import lineage
from tiltyard.sweep.pbt.lineage import Copy, Lineage
from tiltyard.sweep.pbt.members import draws, tunables
from tiltyard.sweep.report import describe_copy

PINNED = "pinned"


class Population:
    """The members of one sweep, for its controller. Stateless: everything is on disk."""

    def __init__(self, sweep: Sweep, plan: Plan) -> None:
        self.sweep, self.plan = sweep, plan
        self.rules = rules_of(plan.population, plan.better > 0)
        self.tunables = tunables(plan)
        require_whole_history(sweep)
        (sweep.folder / PINNED).mkdir(exist_ok=True)

    def record_periods(self, numbers: Iterable[int]) -> set[int]:
        """Record which of these members ended a period, and pin the checkpoints that others may copy.

        Returns those, and members whose next period was set up but never began: the controller was killed, or the job
        refused."""
        history = lineage.read(self.sweep)
        found = set()
        for number in numbers:
            run = Run(self.sweep.place(number))
            schedule = self._schedule(number, history)
            if schedule is None or schedule.until is None or not (run.folder / STATUS).exists():
                continue
            status = run.status()
            if status["state"] != "stopped":
                continue
            if int(status["progress"]["env_steps"]) < schedule.until:
                if str(status["reason"]).startswith(PAUSED):  # a user's stop leaves another reason
                    found.add(number)
                continue
            newest, _ = checkpoint.newest_valid(run)
            if newest is None or newest.env_steps < schedule.until:
                continue
            found.add(number)
            if schedule.period == history.count(number) + 1:
                checkpoint.pin(newest.folder, self._pin(number, schedule.period))
                score = self._score(run, history.copy(number))
                facts = {"period": schedule.period, "env_steps": newest.env_steps, "score": score}
                self.sweep.decide("period", trial=number, **facts)
        self._unpin()
        return found

    def order(self, numbers: Iterable[int]) -> list[int]:
        """The order in which members continue: fewest env steps first."""
        history = lineage.read(self.sweep)
        return sorted(numbers, key=lambda number: (history.begins(number), number))

    def set_up(self, number: int, waiting: Iterable[int]) -> list[str]:
        """Prepare a member's next period: decide about it and about all that wait at the end of as early a period, make
        it a copy if so decided, and write how far it trains. Returns sentences about copies.

        A member in the middle of a period just continues.
        """
        history, folder = lineage.read(self.sweep), self.sweep.place(number)
        known, over = self._schedule(number, history), history.count(number)
        if known is not None and known.period > over:
            return []
        alike = [each for each in waiting if history.begins(each) <= history.begins(number)]
        for each in dict.fromkeys([number, *alike]):
            self._decide(each)
        history = lineage.read(self.sweep)
        copy = history.copied_after(number, over)
        if copy is not None:
            self._make_copy(history, copy)
        until = max(self.rules.start, history.begins(number) + self.rules.period)
        SettingsSchedule([(0, history.settings(number))], until, over + 1).write(folder)
        return [describe_copy(copy)] if copy is not None else []

    def _schedule(self, number: int, history: Lineage) -> SettingsSchedule | None:
        """How far the member trains; None before that is written, and if the file is damaged: it follows from the
        history."""
        try:
            schedule = read_schedule(self.sweep.place(number))
        except UseError:
            return None
        if schedule is not None and lineage.is_incomplete(history, number, schedule):
            raise lost_history(self.sweep, f"it lacks decisions about member {number}")
        return schedule

    # -- deciding

    def _decide(self, number: int) -> None:
        """Record whether the member becomes a copy, of which one, and with which settings; once for each period."""
        history = lineage.read(self.sweep)
        if not history.undecided(number):
            return
        over = history.count(number)
        rng, failed = draws(self.plan, number, over), self._failed()
        ranked = [each for each in history.members() if each.number not in failed]
        source = source_for(self.rules, ranked, number, rng)
        if source is None or self._awaited(history, failed):
            self.sweep.decide("stays", trial=number, period=over)
            return
        own, theirs = history.periods[number][-1], history.periods[source][-1]
        settings = history.settings(source, theirs.number)
        if self.plan.population.explore == "pb2":
            others = [history.settings(other) for other in history.first if other != number]
            after = {**settings, **pb2.propose(self.tunables, history.gains(self.plan.better), others, self.rules, rng)}
        else:
            after = perturb(self.tunables, settings, self.rules, rng)
        self.sweep.decide(
            "exploit",
            trial=number,
            period=over,
            source=source,
            source_period=theirs.number,
            env_steps=own.env_steps,
            source_env_steps=theirs.env_steps,
            counts_from=theirs.env_steps,
            before=history.settings(number),
            after=after,
            attempt=int(Run(self.sweep.place(number)).status()["attempt"]),
            score=own.score,
            source_score=theirs.score,
        )

    def _failed(self) -> set[int]:
        """Members whose retries are used up: no other waits for them, and they are not ranked."""
        known = results.used_up(self.plan, self.sweep.decisions())
        often = [trial for trial in self.sweep.trials() if trial.number in known]
        return {row.trial.number for row in results.rows(self.sweep, self.plan, often) if row.state == "failed"}

    def _awaited(self, history: Lineage, failed: set[int]) -> bool:
        """Whether a member has yet to end its first period: no one is ranked worst before that."""
        unknown = [number for number, periods in history.periods.items() if not periods and number not in failed]
        runs = [Run(self.sweep.place(number)) for number in unknown]
        return any(not run.folder.exists() or run.status()["state"] != "finished" for run in runs)

    def _score(self, run: Run, copy: Copy | None) -> float | None:
        """The newest value of the metric that the member recorded since it last became a copy."""
        since = copy.attempt if copy is not None else 0
        newest = History(run).curve(self.plan.metric.name, above=since).newest
        return newest[1] if newest else None

    # -- copying

    def _make_copy(self, history: Lineage, copy: Copy) -> None:
        """Make the source's pinned checkpoint the member's newest. Idempotent."""
        run = Run(self.sweep.place(copy.member))
        pinned = checkpoint.select(self._pin(copy.source, copy.source_period))
        theirs = history.settings(copy.source, copy.source_period)
        same_env = all(theirs.get(key) == value for key, value in copy.after.items() if key.startswith("env."))
        with Lock.acquire(run):
            checkpoint.copy_into(run, pinned, score=pinned.score if same_env else None, milestone=False)
            write_status(run, progress=pinned.progress)
            if not any(each["kind"] == "exploited" and each["period"] == copy.period for each in read_events(run)):
                log_event(run, "exploited", describe_copy(copy), **vars(copy))

    # -- pinned checkpoints

    def _pin(self, number: int, period: int) -> Path:
        return self.sweep.folder / PINNED / f"{number:04d}-{period:05d}"

    def _unpin(self) -> None:
        """Delete pins that no copy can need: all but each member's newest and the sources of copies not made yet."""
        history = lineage.read(self.sweep)
        kept = {self._pin(number, history.count(number)) for number in history.first}
        for number in history.first:
            copy = history.copied_after(number, history.count(number))
            if copy is not None:
                kept.add(self._pin(copy.source, copy.source_period))
        for place in (self.sweep.folder / PINNED).iterdir():
            if place not in kept:
                shutil.rmtree(place, ignore_errors=True)
