"""The loss of PPO (Schulman et al. 2017), the only one: every engine and device uses it, autograd differentiates it.

`fast_mlp` has the same loss with its gradient written out, for plain MLPs on the CPU; a test compares both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tiltyard.algos.minibatches import Minibatch
from tiltyard.models.policy_net import PolicyNet
from tiltyard.models.torch_distributions import TorchActionDist

# The metrics of `Losses`, without the total.
COLUMNS = ("loss/policy", "loss/value", "loss/entropy", "loss/kl", "learn/clip_fraction")


class Outputs(NamedTuple):
    """The net's outputs for a minibatch."""

    dist: TorchActionDist
    value: Tensor  # [T, B], in normalised units


class Losses(NamedTuple):
    """Scalars; `total` is minimised, the others are its terms and metrics."""

    total: Tensor
    policy: Tensor
    value: Tensor
    entropy: Tensor
    kl: Tensor
    clip_fraction: Tensor


def net_outputs(net: PolicyNet, batch: Minibatch) -> Outputs:
    """The outputs of this or of another net for a minibatch."""
    params, value = net.unroll(batch.obs, batch.state0, batch.first, prepared=True, starts=batch.starts)
    return Outputs(TorchActionDist(net.spec.action, params, net.log_std, batch.mask), value)


def ppo_loss(batch: Minibatch, outputs: Outputs, settings: Mapping[str, float]) -> Losses:
    """L = -E[min(r A, clip(r, 1 - e, 1 + e) A)] + c1 E[(V - target)^2] / 2 - c2 E[H] + c3 KL(old || new)."""
    log_ratio = batch.where_valid(outputs.dist.log_prob(batch.action) - batch.log_prob)
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - settings["clip"], 1 + settings["clip"])
    policy = -batch.mean(torch.minimum(ratio * batch.advantage, clipped_ratio * batch.advantage))

    squares = (outputs.value - batch.target).square()
    if "value_clip" in settings:
        change = (outputs.value - batch.value).clamp(-settings["value_clip"], settings["value_clip"])
        squares = torch.maximum(squares, (batch.value + change - batch.target).square())
    value = 0.5 * batch.mean(squares)

    entropy = batch.mean(outputs.dist.entropy())
    # Unbiased for samples of the old policy, never negative, of low variance.
    kl = batch.mean(log_ratio.expm1() - log_ratio)
    total = policy + settings["value_coef"] * value
    if settings["entropy"]:
        total = total - settings["entropy"] * entropy
    if settings["kl"]:
        total = total + settings["kl"] * kl
    clipped = batch.mean(((ratio - 1).abs() > settings["clip"]).to(ratio.dtype))
    return Losses(total, policy, value, entropy, kl, clipped)
