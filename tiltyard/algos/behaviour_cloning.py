"""Behaviour cloning: gradient steps on the negative log likelihood of recorded actions (Pomerleau 1989).

    without memory   [T, B] steps -> shuffled minibatches of single steps -> loss -> gradient step
    with memory      [T, B] steps -> chunks of bptt steps of all rows, in order, with the state after the last chunk

The critic learns the recorded returns at the same time. Where the samples come from is the engine's business.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tiltyard.algos.flat_adam import Adam
from tiltyard.algos.schedules import ScheduledValue, fix_values, numbers_now
from tiltyard.config.clone_algo import Clone
from tiltyard.errors import DivergedError
from tiltyard.models.policy_net import PolicyNet
from tiltyard.models.recurrent import State
from tiltyard.models.torch_distributions import TorchActionDist
from tiltyard.types import Array, Arrays, Tree

CHANGEABLE = ("lr", "entropy", "value_coef", "gamma")
COLUMNS = ("loss/clone", "loss/value", "loss/entropy", "learn/accuracy", "learn/gradient_norm")
NORM = -1


class Samples(Protocol):
    """Recorded steps [T, B, ...]."""

    obs: Arrays
    action: Array
    returns: Array
    first: Array


@dataclass
class Minibatch:
    """Samples on the net's device, [T, B, ...]; T = 1 without memory."""

    obs: dict[str, Tensor]  # prepared by the normaliser
    raw: Arrays  # the same before that, with memory only
    first: Tensor
    action: Tensor
    target: Tensor  # for the value, in normalised units


