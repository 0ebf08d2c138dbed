"""The distributions of models/distributions.py in torch, as RLlib's losses need them: same values, with autograd.

A module's output for RLlib is one row of numbers: the model's parameters, log_std, and the mask as 0 and 1.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import torch
import torch.nn.functional as F
from ray.rllib.core.distribution.torch.torch_distribution import TorchDistribution
from torch import Tensor

from tiltyard.models import distributions
from tiltyard.models.policy_net import PolicyNet
from tiltyard.types import ActionPart, EnvSpec


def inputs(net: PolicyNet, params: Tensor, mask: Tensor | None) -> Tensor:
    """A module's output: [..., outputs + columns of log_std + mask_size]."""
    parts = [params]
    if net.log_std.numel():
        parts.append(net.log_std.expand(*params.shape[:-1], -1))
    if mask is not None:
        parts.append(mask.to(params.dtype))
    return torch.cat(parts, -1) if len(parts) > 1 else params


class ActionsOf:
    """Stands for a distribution class in RLlib, which only calls `from_logits`."""

    def __init__(self, spec: EnvSpec) -> None:
        self.spec = spec

    def from_logits(self, logits: Tensor, **_: Any) -> Actions:
        return Actions(self.spec, logits)


class Actions(TorchDistribution):  # type: ignore[misc]
    """Distribution over flat actions [..., columns]; parts are independent."""

    def __init__(self, spec: EnvSpec, row: Tensor) -> None:
        action = spec.action
        outputs, stds = distributions.outputs(action), distributions.continuous_columns(action)
        params, log_std = row[..., :outputs], row[..., outputs : outputs + stds]
        mask = row[..., outputs + stds :] > 0.5 if spec.masked else None
        self.pieces: list[tuple[ActionPart, Tensor, Tensor]] = []  # parameters, log_std
        at = std_at = mask_at = 0
        for part in action.parts:
            width = distributions.part_outputs(part)
            piece, own = params[..., at : at + width], log_std[..., :0]
            if part.kind == "categorical":
                if mask is not None:
                    piece = torch.where(mask[..., mask_at : mask_at + width], piece, float(distributions.FORBIDDEN))
                    mask_at += width
                piece = F.log_softmax(piece, -1)
            elif part.kind == "continuous":
                own = log_std[..., std_at : std_at + width]
                std_at += width
                inside = torch.tensor(distributions.bounded(part), device=piece.device)
                piece = torch.where(inside, torch.tanh(piece), piece)
            self.pieces.append((part, piece, own))
            at += width

    def logp(self, value: Tensor, **_: Any) -> Tensor:
        at, terms = 0, []
        for part, params, log_std in self.pieces:
            taken = value[..., at : at + part.columns]
            at += part.columns
            if part.kind == "categorical":
                terms.append(params.gather(-1, taken.long()).squeeze(-1))
            elif part.kind == "binary":
                terms.append((taken * params - F.softplus(params)).sum(-1))
            else:
                scaled = (taken - params) / log_std.exp()
                terms.append((-0.5 * scaled.square() - log_std - distributions.HALF_LOG_TAU).sum(-1))
        return _added(terms)

    def entropy(self) -> Tensor:
        terms = []
        for part, params, log_std in self.pieces:
            if part.kind == "categorical":
                terms.append(-(params.exp() * params).sum(-1))
            elif part.kind == "binary":
                terms.append((F.softplus(params) - params * torch.sigmoid(params)).sum(-1))
            else:
                terms.append((log_std + 0.5 + distributions.HALF_LOG_TAU).sum(-1))
        return _added(terms)

    def kl(self, other: Actions) -> Tensor:
        """KL(self || other)."""
        terms = []
        for (part, params, log_std), (_, theirs, their_log_std) in zip(self.pieces, other.pieces, strict=True):
            if part.kind == "categorical":
                terms.append((params.exp() * (params - theirs)).sum(-1))
            elif part.kind == "binary":
                chance = torch.sigmoid(params)
                both = F.softplus(theirs) - F.softplus(params) + chance * (params - theirs)
                terms.append(both.sum(-1))
            else:
                spread = (2 * (log_std - their_log_std)).exp()
                apart = ((params - theirs) / their_log_std.exp()).square()
                terms.append((0.5 * (spread + apart - 1) + their_log_std - log_std).sum(-1))
        return _added(terms)

    def _get_torch_distribution(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError  # unused: all methods are overridden above

    @staticmethod
    def required_input_dim(space: gymnasium.Space[Any], **_: Any) -> int:
        return math.prod(space.shape or (1,))


def _added(terms: list[Tensor]) -> Tensor:
    return terms[0] if len(terms) == 1 else torch.stack(terms).sum(0)
