"""Proximal policy optimisation (Schulman et al. 2017): one update from one rollout. A2C is one unclipped epoch of it.

    rollout [T, B] -> advantages -> chunks [bptt, N] -> epochs x shuffled minibatches -> loss -> gradient step

The loss is numpy; `by_x` is its derivative by x, written out beside it. `backprop` turns those into the gradient of the
weights. With several learners each takes its share of every minibatch and `allreduce` sums the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tiltyard.algos.advantages import Steps, clipped_gae, gae, vtrace
from tiltyard.algos.allreduce import LearnerGroup, SingleProcess
from tiltyard.algos.backprop import Backprop
from tiltyard.algos.flat_adam import Adam
from tiltyard.algos.minibatches import Chunks, make_chunks, shuffled
from tiltyard.algos.schedules import ScheduledValue
from tiltyard.config import algos as settings
from tiltyard.config.fields import is_number
from tiltyard.errors import DivergedError, UseError, did_you_mean
from tiltyard.models.policy_net import PolicyNet
from tiltyard.types import Rollout, Tree

Array = NDArray[Any]

Losses = tuple[float, float, float]  # policy loss, value loss, entropy

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
        self, algo: settings.Ppo | settings.A2c, net: PolicyNet, bptt: int, total_env_steps: int | None, seed: int
    ) -> None:
        self.algo = as_ppo(algo)
        self.net = net
        self.bptt = bptt if net.recurrent else 1
        if self.algo.rollout % self.bptt:
            raise UseError(
                f"algo.rollout = {self.algo.rollout} must be a multiple of model.memory.bptt = {self.bptt}",
                f"set algo.rollout={max(1, self.algo.rollout // self.bptt) * self.bptt}",
            )
        self.adam = Adam(net, self.algo.adam_eps)
        self.backprop = Backprop(net, self.adam)
        self.values = {
            name: ScheduledValue(getattr(self.algo, name), total_env_steps, rises_with_kl=name in RISES_WITH_KL)
            for name in CHANGEABLE
        }
        self.group: LearnerGroup = SingleProcess()
        self.env_steps = 0  # at the newest update; schedules are evaluated here
        self.used: dict[str, float] = {}  # settings of the newest update; empty before the first
        self.shuffling = np.random.default_rng(seed)

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
        chunks = make_chunks(self.net, self.bptt, rollout, numbers)

        epochs = 0
        epoch = _Epoch()
        for _ in range(self.algo.epochs):
            epoch = _Epoch()
            for chosen in shuffled(chunks, self.algo.minibatch, self.shuffling):
                self._gradient_step(chunks, chosen, now, epoch)
                if after_step is not None:
                    after_step()
            epochs += 1
            epoch.allreduce(self.group)
            if self.algo.kl_stop is not None and epoch.kl() > self.algo.kl_stop:
                break
        kl = epoch.kl()

        if any(value.adapts for value in self.values.values()):
            # The epoch's own KL was measured before its gradient steps: too early when epochs are few.
            log_ratio = self._log_ratios(chunks)
            kl = float(_divergence(log_ratio if chunks.valid is None else log_ratio[chunks.valid > 0]).mean())
            for value in self.values.values():
                value.observe_kl(kl)
        # Last: with new statistics the net would differ from the policy that acted, and ratios would not start at 1.
        self.net.normaliser.observe(rollout.obs, rollout.valid)
        return {
            **epoch.means(),
            "loss/kl": kl,
            "learn/clip_fraction": epoch.clip_fraction(now["clip"]),
            "learn/epochs": float(epochs),
            "learn/explained_variance": _explained_variance(rollout.value[rollout.valid], returns[rollout.valid]),
            **{f"setting/{name}": now[name] for name in ("lr", "clip", "entropy", "kl")},
        }

    def _gradient_step(self, chunks: Chunks, chosen: Array, now: dict[str, float], epoch: _Epoch) -> None:
        """One minibatch: the loss, its gradient, Adam."""
        part = self.group.share(len(chosen))
        batch = chunks.take(chosen, part)
        if batch.first.size:
            losses, log_ratio = self._differentiate(batch, part, now)
        else:  # fewer chunks than learners: this one adds nothing
            losses, log_ratio = (0.0, 0.0, 0.0), np.zeros(batch.first.shape, np.float32)
            self.adam.gradient.zero_()
        self.group.sum_(self.adam.gradient)
        norm = self.adam.norm()
        if not math.isfinite(norm):
            raise self._diverged(chunks.take(chosen), self.group.total(np.array(losses)), norm)
        limit = self.algo.max_grad_norm
        self.adam.step(now["lr"], 1.0 if limit is None or norm <= limit else limit / norm)
        self.net.clamp_log_std()
        if self.group.size > 1:
            mine, log_ratio = log_ratio, np.zeros(batch.numbers.shape[1:], np.float32)
            log_ratio[:, part] = mine
        epoch.add(losses, norm, log_ratio, batch.valid)

    def _differentiate(self, batch: Chunks, part: slice, now: dict[str, float]) -> tuple[Losses, Array]:
        """Put this learner's part of the gradient into Adam's vector; returns its part of the losses and log ratios."""
        advantage, valid = batch.numbers[1], batch.valid
        # Means over valid samples are sums with this weight; it is one number if all are valid.
        count = advantage.size if valid is None else valid.sum()
        weight = 1 / count if valid is None else valid / count
        if self.algo.normalise_advantage and count > 1:
            advantage = _normalise(advantage, weight)
        advantage = advantage[:, part]
        old_log_prob, _, target, old_value = batch.numbers[:, :, part]
        if valid is not None and not isinstance(weight, float):
            valid, weight = valid[:, part], weight[:, part]

        params, value = self.backprop.forward(batch.obs, batch.state0, batch.first)
        dist = self.net.distribution(params, batch.mask)
        log_ratio = dist.log_prob(batch.action) - old_log_prob
        if valid is not None:
            log_ratio = np.where(valid > 0, log_ratio, np.float32(0))
        ratio = np.exp(log_ratio)
        gain, capped = ratio * advantage, _clip(ratio, 1 - now["clip"], 1 + now["clip"]) * advantage
        policy_loss = -_mean(np.minimum(gain, capped), weight)
        # d ratio / d log_prob = ratio; beyond the clip the gradient is zero.
        by_log_prob = np.where(gain <= capped, -gain, np.float32(0)) * weight

        error = value - target
        squares = np.square(error)
        if self.algo.value_clip is not None:
            moved = old_value + _clip(value - old_value, -self.algo.value_clip, self.algo.value_clip)
            cut = np.square(moved - target)
            error = np.where((squares > cut) | (np.abs(value - old_value) <= self.algo.value_clip), error, 0)
            squares = np.maximum(squares, cut)
        value_loss = 0.5 * _mean(squares, weight)
        by_value = error * (weight * now["value_coef"])

        entropy = _mean(dist.entropy(), weight)
        by_entropy = np.full_like(value, -now["entropy"]) * weight if now["entropy"] else None
        loss = policy_loss + now["value_coef"] * value_loss - now["entropy"] * entropy
        if now["kl"]:
            loss += now["kl"] * _mean(_divergence(log_ratio), weight)
            by_log_prob += (ratio - 1) * weight * now["kl"]

        by_params, by_log_std = dist.gradient(batch.action, by_log_prob, by_entropy)
        self.backprop.backward(by_params, by_value, by_log_std)
        if not math.isfinite(loss):
            self.adam.gradient.fill_(math.nan)  # every learner sees it in the summed gradient
        return (policy_loss, value_loss, entropy), log_ratio

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
        log_ratio = self._log_ratios(make_chunks(self.net, self.bptt, rollout, numbers, keep_invalid=True))
        length, rows = rollout.reward.shape
        return np.exp(log_ratio).reshape(self.bptt, -1, rows).swapaxes(0, 1).reshape(length, rows)

    def _log_ratios(self, chunks: Chunks) -> Array:
        """Log ratios [bptt, N] of all samples under the current policy, one minibatch at a time to limit memory."""
        everything = np.arange(chunks.first.shape[1])
        mine = everything[self.group.share(len(everything))]
        size = max(1, self.algo.minibatch // self.bptt)
        found = np.zeros(chunks.first.shape, np.float32)
        for at in range(0, len(mine), size):
            chosen = mine[at : at + size]
            part = chunks.take(chosen)
            with torch.no_grad():
                params, _ = self.backprop.forward(part.obs, part.state0, part.first)
            found[:, chosen] = self.net.distribution(params, part.mask).log_prob(part.action) - part.numbers[0]
        return self.group.total(found)

    # ------------------------------------------------------------------------------------------ state

    def current_settings(self) -> dict[str, float]:
        """All numeric settings with their current values; those of CHANGEABLE can change while training."""
        fixed = {name: value for name, value in self.algo if is_number(value)}
        return fixed | {name: value.at(self.env_steps) for name, value in self.values.items()}

    def change(self, changes: dict[str, float]) -> None:
        """Set some of CHANGEABLE to numbers, in place of their schedules."""
        for name, number in changes.items():
            if name not in self.values:
                raise UseError(f"algo.{name} cannot change during training", did_you_mean(name, self.values))
            if not math.isfinite(number) or number < 0:
                raise UseError(f"algo.{name} cannot become {number}", "give a finite number of at least 0")
        for name, number in changes.items():
            self.values[name].fix(float(number))

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

    def _diverged(self, batch: Chunks, losses: Array, norm: float) -> DivergedError:
        """The error for a loss or gradient that is not finite, with the minibatch that caused it."""
        named = zip(("policy loss", "value loss", "entropy"), losses, strict=True)
        bad = next((name for name, loss in named if not math.isfinite(loss)), None)
        if bad is None:
            parts = zip(self.adam.names, self.adam.gradient_parts(), strict=True)
            bad = next((f"gradient of {name}" for name, part in parts if not bool(part.isfinite().all())), "gradient")
        names = ("log_prob", "advantage", "target", "value")
        arrays: dict[str, object] = {f"obs.{name}": x.cpu().numpy() for name, x in batch.obs.items()}
        arrays |= {f"state0.{name}": x.cpu().numpy() for name, x in batch.state0.items()}
        arrays |= dict(zip(names, batch.numbers, strict=True))
        arrays |= {"action": batch.action, "first": batch.first}
        return DivergedError(f"the {bad} is not a finite number (gradient norm {norm})", DIVERGED_HINT, arrays)


class _Epoch:
    """What the gradient steps of one epoch leave for the metrics."""

    def __init__(self) -> None:
        self.numbers: list[tuple[float, float, float, float]] = []
        self.log_ratios: list[Array] = []  # of valid samples, each before its gradient step

    def add(self, losses: Losses, norm: float, log_ratio: Array, valid: Array | None) -> None:
        self.numbers.append((*losses, norm))
        self.log_ratios.append(log_ratio.reshape(-1) if valid is None else log_ratio[valid > 0])

    def allreduce(self, group: LearnerGroup) -> None:
        """Sum the parts of all learners, once the epoch is complete."""
        if group.size == 1 or not self.numbers:
            return
        self.log_ratios = [group.total(np.concatenate(self.log_ratios))]
        losses = group.total(np.array([numbers[:3] for numbers in self.numbers]))
        self.numbers = [(*loss, norm) for loss, (*_, norm) in zip(losses.tolist(), self.numbers, strict=True)]

    def kl(self) -> float:
        """KL divergence from the policy that acted, over the epoch's samples."""
        return float(_divergence(np.concatenate(self.log_ratios)).mean()) if self.log_ratios else 0.0

    def clip_fraction(self, clip: float) -> float:
        """Share of samples whose ratio is clipped."""
        return float((np.abs(np.expm1(np.concatenate(self.log_ratios))) > clip).mean()) if self.log_ratios else 0.0

    def means(self) -> dict[str, float]:
        if not self.numbers:
            return {}
        names = ("loss/policy", "loss/value", "loss/entropy", "learn/gradient_norm")
        columns = zip(*self.numbers, strict=True)
        return {name: sum(column) / len(column) for name, column in zip(names, columns, strict=True)}


