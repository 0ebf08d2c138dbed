"""Minibatches: a rollout [T, B] cut into chunks of `bptt` steps, which are shuffled as a whole.

A chunk starts from the recurrent state kept with the rollout; without memory it is one step. All of an update goes to
the net's device in one transfer; what decides on the shapes of minibatches (`first`, `valid`) stays here as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tiltyard.models.policy_net import PolicyNet
from tiltyard.types import Array, Rollout

ALIGNMENT = 16  # bytes, of every tensor in a transfer


@dataclass
class Minibatch:
    """Samples [T, B, ...] on the net's device; with several learners the part of one of them. T = 1 without memory."""

    obs: dict[str, Tensor]  # prepared by the normaliser
    state0: dict[str, Tensor]  # [B, ...]: recurrent state before the first step
    first: Tensor  # bool: an episode starts here
    starts: list[int]  # the steps at which any row has `first`
    mask: Tensor | None
    action: Tensor  # [T, B, columns]
    log_prob: Tensor  # under the policy that acted
    advantage: Tensor  # normalised if algo.normalise_advantage is set
    target: Tensor  # for the value, in normalised units
    value: Tensor  # of the net that acted, in normalised units
    valid: Tensor | None  # 1 or 0; None when every sample is valid
    count: float  # valid samples of the whole minibatch

    def mean(self, x: Tensor) -> Tensor:
        """Mean of [T, B] over the valid samples; the parts of several learners add up to it."""
        return (x if self.valid is None else x * self.valid).sum() / self.count

    def where_valid(self, x: Tensor) -> Tensor:
        """[T, B] with 0 at invalid samples."""
        return x if self.valid is None else torch.where(self.valid > 0, x, 0.0)


@dataclass
class Chunks:
    """N chunks as [bptt, N, ...]."""

    tensors: dict[str, Tensor]  # action, mask, first, valid, numbers [4, bptt, N], obs.NAME, state0.NAME [N, ...]
    first: Array
    valid: Array | None  # None when every sample is

    def to(self, net: PolicyNet, order: Sequence[Array] = ()) -> tuple[Chunks, list[Tensor]]:
        """Copy to the net's device and prepare the observations there; `order` are indices for `take`."""
        indices = torch.from_numpy(np.concatenate(order)) if order else torch.zeros(0, dtype=torch.int64)
        *moved, rows = send([*self.tensors.values(), indices], net.device)
        tensors = dict(zip(self.tensors, moved, strict=True))
        tensors |= {f"obs.{name}": x for name, x in net.normaliser.prepare(_below("obs.", tensors)).items()}
        return Chunks(tensors, self.first, self.valid), list(torch.split(rows, [len(each) for each in order]))

    def take(
        self, chosen: Array, rows: Tensor | None = None, part: slice = slice(None), *, normalise: bool = False
    ) -> Minibatch:
        """Select chunks by index (`rows` are the same on the device), of those only this learner's part.

        Advantages are normalised over the whole selection.
        """
        rows = torch.as_tensor(chosen, device=self.tensors["first"].device) if rows is None else rows
        numbers = self.tensors["numbers"].index_select(2, rows)
        valid = None if self.valid is None else self.tensors["valid"].index_select(1, rows)
        count = float(chosen.size * len(self.first) if self.valid is None else self.valid.take(chosen, 1).sum())
        log_prob, advantage, target, value = numbers.unbind()
        if normalise and count > 1:
            advantage = normalised(advantage, valid, count)
        if part != slice(None):
            rows, valid = rows[part], None if valid is None else valid[:, part]
            log_prob, advantage, target, value = (x[:, part] for x in (log_prob, advantage, target, value))
        found = {
            name: x.index_select(0 if name.startswith("state0.") else 1, rows)
            for name, x in self.tensors.items()
            if name not in ("numbers", "valid")
        }
        return Minibatch(
            _below("obs.", found),
            _below("state0.", found),
            found["first"],
            np.flatnonzero(self.first[:, chosen[part]].any(1)).tolist() if len(self.first) > 1 else [],
            found.get("mask"),
            found["action"],
            log_prob,
            advantage,
            target,
            value,
            valid,
            count,
        )


def cut_rollout(
    net: PolicyNet, bptt: int, rollout: Rollout, numbers: Sequence[Array], *, keep_invalid: bool = False
) -> Chunks:
    """[T, B, ...] -> [bptt, T / bptt * B, ...], on the CPU: chunk c of row b becomes column c * B + b.

    Without memory, invalid steps are left out unless `keep_invalid`. `numbers` are log_prob, advantage, target, value.
    """
    all_valid = bool(rollout.valid.all())
    kept = None if all_valid or keep_invalid or net.recurrent else np.flatnonzero(rollout.valid)

    def cut(x: Array) -> Array:
        if bptt == 1:
            flat = x.reshape(1, -1, *x.shape[2:])
            return flat if kept is None else flat.take(kept, 1)
        return x.reshape(-1, bptt, *x.shape[1:]).swapaxes(0, 1).reshape(bptt, -1, *x.shape[2:])

    first, valid = cut(rollout.first), None if all_valid or kept is not None else cut(rollout.valid)
    arrays = {"action": cut(rollout.action), "first": first}
    arrays["numbers"] = np.stack([cut(x) for x in numbers], dtype=np.float32)
    arrays |= {} if rollout.mask is None else {"mask": cut(rollout.mask)}
    arrays |= {} if valid is None else {"valid": valid.astype(np.float32)}
    arrays |= {f"obs.{name}": cut(x) for name, x in rollout.obs.items()}
    arrays |= {f"state0.{name}": x.reshape(-1, *x.shape[2:]) for name, x in rollout.state0.items()}
    return Chunks({name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in arrays.items()}, first, valid)


def shuffled(chunks: Chunks, minibatch: int, rng: np.random.Generator) -> list[Array]:
    """Indices of all chunks with a valid step, in random order, in parts of about `minibatch` env steps."""
    order = rng.permutation(chunks.first.shape[1])
    if chunks.valid is not None:
        order = order[np.asarray(chunks.valid.any(0))[order]]
    parts = math.ceil(len(order) * len(chunks.first) / minibatch)
    return np.array_split(order, max(1, parts)) if len(order) else []


def send(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of the CPU on a device, copied in one transfer."""
    if device.type == "cpu":
        return list(tensors)
    bytes_of = [x.reshape(-1).view(torch.uint8) for x in tensors]
    gaps = [torch.zeros(-len(x) % ALIGNMENT, dtype=torch.uint8) for x in bytes_of]
    moved = torch.cat([piece for both in zip(bytes_of, gaps, strict=True) for piece in both]).to(device)
    parts = torch.split(moved, [len(x) + len(gap) for x, gap in zip(bytes_of, gaps, strict=True)])
    return [
        part[: len(flat)].view(x.dtype).view(x.shape) for part, flat, x in zip(parts, bytes_of, tensors, strict=True)
    ]


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def normalised(advantage: Tensor, valid: Tensor | None, count: float) -> Tensor:
    """Scale to mean 0 and variance 1 over valid samples."""
    if valid is None:
        variance, mean = torch.var_mean(advantage, correction=0)
        return (advantage - mean) / (variance.sqrt() + 1e-8)
    centred = advantage - (advantage * valid).sum() / count
    return centred / (((centred.square() * valid).sum() / count).sqrt() + 1e-8)
