"""Proximal policy optimisation: one update from one rollout. A2C is the same with one epoch and nothing clipped.

Owns the loss, the order of minibatches and the schedules; not how rollouts are made. Read `update` top to bottom:

    rollout [T, B] -> advantages -> chunks [bptt, N] -> epochs x shuffled minibatches -> loss -> gradient step

Rows are cut into chunks of `bptt` steps that start from the memory kept with the rollout; without memory a chunk is
one step. Chunks, not steps, are shuffled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tiltyard.algos.adam import Adam
from tiltyard.algos.returns import clipped_gae, gae, vtrace
from tiltyard.algos.schedules import ScheduledValue
from tiltyard.config import experiment as settings
from tiltyard.errors import DivergedError, UseError, did_you_mean
from tiltyard.models.net import PolicyNet
from tiltyard.types import Rollout, Tree

Array = NDArray[Any]

CHANGEABLE = ("lr", "clip", "entropy", "kl", "gamma", "gae_lambda", "value_coef")
HOLDS_BACK = ("kl", "entropy")  # these grow when the policy moves too fast; lr and clip shrink
UNLIMITED = 1e15
CALMER = "lower algo.lr, set algo.max_grad_norm, or normalise observations (model.normalise.obs=true)"


def as_ppo(algo: settings.Ppo | settings.A2c) -> settings.Ppo:
    """A2C in PPO's terms: each sample used once, all at once, with a ratio of 1 that no clip can touch."""
    if isinstance(algo, settings.Ppo):
        return algo
    same = {name: getattr(algo, name) for name in settings.A2c.model_fields if name != "id"}
    return settings.Ppo(**same, minibatch=int(UNLIMITED), epochs=1, clip=UNLIMITED)


@dataclass
class Chunks:
    """Learning data as [bptt, N, ...], N chunks. `numbers` holds what every sample has one float of."""

    obs: dict[str, Tensor]  # as models see them
    state0: dict[str, Tensor]  # [N, ...]
    first: Tensor
    mask: Tensor | None
    action: Tensor
    numbers: Tensor  # [4, bptt, N]: log_prob, advantage, target, value; the last two in normalised units
    valid: Tensor | None  # None when every sample is

    def take(self, chosen: Tensor) -> Chunks:
        """The chunks with these indices."""
        return Chunks(
            {name: x.index_select(1, chosen) for name, x in self.obs.items()},
            {name: x.index_select(0, chosen) for name, x in self.state0.items()},
            self.first.index_select(1, chosen),
            None if self.mask is None else self.mask.index_select(1, chosen),
            self.action.index_select(1, chosen),
            self.numbers.index_select(2, chosen),
            None if self.valid is None else self.valid.index_select(1, chosen),
        )


