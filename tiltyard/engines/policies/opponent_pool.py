"""Opponent pools: past versions of learning policies, saved every so many env steps and drawn as opponents.

    main at env step   0   50,000   100,000   150,000        keep: 3
    past                   50,000   100,000   150,000   ──>  an episode's seed draws one of them for each of its agents

A version is named by the env step at which it was saved. Owns when versions are saved, which are kept and how one is
drawn; matchmaking.py decides which policy plays an agent, multi_policy.py acts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from tiltyard.config.experiment import Experiment
from tiltyard.config.policies import Past
from tiltyard.models.policy_net import PolicyNet
from tiltyard.run.checkpoint import read_tree, write_tree
from tiltyard.types import Arrays, EnvSpec

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
        self.marks: dict[int, int] = {}
        """version -> a number that changes whenever its weights do"""
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


def write_versions(folder: Path, name: str, versions: Mapping[int, Arrays]) -> None:
    """Write them into a checkpoint's engine folder."""
    tree = {"env_steps": list(versions), "weights": {str(at): arrays for at, arrays in versions.items()}}
    write_tree(folder / "engine", f"past-{name}", tree)


def read_versions(folder: Path, name: str) -> dict[int, Arrays]:
    """Read what `write_versions` wrote; empty if the checkpoint has no such pool."""
    if not (folder / "engine" / f"past-{name}.json").exists():
        return {}
    tree = read_tree(folder / "engine", f"past-{name}")
    return {int(at): tree["weights"][str(at)] for at in tree["env_steps"]}
