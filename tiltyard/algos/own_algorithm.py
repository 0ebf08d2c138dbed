"""`algo: {id: path/file.py:MyAlgo}`: a user's own algorithm, with the methods that the learner needs of `Ppo`.

Guide: docs/guides/custom-loss-and-algorithm.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from tiltyard.algos.allreduce import LearnerGroup, SingleProcess
from tiltyard.algos.schedules import ScheduledValue
from tiltyard.config.algos import OwnAlgo
from tiltyard.errors import ConfigError, DivergedError, UseError
from tiltyard.models.policy_net import PolicyNet
from tiltyard.plugins import resolve
from tiltyard.types import Rollout, Tree


class Algorithm(Protocol):
    """What a user's class has; it is called with the net and a random generator, which is saved for it."""

    def update(self, rollout: Rollout, env_steps: int) -> dict[str, float]:
        """Learn from a rollout that began at `env_steps`; returns metrics by name."""

    def save(self) -> Tree:
        """A copy of its state: nested dicts and lists of arrays, numbers, strings, booleans and None."""

    def load(self, tree: Tree) -> None:
        """Continue from `save`."""


class OwnAlgorithm:
    """Trains one policy with a user's class."""

    def __init__(self, settings: OwnAlgo, net: PolicyNet, seed: int, base: Sequence[Path]) -> None:
        self._settings, self._net = settings, net
        self._call = partial(resolve.call_plugin, f"algo.id = {settings.id}")
        self.values: dict[str, ScheduledValue] = {}
        self.shuffling = np.random.default_rng(seed)
        self.group: LearnerGroup = SingleProcess()
        self.used: dict[str, float] = {}
        self.untrained = True
        target = resolve.load(resolve.parse(settings.id, {}, resolve.CONVENTIONAL["algo"], base))
        problems = resolve.check_options(target, settings.options, 2, "algo.options")
        if problems:
            raise ConfigError(problems)
        self.algorithm: Algorithm = self._call(target, net, self.shuffling, **settings.options)
        missing = [name for name in ("update", "save", "load") if not callable(getattr(self.algorithm, name, None))]
        if missing:
            raise UseError(f"algo.id = {settings.id} has no {missing[0]}()", "write update, save and load")

    def update(
        self, rollout: Rollout, env_steps: int, after_step: Callable[[], None] | None = None
    ) -> dict[str, float]:
        self.untrained = False
        metrics: dict[str, float] = self._call(self.algorithm.update, rollout, env_steps)
        if after_step is not None:
            after_step()
        if not bool(torch.stack([parameter.isfinite().all() for parameter in self._net.parameters()]).all()):
            hint = "lower its learning rate, or clip its gradients"
            raise DivergedError(f"algo.id = {self._settings.id}: the weights are not finite numbers", hint, {})
        try:
            return {str(name): float(value) for name, value in metrics.items()}
        except (AttributeError, TypeError, ValueError) as error:
            hint = "return a dict of numbers, which may be empty"
            raise UseError(f"algo.id = {self._settings.id}: update() must return numbers by name", hint) from error

    def current_settings(self) -> dict[str, float]:
        return {}

    def change(self, changes: dict[str, float]) -> None:
        if changes:
            message = f"algo.{next(iter(changes))} cannot change during training"
            raise UseError(message, f"algo.id = {self._settings.id} has no such settings")

    def save(self) -> Tree:
        return {"own": self._call(self.algorithm.save), "rng": self.shuffling.bit_generator.state}

    def load(self, tree: Tree) -> None:
        if "own" not in tree:
            raise UseError("the checkpoint is of another algorithm", "start a new run with model.init")
        self._call(self.algorithm.load, tree["own"])
        self.shuffling.bit_generator.state = tree["rng"]


class OwnBackup:
    """A copy of the policy and its algorithm from before an update, to go back to."""

    def __init__(self, net: PolicyNet, algo: OwnAlgorithm) -> None:
        self._net, self._algo = net, algo

    def save(self) -> None:
        self._weights, self._tree = self._net.arrays(), self._algo.save()

    def restore(self) -> None:
        self._net.load_arrays(self._weights)
        self._algo.load(self._tree)