class Ppo:
    """The learner of one policy: the net it changes, Adam's moments, schedules and the shuffling's random stream."""

    def __init__(
        self, algo: settings.Ppo | settings.A2c, net: PolicyNet, bptt: int, total_env_steps: int | None, seed: int
    ) -> None:
        self.algo = as_ppo(algo)
        self.net = net
        self.bptt = bptt if net.recurrent else 1
        if self.algo.rollout % self.bptt:
            raise UseError(
                f"algo.rollout = {self.algo.rollout} is no multiple of model.memory.bptt = {self.bptt}",
                f"set algo.rollout={max(1, self.algo.rollout // self.bptt) * self.bptt}",
            )
        self.adam = Adam(net, self.algo.adam_eps)
        self.values = {
            name: ScheduledValue(getattr(self.algo, name), total_env_steps, rises_with_kl=name in HOLDS_BACK)
            for name in CHANGEABLE
        }
        self.env_steps = 0  # of the newest update: where the schedules stand
        self.shuffling = np.random.default_rng(seed)

    # ------------------------------------------------------------------------------------------ the update

    def update(self, rollout: Rollout, env_steps: int) -> dict[str, float]:
        """Learn from a rollout. `env_steps` are those before it; returns metrics by their names."""
        self.env_steps = env_steps
        now = self.settings_in_force()
        _check_finite(rollout)

        advantage, returns = self._advantages(rollout, now["gamma"], now["gae_lambda"])
        # What the net put out for these values, in the units it has had until now: value_clip compares outputs.
        outputs = self.net.normalise_value(torch.as_tensor(rollout.value, device=self.net.log_std.device))
        self.net.observe_returns(torch.as_tensor(returns[rollout.valid]))
        chunks = self._chunks(rollout, advantage, returns, outputs)

        epochs, kl = 0, 0.0
        epoch = _Epoch()
        for _ in range(self.algo.epochs):
            epoch = _Epoch()
            for chosen in self._minibatches(chunks):
                self._gradient_step(chunks.take(chosen), now, epoch)
            epochs += 1
            kl = epoch.kl()
            if self.algo.kl_stop is not None and kl > self.algo.kl_stop:
                break

        if any(value.adapts for value in self.values.values()):
            # What the epoch saw came before its gradient steps: too little to steer by when epochs are few.
            log_ratio = self._log_ratios(chunks)
            kl = float(_divergence(log_ratio if chunks.valid is None else log_ratio[chunks.valid > 0]).mean())
            for value in self.values.values():
                value.observe_kl(kl)
        # Only now: with other statistics the net would not be the policy that acted, and ratios would not start at 1.
        self.net.observe(rollout.obs, rollout.valid)
        return {
            **epoch.means(),
            "loss/kl": kl,
            "learn/clip_fraction": epoch.beyond(now["clip"]),
            "learn/epochs": float(epochs),
            "learn/explained_variance": _explained_variance(rollout.value[rollout.valid], returns[rollout.valid]),
            **{f"setting/{name}": now[name] for name in ("lr", "clip", "entropy", "kl")},
        }

    def _gradient_step(self, batch: Chunks, now: dict[str, float], epoch: _Epoch) -> None:
        """One minibatch: the loss, its gradient, Adam."""
        old_log_prob, advantage, target, old_value = batch.numbers.unbind()
        # Means are over valid samples: sums under this weight where some are not.
        weight = None if batch.valid is None else batch.valid / batch.valid.sum()
        if self.algo.normalise_advantage:
            advantage = _normalise(advantage, weight)

        dist, value = self.net.unroll(batch.obs, batch.state0, batch.first, batch.mask, prepared=True)
        log_ratio = dist.log_prob(batch.action) - old_log_prob
        if weight is not None:
            log_ratio = torch.where(weight > 0, log_ratio, 0.0)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - now["clip"], 1 + now["clip"])
        policy_loss = -_mean(torch.minimum(ratio * advantage, clipped * advantage), weight)

        error = F.mse_loss(value, target, reduction="none")
        if self.algo.value_clip is not None:
            moved = old_value + (value - old_value).clamp(-self.algo.value_clip, self.algo.value_clip)
            error = torch.maximum(error, F.mse_loss(moved, target, reduction="none"))
        value_loss = 0.5 * _mean(error, weight)
        loss = torch.add(policy_loss, value_loss, alpha=now["value_coef"])

        with torch.set_grad_enabled(now["entropy"] > 0):
            entropy = _mean(dist.entropy(), weight)
        if now["entropy"]:
            loss = torch.sub(loss, entropy, alpha=now["entropy"])
        if now["kl"]:
            loss = loss + now["kl"] * _mean(_divergence(log_ratio), weight)

        norm = self.adam.differentiate(loss)
        if not math.isfinite(norm) or not math.isfinite(loss.item()):
            raise self._diverged(
                batch, {"policy loss": policy_loss, "value loss": value_loss, "entropy": entropy}, norm
            )
        most = self.algo.max_grad_norm
        self.adam.step(now["lr"], 1.0 if most is None or norm <= most else most / norm)
        self.net.keep_inside()
        epoch.add(policy_loss, value_loss, entropy, norm, log_ratio, batch.valid)

    def _advantages(self, rollout: Rollout, gamma: float, lam: float) -> tuple[Array, Array]:
        """[T, B] advantages and returns, in units of reward, by the method set."""
        parts = (rollout.reward, rollout.value, rollout.bootstrap, rollout.terminated, rollout.truncated)
        if self.algo.advantage == "gae":
            return gae(*parts, gamma, lam)
        method = vtrace if self.algo.advantage == "vtrace" else clipped_gae
        return method(*parts, self._ratios(rollout), gamma, lam, self.algo.rho_clip)

    def _ratios(self, rollout: Rollout) -> Array:
        """[T, B]: how much likelier the actions are under the current policy than under the one that acted."""
        nothing = np.zeros_like(rollout.reward)
        log_ratio = self._log_ratios(self._chunks(rollout, nothing, nothing, nothing))
        length, rows = rollout.reward.shape
        split = log_ratio.exp().view(self.bptt, length // self.bptt, rows).transpose(0, 1)
        return split.reshape(length, rows).cpu().numpy()

    @torch.no_grad()
    def _log_ratios(self, chunks: Chunks) -> Tensor:
        """[bptt, N] of all samples under the policy as it is, a minibatch at a time to bound the memory it takes."""
        everything = torch.arange(chunks.first.shape[1], device=chunks.first.device)
        parts = []
        for chosen in torch.split(everything, max(1, self.algo.minibatch // self.bptt)):
            part = chunks.take(chosen)
            dist, _ = self.net.unroll(part.obs, part.state0, part.first, part.mask, prepared=True)
            parts.append(dist.log_prob(part.action) - part.numbers[0])
        return torch.cat(parts, 1)

    # ------------------------------------------------------------------------------------------ minibatches

    def _chunks(self, rollout: Rollout, advantage: Array, returns: Array, outputs: Array | Tensor) -> Chunks:
        """[T, B, ...] -> [bptt, T / bptt * B, ...]: chunk c of row b becomes column c * B + b."""
        device = self.net.log_std.device

        def cut(array: Array | Tensor) -> Tensor:
            x = torch.as_tensor(array, device=device)
            if self.bptt == 1:
                return x.reshape(1, -1, *x.shape[2:])
            split = x.view(-1, self.bptt, *x.shape[1:]).transpose(0, 1)
            return split.reshape(self.bptt, -1, *x.shape[2:])

        target = self.net.normalise_value(cut(returns))
        numbers = (cut(rollout.log_prob), cut(advantage), target, cut(outputs))
        return Chunks(
            {name: cut(x) for name, x in self.net.prepare(rollout.obs).items()},
            {name: torch.as_tensor(x, device=device).flatten(0, 1) for name, x in rollout.state0.items()},
            cut(rollout.first),
            None if rollout.mask is None else cut(rollout.mask),
            cut(rollout.action),
            torch.stack(numbers),
            None if rollout.valid.all() else cut(rollout.valid).to(torch.float32),
        )

    def _minibatches(self, chunks: Chunks) -> Iterator[Tensor]:
        """Indices of chunks: all that hold a decision, shuffled, in parts of about `minibatch` env steps each."""
        order = torch.from_numpy(self.shuffling.permutation(chunks.first.shape[1])).to(chunks.first.device)
        if chunks.valid is not None:
            order = order[chunks.valid.any(0)[order]]
        parts = math.ceil(len(order) * self.bptt / self.algo.minibatch)
        return iter(torch.tensor_split(order, max(1, parts))) if len(order) else iter(())

    # ------------------------------------------------------------------------------------------ state

    def settings_in_force(self) -> dict[str, float]:
        """Every setting that can change while training, as it stands."""
        return {name: value.at(self.env_steps) for name, value in self.values.items()}

    def change(self, changes: dict[str, float]) -> None:
        """Set some of `settings_in_force` to numbers, over their schedules."""
        for name, number in changes.items():
            if name not in self.values:
                raise UseError(f"algo.{name} cannot change while training", did_you_mean(name, self.values))
            if not math.isfinite(number) or number < 0:
                raise UseError(f"algo.{name} cannot become {number}", "give a finite number that is not negative")
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
        """Continue exactly where `save` left."""
        self.adam.load(tree["adam"])
        for name, value in self.values.items():
            value.load(tree["settings"][name])
        self.env_steps = int(tree["env_steps"])
        self.shuffling.bit_generator.state = tree["shuffling"]

    def _diverged(self, batch: Chunks, losses: dict[str, Tensor], norm: float) -> DivergedError:
        """The first thing that is no finite number, with the minibatch that led there."""
        bad = next((name for name, loss in losses.items() if not math.isfinite(loss.item())), None)
        if bad is None:
            parts = zip(self.adam.names, self.adam.gradient_parts(), strict=True)
            bad = next((f"gradient of {name}" for name, part in parts if not bool(part.isfinite().all())), "gradient")
        names = ("log_prob", "advantage", "target", "value")
        arrays: dict[str, object] = {f"obs.{name}": x.cpu().numpy() for name, x in batch.obs.items()}
        arrays |= {f"state0.{name}": x.cpu().numpy() for name, x in batch.state0.items()}
        arrays |= {name: x.cpu().numpy() for name, x in zip(names, batch.numbers.unbind(), strict=True)}
        arrays |= {"action": batch.action.cpu().numpy(), "first": batch.first.cpu().numpy()}
        return DivergedError(f"the {bad} is not a finite number (gradient norm {norm})", CALMER, arrays)


class _Epoch:
    """What the gradient steps of one epoch left for metrics; worked out once, at its end."""

    def __init__(self) -> None:
        self.losses: list[tuple[Tensor, Tensor, Tensor]] = []
        self.norms: list[float] = []
        self.log_ratios: list[Tensor] = []  # of valid samples, each before its gradient step

    def add(
        self, policy: Tensor, value: Tensor, entropy: Tensor, norm: float, log_ratio: Tensor, valid: Tensor | None
    ) -> None:
        self.losses.append((policy.detach(), value.detach(), entropy.detach()))
        self.norms.append(norm)
        ratios = log_ratio.detach()
        self.log_ratios.append(ratios.flatten() if valid is None else ratios[valid > 0])

    def kl(self) -> float:
        """KL divergence of the policy from the one that acted, over the epoch's samples."""
        return float(_divergence(torch.cat(self.log_ratios)).mean()) if self.log_ratios else 0.0

    def beyond(self, clip: float) -> float:
        """Share of samples whose ratio the clip cuts."""
        return float(((torch.cat(self.log_ratios).exp() - 1).abs() > clip).float().mean()) if self.log_ratios else 0.0

    def means(self) -> dict[str, float]:
        if not self.losses:
            return {}
        policy, value, entropy = (float(sum(column)) / len(self.losses) for column in zip(*self.losses, strict=True))
        norm = sum(self.norms) / len(self.norms)
        return {"loss/policy": policy, "loss/value": value, "loss/entropy": entropy, "learn/gradient_norm": norm}


def _mean(x: Tensor, weight: Tensor | None) -> Tensor:
    return x.mean() if weight is None else (x * weight).sum()


def _divergence(log_ratio: Tensor) -> Tensor:
    """Its mean over samples of the old policy is KL(old || new): unbiased, never negative, low in variance."""
    return torch.expm1(log_ratio) - log_ratio


def _normalise(advantage: Tensor, weight: Tensor | None) -> Tensor:
    """Mean 0 and variance 1 over valid samples."""
    if weight is None:
        spread, middle = torch.std_mean(advantage, correction=0)
        return (advantage - middle) / (spread + 1e-8)
    centred = advantage - _mean(advantage, weight)
    return centred / (_mean(centred.square(), weight).sqrt() + 1e-8)


def _explained_variance(value: Array, returns: Array) -> float:
    """1: values foretell the returns; 0: no better than their mean; negative: worse. NaN when returns do not vary."""
    spread = float(np.var(returns, dtype=np.float64)) if returns.size else 0.0
    return math.nan if spread == 0 else 1 - float(np.var(returns - value, dtype=np.float64)) / spread


def _check_finite(rollout: Rollout) -> None:
    """Rewards, values, log probabilities and observations of valid rows must be numbers."""
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
                "check what the env gives" if "value" not in name and "log_prob" not in name else CALMER,
                arrays,
            )
