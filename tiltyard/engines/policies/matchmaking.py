"""Who plays whom: the agents of an env, the policies that may play each, and what is drawn where there is a choice.

A draw depends on nothing but the episode's seed (which is of the run's seed, the copy of the env and the episode's
number) and the agent's place, so that a resume, other workers and an evaluation's workers all draw the same.

    match: {catcher: main, "*": {main: 0.2, rival: 0.8}}      agents catcher, runner
    ──>    catcher: place 0        runner: place 0 with 20 %, place 1 with 80 %
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np

from tiltyard.config.experiment import Experiment
from tiltyard.errors import ConfigError, Problem, did_you_mean
from tiltyard.types import Array

MATCH = 5  # its role in the seed tree of an episode


class Match:
    """For each agent, in the env's order, the policies that may play it, by their places among all, with weights.

    `measured`: the first policy that learns and may play does so in every episode: where chance leaves it out, it takes
    the first seat that it may have, because there would be nothing to measure.
    """

    def __init__(self, experiment: Experiment, agents: Sequence[str], *, measured: bool = False) -> None:
        self.policies, self.agents, self.measured = list(experiment.policy_settings), list(agents), measured
        self.pools: list[dict[str, float]] = _pools(experiment, agents, measured=measured)
        played = {name for pool in self.pools for name in pool}
        self.whom = next(self.policies.index(name) for name in experiment.learning if name in played)
        self._choices = [np.array([self.policies.index(name) for name in pool]) for pool in self.pools]
        self._ends = [np.cumsum([*pool.values()]) / sum(pool.values()) for pool in self.pools]
        self._first = next(place for place, choices in enumerate(self._choices) if self.whom in choices)

    def draw(self, seed: int) -> Array:
        """Places of the policies that play the agents in the episode with this seed."""
        seats = np.array([self._drawn(seed, agent) for agent in range(len(self.agents))])
        if self.measured and self.whom not in seats:
            seats[self._first] = self.whom
        return seats

    def _drawn(self, seed: int, agent: int) -> int:
        choices = self._choices[agent]
        if len(choices) == 1:
            return int(choices[0])
        word = np.random.SeedSequence(entropy=seed, spawn_key=(MATCH, agent)).generate_state(1)[0]
        return int(choices[np.searchsorted(self._ends[agent][:-1], word / 2**32, side="right")])

    def returns(self, seats: Array, own: Mapping[str, float], total: float) -> dict[str, float]:
        """The mean return of each policy that played, from `own`, the returns of the agents that took part by name.

        An env with one agent tells only the `total`.
        """
        own = own if len(self.agents) > 1 else {self.agents[0]: total}
        found: dict[int, list[float]] = {}
        for agent, place in zip(self.agents, seats.tolist(), strict=True):
            if agent in own:
                found.setdefault(place, []).append(own[agent])
        return {self.policies[place]: sum(found[place]) / len(found[place]) for place in sorted(found)}

    def describe(self) -> str:
        """player_0: main; player_1: main 20 %, rival 80 %"""
        return "; ".join(f"{agent}: {_shares(pool)}" for agent, pool in zip(self.agents, self.pools, strict=True))


def _shares(pool: Mapping[str, float]) -> str:
    if len(pool) == 1:
        return next(iter(pool))
    return ", ".join(f"{name} {100 * weight / sum(pool.values()):.3g} %" for name, weight in pool.items())


def _pools(experiment: Experiment, agents: Sequence[str], *, measured: bool) -> list[dict[str, float]]:
    """The pool of each agent; ConfigError with all that does not fit the env's agents, or policies that learn and play
    nobody: all of them must, but for a measurement, for which one will do."""
    everybody = experiment.learning if experiment.population is not None else experiment.learning[:1]
    match = experiment.match or {"*": dict.fromkeys(everybody, 1.0)}
    decided = {agent: next((pattern for pattern in match if fnmatchcase(agent, pattern)), None) for agent in agents}
    problems = []
    for pattern in experiment.match:
        if not any(fnmatchcase(agent, pattern) for agent in agents):
            hint = did_you_mean(pattern, agents) or f"the env's agents are {', '.join(agents[:5])}, ..."
            problems.append(Problem(f"match.{pattern}", "", "fits no agent of the env", hint))
        elif pattern not in decided.values():
            earlier = next(other for other in decided.values() if other is not None)
            message = "decides for nobody: patterns before it fit every agent that it fits"
            problems.append(Problem(f"match.{pattern}", "", message, f"put it before {earlier!r}, or leave it out"))
    for agent in [agent for agent, pattern in decided.items() if pattern is None]:
        hint = f"add {agent!r} or the pattern '*' to match"
        problems.append(Problem("match", "", f"no pattern fits agent {agent!r}: nobody would play it", hint))
    pools = [dict(match[pattern]) for pattern in decided.values() if pattern is not None]
    played = {name for pool in pools for name in pool}
    idle = [name for name in experiment.learning if name not in played and not problems]
    for name in idle if not measured or len(idle) == len(experiment.learning) else ():
        hint = f"give it agents in match, or leave policies.{name} out"
        problems.append(Problem(f"policies.{name}", "", "plays no agent: there is nothing to learn or measure", hint))
    if problems:
        raise ConfigError(problems, "who plays whom")
    return pools
