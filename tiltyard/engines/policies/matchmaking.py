"""Matchmaking: which policies may play which agents of an env, how one is drawn, and which of its past versions.

A draw depends only on the episode's seed and the agent's index, so that resumed runs, other workers and evaluations
draw the same.

    match: {catcher: main, "*": {main: 0.2, rival: 0.8}}      agents catcher, runner
    ──>    catcher: policy 0        runner: policy 0 with 20 %, policy 1 with 80 %

An opponent pool has past versions of a learning policy, each named by the env step at which it was saved:

    main at env step   0   50,000   100,000   150,000        keep: 3
    past                   50,000   100,000   150,000   ──>  an episode's seed draws one of them for each of its agents
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import torch

from tiltyard.config.experiment import Experiment
from tiltyard.config.policies import Past
from tiltyard.errors import ConfigError, Problem, did_you_mean
from tiltyard.models.policy_net import PolicyNet
from tiltyard.run.state_file import read_tree
from tiltyard.types import Array, Arrays, EnvSpec, Tree

MATCH = 5  # role in the seed tree of an episode


class Match:
    """For each agent, in the env's order, the indices of the policies that may play it, with weights.

    With `measured`, the first learning policy plays in every episode: if it was not drawn, it takes the first agent
    that it may play, because otherwise there would be nothing to measure.
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
        """Indices of the policies that play the agents in the episode with this seed."""
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
        """The mean return of each policy that played, from `own`, the returns of the participating agents by name.

        An env with one agent reports only the `total`.
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
    """The weighted policies of each agent. ConfigError for patterns that do not fit the env's agents, and for learning
    policies that play no agent; when `measured`, one that plays is enough."""
    learning = experiment.learning if experiment.population is not None else experiment.learning[:1]
    match = experiment.match or {"*": dict.fromkeys(learning, 1.0)}
    decided = {agent: next((pattern for pattern in match if fnmatchcase(agent, pattern)), None) for agent in agents}
    problems = []
    for pattern in experiment.match:
        if not any(fnmatchcase(agent, pattern) for agent in agents):
            hint = did_you_mean(pattern, agents) or f"the env's agents are {', '.join(agents[:5])}, ..."
            problems.append(Problem(f"match.{pattern}", "", "matches no agent of the env", hint))
        elif pattern not in decided.values():
            earlier = next(other for other in decided.values() if other is not None)
            message = "never matches; earlier patterns cover all its agents"
            problems.append(Problem(f"match.{pattern}", "", message, f"put it before {earlier!r}, or leave it out"))
    for agent in [agent for agent, pattern in decided.items() if pattern is None]:
        hint = f"add {agent!r} or the pattern '*' to match"
        problems.append(Problem("match", "", f"no pattern matches agent {agent!r}", hint))
    pools = [dict(match[pattern]) for pattern in decided.values() if pattern is not None]
    played = {name for pool in pools for name in pool}
    idle = [name for name in experiment.learning if name not in played and not problems]
    for name in idle if not measured or len(idle) == len(experiment.learning) else ():
        hint = f"give it agents in match, or leave policies.{name} out"
        problems.append(Problem(f"policies.{name}", "", "plays no agent; there is nothing to learn or measure", hint))
    if problems:
        raise ConfigError(problems, "the match")
    return pools


# ---------------------------------------------------------------------------------------------- opponent pools


VERSION = 6  # role in the seed tree of an episode
CPU = torch.device("cpu")

Versions = dict[int, PolicyNet]


def draw_version(past: Past, known: Sequence[int], seed: int, agent: int) -> int:
    """Draw the version, among those `known`, that plays an agent in the episode with this seed."""
    steps = sorted(known)
    ends = np.cumsum(past.fade ** np.arange(len(steps) - 1, -1, -1.0))
    word = np.random.SeedSequence(entropy=seed, spawn_key=(VERSION, agent)).generate_state(1)[0]
    return steps[int(np.searchsorted(ends[:-1], word / 2**32 * ends[-1], side="right"))]


class VersionPool:
    """The versions of one pool, as nets that act and never learn."""

    def __init__(
        self, past: Past, experiment: Experiment, spec: EnvSpec, base: Sequence[Path], device: torch.device = CPU
    ) -> None:
        self.past, self.device, self.versions = past, device, Versions()
        self.marks: dict[int, int] = {}  # version -> a number that changes whenever its weights do
        self._made = (experiment, spec, base)
        self._count = 0
        self._spare: list[PolicyNet] = []

    def is_due(self, before: int, now: int) -> bool:
        """Whether a version must be saved after training from one env step to another."""
        return now // self.past.every > before // self.past.every

    def add(self, env_steps: int, weights: Arrays) -> None:
        """Add a version and drop the oldest beyond `keep`."""
        self._count += 1
        self.put(env_steps, weights, self._count)
        self.keep_only(sorted(self.versions)[-self.past.keep :])

    def put(self, env_steps: int, weights: Arrays, mark: int) -> None:
        """Add or replace a version; drops none."""
        if env_steps not in self.versions:
            self.versions[env_steps] = self._spare.pop() if self._spare else self._net()
        self.versions[env_steps].load_arrays(weights)
        self.marks[env_steps] = mark

    def _net(self) -> PolicyNet:
        experiment, spec, base = self._made
        return PolicyNet(spec, experiment.model, base, seed=0).to(self.device).eval()

    def keep_only(self, kept: Sequence[int]) -> None:
        """Drop all other versions."""
        for env_steps in [each for each in self.versions if each not in kept]:
            self._spare.append(self.versions.pop(env_steps))
            del self.marks[env_steps]

    def arrays(self) -> dict[int, Arrays]:
        """A copy of the weights of each version."""
        return {env_steps: net.arrays() for env_steps, net in self.versions.items()}


def fill_version_pools(pools: Mapping[str, VersionPool], versions: Mapping[str, Mapping[int, Arrays]]) -> None:
    """Replace the contents of the pools by these versions."""
    for name, pool in pools.items():
        pool.keep_only([])
        for env_steps, weights in versions[name].items():
            pool.add(env_steps, weights)


def versions_tree(name: str, pool: VersionPool) -> dict[str, Tree]:
    """The tree of a pool by its name in a checkpoint. It shares the nets' memory."""
    weights = {str(at): net.views() for at, net in pool.versions.items()}
    return {f"engine/past-{name}": {"env_steps": list(pool.versions), "weights": weights}}


def read_versions(folder: Path, name: str) -> dict[int, Arrays]:
    """Read the tree of a pool; empty if the checkpoint has no such pool."""
    if not (folder / "engine" / f"past-{name}.json").exists():
        return {}
    tree = read_tree(folder / "engine", f"past-{name}")
    return {int(at): tree["weights"][str(at)] for at in tree["env_steps"]}
