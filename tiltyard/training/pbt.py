"""Selection among the policies of one run: a population that learns in one engine, from envs that it shares.

    between two steps:   who is due? ──> who is far behind, and copies whom? ──> snapshot, adopt, compare ──> say so

Who copies whom, and with which settings, is algos.population's; copying is the engine's. Every draw is of the run's
seed and the number of the decision, and what is remembered travels with checkpoints (standing.py): a resume decides the
same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tiltyard.algos.pbt import (
    Exploit,
    Gain,
    Member,
    Settings,
    is_due,
    latin_hypercube,
    parse_tunables,
    pb2,
    perturb,
    replacements,
    rules_of,
    schedule,
)
from tiltyard.config.algos import KlAdaptive
from tiltyard.config.population import Population
from tiltyard.errors import TiltyardError, UseError, did_you_mean
from tiltyard.run.checkpoint import newest_valid, read_tree
from tiltyard.run.events import log_event
from tiltyard.run.folder import Run
from tiltyard.training.attempt import Attempt
from tiltyard.types import Tree

DECISIONS = 7  # their role in the run's seed tree


class PbtSelection:
    """Who of the policies of an attempt copies whom."""

    def __init__(self, attempt: Attempt, population: Population) -> None:
        self.attempt, self.population, self.names = attempt, population, attempt.experiment.learning
        self.tunables, self.rules = (
            parse_tunables(population.space),
            rules_of(population, population.goal == "maximise"),
        )
        told = attempt.ledger.selection
        self.now = self._restored(PbtState.read(told)) if told and told["names"] == self.names else self._begun()
        attempt.ledger.selection = self.now.dump()

    def turn(self, found: Mapping[str, float]) -> None:
        """Decide about those that are due, by what the newest update and episodes gave."""
        now = self.now
        for name in self.names:
            now.env_steps[name] = int(found.get(f"policy/{name}/env_steps", now.env_steps.get(name, 0)))
        members = [self._member(number, found) for number in range(len(self.names))]
        due = [member for member in members if is_due(self.rules, member)]
        if not due:
            return
        now.turns += 1
        rng = self._draws(now.turns)
        for member in due:
            self._note(member)
        for number, source in replacements(self.rules, members, rng).items():
            self._exploit(members[number], members[source], rng)
        self.attempt.ledger.selection = now.dump()

    def _draws(self, turn: int) -> np.random.Generator:
        seed = np.random.SeedSequence(entropy=self.attempt.experiment.seed, spawn_key=(DECISIONS, turn))
        return np.random.default_rng(seed)

    def _member(self, number: int, found: Mapping[str, float]) -> Member:
        name = self.names[number]
        score = found.get(f"policy/{name}/{self.population.metric}")
        return Member(number, self.now.env_steps[name], score, self.now.decided.get(name, 0))

    # ------------------------------------------------------------------------------------------ settings

    def _begun(self) -> PbtState:
        """Policies that begin spread over the space, but for numbers of their own."""
        experiment, now = self.attempt.experiment, PbtState(list(self.names))
        keys = [key for tunable in self.tunables for key in tunable.keys]
        for name, drawn in zip(
            self.names, latin_hypercube(self.tunables, len(self.names), self._draws(0)), strict=True
        ):
            own = {f"algo.{number}": value for number, value in experiment.policy_settings[name].algo.given().items()}
            now.first[name] = now.settings[name] = drawn | {key: value for key, value in own.items() if key in keys}
            self._adopt(name, None, now.first[name])
            self.attempt.say("started", f"policy {name} begins with {_said(now.first[name])}")
        return now

    def _restored(self, now: PbtState) -> PbtState:
        """What was decided holds, also where the experiment's own number was changed since. What adapts by itself went
        on from there, and is as it was."""
        algo = self.attempt.experiment.algo
        for name, settings in now.settings.items():
            numbers = {key: getattr(algo, key.removeprefix("algo."), None) for key in settings}
            decided = {key: value for key, value in settings.items() if not isinstance(numbers[key], KlAdaptive)}
            self._adopt(name, None, decided)
        return now

    def _adopt(self, name: str, source: str | None, settings: Settings) -> None:
        """Copy a policy and change its settings; TiltyardError unless those are in force then."""
        engine = self.attempt.engine
        asked = {key.removeprefix("algo."): float(value) for key, value in settings.items()}
        got = engine.adopt(name, None if source is None else engine.snapshot(source), asked)
        for number, value in asked.items():
            if got[number] != value:
                raise TiltyardError(
                    f"algo.{number} of policy {name} was to become {value!r}, and the engine has {got[number]!r}",
                    "nothing was learned with it; this is a fault of the engine: please report it",
                )

    # ------------------------------------------------------------------------------------------ decisions

    def _note(self, member: Member) -> None:
        """What a policy's settings brought since the last decision about it."""
        now, name = self.now, self.names[member.number]
        now.decided[name] = member.env_steps
        if member.score is None:
            return
        if name in now.scores:
            gain = (member.score - now.scores[name]) * (1 if self.rules.maximise else -1)
            now.gains = [*now.gains, Gain(now.settings[name], member.env_steps, gain)][-KEPT:]
        now.scores[name] = member.score

    def _exploit(self, member: Member, source: Member, rng: np.random.Generator) -> None:
        """Make a copy of the source of a member."""
        now, name, other = self.now, self.names[member.number], self.names[source.number]
        before, after = now.settings[name], self._explored(name, other, rng)
        self._adopt(name, other, after)
        self.attempt.ledger.forget(name)
        now.settings[name] = after
        assert member.score is not None and source.score is not None  # they were compared
        now.scores[name] = source.score
        counts = (member.env_steps, source.env_steps, member.env_steps)
        now.exploits.append(Exploit(member.number, source.number, *counts, before, after))
        moved = {key: value for key, value in after.items() if value != now.settings[other].get(key)}
        sentence = (
            f"policy {name} becomes a copy of {other} at env step {self.attempt.progress.env_steps:,}: "
            f"{member.score:.4g} against {source.score:.4g}"
        )
        sentence += f"; then {_said(moved)}" if moved else ""
        told = {**asdict(now.exploits[-1]), "member": name, "source": other, "at": self.attempt.progress.env_steps}
        log_event(self.attempt.run, "exploited", sentence, scores=[member.score, source.score], **told)
        self.attempt.screen.say(sentence)

    def _explored(self, name: str, source: str, rng: np.random.Generator) -> Settings:
        """What the copy goes on with."""
        if self.population.explore == "pb2":
            others = [self.now.settings[each] for each in self.names if each != name]
            return pb2(self.tunables, self.now.gains, others, self.rules, rng)
        return perturb(self.tunables, self.now.settings[source], self.rules, rng)


