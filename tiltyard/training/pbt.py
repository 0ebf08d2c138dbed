"""Population-based training among the policies of one run: they learn in one engine and share its envs.

    between two steps:   which policies are due? ──> which is far behind, and copies which? ──> snapshot, adopt, check

algos.pbt decides which policy copies which and with which settings; the engine copies. Every random draw comes from the
run's seed and the number of the decision, and PbtState is saved with checkpoints, so a resume decides the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tiltyard.algos.pb2 import Gain, propose
from tiltyard.algos.pbt import Exploit, Member, Settings, is_due, replacements, rules_of, schedule
from tiltyard.algos.tunables import latin_hypercube, parse_tunables, perturb
from tiltyard.config.fields import is_number
from tiltyard.config.policies import Population
from tiltyard.config.schedules import KlAdaptive
from tiltyard.errors import UseError, did_you_mean
from tiltyard.run.checkpoint import newest_valid
from tiltyard.run.folder import Run
from tiltyard.run.state_file import read_tree
from tiltyard.training.attempt import Attempt
from tiltyard.training.live_settings import adopt
from tiltyard.types import Tree

DECISIONS = 7  # the role of decisions in the run's seed tree
KEPT_GAINS = 200  # PB2 uses the latest ones


class PbtSelection:
    """Replaces weak policies of an attempt by changed copies of strong ones."""

    def __init__(self, attempt: Attempt, population: Population) -> None:
        self.attempt, self.population, self.names = attempt, population, attempt.experiment.learning
        self.tunables, self.rules = (
            parse_tunables(population.space),
            rules_of(population, population.goal == "maximise"),
        )
        saved = attempt.state.selection
        self.now = self._restore(PbtState.read(saved)) if saved and saved["names"] == self.names else self._start()
        attempt.state.selection = self.now.dump()

    def select(self, metrics: Mapping[str, float]) -> None:
        """Decide about the policies that are due, by the newest metrics."""
        now = self.now
        for name in self.names:
            now.env_steps[name] = int(metrics.get(f"policy/{name}/env_steps", now.env_steps.get(name, 0)))
        members = [self._member(number, metrics) for number in range(len(self.names))]
        due = [member for member in members if is_due(self.rules, member)]
        if not due:
            return
        now.decisions += 1
        rng = self._rng(now.decisions)
        for member in due:
            self._record_gain(member)
        for number, source in replacements(self.rules, members, rng).items():
            self._exploit(members[number], members[source], rng)
        self.attempt.state.selection = now.dump()

    def _rng(self, decision: int) -> np.random.Generator:
        seed = np.random.SeedSequence(entropy=self.attempt.experiment.seed, spawn_key=(DECISIONS, decision))
        return np.random.default_rng(seed)

    def _member(self, number: int, metrics: Mapping[str, float]) -> Member:
        name = self.names[number]
        score = metrics.get(f"policy/{name}/{self.population.metric}")
        return Member(number, self.now.env_steps[name], score, self.now.decided.get(name, 0))

    # ------------------------------------------------------------------------------------------ settings

    def _start(self) -> PbtState:
        """Spread the policies over the search space; settings given per policy stay."""
        experiment, now = self.attempt.experiment, PbtState(list(self.names))
        keys = [key for tunable in self.tunables for key in tunable.keys]
        for name, drawn in zip(self.names, latin_hypercube(self.tunables, len(self.names), self._rng(0)), strict=True):
            given = experiment.policy_settings[name].algo.model_dump(exclude_none=True)
            own = {f"algo.{number}": value for number, value in given.items()}
            now.first[name] = now.settings[name] = drawn | {key: value for key, value in own.items() if key in keys}
            adopt(self.attempt.engine, name, None, now.first[name])
            self.attempt.writer.log("started", f"policy {name} starts with {_text(now.first[name])}")
        return now

    def _restore(self, now: PbtState) -> PbtState:
        """Apply the settings that were decided, even if the experiment's own values changed since. Settings that adapt
        by themselves continue from the checkpoint."""
        algo = self.attempt.experiment.algo
        for name, settings in now.settings.items():
            numbers = {key: getattr(algo, key.removeprefix("algo."), None) for key in settings}
            decided = {key: value for key, value in settings.items() if not isinstance(numbers[key], KlAdaptive)}
            adopt(self.attempt.engine, name, None, decided)
        return now

    # ------------------------------------------------------------------------------------------ decisions

    def _record_gain(self, member: Member) -> None:
        """Record how much the score rose since the last decision about this policy."""
        now, name = self.now, self.names[member.number]
        now.decided[name] = member.env_steps
        if member.score is None:
            return
        if name in now.scores:
            gain = (member.score - now.scores[name]) * (1 if self.rules.maximise else -1)
            now.gains = [*now.gains, Gain(now.settings[name], member.env_steps, gain)][-KEPT_GAINS:]
        now.scores[name] = member.score

    def _exploit(self, member: Member, source: Member, rng: np.random.Generator) -> None:
        """Replace a member by a copy of `source`."""
        now, name, other = self.now, self.names[member.number], self.names[source.number]
        before, after = now.settings[name], self._explore(name, other, rng)
        adopt(self.attempt.engine, name, self.attempt.engine.snapshot(other), after)
        self.attempt.state.forget(name)
        now.settings[name] = after
        assert member.score is not None and source.score is not None  # replacements() compares only scored members
        now.scores[name] = source.score
        counts = (member.env_steps, source.env_steps, member.env_steps)
        now.exploits.append(Exploit(member.number, source.number, *counts, before, after))
        moved = {key: value for key, value in after.items() if value != now.settings[other].get(key)}
        message = (
            f"policy {name} becomes a copy of {other} at env step {self.attempt.progress.env_steps:,}: "
            f"{member.score:.4g} against {source.score:.4g}"
        )
        message += f"; then {_text(moved)}" if moved else ""
        facts = {**asdict(now.exploits[-1]), "member": name, "source": other, "at": self.attempt.progress.env_steps}
        self.attempt.writer.log("exploited", message, scores=[member.score, source.score], **facts)

    def _explore(self, name: str, source: str, rng: np.random.Generator) -> Settings:
        """The settings that the copy continues with."""
        if self.population.explore == "pb2":
            others = [self.now.settings[each] for each in self.names if each != name]
            return propose(self.tunables, self.now.gains, others, self.rules, rng)
        return perturb(self.tunables, self.now.settings[source], self.rules, rng)


def _text(settings: Settings) -> str:
    return ", ".join(f"{key} {value:.4g}" for key, value in settings.items())


@dataclass
class PbtState:
    """What selection remembers from decision to decision, by policy name; members are numbered as in `names`."""

    names: list[str]
    first: dict[str, Settings] = field(default_factory=dict)
    settings: dict[str, Settings] = field(default_factory=dict)
    env_steps: dict[str, int] = field(default_factory=dict)
    """env steps that the policy has learned from"""
    decided: dict[str, int] = field(default_factory=dict)
    """these env steps at the last decision about the policy"""
    scores: dict[str, float] = field(default_factory=dict)
    """at the last decision about the policy; after a copy, that of its source"""
    gains: list[Gain] = field(default_factory=list)
    exploits: list[Exploit] = field(default_factory=list)
    decisions: int = 0

    def dump(self) -> Tree:
        tree = asdict(self)
        return {**tree, "turns": tree.pop("decisions")}  # its name in checkpoints

    @staticmethod
    def read(tree: Tree) -> PbtState:
        gains, exploits = [Gain(**each) for each in tree["gains"]], [Exploit(**each) for each in tree["exploits"]]
        rest = {name: value for name, value in tree.items() if name != "turns"}
        return PbtState(**{**rest, "gains": gains, "exploits": exploits, "decisions": tree["turns"]})


def read_pbt_state(run: Run) -> PbtState:
    """The state in a run's newest checkpoint."""
    found, _ = newest_valid(run)
    tree = None if found is None else read_tree(found.folder, "loop").get("selection")
    if tree is None:
        raise UseError(f"run {run.id} has no population or no checkpoint yet", "set `population` in an experiment")
    return PbtState.read(tree)


def policy_lineage(run: Run) -> dict[str, Any]:
    """All copies made, and for each policy the settings schedule that repeats it in a run alone."""
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
    """The settings of one policy, by the env step they start at."""
    if name not in now.names:
        raise UseError(f"the population has no policy {name!r}", did_you_mean(name, now.names))
    first = {place: now.first[each] for place, each in enumerate(now.names)}
    found = schedule(now.names.index(name), now.exploits, first)
    for setting, value in [each for _, settings in found for each in settings.items()]:
        if not (setting.startswith("algo.") and is_number(value)):  # the checkpoint may be another user's
            message = f"the population's schedule has {setting} = {value!r}, but varies only numbers of algo"
            raise UseError(message, "its checkpoint was changed; use another one")
    return found
