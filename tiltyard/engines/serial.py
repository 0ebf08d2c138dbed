"""The serial engine: envs, inference and update in one process, one after another.

    step():   every group of envs fills its part of the rollout  ->  one update

The reference for other engines, and for readers: the same seed gives the same weights, also across stop and resume.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from tiltyard.config.experiment import Experiment
from tiltyard.engines.collector import Collector, empty_rollout
from tiltyard.engines.engine_state import dropped_groups, read_state
from tiltyard.engines.policies.policy_set import PolicySet
from tiltyard.engines.topology import Topology, learner_threads
from tiltyard.envs.watchdog import calling_envs
from tiltyard.models.policy_net import PolicyNet
from tiltyard.types import Arrays, EnvSpec, PolicyState, Progress, Report, Tree


class SerialEngine:
    """Learns and samples in this process, with one group of envs per worker of the equivalent local engine."""

    def __init__(
        self,
        experiment: Experiment,
        spec: EnvSpec,
        base: Sequence[Path],
        chosen: Topology,
        net: PolicyNet | None = None,
    ) -> None:
        self.experiment, self.chosen = experiment, chosen
        self.policies = PolicySet(experiment, spec, base, net)
        self.learner = self.policies.first
        self.threads, self.why = learner_threads(experiment, spec, self.learner.net, chosen)
        torch.set_num_threads(self.threads)
        groups = max(1, chosen.workers)
        self.rollout = empty_rollout(experiment, spec, self.learner.net, experiment.engine.envs)
        envs = experiment.engine.envs // groups
        rows = envs * len(spec.agents)
        self.groups = [Collector(experiment, spec, base, self.policies.actor(), envs, group) for group in range(groups)]
        self.parts = [self.rollout.rows(group * rows, (group + 1) * rows) for group in range(groups)]
        self.progress = Progress()
        self.version = 0  # of the weights: grows with each update or replaced policy

    def describe(self) -> list[str]:
        return [*self.policies.describe(), f"engine  {self.experiment.engine.kind}: {self._processes()}"]

    def _processes(self) -> str:
        envs, threads = self.experiment.engine.envs, f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        if self.experiment.engine.kind == "serial":
            return f"{envs} envs, {threads}, {self.learner.device}"
        return f"{envs} envs in this process ({self.chosen.why}), {threads} ({self.why}), {self.learner.device}"

    def step(self) -> Report:
        started = perf_counter()
        spent = {"env": 0.0, "inference": 0.0, "learn": 0.0}
        frames = -sum(group.envs.stats.frames_taken for group in self.groups)
        with calling_envs():
            episodes = [
                end
                for group, part in zip(self.groups, self.parts, strict=True)
                for end in group.fill(part, self.version, spent)
            ]
        episodes = self.policies.own_returns(episodes)
        frames += sum(group.envs.stats.frames_taken for group in self.groups)
        batch = int(self.rollout.valid.sum())

        mark = perf_counter()
        metrics = self.policies.update(self.rollout, self.progress.env_steps)
        self.version += 1
        spent["learn"] = perf_counter() - mark

        total = perf_counter() - started
        self.progress = self.progress.plus(batch, frames, 1, len(episodes), total)
        spent["other"] = max(0.0, total - sum(spent.values()))
        return Report(self.progress, metrics, episodes, spent)

    # ------------------------------------------------------------------------------------------ disk

    def save(self, folder: Path, *, cut: bool = False) -> dict[str, Tree]:
        trees, learner = self.policies.save()
        parts = {"groups": len(self.groups), "cut": cut, "threads": self.threads, "version": self.version}
        trees["engine/state"] = {**parts, "progress": asdict(self.progress), "learner": learner}
        return trees | {f"engine/group-{each.group}": each.tree() for each in self.groups if not cut}

    def load(self, folder: Path) -> list[str]:
        tree = read_state(folder)
        self.progress = Progress(**tree["progress"])
        self.version = tree.get("version", self.progress.updates)
        notes = self.policies.load(folder, tree)
        notes += [note for group in self.groups for note in group.load(folder)]
        return notes + dropped_groups(tree, len(self.groups))

    # ------------------------------------------------------------------------------------------ between steps

    def snapshot(self, policy: str | None = None) -> PolicyState:
        return self.policies.snapshot(policy)

    def adopt(self, policy: str | None, state: PolicyState | None, settings: dict[str, float]) -> dict[str, float]:
        now = self.policies.adopt(policy, state, settings)
        if state is not None:
            self.version += 1
            self.policies.replaced(policy, self.version)
        return now

    def set_env_options(self, options: Mapping[str, Any]) -> None:
        for group in self.groups:
            group.envs.set_options(options)

    def past(self) -> dict[str, dict[int, Arrays]]:
        return self.policies.past()

    def close(self) -> None:
        self.policies.close()
        for group in self.groups:
            group.close()
