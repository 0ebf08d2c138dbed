"""Normalisation: running statistics of observations and returns, and what they are applied to.

Statistics change only in `observe` and `observe_returns`, which the learner calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tiltyard.config.sections import Normalise
from tiltyard.models.layers import bytes_to_float
from tiltyard.types import Array, ArraySpec, EnvSpec

OBS_CLIP = np.float32(10)  # standard deviations
TINY = 1e-8
IMAGES_EVERY = 8  # steps: neighbouring frames are nearly equal, and counting every pixel is slow

Obs = Mapping[str, Tensor | Array]


class RunningStats(nn.Module):
    """Mean and variance of all samples in float64; `shift` and `scale` are their float32 form, ready to apply."""

    count: Tensor
    mean: Tensor
    squares: Tensor  # sum of squared distances from the mean
    shift: Tensor
    scale: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("squares", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("shift", torch.zeros(shape), persistent=False)
        self.register_buffer("scale", torch.ones(shape), persistent=False)
        # The same numbers on the CPU, wherever the buffers are: an update must not wait for an accelerator.
        self._sums: tuple[Any, ...] = (0.0, np.zeros(shape), np.zeros(shape))
        self.on_cpu: tuple[Any, Any] = (np.zeros(shape, np.float32), np.ones(shape, np.float32))  # shift and scale

    def observe(self, x: Array) -> None:
        """Add [N, *shape] (Chan et al. 1979: exact merge of the moments of two sets)."""
        if len(x) == 0:
            return
        x = x.astype(np.float64)
        count, mean, squares = self._sums
        own = x.mean(0)
        moved, total = own - mean, count + len(x)
        squares = squares + np.square(x - own).sum(0) + np.square(moved) * (count * len(x) / total)
        self._sums = total, mean + moved * (len(x) / total), squares
        for buffer, number in zip((self.count, self.mean, self.squares), self._sums, strict=True):
            buffer.copy_(torch.as_tensor(number))
        self._derive()

    def refresh(self) -> None:
        """Read the buffers after they were loaded."""
        self._sums = tuple(buffer.cpu().numpy().copy() for buffer in (self.count, self.mean, self.squares))
        self._derive()

    def _derive(self) -> None:
        count, mean, squares = self._sums
        spread = np.sqrt(squares / count + TINY) if count else np.ones_like(mean)
        self.on_cpu = np.float32(mean), np.float32(spread)  # float32() keeps arrays arrays
        self.shift.copy_(torch.as_tensor(self.on_cpu[0]))
        self.scale.copy_(torch.as_tensor(self.on_cpu[1]))


class Normaliser:
    """The running statistics of one policy. Its modules are registered, and saved, by the PolicyNet."""

    def __init__(self, spec: EnvSpec, settings: Normalise) -> None:
        self.spec = spec
        self.names = tuple(
            name
            for name, item in spec.obs.items()
            if item.kind == "box" and (settings.images if item.image else settings.obs)
        )
        self.obs_stats = [RunningStats(spec.obs[name].shape) for name in self.names]
        self.return_stats = RunningStats(()) if settings.returns else None

    def prepare(self, obs: Obs, device: torch.device | None = None) -> dict[str, Tensor]:
        """Convert numbers to float32 (bytes to 0..1, then normalised), categories and words to int64.

        Byte images stay bytes, a quarter of the size, until the model scales them one minibatch at a time.
        """
        prepared = {
            name: _convert(torch.as_tensor(obs[name], device=device), item, name in self.names)
            for name, item in self.spec.obs.items()
        }
        for name, stats in zip(self.names, self.obs_stats, strict=True):
            centred = prepared[name] - stats.shift
            prepared[name] = centred.div_(stats.scale).clamp_(-float(OBS_CLIP), float(OBS_CLIP))
        return prepared

    def normalise_array(self, x: Array) -> Array:
        """Normalise the only float32 observation in numpy: `prepare` for the hot path of acting."""
        (stats,) = self.obs_stats
        shift, scale = stats.on_cpu
        x = x - shift
        x /= scale
        clipped: Array = np.minimum(np.maximum(x, -OBS_CLIP, out=x), OBS_CLIP, out=x)
        return clipped

    def observe(self, obs: Mapping[str, Array], valid: Array) -> None:
        """Add observations [T, B, ...] of valid rows."""
        for name, stats in zip(self.names, self.obs_stats, strict=True):
            every = IMAGES_EVERY if self.spec.obs[name].image else 1
            stats.observe(obs[name][::every][valid[::every]])

    def observe_returns(self, returns: Array) -> None:
        """Add returns [N], in units of reward."""
        if self.return_stats is not None:
            self.return_stats.observe(returns)

    def normalise_value(self, value: Array) -> Array:
        """Convert values from units of reward to those of the model's output."""
        stats = self.return_stats
        return value if stats is None else (value - stats.on_cpu[0]) / stats.on_cpu[1]

    def denormalise_value(self, value: Array) -> Array:
        """Convert values from the model's output to units of reward."""
        stats = self.return_stats
        return value if stats is None else value * stats.on_cpu[1] + stats.on_cpu[0]

    def refresh(self) -> None:
        """Derive shifts and scales after statistics were loaded."""
        for stats in (*self.obs_stats, *([] if self.return_stats is None else [self.return_stats])):
            stats.refresh()


def scale_images(obs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Prepared observations with byte images as 0..1, as user models receive them."""
    return {name: bytes_to_float(x) for name, x in obs.items()}


def _convert(x: Tensor, item: ArraySpec, normalised: bool) -> Tensor:
    if item.kind in ("discrete", "multi_discrete", "text"):
        return x.to(torch.int64)
    if item.kind == "box" and x.dtype is torch.uint8 and not normalised:
        return x if item.image else bytes_to_float(x)
    return x if x.dtype is torch.float32 else x.to(torch.float32)
