"""Minibatches: a rollout [T, B] cut into chunks of `bptt` steps, which are shuffled as a whole.

A chunk starts from the recurrent state kept with the rollout; without memory it is one step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiltyard.models.policy_net import PolicyNet
from tiltyard.types import Rollout

Array = NDArray[Any]


@dataclass
class Chunks:
    """N chunks as [bptt, N, ...]. The net's inputs are on its device, the rest is numpy."""

    obs: dict[str, Tensor]  # prepared by the normaliser
    state0: dict[str, Tensor]  # [N, ...]
    first: Array
    mask: Array | None
    action: Array
    numbers: Array  # [4, bptt, N]: log_prob, advantage, target, old value; the last two in normalised units
    valid: Array | None  # None when every sample is

    def take(self, chosen: Array, part: slice = slice(None)) -> Chunks:
        """Select chunks by index; `part` limits all but `numbers` and `valid` to this learner's share."""
        mine = chosen[part]
        rows = torch.from_numpy(mine)
        return Chunks(
            {name: x.index_select(1, rows.to(x.device)) for name, x in self.obs.items()},
            {name: x.index_select(0, rows.to(x.device)) for name, x in self.state0.items()},
            self.first.take(mine, 1),
            None if self.mask is None else self.mask.take(mine, 1),
            self.action.take(mine, 1),
            self.numbers.take(chosen, 2),
            None if self.valid is None else self.valid.take(chosen, 1),
        )


def make_chunks(
    net: PolicyNet, bptt: int, rollout: Rollout, numbers: Sequence[Array], *, keep_invalid: bool = False
) -> Chunks:
    """[T, B, ...] -> [bptt, T / bptt * B, ...]: chunk c of row b becomes column c * B + b.

    Without memory, invalid steps are left out unless `keep_invalid`.
    """
    all_valid = bool(rollout.valid.all())
    kept = None if all_valid or keep_invalid or net.recurrent else np.flatnonzero(rollout.valid)

    def cut(x: Array) -> Array:
        if bptt == 1:
            flat = x.reshape(1, -1, *x.shape[2:])
            return flat if kept is None else flat.take(kept, 1)
        return x.reshape(-1, bptt, *x.shape[1:]).swapaxes(0, 1).reshape(bptt, -1, *x.shape[2:])

    return Chunks(
        net.normaliser.prepare({name: cut(x) for name, x in rollout.obs.items()}, net.device),
        {name: torch.as_tensor(x, device=net.device).flatten(0, 1) for name, x in rollout.state0.items()},
        cut(rollout.first),
        None if rollout.mask is None else cut(rollout.mask),
        cut(rollout.action),
        np.stack([cut(x) for x in numbers], dtype=np.float32),
        None if all_valid or kept is not None else cut(rollout.valid).astype(np.float32),
    )


def shuffled(chunks: Chunks, minibatch: int, rng: np.random.Generator) -> list[Array]:
    """Indices of all chunks with a valid step, in random order, in parts of about `minibatch` env steps."""
    order = rng.permutation(chunks.first.shape[1])
    if chunks.valid is not None:
        order = order[np.asarray(chunks.valid.any(0))[order]]
    parts = math.ceil(len(order) * len(chunks.first) / minibatch)
    return np.array_split(order, max(1, parts)) if len(order) else []
