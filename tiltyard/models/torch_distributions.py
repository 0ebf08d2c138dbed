"""The distributions of models/distributions.py in torch, as losses need them: same values, with autograd.

Few operations and no constants from the CPU: a loss on an accelerator must not wait for copies.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tiltyard.models.distributions import FORBIDDEN, HALF_LOG_TAU, bounded, part_outputs
from tiltyard.types import ActionPart, ActionSpec


class TorchActionDist:
    """Distribution over flat actions [..., columns]; parts are independent. log_std is [columns] or [..., columns]."""

    def __init__(self, action: ActionSpec, params: Tensor, log_std: Tensor, mask: Tensor | None) -> None:
        self.shape = params.shape[:-1]
        self.parts: list[tuple[ActionPart, Tensor, Tensor]] = []  # log probabilities, logits or means; log_std
        at = std_at = mask_at = 0
        for part in action.parts:
            width = part_outputs(part)
            piece = params if len(action.parts) == 1 else params[..., at : at + width]
            own = log_std[..., :0]
            if part.kind == "categorical":
                if mask is not None:
                    piece = torch.where(mask[..., mask_at : mask_at + width], piece, float(FORBIDDEN))
                    mask_at += width
                piece = F.log_softmax(piece, -1)
            elif part.kind == "continuous":
                own = log_std[..., std_at : std_at + width]
                std_at += width
                piece = _bounded_means(part, piece)
            self.parts.append((part, piece, own))
            at += width

    def log_prob(self, action: Tensor) -> Tensor:
        """Logarithm of the probability (density, where continuous) of [..., columns]: [...]."""
        at, terms = 0, []
        for part, params, log_std in self.parts:
            taken = action[..., at : at + part.columns]
            at += part.columns
            if part.kind == "categorical":
                terms.append(params.gather(-1, taken.long()).squeeze(-1))
            elif part.kind == "binary":
                terms.append((taken * params - F.softplus(params)).sum(-1))
            else:
                scaled = (taken - params) / log_std.exp()
                terms.append((-0.5 * scaled.square() - log_std - HALF_LOG_TAU).sum(-1))
        return _added(terms)

    def entropy(self) -> Tensor:
        """[...] in nats; differential where continuous."""
        terms = []
        for part, params, log_std in self.parts:
            if part.kind == "categorical":
                terms.append(-(params.exp() * params).sum(-1))
            elif part.kind == "binary":
                terms.append((F.softplus(params) - params * torch.sigmoid(params)).sum(-1))
            else:
                terms.append((log_std + 0.5 + HALF_LOG_TAU).sum(-1).expand(self.shape))
        return _added(terms)

    def kl(self, other: TorchActionDist) -> Tensor:
        """KL(self || other), [...]."""
        terms = []
        for (part, params, log_std), (_, theirs, their_log_std) in zip(self.parts, other.parts, strict=True):
            if part.kind == "categorical":
                terms.append((params.exp() * (params - theirs)).sum(-1))
            elif part.kind == "binary":
                chance = torch.sigmoid(params)
                terms.append((F.softplus(theirs) - F.softplus(params) + chance * (params - theirs)).sum(-1))
            else:
                spread = (2 * (log_std - their_log_std)).exp()
                apart = ((params - theirs) / their_log_std.exp()).square()
                terms.append((0.5 * (spread + apart - 1) + their_log_std - log_std).sum(-1))
        return _added(terms)


def _added(terms: list[Tensor]) -> Tensor:
    return terms[0] if len(terms) == 1 else torch.stack(terms).sum(0)


def _bounded_means(part: ActionPart, piece: Tensor) -> Tensor:
    inside = bounded(part)
    if all(inside):
        return torch.tanh(piece)
    if not any(inside):
        return piece
    columns = piece.unbind(-1)
    return torch.stack([torch.tanh(x) if yes else x for x, yes in zip(columns, inside, strict=True)], -1)
