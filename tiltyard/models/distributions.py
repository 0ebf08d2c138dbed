"""Action spaces as numbers: how many a model must put out for an action, and the distribution those numbers mean.

Knows nothing of models or envs. The flat action is float32 [..., columns]; the parameters are [..., outputs]:

    part          columns        outputs     distribution
    categorical   1 (an index)   options     softmax over the options, less those that a mask forbids
    binary        n (0 or 1)     n           independent coins, logits
    continuous    n              n           independent normals, log_std stands beside; the mean is tanh(output)
                                             where the box has bounds, the output itself where it has none

    squashed      n              2 n         a normal with its own spread for each, drawn and then squashed by tanh:
                                             `SquashedDist`, for actions that are bounded numbers and nothing else

Without the tanh a mean can leave a bounded box for good: every draw is then clipped to the same edge, and no noise
explores any more. For the same reason the noise is never wider than half the box (`widest_noise`): wider, it is
clipped to the two edges and the inside is never tried.

Distributions are numpy arrays, with their gradients written out: a call on the few numbers of a batch's actions costs
a third of what it does in torch, and actions are wanted outside the device anyway. Torch gives the random numbers.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tiltyard.types import ActionPart, ActionSpec

Array = NDArray[Any]

FORBIDDEN = np.float32(-1e9)  # a logit whose probability is exactly 0 in float32, yet finite: 0 * FORBIDDEN is 0
SMALLEST = np.float32(1e-30)  # keeps a probability divided by an exponential draw finite
HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)
FEW = 16
LOG_SPREADS = (-5.0, 2.0)  # of a squashed distribution, as RLlib limits them
INSIDE = np.float32(1e-6)


def part_outputs(part: ActionPart) -> int:
    """Numbers that a model puts out for one part."""
    return part.options if part.kind == "categorical" else part.columns


def outputs(action: ActionSpec) -> int:
    """Numbers that a model puts out for the whole action."""
    return sum(part_outputs(part) for part in action.parts)


def continuous_columns(action: ActionSpec) -> int:
    """Width of log_std."""
    return sum(part.columns for part in action.parts if part.kind == "continuous")


@lru_cache(maxsize=256)
def bounded(part: ActionPart) -> tuple[bool, ...]:
    """Which columns of a continuous part have two finite bounds."""
    return tuple(math.isfinite(low) and math.isfinite(high) for low, high in zip(part.low, part.high, strict=True))


def max_log_std(action: ActionSpec) -> list[float]:
    """The largest log_std of every continuous column."""
    parts = [part for part in action.parts if part.kind == "continuous"]
    return [0.0 if inside else math.inf for part in parts for inside in bounded(part)]


class Piece(NamedTuple):
    """The distribution of one part: its parameters [..., outputs], and what is made of them once."""

    part: ActionPart
    at: int  # its first column in the action
    params: Array  # categorical: log probabilities; binary: logits; continuous: means
    chance: Array  # categorical and binary: probabilities; continuous: standard deviations [columns]
    log_std: Array  # continuous only


class ActionDist:
    """Distribution over flat actions. Parts are independent: log probabilities and entropies add up."""

    __slots__ = ("pieces",)

    def __init__(self, action: ActionSpec, params: Array, log_std: Array, mask: Array | None) -> None:
        self.pieces: list[Piece] = []
        column = at = mask_at = std_at = 0
        for part in action.parts:
            width = part_outputs(part)
            piece = params if len(action.parts) == 1 else params[..., at : at + width]
            own = log_std[:0]
            if part.kind == "categorical":
                if mask is not None:
                    piece = np.where(mask[..., mask_at : mask_at + width], piece, FORBIDDEN)
                    mask_at += width
                piece, chance = _log_softmax(piece)
            elif part.kind == "binary":
                chance = _sigmoid(piece)
            else:
                own = log_std[std_at : std_at + width]
                std_at += width
                piece, chance = _means(part, piece), np.exp(own)
            self.pieces.append(Piece(part, column, piece, chance, own))
            column += part.columns
            at += width

    def sample(self, generator: torch.Generator | None = None) -> Array:
        """A draw. Forbidden options are never drawn."""
        columns = []
        for part, _, params, chance, _ in self.pieces:
            noise = torch.empty(params.shape)
            if part.kind == "categorical":
                # Exponential races: argmax of p / E is a draw from p, and needs no cumulative sum.
                race = np.maximum(noise.exponential_(generator=generator).numpy(), SMALLEST)
                columns.append(np.argmax(np.divide(chance, race, out=race), -1)[..., None].astype(np.float32))
            elif part.kind == "binary":
                columns.append((noise.uniform_(generator=generator).numpy() < chance).astype(np.float32))
            else:
                columns.append(params + noise.normal_(generator=generator).numpy() * chance)
        return columns[0] if len(columns) == 1 else np.concatenate(columns, -1)

    def mode(self) -> Array:
        """The likeliest action."""
        columns = []
        for part, _, params, _, _ in self.pieces:
            if part.kind == "categorical":
                columns.append(np.argmax(params, -1)[..., None].astype(np.float32))
            elif part.kind == "binary":
                columns.append((params > 0).astype(np.float32))
            else:
                columns.append(params)
        return columns[0] if len(columns) == 1 else np.concatenate(columns, -1)

    def log_prob(self, action: Array) -> Array:
        """Logarithm of the probability (density, where continuous) of [..., columns]: [...]."""
        total: Array | None = None
        for part, at, params, chance, log_std in self.pieces:
            taken = action[..., at : at + part.columns]
            if part.kind == "categorical":
                term = params.reshape(-1).take(_places(taken, part.options)).reshape(params.shape[:-1])
            elif part.kind == "binary":
                term = _sum_last(taken * params - np.logaddexp(np.float32(0), params))
            else:
                scaled = (taken - params) / chance
                term = _dot_last(scaled, scaled) * -0.5 - (float(log_std.sum()) + HALF_LOG_TAU * part.columns)
            total = term if total is None else total + term
        assert total is not None
        return total

    def entropy(self) -> Array:
        """[...] in nats; differential where continuous."""
        total: Array | None = None
        for part, _, params, chance, log_std in self.pieces:
            if part.kind == "categorical":
                term = -_dot_last(chance, params)
            elif part.kind == "binary":
                term = _sum_last(np.logaddexp(np.float32(0), params) - params * chance)
            else:
                most = float(log_std.sum()) + (0.5 + HALF_LOG_TAU) * part.columns
                term = np.full(params.shape[:-1], most, np.float32)
            total = term if total is None else total + term
        assert total is not None
        return total

    def gradient(self, action: Array, by_log_prob: Array, by_entropy: Array | None) -> tuple[Array, Array]:
        """What a loss changes by with the parameters [..., outputs] and with log_std, given what it changes by with the
        log probability of each action and (None: nothing) with each entropy, both [...].

        categorical   d log p(a) = [a] - p          dH = -p (log p + H)
        binary        d log p(a) = a - p            dH = -p (1 - p) logit
        continuous    d log p(a) = (a - m) / s^2    dH = 0           and by log_std: ((a - m) / s)^2 - 1, and 1
        """
        by_params, by_log_std = [], []
        likelier = by_log_prob[..., None]
        wider = None if by_entropy is None else by_entropy[..., None]
        for part, at, params, chance, _ in self.pieces:
            taken = action[..., at : at + part.columns]
            if part.kind == "categorical":
                by = chance * -likelier
                by.reshape(-1)[_places(taken, part.options)] += by_log_prob.reshape(-1)
                if wider is not None:
                    surprise = chance * params
                    by -= (surprise - chance * _sum_last(surprise)[..., None]) * wider
            elif part.kind == "binary":
                by = (taken - chance) * likelier
                if wider is not None:
                    by -= chance * (1 - chance) * params * wider
            else:
                scaled = (taken - params) / chance
                by = scaled / chance * likelier
                inside = np.array(bounded(part))
                if inside.any():
                    by *= np.where(inside, 1 - np.square(params), np.float32(1))  # through the tanh
                rows = ((np.square(scaled) - 1) * likelier).reshape(-1, part.columns)
                by_log_std.append(rows.sum(0) + (0.0 if by_entropy is None else by_entropy.sum()))
            by_params.append(by)
        none = np.zeros(0, np.float32)
        return (
            by_params[0] if len(by_params) == 1 else np.concatenate(by_params, -1),
            np.concatenate(by_log_std) if by_log_std else none,
        )


class SquashedDist:
    """Distribution over bounded numbers: parameters [..., 2 columns] are means and log spreads before the tanh."""

    __slots__ = ("log_std", "mean")

    def __init__(self, params: Array) -> None:
        self.mean, log_std = np.split(params, 2, axis=-1)
        self.log_std = np.clip(log_std, *LOG_SPREADS)

    def sample(self, generator: torch.Generator | None = None) -> Array:
        noise = torch.empty(self.mean.shape).normal_(generator=generator).numpy()
        return np.asarray(np.tanh(self.mean + noise * np.exp(self.log_std)))

    def mode(self) -> Array:
        """Where the middle of the noise comes to lie."""
        return np.asarray(np.tanh(self.mean))

    def log_prob(self, action: Array) -> Array:
        """Logarithm of the density; infinitely far out, at the bounds themselves, that of a point just inside."""
        raw = np.arctanh(np.clip(action, -1 + INSIDE, 1 - INSIDE))
        scaled = (raw - self.mean) / np.exp(self.log_std)
        squash = np.log1p(-np.square(np.tanh(raw)))
        return _sum_last(-0.5 * np.square(scaled) - self.log_std - np.float32(HALF_LOG_TAU) - squash)


def can_squash(action: ActionSpec) -> bool:
    """Whether every part is of bounded numbers."""
    return all(part.kind == "continuous" and all(bounded(part)) for part in action.parts)


def _log_softmax(logits: Array) -> tuple[Array, Array]:
    """Log probabilities and probabilities over the last axis."""
    logits = logits - _max_last(logits)[..., None]
    chance = np.exp(logits)
    total = _sum_last(chance)[..., None]
    logits -= np.log(total)
    chance /= total
    return logits, chance


def _sum_last(x: Array) -> Array:
    """The sum over the last axis, by einsum: numpy's own sum is slow where rows are many and short."""
    return np.asarray(np.einsum("...i->...", x))


def _dot_last(x: Array, y: Array) -> Array:
    return np.asarray(np.einsum("...i,...i->...", x, y))


def _max_last(x: Array) -> Array:
    """The maximum over the last axis, column by column where there are few, for the same reason."""
    if x.shape[-1] > FEW:
        return np.asarray(x.max(-1))
    most = x[..., 0].copy()
    for at in range(1, x.shape[-1]):
        np.maximum(most, x[..., at], out=most)
    return most


def _sigmoid(logits: Array) -> Array:
    return 0.5 + 0.5 * np.tanh(0.5 * logits)  # never overflows


def _means(part: ActionPart, piece: Array) -> Array:
    inside = bounded(part)
    if all(inside):
        return np.tanh(piece)
    return np.where(np.array(inside), np.tanh(piece), piece) if any(inside) else piece


def _places(taken: Array, options: int) -> Array:
    """Where the options taken, [..., 1], lie in [..., options] laid end to end."""
    chosen = taken.reshape(-1).astype(np.int64)
    chosen += np.arange(0, chosen.size * options, options)
    return chosen
