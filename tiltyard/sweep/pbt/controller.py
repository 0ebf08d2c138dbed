"""Population-based training over the trials of a sweep: who has come to the end of a period, and what becomes of it.

    a member pauses -> its checkpoint is pinned, its score written down
    its turn comes  -> is it of the worst, and far behind?  the decision is written down, either way
                    -> the source's pinned checkpoint becomes the member's newest, its new settings are told to it
                    -> it goes on to the end of its next period

The decision about a member is made as late as can be: when there is room for it, or for another that has come as far.
By then those that wait with it can be compared with it.
Killed at any moment, whoever comes next finds what is decided and not done, and does it; what is not decided yet is
decided from the same lines by the same draws. All of it is for whoever holds the sweep's lock.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tiltyard.algos import pb2
from tiltyard.algos.pbt import rules_of, source_for
from tiltyard.algos.tunables import perturb
from tiltyard.config.sweep_plan import Plan
from tiltyard.run import checkpoint, metrics
from tiltyard.run.events import log_event
from tiltyard.run.folder import Run, read_events, write_status
from tiltyard.run.lock import Lock
from tiltyard.run.settings_schedule import PAUSED, SettingsSchedule
from tiltyard.run.settings_schedule import read as read_schedule
from tiltyard.run.status import STATUS
from tiltyard.sweep import results
from tiltyard.sweep.folder import Sweep
from tiltyard.sweep.pbt import lineage
from tiltyard.sweep.pbt.lineage import Copy, Lineage
from tiltyard.sweep.pbt.members import draws, tunables
from tiltyard.sweep.report import describe_copy

PINNED = "pinned"


class Population:
    """What a controller asks about the members. Remembers nothing: the disk says it all."""

    def __init__(self, sweep: Sweep, plan: Plan) -> None:
        self.sweep, self.plan = sweep, plan
        self.rules = rules_of(plan.population, plan.better > 0)
        self.tunables = tunables(plan)
        (sweep.folder / PINNED).mkdir(exist_ok=True)

    def note(self, numbers: Iterable[int]) -> set[int]:
        """Write down who of these has come to the end of a period, and pin what others may copy; those that have, and
        those that were told of the next one and never got to begin it, because whoever told them was killed or refused.
        """
        story = lineage.read(self.sweep)
        found = set()
        for number in numbers:
            run = Run(self.sweep.place(number))
            paused = _paused(run)
            if paused is None:
                found |= {number} if _told_and_left(run) else set()
                continue
            found.add(number)
            period, at = paused
            if period == story.count(number) + 1:
                checkpoint.pin(at.folder, self._pin(number, period))
                score = self._score(run, story.copy(number))
                self.sweep.decide("period", trial=number, period=period, env_steps=at.env_steps, score=score)
        self._unpin()
        return found

    def order(self, numbers: Iterable[int]) -> list[int]:
        """Who goes next: the member with the fewest env steps."""
        story = lineage.read(self.sweep)
        return sorted(numbers, key=lambda number: (story.begins(number), number))

    def set_up(self, number: int, waiting: Iterable[int]) -> list[str]:
        """Before a member is started: decide about it, and about all that wait at the end of as early a period; make it
        a copy if that was decided, and tell it how far to go. Sentences about what was done.

        Whoever is in the middle of a period goes on with it.
        """
        story, folder = lineage.read(self.sweep), self.sweep.place(number)
        known, over = read_schedule(folder), story.count(number)
        if known is not None and known.period > over:
            return []
        alike = [each for each in waiting if story.begins(each) <= story.begins(number)]
        for each in dict.fromkeys([number, *alike]):
            self._decide(each)
        story = lineage.read(self.sweep)
        copy = story.copied_after(number, over)
        if copy is not None:
            self._make_copy(story, copy)
        until = max(self.rules.start, story.begins(number) + self.rules.period)
        SettingsSchedule([(0, story.settings(number))], until, over + 1).write(folder)
        return [describe_copy(copy)] if copy is not None else []

    # -- deciding

    def _decide(self, number: int) -> None:
        """Write down whether the member becomes a copy, of whom, and with which settings; once for each period."""
        story = lineage.read(self.sweep)
        if not story.undecided(number):
            return
        over = story.count(number)
        rng, failed = draws(self.plan, number, over), self._failed()
        ranked = [each for each in story.members() if each.number not in failed]
        source = source_for(self.rules, ranked, number, rng)
        if source is None or self._awaited(story, failed):
            self.sweep.decide("stays", trial=number, period=over)
            return
        own, theirs = story.periods[number][-1], story.periods[source][-1]
        settings = story.settings(source, theirs.number)
        if self.plan.population.explore == "pb2":
            others = [story.settings(other) for other in story.first if other != number]
            after = {**settings, **pb2.propose(self.tunables, story.gains(self.plan.better), others, self.rules, rng)}
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
            before=story.settings(number),
            after=after,
            attempt=int(Run(self.sweep.place(number)).status()["attempt"]),
            score=own.score,
            source_score=theirs.score,
        )

    def _failed(self) -> set[int]:
        """Who failed once too often, whether it said so or was killed: nobody waits for it, and it holds no place among
        the best or the worst. Whoever is tried again by itself is none of these."""
        known = results.failures(self.sweep.decisions())
        often = [trial for trial in self.sweep.trials() if len(known.get(trial.number, ())) > self.plan.retries]
        return {row.trial.number for row in results.rows(self.sweep, self.plan, often) if row.state == "failed"}

    def _awaited(self, story: Lineage, failed: set[int]) -> bool:
        """Whether somebody has not come to the end of a first period yet, and will: nobody is the worst before that."""
        unknown = [number for number, periods in story.periods.items() if not periods and number not in failed]
        runs = [Run(self.sweep.place(number)) for number in unknown]
        return any(not run.folder.exists() or run.status()["state"] != "finished" for run in runs)

    def _score(self, run: Run, copy: Copy | None) -> float | None:
        """The newest value of the metric, of those that the member recorded since it is what it is."""
        since = copy.attempt if copy is not None else 0
        own = [record for record in metrics.read(run) if int(record.get("attempt", 0)) > since]
        return metrics.latest(own, self.plan.metric.name)

    # -- doing it

    def _make_copy(self, story: Lineage, copy: Copy) -> None:
        """The source's pinned checkpoint becomes the member's newest. Done again, it changes nothing."""
        exploit = copy.exploit
        run = Run(self.sweep.place(exploit.member))
        pinned = checkpoint.select(self._pin(exploit.source, copy.source_period))
        theirs = story.settings(exploit.source, copy.source_period)
        same_env = all(theirs.get(key) == value for key, value in exploit.after.items() if key.startswith("env."))
        with Lock.acquire(run):
            checkpoint.copy_into(run, pinned, score=pinned.score if same_env else None, milestone=False)
            write_status(run, progress=pinned.progress)
            if not any(each["kind"] == "exploited" and each["period"] == copy.period for each in read_events(run)):
                log_event(run, "exploited", describe_copy(copy), **copy.as_data())

    # -- what may be copied

    def _pin(self, number: int, period: int) -> Path:
        return self.sweep.folder / PINNED / f"{number:04d}-{period:05d}"

    def _unpin(self) -> None:
        """Drop what nobody can ask for any more: all but each member's newest, and the sources of copies not made."""
        story = lineage.read(self.sweep)
        kept = {self._pin(number, story.count(number)) for number in story.first}
        for number in story.first:
            copy = story.copied_after(number, story.count(number))
            if copy is not None:
                kept.add(self._pin(copy.exploit.source, copy.source_period))
        for place in (self.sweep.folder / PINNED).iterdir():
            if place not in kept:
                shutil.rmtree(place, ignore_errors=True)


def _stopped(run: Run) -> tuple[SettingsSchedule, int, dict[str, Any]] | None:
    """How far a member that is stopped was told to go, and its status; None for others."""
    stretches = read_schedule(run.folder)
    if stretches is None or stretches.until is None or not (run.folder / STATUS).exists():
        return None
    status = run.status()
    return (stretches, stretches.until, status) if status["state"] == "stopped" else None


def _told_and_left(run: Run) -> bool:
    """Whether a member paused, was told of its next period, and nobody has written to it since: not a person either,
    who would have left another reason."""
    found = _stopped(run)
    if found is None:
        return False
    _, until, status = found
    return str(status["reason"]).startswith(PAUSED) and int(status["progress"]["env_steps"]) < until


def _paused(run: Run) -> tuple[int, checkpoint.Checkpoint] | None:
    """The period whose end a member has come to, and the checkpoint there; None for one that has not."""
    found = _stopped(run)
    if found is None:
        return None
    stretches, until, status = found
    if int(status["progress"]["env_steps"]) < until:
        return None
    newest, _ = checkpoint.newest_valid(run)
    return (stretches.period, newest) if newest is not None and newest.env_steps >= until else None
