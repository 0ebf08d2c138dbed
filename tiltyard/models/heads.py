"""Action spaces as numbers: how many a model must put out for an action, and the distribution those numbers mean.

Knows nothing of models or envs. The flat action is float32 [..., columns]; the parameters are [..., outputs]:

    part          columns        outputs     distribution
    categorical   1 (an index)   options     softmax over the options, less those that a mask forbids
    binary        n (0 or 1)     n           independent coins, logits
    continuous    n              n           independent normals, log_std stands beside; the mean is tanh(output)
                                             where the box has bounds, the output itself where it has none

Without the tanh a mean can leave a bounded box for good: every draw is then clipped to the same edge, and no noise
explores any more. For the same reason the noise is never wider than half the box (`widest_noise`): wider, it is
clipped to the two edges and the inside is never tried.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from tiltyard.types import ActionPart, ActionSpec

FORBIDDEN = -1e9  # a logit whose probability is exactly 0 in float32, yet finite: 0 * FORBIDDEN is 0 in the entropy
SMALLEST = 1e-30  # keeps the logarithm of an exponential draw finite
HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)


def outputs_of(part: ActionPart) -> int:
    """Numbers that a model puts out for one part."""
    return part.options if part.kind == "categorical" else part.columns


def outputs(action: ActionSpec) -> int:
    """Numbers that a model puts out for the whole action."""
    return sum(outputs_of(part) for part in action.parts)


def continuous_columns(action: ActionSpec) -> int:
    """Width of log_std."""
    return sum(part.columns for part in action.parts if part.kind == "continuous")


@lru_cache(maxsize=256)
def bounded(part: ActionPart) -> tuple[bool, ...]:
    """Which columns of a continuous part have two finite bounds."""
    return tuple(math.isfinite(low) and math.isfinite(high) for low, high in zip(part.low, part.high, strict=True))


def widest_noise(action: ActionSpec) -> list[float]:
    """The largest log_std of every continuous column."""
    parts = [part for part in action.parts if part.kind == "continuous"]
    return [0.0 if inside else math.inf for part in parts for inside in bounded(part)]


def _means(part: ActionPart, piece: Tensor) -> Tensor:
    inside = bounded(part)
    if all(inside):
        return torch.tanh(piece)
    if not any(inside):
        return piece
    return torch.where(torch.tensor(inside, device=piece.device), torch.tanh(piece), piece)


class ActionDist:
    """Distribution over flat actions. Parts are independent: log probabilities, entropies and divergences add up.

    `pieces` holds one (part, parameters, log_std) per part; categorical parameters are log probabilities.
    """

    __slots__ = ("pieces",)

    def __init__(self, action: ActionSpec, params: Tensor, log_std: Tensor, mask: Tensor | None) -> None:
        self.pieces: list[tuple[ActionPart, Tensor, Tensor]] = []
        parts = action.parts
        if len(parts) == 1 and parts[0].kind == "categorical" and mask is None:  # the usual case: one operation
            self.pieces.append((parts[0], torch.log_softmax(params, -1), log_std))
            return
        at = mask_at = std_at = 0
        for part in parts:
            width = outputs_of(part)
            piece = params[..., at : at + width]
            at += width
            if part.kind == "categorical":
                if mask is not None:
                    piece = torch.where(mask[..., mask_at : mask_at + width], piece, FORBIDDEN)
                    mask_at += width
                self.pieces.append((part, torch.log_softmax(piece, -1), log_std))
            elif part.kind == "continuous":
                self.pieces.append((part, _means(part, piece), log_std[std_at : std_at + width]))
                std_at += width
            else:
                self.pieces.append((part, piece, log_std))

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """A draw. Forbidden options are never drawn."""
        columns = []
        for part, piece, log_std in self.pieces:
            if part.kind == "categorical":
                # Exponential races: argmax of log p - log E is a draw from p, and needs no cumulative sum.
                race = torch.empty_like(piece).exponential_(generator=generator).clamp_(min=SMALLEST).log_()
                columns.append(torch.argmax(piece - race, -1, keepdim=True).to(torch.float32))
            elif part.kind == "binary":
                coin = torch.empty_like(piece).uniform_(generator=generator)
                columns.append((coin < torch.sigmoid(piece)).to(torch.float32))
            else:
                noise = torch.empty_like(piece).normal_(generator=generator)
                columns.append(torch.addcmul(piece, noise, log_std.exp()))
        return columns[0] if len(columns) == 1 else torch.cat(columns, -1)

    def mode(self) -> Tensor:
        """The likeliest action."""
        columns = []
        for part, piece, _ in self.pieces:
            if part.kind == "categorical":
                columns.append(torch.argmax(piece, -1, keepdim=True).to(torch.float32))
            elif part.kind == "binary":
                columns.append((piece > 0).to(torch.float32))
            else:
                columns.append(piece)
        return columns[0] if len(columns) == 1 else torch.cat(columns, -1)

    def log_prob(self, action: Tensor) -> Tensor:
        """Logarithm of the probability (density, where continuous) of [..., columns]: [...]."""
        total: Tensor | None = None
        at = 0
        for part, piece, log_std in self.pieces:
            taken = action if len(self.pieces) == 1 else action[..., at : at + part.columns]
            at += part.columns
            if part.kind == "categorical":
                term = torch.gather(piece, -1, taken.to(torch.int64)).squeeze(-1)
            elif part.kind == "binary":
                term = (taken * piece - F.softplus(piece)).sum(-1)
            else:
                scaled = (taken - piece) * torch.exp(-log_std)
                term = scaled.square().sum(-1) * -0.5 - (log_std.sum() + HALF_LOG_TAU * part.columns)
            total = term if total is None else total + term
        assert total is not None
        return total

    def entropy(self) -> Tensor:
        """[...] in nats; differential where continuous."""
        total: Tensor | None = None
        for part, piece, log_std in self.pieces:
            if part.kind == "categorical":
                term = -(piece.exp() * piece).sum(-1)
            elif part.kind == "binary":
                term = (F.softplus(piece) - piece * torch.sigmoid(piece)).sum(-1)
            else:
                term = (log_std.sum() + (0.5 + HALF_LOG_TAU) * part.columns).expand(piece.shape[:-1])
            total = term if total is None else total + term
        assert total is not None
        return total
