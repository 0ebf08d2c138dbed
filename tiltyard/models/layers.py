"""Dense layers, activations and orthogonal initialisation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiltyard.errors import UseError, did_you_mean

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": F.relu,
    "elu": F.elu,
    "silu": F.silu,
    "gelu": F.gelu,
    "leaky_relu": F.leaky_relu,
}
MAX_EXACT_WIDTH = 1024  # wider layers start from independent rows, orthogonal to within 2 degrees


def get_activation(name: str) -> Callable[[Tensor], Tensor]:
    """Look up an activation by its name in the settings."""
    if name not in ACTIVATIONS:
        raise UseError(f"unknown activation {name!r}", did_you_mean(name, ACTIVATIONS))
    return ACTIVATIONS[name]


def orthogonal_(weight: Tensor, gain: float = 1.0) -> None:
    """Fill with an orthogonal matrix; only nearly orthogonal when wide (the exact one costs width cubed)."""
    columns = weight[0].numel()
    if min(weight.shape[0], columns) <= MAX_EXACT_WIDTH:
        nn.init.orthogonal_(weight, gain)
    else:
        nn.init.normal_(weight, std=gain / math.sqrt(max(weight.shape[0], columns)))


def init_orthogonal(layer: nn.Linear | nn.Conv2d, gain: float) -> None:
    """Set orthogonal weights and zero biases."""
    orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


class Mlp(nn.Module):
    """Dense layers; with `last_gain` the last one is linear (a head), otherwise activated like the others."""

    def __init__(self, sizes: Sequence[int], activation: str, last_gain: float | None = None) -> None:
        super().__init__()
        self.size = sizes[-1]
        self.activation = get_activation(activation)
        self.linear_last = last_gain is not None
        for at, (inputs, outputs) in enumerate(pairwise(sizes)):
            layer = nn.Linear(inputs, outputs)
            init_orthogonal(layer, last_gain if last_gain is not None and at == len(sizes) - 2 else math.sqrt(2))
            self.add_module(str(at), layer)

    def forward(self, x: Tensor) -> Tensor:
        # Uses the weights directly: with few rows, calling a module costs as much as the layer.
        layers = list(self._modules.values())
        for layer in layers[:-1] if self.linear_last else layers:
            weights = layer._parameters  # type: ignore[union-attr]
            x = self.activation(F.linear(x, weights["weight"], weights["bias"]))  # type: ignore[arg-type]
        if self.linear_last:
            weights = layers[-1]._parameters  # type: ignore[union-attr]
            x = F.linear(x, weights["weight"], weights["bias"])  # type: ignore[arg-type]
        return x


def bytes_to_float(x: Tensor) -> Tensor:
    """Scale bytes to 0..1; other types stay unchanged."""
    return x.to(torch.float32).div_(255.0) if x.dtype is torch.uint8 else x
