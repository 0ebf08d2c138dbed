"""A population's story, read off the decisions of its sweep: who came how far, with what, and who is a copy of whom.

    {"kind": "period", "trial": 3, "period": 2, "env_steps": 10240, "score": 20.5}       the end of a member's period
    {"kind": "exploit", "trial": 3, "period": 2, "source": 1, "source_period": 2, ...}   after it, a copy of another's
    {"kind": "stays", "trial": 1, "period": 2}                                           after it, nobody's

A line is written before it is acted upon. Every exploit follows from the lines above it and the plan's seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tiltyard.algos.pb2 import Gain
from tiltyard.algos.pbt import Exploit, Member, Settings, schedule
from tiltyard.errors import UseError
from tiltyard.run import atomic
from tiltyard.run.folder import Run
from tiltyard.run.settings_schedule import SettingsSchedule
from tiltyard.sweep.folder import Sweep, Trial
from tiltyard.sweep.preflight import new_run


@dataclass(frozen=True)
class Period:
    """Where a member stood at the end of one of its periods, which count from 1."""

    number: int
    env_steps: int
    score: float | None


@dataclass(frozen=True)
class Copy:
    """An exploit, after which of the member's periods, and of which of the source's."""

    exploit: Exploit
    period: int
    source_period: int
    attempt: int
    """of the member, when it was replaced: what it recorded until then was another's"""
    score: float | None
    source_score: float | None

    def as_data(self) -> dict[str, Any]:
        facts = {name: value for name, value in vars(self).items() if name != "exploit"}
        return {**vars(self.exploit), **facts}


class Lineage:
    """The story of all members so far."""

    def __init__(self, trials: Iterable[Trial], decisions: Iterable[Mapping[str, Any]]) -> None:
        self.first: dict[int, Settings] = {}
        self.seeds: dict[int, int] = {}
        for trial in trials:
            self.first[trial.number], self.seeds[trial.number] = trial.settings, trial.seed
        self.periods: dict[int, list[Period]] = {number: [] for number in self.first}
        self.copies: list[Copy] = []
        self._stay: set[tuple[int, int]] = set()
        for line in decisions:
            if line["kind"] == "period":
                period = Period(line["period"], line["env_steps"], atomic.number(line["score"]))
                self.periods[line["trial"]].append(period)
            elif line["kind"] == "exploit":
                self.copies.append(_copy(line))
            elif line["kind"] == "stays":
                self._stay.add((line["trial"], line["period"]))

    def count(self, member: int) -> int:
        """How many of its periods are over."""
        return len(self.periods[member])

    def copy(self, member: int) -> Copy | None:
        """The newest one that made the member what it is."""
        return next((each for each in reversed(self.copies) if each.exploit.member == member), None)

    def settings(self, member: int, period: int | None = None) -> Settings:
        """Those of the member's newest period, or of an earlier one."""
        made = [each for each in self.copies if each.exploit.member == member]
        made = [each for each in made if period is None or each.period < period]
        return made[-1].exploit.after if made else self.first[member]

    def undecided(self, member: int) -> bool:
        """Whether nobody has said yet what becomes of the member after its newest period."""
        period = self.count(member)
        return period > 0 and (member, period) not in self._stay and self.copied_after(member, period) is None

    def copied_after(self, member: int, period: int) -> Copy | None:
        """What made the member another after that period, if anything did."""
        return next((each for each in self.copies if each.exploit.member == member and each.period == period), None)

    def begins(self, member: int) -> int:
        """The env steps that its next period begins at."""
        return self._after(member, self.count(member))[0]

    def _after(self, member: int, period: int) -> tuple[int, float | None]:
        """Env steps and score that the member goes on with after a period; period 0 was over before it began."""
        copy = self.copied_after(member, period)
        if copy is not None:
            return copy.exploit.counts_from, copy.source_score
        if period == 0:
            return 0, None
        return self.periods[member][period - 1].env_steps, self.periods[member][period - 1].score

    def members(self) -> list[Member]:
        """As a decision sees them: each as it stood at the end of its newest period. Whoever became a copy since then
        counts as what it was: else the next worse would be the worst, and so on."""
        newest = [(number, periods[-1]) for number, periods in self.periods.items() if periods]
        return [
            Member(number, last.env_steps, last.score, self._after(number, last.number - 1)[0])
            for number, last in newest
        ]

    def gains(self, better: float) -> list[Gain]:
        """What each period brought, where that is known."""
        found = []
        for number, periods in self.periods.items():
            for period in periods:
                before = self._after(number, period.number - 1)[1]
                if before is not None and period.score is not None:
                    gain = better * (period.score - before)
                    found.append(Gain(self.settings(number, period.number), period.env_steps, gain))
        return found

    def schedule(self, member: int) -> list[tuple[int, Settings]]:
        """From which env step on which settings, seeds among them, for one run that repeats what made the member."""
        first = {number: {**settings, "seed": self.seeds[number]} for number, settings in self.first.items()}
        seeded = [_with_seed(each.exploit, self.seeds) for each in self.copies]
        return schedule(member, seeded, first)


def read(sweep: Sweep) -> Lineage:
    """The story as it stands on the disk."""
    return Lineage(sweep.trials(), sweep.decisions())


def _copy(line: Mapping[str, Any]) -> Copy:
    exploit = Exploit(
        line["trial"],
        line["source"],
        line["env_steps"],
        line["source_env_steps"],
        line["counts_from"],
        dict(line["before"]),
        dict(line["after"]),
    )
    scores = (atomic.number(line["score"]), atomic.number(line["source_score"]))
    return Copy(exploit, line["period"], line["source_period"], line["attempt"], *scores)


def _with_seed(exploit: Exploit, seeds: Mapping[int, int]) -> Exploit:
    """Whoever becomes a copy goes on with draws of its own."""
    seed = {"seed": seeds[exploit.member]}
    return replace(exploit, before={**exploit.before, **seed}, after={**exploit.after, **seed})


def story_of(sweep: Sweep) -> Lineage:
    """The story of a sweep that is a population; UseError for others."""
    if sweep.plan().search != "population":
        raise UseError(f"{sweep.id} is no population: nobody is a copy of anybody", "tiltyard sweep status")
    return read(sweep)


def schedule_of(sweep: Sweep, member: int) -> list[tuple[int, Settings]]:
    """From which env step on which settings."""
    story = story_of(sweep)
    if member not in story.first:
        raise UseError(f"{sweep.id} has no member {member}", f"it has 1 to {len(story.first)}")
    return story.schedule(member)


def make(sweep: Sweep, member: int, command: Sequence[str]) -> Run:
    """The run, ready to be trained; made beside the sweep."""
    schedule = schedule_of(sweep, member)
    first = dict(schedule[0][1])
    trial = Trial(member, member, first.pop("seed"), first)
    return new_run(sweep, sweep.plan(), trial, command, schedule=SettingsSchedule(schedule))