class Cloning:
    """Trains one policy: its net, Adam's moments, schedules and the random stream of the shuffling."""

    def __init__(self, settings: Clone, net: PolicyNet, bptt: int, total_env_steps: int | None, seed: int) -> None:
        self.settings, self.net = settings, net
        self.bptt = bptt if net.recurrent else 1
        self.adam = Adam(net, settings.adam_eps)
        self.values = {name: ScheduledValue(getattr(settings, name), total_env_steps) for name in CHANGEABLE}
        self.discrete = any(part.kind != "continuous" for part in net.spec.action.parts)
        self.env_steps = 0  # at the newest update; schedules are evaluated here
        self.used: dict[str, float] = {}
        self.shuffling = np.random.default_rng(seed)

    # ------------------------------------------------------------------------------------------ learning

    def update(self, samples: Samples, state: State, env_steps: int) -> tuple[dict[str, float], State]:
        """One gradient step on each minibatch; returns metrics, and the recurrent state after the samples."""
        self.env_steps = env_steps
        now = self.used = self.current_settings()
        self.net.normaliser.observe_returns(samples.returns.reshape(-1))
        self.adam.skip.zero_()
        rows: list[Tensor] = []
        for batch in self._minibatches(samples, shuffle=True):
            found = self._measured(batch, state)
            state = self._after(batch, state)  # before the gradient step, as the loss sees it
            total = found[0] + now["value_coef"] * found[1] - now["entropy"] * found[2]
            self.adam.differentiate(total)
            norm = self.adam.step(now["lr"], self.settings.max_grad_norm)
            if isinstance(norm, float) and not math.isfinite(norm):
                raise _diverged(batch)
            self._clamp_log_std()
            rows.append(torch.cat([found.detach(), torch.as_tensor([norm], device=found.device)]))
        table = torch.stack(rows).cpu().numpy()
        if not np.isfinite(table[:, NORM]).all():  # on an accelerator it is read here
            raise _diverged(batch)
        named = dict(zip(COLUMNS, table.mean(0).tolist(), strict=True))
        if not self.discrete:
            del named["learn/accuracy"]
        return {**named, "setting/lr": now["lr"], "setting/entropy": now["entropy"]}, state

    @torch.no_grad()
    def measure(self, samples: Samples, state: State) -> tuple[dict[str, float], State]:
        """The same on samples that are not learned from."""
        rows, sizes = [], []
        for batch in self._minibatches(samples, shuffle=False):
            rows.append(self._measured(batch, state))
            state = self._after(batch, state)
            sizes.append(batch.first.numel())
        mean = np.average(torch.stack(rows).cpu().numpy(), axis=0, weights=sizes)
        found = {"loss/validation": float(mean[0])}
        return found | ({"learn/validation_accuracy": float(mean[3])} if self.discrete else {}), state

    def _measured(self, batch: Minibatch, state: State) -> Tensor:
        """Negative log likelihood, value loss, entropy and accuracy of a minibatch."""
        params, value = self.net.unroll(batch.obs, state, batch.first, prepared=True)
        dist = TorchActionDist(self.net.spec.action, params, self.net.log_std, None)
        value_loss = 0.5 * (value - batch.target).square().mean()
        return torch.stack(
            [-dist.log_prob(batch.action).mean(), value_loss, dist.entropy().mean(), _accuracy(dist, batch.action)]
        )

    def _minibatches(self, samples: Samples, *, shuffle: bool) -> Iterator[Minibatch]:
        """Yield the samples; with memory in their order."""
        device, steps, rows = self.net.device, *samples.first.shape
        target = np.asarray(self.net.normaliser.normalise_value(samples.returns), np.float32)
        arrays = {"action": samples.action, "target": target, "first": samples.first}
        tensors = {name: torch.as_tensor(array, device=device) for name, array in arrays.items()}
        obs = self.net.normaliser.prepare(samples.obs, device)
        if self.net.recurrent:
            for begin in range(0, steps, self.bptt):
                part = slice(begin, begin + self.bptt)
                cut = {name: x[part] for name, x in tensors.items()}
                raw = {name: x[part] for name, x in samples.obs.items()}
                yield Minibatch({name: x[part] for name, x in obs.items()}, raw, **cut)
            return
        tensors = {name: x.flatten(0, 1) for name, x in tensors.items()}
        obs = {name: x.flatten(0, 1) for name, x in obs.items()}
        order = self.shuffling.permutation(steps * rows) if shuffle else np.arange(steps * rows)
        for chosen in np.array_split(order, math.ceil(len(order) / self.settings.minibatch)):
            at = torch.as_tensor(chosen, device=device)
            taken = {name: x.index_select(0, at).unsqueeze(0) for name, x in tensors.items()}
            yield Minibatch({name: x.index_select(0, at).unsqueeze(0) for name, x in obs.items()}, {}, **taken)

    def _after(self, batch: Minibatch, state: State) -> State:
        """The recurrent state after a chunk, from which the next one starts."""
        for step in range(len(batch.first)) if self.net.recurrent else ():
            state = self.net.infer({name: x[step] for name, x in batch.raw.items()}, state, batch.first[step])[2]
        return state

    @torch.no_grad()
    def _clamp_log_std(self) -> None:
        self.net.clamp_log_std()
        self.net.log_std.data.clamp_(min=self.settings.min_log_std)

    # ------------------------------------------------------------------------------------------ state

    def current_settings(self) -> dict[str, float]:
        """All numeric settings with their current values; those of CHANGEABLE can change while training."""
        return numbers_now(self.settings, self.values, self.env_steps)

    def change(self, changes: dict[str, float]) -> None:
        """Set some of CHANGEABLE to numbers, in place of their schedules."""
        fix_values(self.values, changes)

    def save(self) -> Tree:
        return {
            "adam": self.adam.save(),
            "settings": {name: value.save() for name, value in self.values.items()},
            "env_steps": self.env_steps,
            "shuffling": self.shuffling.bit_generator.state,
        }

    def load(self, tree: Tree) -> None:
        """Continue from `save`."""
        self.adam.load(tree["adam"])
        for name, value in self.values.items():
            value.load(tree["settings"][name])
        self.env_steps = int(tree["env_steps"])
        self.shuffling.bit_generator.state = tree["shuffling"]


def _accuracy(dist: TorchActionDist, action: Tensor) -> Tensor:
    """The fraction of steps whose most likely action, where it is discrete, is the recorded one."""
    right, at = torch.ones(action.shape[:-1], dtype=torch.bool, device=action.device), 0
    for part, params, _ in dist.parts:
        taken = action[..., at : at + part.columns]
        at += part.columns
        if part.kind == "categorical":
            right &= params.argmax(-1) == taken[..., 0].long()
        elif part.kind == "binary":
            right &= ((params > 0) == (taken > 0)).all(-1)
    return right.float().mean()


def _diverged(batch: Minibatch) -> DivergedError:
    arrays: dict[str, object] = {f"obs.{name}": x.cpu().numpy() for name, x in batch.obs.items()}
    arrays |= {name: getattr(batch, name).cpu().numpy() for name in ("action", "target", "first")}
    hint = "lower algo.lr, set algo.max_grad_norm, or normalise observations (model.normalise.obs=true)"
    return DivergedError("the gradient of behaviour cloning is not a finite number", hint, arrays)
