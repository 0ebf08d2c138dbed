"""`algo.loss`: a user's own term that is added to PPO's loss, a function or a class in a file of theirs.

    def my_term(batch, outputs, settings, *, weight=0.1): return weight * batch.mean(...), {"name": number}

Guide: docs/guides/custom-loss-and-algorithm.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tiltyard.algos.minibatches import Minibatch
from tiltyard.algos.ppo_loss import COLUMNS, Outputs
from tiltyard.config.fields import Plugin
from tiltyard.errors import ConfigError, Problem, UseError
from tiltyard.models.policy_net import PolicyNet
from tiltyard.plugins import resolve
from tiltyard.types import Tree


class OwnLoss:
    """Calls the term and checks what it returns. A class is built once, with the net as training begins."""

    def __init__(self, plugin: Plugin, net: PolicyNet, base: Sequence[Path]) -> None:
        self._plugin = plugin
        self._call = partial(resolve.call_plugin, f"algo.loss = {plugin.id}")
        target = resolve.load(resolve.parse(plugin.id, {}, resolve.CONVENTIONAL["loss"], base))
        given = 1 if inspect.isclass(target) else 3  # the net; or batch, outputs and settings
        problems = resolve.check_options(target, plugin.options, given, "algo.loss.options")
        if problems:
            raise ConfigError(problems)
        self.name = f"loss/{target.__name__}"
        if self.name in COLUMNS:
            problem = Problem("algo.loss", plugin.id, "has the name of a term of PPO", f"rename {target.__name__}")
            raise ConfigError([problem])
        self._term: Callable[..., Any] = partial(target, **plugin.options)
        if inspect.isclass(target):
            self._term = self._call(self._term, net)
        if isinstance(self._term, nn.Module):
            self._term.to(net.device)
        self._keys: list[str] | None = None

    def __call__(
        self, batch: Minibatch, outputs: Outputs, settings: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The term, and its metrics by full name, itself first."""
        found = self._call(self._term, batch, outputs, settings)
        term, metrics = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        numbers = [term, *(metrics.values() if isinstance(metrics, dict) else [metrics])]
        if not isinstance(metrics, dict) or not all(isinstance(x, Tensor) and x.numel() == 1 for x in numbers):
            hint = "return batch.mean(...), or a tuple of that and a dict of such tensors"
            raise UseError(f"algo.loss = {self._plugin.id} must return a tensor with one number", hint)
        if self._keys is None:
            self._keys = list(metrics)
        if self._keys != list(metrics):
            message = f"algo.loss = {self._plugin.id} returned the metrics {list(metrics)} after {self._keys}"
            raise UseError(message, "return the same names in every call")
        names = [self.name, *(f"{self.name}/{key}" for key in metrics)]
        return term.reshape(()), {name: x.detach().reshape(()) for name, x in zip(names, numbers, strict=True)}

    def save(self) -> Tree:
        """The state of a term that is a module, sharing its memory on the CPU; {} for others."""
        term = self._term
        return {n: x.cpu().numpy() for n, x in term.state_dict().items()} if isinstance(term, nn.Module) else {}

    def load(self, tree: Tree) -> None:
        if isinstance(self._term, nn.Module) and tree:
            try:
                self._term.load_state_dict({name: torch.as_tensor(array) for name, array in tree.items()})
            except RuntimeError as error:
                message = f"algo.loss = {self._plugin.id}: the checkpoint has the state of another term"
                raise UseError(message, "use the term that it was trained with, or model.init") from error
