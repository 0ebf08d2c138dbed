"""A population's history, read from the decisions of its sweep: how far each member trained, with which settings, and
which member is a copy of which.

    {"kind": "period", "trial": 3, "period": 2, "env_steps": 10240, "score": 20.5}       the end of a member's period
    {"kind": "exploit", "trial": 3, "period": 2, "source": 1, "source_period": 2, ...}   after it: a copy of another
    {"kind": "stays", "trial": 1, "period": 2}                                           after it: unchanged

A line is written before anything acts on it. Every exploit follows from the lines above it and the plan's seed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from tiltyard.algos.pb2 import Gain
from tiltyard.algos.pbt import Exploit, Member, Settings, schedule
from tiltyard.errors import TiltyardError, UseError
from tiltyard.run import atomic
from tiltyard.run.folder import Run
from tiltyard.run.settings_schedule import SettingsSchedule
from tiltyard.run.settings_schedule import read as read_schedule
from tiltyard.sweep.folder import DECISIONS, Sweep, Trial
from tiltyard.sweep.preflight import new_run


@dataclass(frozen=True)
class Period:
    """A member at the end of one of its periods, which count from 1."""

    number: int
    env_steps: int
    score: float | None


@dataclass(frozen=True)
class Copy(Exploit):
    """An exploit, with the member's period after which it happened and the source's period that was copied."""

    period: int
    source_period: int
    attempt: int
    """of the member, when it was replaced: its records up to this attempt do not count for the copy"""
    score: float | None
    source_score: float | None


class Lineage:
    """The history of all members so far."""

    def __init__(self, trials: Iterable[Trial], decisions: Iterable[Mapping[str, Any]]) -> None:
        self.first: dict[int, Settings] = {}
        self.seeds: dict[int, int] = {}
        for trial in trials:
            self.first[trial.number], self.seeds[trial.number] = trial.settings, trial.seed
        self.periods: dict[int, list[Period]] = {number: [] for number in self.first}
        self.copies: list[Copy] = []
        self._stay: set[tuple[int, int]] = set()
        for line in decisions:
            try:
                self._add(line)
            except (KeyError, TypeError) as error:
                message = f"a line of {DECISIONS} is damaged: {line}"
                raise TiltyardError(message, "restore it; the members are runs, which can be used alone") from error

    def _add(self, line: Mapping[str, Any]) -> None:
        if line["kind"] == "period":
            period = Period(line["period"], line["env_steps"], atomic.number(line["score"]))
            self.periods[line["trial"]].append(period)
        elif line["kind"] == "exploit":
            facts = {field.name: line[field.name] for field in fields(Copy) if field.name != "member"}
            scores = {name: atomic.number(line[name]) for name in ("score", "source_score")}
            self.copies.append(Copy(line["trial"], **{**facts, **scores}))
        elif line["kind"] == "stays":
            self._stay.add((line["trial"], line["period"]))

    def count(self, member: int) -> int:
        """How many periods of the member are over."""
        return len(self.periods[member])

    def copy(self, member: int) -> Copy | None:
        """The newest copy that replaced the member."""
        return next((each for each in reversed(self.copies) if each.member == member), None)

    def settings(self, member: int, period: int | None = None) -> Settings:
        """The settings of the member's newest period, or of an earlier one."""
        made = [each for each in self.copies if each.member == member]
        made = [each for each in made if period is None or each.period < period]
        return made[-1].after if made else self.first[member]

    def undecided(self, member: int) -> bool:
        """Whether no decision about the member after its newest period is recorded."""
        period = self.count(member)
        return period > 0 and (member, period) not in self._stay and self.copied_after(member, period) is None

    def copied_after(self, member: int, period: int) -> Copy | None:
        """The copy that replaced the member after that period, if any."""
        return next((each for each in self.copies if each.member == member and each.period == period), None)

    def begins(self, member: int) -> int:
        """The env steps at which its next period begins."""
        return self._after(member, self.count(member))[0]

    def _after(self, member: int, period: int) -> tuple[int, float | None]:
        """Env steps and score with which the member continues after a period; 0 means before the first."""
        copy = self.copied_after(member, period)
        if copy is not None:
            return copy.counts_from, copy.source_score
        if period == 0:
            return 0, None
        return self.periods[member][period - 1].env_steps, self.periods[member][period - 1].score

    def members(self) -> list[Member]:
        """The members as a decision ranks them: each as at the end of its newest period. One that became a copy since
        counts as it was: else the next one would be the worst, and so on."""
        newest = [(number, periods[-1]) for number, periods in self.periods.items() if periods]
        return [Member(each, at.env_steps, at.score, self._after(each, at.number - 1)[0]) for each, at in newest]

    def gains(self, better: float) -> list[Gain]:
        """The change of score in each period, where both scores are known."""
        found = []
        for number, periods in self.periods.items():
            for period in periods:
                before = self._after(number, period.number - 1)[1]
                if before is not None and period.score is not None:
                    gain = better * (period.score - before)
                    found.append(Gain(self.settings(number, period.number), period.env_steps, gain))
        return found

    def schedule(self, member: int) -> list[tuple[int, Settings]]:
        """(env step, settings from there on), seeds included, for one run that repeats the member's history."""
        first = {number: {**settings, "seed": self.seeds[number]} for number, settings in self.first.items()}
        # A copy has the member's own seed: it does not repeat the source's random numbers.
        seeded = [replace(each, after={**each.after, "seed": self.seeds[each.member]}) for each in self.copies]
        return schedule(member, seeded, first)


def is_incomplete(history: Lineage, number: int, schedule: SettingsSchedule) -> bool:
    """Whether a member trains by decisions that the history lacks: lines of decisions.jsonl were lost."""
    if schedule.period != history.count(number) + 1:
        return schedule.period > history.count(number)
    return bool(schedule.parts) and schedule.parts[-1][1] != history.settings(number)


def find_gaps(sweep: Sweep) -> list[str]:
    """A sentence about each member whose history is incomplete."""
    history, found = read(sweep), []
    for number in history.first:
        with contextlib.suppress(UseError):  # a damaged schedule is written again before the member continues
            schedule = read_schedule(sweep.place(number))
            if schedule is not None and is_incomplete(history, number, schedule):
                found.append(f"{DECISIONS} lacks decisions about member {number}")
    return found


def read(sweep: Sweep) -> Lineage:
    """Read the history from disk."""
    return Lineage(sweep.trials(), sweep.decisions())


def lineage_of(sweep: Sweep) -> Lineage:
    """The history of a population; UseError for other sweeps."""
    if sweep.plan().search != "population":
        raise UseError(f"{sweep.id} is not a population (search: population)", f"tiltyard sweep status {sweep.typed}")
    return read(sweep)


def schedule_of(sweep: Sweep, member: int) -> list[tuple[int, Settings]]:
    """(env step, settings from there on) of one member."""
    found = lineage_of(sweep)
    if member not in found.first:
        raise UseError(f"{sweep.id} has no member {member}", f"members are 1 to {len(found.first)}")
    return found.schedule(member)


def make(sweep: Sweep, member: int, command: Sequence[str]) -> Run:
    """Make a run beside the sweep that repeats the member's history when trained."""
    schedule = schedule_of(sweep, member)
    first = dict(schedule[0][1])
    trial = Trial(member, member, first.pop("seed"), first)
    return new_run(sweep, sweep.plan(), trial, command, schedule=SettingsSchedule(schedule))