def _mean(x: Array, weight: Array | float) -> float:
    return float(x.sum()) * weight if isinstance(weight, float) else float((x * weight).sum())


def _clip(x: Array, low: float, high: float) -> Array:
    return np.minimum(np.maximum(x, low), high)  # twice as fast as np.clip on short arrays


def _divergence(log_ratio: Array) -> Array:
    """Its mean over samples of the old policy estimates KL(old || new): unbiased, never negative, low variance."""
    return np.expm1(log_ratio) - log_ratio


def _normalise(advantage: Array, weight: Array | float) -> Array:
    """Scale to mean 0 and variance 1 over valid samples."""
    centred = advantage - _mean(advantage, weight)
    return centred / (math.sqrt(_mean(np.square(centred), weight)) + 1e-8)


def _explained_variance(value: Array, returns: Array) -> float:
    """1: values predict the returns; 0: no better than their mean; negative: worse. NaN if returns are constant."""
    spread = float(np.var(returns, dtype=np.float64)) if returns.size else 0.0
    return math.nan if spread == 0 else 1 - float(np.var(returns - value, dtype=np.float64)) / spread


def _check_finite(rollout: Rollout) -> None:
    """Raise DivergedError unless rewards, values, log probabilities and observations of valid rows are finite."""
    named = {
        "reward": rollout.reward,
        "value": rollout.value,
        "log_prob": rollout.log_prob,
        "bootstrap": rollout.bootstrap,
    }
    named |= {f"observation {name}": x for name, x in rollout.obs.items() if x.dtype.kind == "f"}
    for name, array in named.items():
        if not np.isfinite(array).all() and not np.isfinite(array[rollout.valid]).all():
            step, row = np.argwhere(~np.isfinite(array).reshape(*array.shape[:2], -1).all(-1) & rollout.valid)[0]
            arrays: dict[str, object] = {**named, "action": rollout.action, "valid": rollout.valid}
            raise DivergedError(
                f"the {name} of row {row} at step {step} of the rollout is not a finite number",
                "check the env's rewards and observations"
                if "value" not in name and "log_prob" not in name
                else DIVERGED_HINT,
                arrays,
            )