def _said(settings: Settings) -> str:
    return ", ".join(f"{key} {value:.4g}" for key, value in settings.items())


def selection_of(attempt: Attempt) -> PbtSelection | None:
    """Where the experiment has a population."""
    population = attempt.experiment.population
    return None if population is None else PbtSelection(attempt, population)


KEPT = 200  # gains: PB2 looks at the latest


@dataclass
class PbtState:
    """What selection remembers from decision to decision; policies by name, and by their place in `names`."""

    names: list[str]
    first: dict[str, Settings] = field(default_factory=dict)
    settings: dict[str, Settings] = field(default_factory=dict)
    env_steps: dict[str, int] = field(default_factory=dict)
    """own ones: those that a policy has learned from"""
    decided: dict[str, int] = field(default_factory=dict)
    """own env steps at the last decision about a policy"""
    scores: dict[str, float] = field(default_factory=dict)
    """at the last decision about it; after a copy, its source's"""
    gains: list[Gain] = field(default_factory=list)
    exploits: list[Exploit] = field(default_factory=list)
    turns: int = 0

    def dump(self) -> Tree:
        return asdict(self)

    @staticmethod
    def read(tree: Tree) -> PbtState:
        gains, exploits = [Gain(**each) for each in tree["gains"]], [Exploit(**each) for each in tree["exploits"]]
        return PbtState(**{**tree, "gains": gains, "exploits": exploits})


def read_pbt_state(run: Run) -> PbtState:
    """That of a run's newest checkpoint."""
    found, _ = newest_valid(run)
    tree = None if found is None else read_tree(found.folder, "loop").get("selection")
    if tree is None:
        raise UseError(
            f"run {run.id} has no population, or no checkpoint of it yet", "set `population` in an experiment"
        )
    return PbtState.read(tree)


def policy_lineage(run: Run) -> dict[str, Any]:
    """Who came from whom, and for each policy of today the settings that a run alone would need to repeat it."""
    now = read_pbt_state(run)
    return {
        "policies": {name: _policy(now, place) for place, name in enumerate(now.names)},
        "exploits": [
            {**asdict(each), "member": now.names[each.member], "source": now.names[each.source]}
            for each in now.exploits
        ],
    }


def _policy(now: PbtState, place: int) -> dict[str, Any]:
    name = now.names[place]
    return {
        "env_steps": now.env_steps.get(name, 0),
        "score": now.scores.get(name),
        "settings": now.settings[name],
        "schedule": [{"from": at, "settings": settings} for at, settings in schedule_of(now, name)],
    }


def schedule_of(now: PbtState, name: str) -> Sequence[tuple[int, Settings]]:
    """From which env step on which settings, for one policy alone."""
    if name not in now.names:
        raise UseError(f"the population has no policy {name!r}", did_you_mean(name, now.names))
    first = {place: now.first[each] for place, each in enumerate(now.names)}
    return schedule(now.names.index(name), now.exploits, first)
