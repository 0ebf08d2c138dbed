"""Proximal policy optimisation (Schulman et al. 2017): one update from one rollout. A2C is one unclipped epoch of it.

    rollout [T, B] -> advantages -> chunks [bptt, N] -> epochs x shuffled minibatches -> loss -> gradient step

The loss is in `ppo_loss`; autograd differentiates it, or `fast_mlp` where that applies. With several learners each
takes its share of every minibatch and `allreduce` sums the gradients. On an accelerator the CPU only queues operations:
all samples go there in one transfer, and all numbers come back in one, after the last gradient step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiltyard.algos.advantages import Steps, clipped_gae, gae, vtrace
from tiltyard.algos.allreduce import LearnerGroup, SingleProcess
from tiltyard.algos.fast_mlp import fast_mlp
from tiltyard.algos.flat_adam import Adam
from tiltyard.algos.minibatches import Chunks, Minibatch, cut_rollout, shuffled
from tiltyard.algos.own_loss import OwnLoss
from tiltyard.algos.ppo_loss import COLUMNS, net_outputs, ppo_loss
from tiltyard.algos.schedules import ScheduledValue, fix_values, numbers_now
from tiltyard.config import algos as settings
from tiltyard.errors import DivergedError, UseError
from tiltyard.models.policy_net import PolicyNet
from tiltyard.types import Rollout, Tree

Array = NDArray[Any]

# Columns of what a gradient step leaves: COLUMNS, whether it was skipped, and the gradient's norm.
KL, SKIPPED, NORM = 3, -2, -1
Row = list[float] | Tensor  # a list on the CPU

CHANGEABLE = ("lr", "clip", "entropy", "kl", "gamma", "gae_lambda", "value_coef")
RISES_WITH_KL = ("kl", "entropy")  # when the policy moves too fast these grow, lr and clip shrink
UNLIMITED = 1e15
DIVERGED_HINT = "lower algo.lr, set algo.max_grad_norm, or normalise observations (model.normalise.obs=true)"


def as_ppo(algo: settings.Ppo | settings.A2c) -> settings.Ppo:
    """A2C as PPO: every sample used once, in one minibatch, with a ratio of 1 and no clip."""
    if isinstance(algo, settings.Ppo):
        return algo
    same = {name: getattr(algo, name) for name in settings.A2c.model_fields if name != "id"}
    return settings.Ppo(**same, minibatch=int(UNLIMITED), epochs=1, clip=UNLIMITED)


class Ppo:
    """Trains one policy: its net, Adam's moments, schedules and the random stream of the shuffling."""

    def __init__(
        self,
        algo: settings.Ppo | settings.A2c,
        net: PolicyNet,
        bptt: int,
        total_env_steps: int | None,
        seed: int,
        base: Sequence[Path] = (),
    ) -> None:
        self.algo = as_ppo(algo)
        self.net = net
        self.bptt = bptt if net.recurrent else 1
        if self.algo.rollout % self.bptt:
            message = f"algo.rollout = {self.algo.rollout} must be a multiple of model.memory.bptt = {self.bptt}"
            hint = f"set algo.rollout={max(1, self.algo.rollout // self.bptt) * self.bptt}"
            raise UseError(message, hint)
        self.adam = Adam(net, self.algo.adam_eps)
        self.fast = fast_mlp(net, self.adam) if self.algo.loss is None else None
        self._base = base
        self.values = {
            name: ScheduledValue(getattr(self.algo, name), total_env_steps, rises_with_kl=name in RISES_WITH_KL)
            for name in CHANGEABLE
        }
        self.group: LearnerGroup = SingleProcess()
        self.env_steps = 0  # at the newest update; schedules are evaluated here
        self._columns: tuple[str, ...] = COLUMNS  # and those of algo.loss, once it was called
        self.used: dict[str, float] = {}  # settings of the newest update; empty before the first
        self.shuffling = np.random.default_rng(seed)

    @property
    def untrained(self) -> bool:
        return self.adam.steps == 0

    @cached_property
    def own_loss(self) -> OwnLoss | None:
        """The term of algo.loss, built when it is first needed, with the weights that the net starts from."""
        return None if self.algo.loss is None else OwnLoss(self.algo.loss, self.net, self._base)

    # ------------------------------------------------------------------------------------------ the update

    @np.errstate(all="ignore")  # overflow shows up in the loss
    def update(
        self, rollout: Rollout, env_steps: int, after_step: Callable[[], None] | None = None
    ) -> dict[str, float]:
        """Learn from a rollout that began at `env_steps`; returns metrics by name.

        `after_step` is called after each gradient step: an update may take long, and workers need attention.
        """
        self.env_steps = env_steps
        _check_finite(rollout)
        now = self.current_settings()
        self.used = {**now, "rollout": len(rollout.reward), "adam_eps": self.adam.eps}
        advantage, returns = self._advantages(rollout, now["gamma"], now["gae_lambda"])
        # The net's outputs in the units used until now: value_clip compares outputs.
        old_value = self.net.normaliser.normalise_value(rollout.value)
        self.net.normaliser.observe_returns(returns[rollout.valid])
        numbers = (rollout.log_prob, advantage, self.net.normaliser.normalise_value(returns), old_value)
        chunks = cut_rollout(self.net, self.bptt, rollout, numbers)
        order = [shuffled(chunks, self.algo.minibatch, self.shuffling) for _ in range(self.algo.epochs)]
        steps, kl = self._gradient_steps(chunks, order, now, after_step)
        # Last: with new statistics the net would differ from the policy that acted, and ratios would not start at 1.
        self.net.normaliser.observe(rollout.obs, rollout.valid)
        newest = steps[-len(order[0]) :].mean(0).tolist() if len(steps) else []
        losses = dict(zip(self._columns, newest, strict=False))
        losses |= {"learn/gradient_norm": newest[NORM]} if newest else {}
        kl = losses.get("loss/kl", 0.0) if kl is None else kl
        for value in self.values.values():
            value.observe_kl(kl)
        return {
            **losses,
            "loss/kl": kl,
            "learn/epochs": len(steps) / len(order[0]) if len(steps) else 0.0,
            "learn/explained_variance": _explained_variance(rollout.value[rollout.valid], returns[rollout.valid]),
            **{f"setting/{name}": now[name] for name in ("lr", "clip", "entropy", "kl")},
        }

    def _gradient_steps(
        self, chunks: Chunks, order: list[list[Array]], now: dict[str, float], after_step: Callable[[], None] | None
    ) -> tuple[Array, float | None]:
        """All epochs. Returns the rows of the gradient steps, and the KL divergence after them if a schedule needs it.

        On an accelerator nothing is read before the end: steps after a `kl_stop` are computed and skipped there.
        """
        all_chosen = [chosen for epoch in order for chosen in epoch]
        if not all_chosen:
            return np.zeros((0, len(COLUMNS))), None
        chunks, places = chunks.to(self.net, all_chosen)
        self.adam.skip.zero_()
        rows: list[Row] = []
        for chosen, place in zip(all_chosen, places, strict=True):
            rows.append(self._gradient_step(chunks, chosen, place, now))
            if after_step is not None:
                after_step()
            if self.algo.kl_stop is not None and len(rows) % len(order[0]) == 0:
                kl = _table(rows[-len(order[0]) :])[:, KL].mean()
                self.group.sum_(kl)
                self.adam.skip |= kl > self.algo.kl_stop
            if self.adam.on_cpu and self.adam.skip:
                break
        table = _table(rows)
        own = table[:, SKIPPED:].clone()
        self.group.sum_(table)  # each learner has its part of every mean
        table[:, SKIPPED:] = own
        found = [table.flatten()]
        if any(value.adapts for value in self.values.values()):
            # The KL divergence in the rows is that before each gradient step: too early when epochs are few.
            found.append(self._divergence(chunks).to(table.dtype).view(1))
        numbers = torch.cat(found).cpu().numpy()  # the only transfer from an accelerator
        steps = numbers[: table.numel()].reshape(table.shape)
        steps = steps[steps[:, SKIPPED] == 0]
        broken = np.flatnonzero(~np.isfinite(steps[:, NORM]))
        if len(broken):
            raise self._diverged(chunks, all_chosen[broken[0]], now)
        return steps, float(numbers[-1]) if len(found) > 1 else None

    def _gradient_step(self, chunks: Chunks, chosen: Array, place: Tensor, now: dict[str, float]) -> Row:
        """One minibatch: the loss, its gradient, Adam."""
        part = self.group.share(len(chosen))
        empty = len(chosen[part]) == 0  # fewer chunks than learners: this one adds nothing
        part = slice(0, 1) if empty else part
        batch = chunks.take(chosen, place, part, normalise=self.algo.normalise_advantage)
        row = self._differentiate(batch, now)
        if empty:
            self.adam.gradient.zero_()
            row = [0.0] * len(row)
        self.group.sum_(self.adam.gradient)
        skipped = None if self.adam.on_cpu else self.adam.skip.float()
        norm = self.adam.step(now["lr"], self.algo.max_grad_norm)
        self.net.clamp_log_std()
        if skipped is None:
            return [*(row.tolist() if isinstance(row, Tensor) else row), 0.0, float(norm)]
        return torch.cat([torch.as_tensor(row, device=skipped.device), torch.stack([skipped, torch.as_tensor(norm)])])

    def _differentiate(self, batch: Minibatch, now: dict[str, float]) -> Row:
        """Put the gradient into Adam's vector; returns the losses."""
        if self.fast is not None:
            return self.fast.differentiate(batch, now)
        outputs = net_outputs(self.net, batch)
        total, *losses = ppo_loss(batch, outputs, now)
        if self.own_loss is not None:
            term, metrics = self.own_loss(batch, outputs, now)
            total, self._columns = total + term, (*COLUMNS, *metrics)
            losses += metrics.values()
        self.adam.differentiate(total)
        return torch.stack(losses).detach()

    def _advantages(self, rollout: Rollout, gamma: float, lam: float) -> tuple[Array, Array]:
        """Advantages and returns [T, B] in units of reward, by algo.advantage."""
        steps = Steps(rollout.reward, rollout.value, rollout.bootstrap, rollout.terminated, rollout.truncated)
        if self.algo.advantage == "gae":
            return gae(steps, gamma, lam)
        method = vtrace if self.algo.advantage == "vtrace" else clipped_gae
        return method(steps, self._ratios(rollout), gamma, lam, self.algo.rho_clip)

    def _ratios(self, rollout: Rollout) -> Array:
        """Importance ratios [T, B]: probability under the current policy over that under the one that acted."""
        nothing = np.zeros_like(rollout.reward)
        numbers = (rollout.log_prob, nothing, nothing, nothing)
        chunks, _ = cut_rollout(self.net, self.bptt, rollout, numbers, keep_invalid=True).to(self.net)
        length, rows = rollout.reward.shape
        ratio = self._log_ratios(chunks).exp().cpu().numpy()
        return ratio.reshape(self.bptt, -1, rows).swapaxes(0, 1).reshape(length, rows)

    def _divergence(self, chunks: Chunks) -> Tensor:
        """KL divergence from the policy that acted, over all valid samples."""
        log_ratio = self._log_ratios(chunks)
        each = log_ratio.expm1() - log_ratio
        return each.mean() if chunks.valid is None else (each * chunks.tensors["valid"]).sum() / int(chunks.valid.sum())

    @torch.no_grad()
    def _log_ratios(self, chunks: Chunks) -> Tensor:
        """Log ratios [bptt, N] of all samples under the current policy, one minibatch at a time to limit memory."""
        everything = np.arange(chunks.first.shape[1])
        found = torch.zeros(chunks.first.shape, device=self.net.device)
        mine = everything[self.group.share(len(everything))]
        for chosen in np.array_split(mine, max(1, -(-mine.size * self.bptt // self.algo.minibatch))):
            if len(chosen):
                at = slice(chosen[0], chosen[-1] + 1)
                batch = chunks.take(chosen, torch.arange(at.start, at.stop, device=self.net.device))
                log_prob = net_outputs(self.net, batch).dist.log_prob(batch.action)
                found[:, at] = batch.where_valid(log_prob - batch.log_prob)
        self.group.sum_(found)
        return found

    # ------------------------------------------------------------------------------------------ state

    def current_settings(self) -> dict[str, float]:
        """All numeric settings with their current values; those of CHANGEABLE can change while training."""
        return numbers_now(self.algo, self.values, self.env_steps)

    def change(self, changes: dict[str, float]) -> None:
        """Set some of CHANGEABLE to numbers, in place of their schedules."""
        fix_values(self.values, changes)

    def save(self) -> Tree:
        return {
            "adam": self.adam.save(),
            "settings": {name: value.save() for name, value in self.values.items()},
            "env_steps": self.env_steps,
            "shuffling": self.shuffling.bit_generator.state,
        } | ({} if self.own_loss is None else {"loss": self.own_loss.save()})

    def load(self, tree: Tree) -> None:
        """Continue from `save`."""
        if "adam" not in tree:
            raise UseError("the checkpoint is of another algorithm", "start a new run with model.init")
        self.adam.load(tree["adam"])
        for name, value in self.values.items():
            value.load(tree["settings"][name])
        self.env_steps = int(tree["env_steps"])
        self.shuffling.bit_generator.state = tree["shuffling"]
        if self.own_loss is not None and "loss" in tree:
            self.own_loss.load(tree["loss"])

    def _diverged(self, chunks: Chunks, chosen: Array, now: dict[str, float]) -> DivergedError:
        """The error for a loss or gradient that is not finite, with the minibatch that caused it.

        The gradient is computed again, of the whole minibatch: the weights have not changed since.
        """
        batch = chunks.take(chosen, normalise=self.algo.normalise_advantage)
        row, gradient = torch.as_tensor(self._differentiate(batch, now)).cpu().tolist(), self.adam.gradient.cpu()
        names = {0: "policy loss", 1: "value loss", 2: "entropy", len(COLUMNS): "term of algo.loss"}
        bad = next((names[at] for at, loss in enumerate(row) if at in names and not math.isfinite(loss)), None)
        if bad is None:
            parts = zip(self.adam.names, self.adam.parts(gradient), strict=True)
            bad = next((f"gradient of {name}" for name, part in parts if not bool(part.isfinite().all())), "gradient")
        arrays: dict[str, object] = {f"obs.{name}": x.cpu().numpy() for name, x in batch.obs.items()}
        arrays |= {f"state0.{name}": x.cpu().numpy() for name, x in batch.state0.items()}
        for name in ("log_prob", "advantage", "target", "value", "action", "first"):
            arrays[name] = getattr(batch, name).cpu().numpy()
        norm = float(torch.linalg.vector_norm(gradient))
        return DivergedError(f"the {bad} is not a finite number (gradient norm {norm})", DIVERGED_HINT, arrays)


def _table(rows: list[Row]) -> Tensor:
    return torch.stack(rows) if isinstance(rows[0], Tensor) else torch.tensor(rows)  # type: ignore[arg-type]


def _explained_variance(value: Array, returns: Array) -> float:
    """1: values predict the returns; 0: no better than their mean; negative: worse. NaN if returns are constant."""
    spread = float(np.var(returns, dtype=np.float64)) if returns.size else 0.0
    return math.nan if spread == 0 else 1 - float(np.var(returns - value, dtype=np.float64)) / spread


def _check_finite(rollout: Rollout) -> None:
    """Raise DivergedError unless rewards, values, log probabilities and observations of valid rows are finite."""
    named = {name: getattr(rollout, name) for name in ("reward", "value", "log_prob", "bootstrap")}
    named |= {f"observation {name}": x for name, x in rollout.obs.items() if x.dtype.kind == "f"}
    for name, array in named.items():
        if not np.isfinite(array).all() and not np.isfinite(array[rollout.valid]).all():
            step, row = np.argwhere(~np.isfinite(array).reshape(*array.shape[:2], -1).all(-1) & rollout.valid)[0]
            arrays: dict[str, object] = {**named, "action": rollout.action, "valid": rollout.valid}
            hint = DIVERGED_HINT if name in ("value", "log_prob") else "check the env's rewards and observations"
            message = f"the {name} of row {row} at step {step} of the rollout is not a finite number"
            raise DivergedError(message, hint, arrays)
