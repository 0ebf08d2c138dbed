"""All policies of a run in the learning process: a Learner for each that learns, a net for each that is frozen.

    rollout ──┬── main:  its own rows  ->  update        with a single policy this is its Learner and nothing else
              ├── rival: its own rows  ->  update
              ├── old:   frozen, no update
              └── past:  no update; a copy of main is added every so often

Owns names: of files, of metrics (policy/NAME/loss/... if there are several), of published weights. matchmaking.py
assigns policies to agents, multi_policy.py acts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from tiltyard.config.experiment import Experiment
from tiltyard.engines.learner import Learner
from tiltyard.engines.policies.frozen import frozen_nets, origin
from tiltyard.engines.policies.matchmaking import Match, VersionPool, fill_version_pools, read_versions, versions_tree
from tiltyard.engines.policies.multi_policy import MultiPolicyActor
from tiltyard.errors import UseError, did_you_mean
from tiltyard.models.policy_files import saved_policies
from tiltyard.models.policy_net import PolicyNet
from tiltyard.run.state_file import read_tree
from tiltyard.types import Arrays, EnvSpec, EpisodeEnd, PolicyState, Rollout, Tree

Item = TypeVar("Item")


def joined(parts: Sequence[Mapping[str, Item]]) -> dict[str, Item]:
    """The weights of all learning policies in one dict: the first's as they are, another's as INDEX/NAME."""
    return {f"{at}/{key}" if at else key: item for at, part in enumerate(parts) for key, item in part.items()}


def make_actor(
    experiment: Experiment,
    spec: EnvSpec,
    learning: Mapping[str, PolicyNet],
    frozen: Mapping[str, PolicyNet],
    past: Mapping[str, VersionPool],
    *,
    measured: bool = False,
) -> PolicyNet | MultiPolicyActor:
    """The actor of a group of envs: the only policy itself, or all of them. `measured` as in Match."""
    if not experiment.several_policies:
        return learning[experiment.learning[0]]
    match = Match(experiment, spec.agents, measured=measured)
    return MultiPolicyActor({**learning, **frozen}, list(frozen), match, past)


class PolicySet:
    """The policies of an experiment; evaluations measure the `first`."""

    def __init__(
        self, experiment: Experiment, spec: EnvSpec, base: Sequence[Path], net: PolicyNet | None = None
    ) -> None:
        self.experiment, self.spec, self.base = experiment, spec, base
        name, *others = experiment.learning
        self.first = Learner(experiment, spec, base, name, net)
        self.learners = {name: self.first} | {each: Learner(experiment, spec, base, each) for each in others}
        self.frozen: dict[str, PolicyNet] = {}
        self.version_pools: dict[str, VersionPool] = {}
        if not self.experiment.several_policies:
            return
        self.frozen = {name: net.to(self.first.device) for name, net in frozen_nets(experiment, spec, base).items()}
        device, past = self.first.device, experiment.past.items()
        self.version_pools = {name: VersionPool(of, experiment, spec, base, device) for name, of in past}
        for pool in self.version_pools.values():
            pool.add(0, self.learners[pool.past.of].net.arrays())

    def actor(self) -> PolicyNet | MultiPolicyActor:
        """The actor of one group of envs: the only policy, or all of them."""
        if not self.experiment.several_policies:
            return self.first.net
        nets = {name: learner.net for name, learner in self.learners.items()}
        return make_actor(self.experiment, self.spec, nets, self.frozen, self.version_pools)

    def describe(self) -> list[str]:
        lines = self.first.describe()
        if self.experiment.several_policies:
            lines += [f"policy  {name}: {self._describe_policy(name)}" for name in self.experiment.policy_settings]
            lines += [f"match   {Match(self.experiment, self.spec.agents).describe()}"]
        return lines

    def _describe_policy(self, name: str) -> str:
        if name in self.frozen:
            return f"frozen, {origin(self.experiment, name, self.base)}"
        if name in self.version_pools:
            past = self.version_pools[name].past
            return f"{past.of} every {past.every:,} env steps, the last {past.keep}"
        given = self.experiment.policy_settings[name].algo.model_dump(exclude_none=True)
        changes = [f"{key} {value:g}" for key, value in given.items()]
        return f"learns with {', '.join(changes)}" if changes else "learns"

    def update(
        self, rollout: Rollout, env_steps: int, after_step: Callable[[], None] | None = None
    ) -> dict[str, float]:
        """Update every policy from its own rows, starting at `env_steps`. On any error all of them are restored."""
        for learner in self.learners.values():
            learner.remember()
        try:
            update = self._update_several if self.experiment.several_policies else self.first.update
            return update(rollout, env_steps, after_step)
        except BaseException:
            for learner in self.learners.values():
                learner.restore()
            raise

    def _update_several(
        self, rollout: Rollout, env_steps: int, after_step: Callable[[], None] | None
    ) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, learner in self.learners.items():
            learned = learner.update(rollout, env_steps, after_step)
            if learned:
                learned |= {"env_steps": float(learner.env_steps)}
            found |= {f"policy/{name}/{metric}": value for metric, value in learned.items()}
        now = env_steps + int(rollout.valid.sum())
        for pool in self.version_pools.values():
            if pool.is_due(env_steps, now):
                pool.add(now, self.learners[pool.past.of].net.arrays())
        return found

    def arrays(self) -> Arrays:
        """A copy of all weights that learning changes, for workers."""
        return joined([learner.net.arrays() for learner in self.learners.values()])

    # ------------------------------------------------------------------------------------------ disk

    def save(self) -> tuple[dict[str, Tree], Tree]:
        """The policies' trees by their names in a checkpoint, and the rest for the engine to keep; memory is shared."""
        saved = {name: learner.save() for name, learner in self.learners.items()}
        trees = {at: tree for policy, _ in saved.values() for at, tree in policy.items()}
        for name, pool in self.version_pools.items():
            trees |= versions_tree(name, pool)
        (first, (_, rest)), *others = saved.items()
        return trees, {**rest, "name": first, "others": {name: other for name, (_, other) in others}}

    def load(self, folder: Path, state: Tree) -> list[str]:
        """Continue from a checkpoint with that `state`; returns notes about policies that it does not have."""
        if (origin := state.get("engine")) in ("rllib", "clone"):
            return self._load_weights(folder, origin)
        tree, env_steps = state["learner"], int(state["progress"]["env_steps"])
        trees = {tree.get("name", "main"): tree, **tree.get("others", {})}
        there = saved_policies(folder)
        notes = []
        for name, learner in self.learners.items():
            if name in trees and name in there:
                learner.load(folder, trees[name])
            else:
                notes.append(f"the checkpoint has no policy {name} (only {', '.join(there)}); it starts from scratch")
        now = {name: self.learners[pool.past.of].net.arrays() for name, pool in self.version_pools.items()}
        versions = {name: read_versions(folder, name) or {env_steps: weights} for name, weights in now.items()}
        fill_version_pools(self.version_pools, versions)
        return notes

    def _load_weights(self, folder: Path, origin: str) -> list[str]:
        """Load only the weights, from a checkpoint of the rllib engine or of behaviour cloning."""
        for name, learner in self.learners.items():
            learner.net.load_arrays(read_tree(folder / "policies", name)["weights"])
        setting = "engine.kind = rllib" if origin == "rllib" else "algo.id = clone"
        return [f"the checkpoint is from {setting}: weights are loaded, the optimiser starts anew"]

    # ------------------------------------------------------------------------------------------ between steps

    def snapshot(self, policy: str | None) -> PolicyState:
        return self._learner(policy).snapshot()

    def adopt(self, policy: str | None, state: PolicyState | None, settings: dict[str, float]) -> dict[str, float]:
        learner = self._learner(policy)
        fresh = learner.algo.untrained
        now = learner.adopt(state, settings)
        for pool in self.version_pools.values():
            if fresh and pool.past.of == learner.name:  # initial weights: the first version gets them, too
                pool.add(0, learner.net.arrays())
        return now

    def replaced(self, policy: str | None, version: int) -> None:
        """Mark a policy as replaced: rows of earlier versions are not its own."""
        self._learner(policy).since = version

    def own_returns(self, ends: Iterable[EpisodeEnd]) -> list[EpisodeEnd]:
        """The episodes without returns earned by policies that have been replaced since."""
        since = {name: learner.since for name, learner in self.learners.items() if learner.since}
        return [
            replace(end, returns={name: each for name, each in end.returns.items() if end.begun >= since.get(name, 0)})
            for end in ends
        ]

    def past(self) -> dict[str, dict[int, Arrays]]:
        return {name: pool.arrays() for name, pool in self.version_pools.items()}

    def _learner(self, policy: str | None) -> Learner:
        if policy is not None and policy not in self.learners:
            raise UseError(f"unknown learning policy {policy!r}", did_you_mean(policy, self.learners))
        return self.first if policy is None else self.learners[policy]

    def close(self) -> None:
        for learner in self.learners.values():
            learner.close()
