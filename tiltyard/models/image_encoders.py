"""Image encoders: convolutions, then one dense layer. Byte images are scaled to 0..1 inside."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiltyard.errors import UseError
from tiltyard.models.layers import bytes_to_float, get_activation, init_orthogonal
from tiltyard.types import ArraySpec

# For activations that nothing else reads: a third less memory traffic.
IN_PLACE: dict[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] = {F.relu: F.relu_}
SMALL_IMAGE = 64  # pixels: larger images are faster with channels last in the first convolution too
NATURE_MIN_SIDE = 36  # pixels: smaller images leave nothing for the third convolution
IMPALA_MIN_SIDE = 20


def image_shape(spec: ArraySpec, name: str, min_side: int = 1) -> tuple[int, int, int, bool]:
    """Channels, height, width, and whether channels come first. Raises UseError if it is not an image or too small."""
    if not spec.image or len(spec.shape) != 3:
        message = f"the {name} encoder needs an image, but the observation is a {spec.kind} of shape {spec.shape}"
        hint = "use encoder: auto, or name the image under model.encoders"
        raise UseError(message, hint)
    first = spec.shape[0] < spec.shape[2]
    channels, height, width = spec.shape if first else (spec.shape[2], spec.shape[0], spec.shape[1])
    if min(height, width) < min_side:
        raise UseError(
            f"the {name} encoder needs at least {min_side} x {min_side} pixels, but the image has {height} x {width}",
            "use the encoder simple or resnet",
        )
    return channels, height, width, first


def channels_last(x: Tensor, channels_first: bool) -> Tensor:
    """[N, image] -> [N, channels, height, width] with channels last in memory, which makes convolutions a third faster.

    Bytes stay bytes: as floats there is four times as much to move.
    """
    x = x if channels_first else x.permute(0, 3, 1, 2)
    return x.contiguous(memory_format=torch.channels_last)


class Convolutions(nn.Module):
    """[N, image] -> [N, size]: convolutions (channels, kernel, stride, padding), then one dense layer."""

    takes_bytes = True

    def __init__(
        self,
        spec: ArraySpec,
        name: str,
        min_side: int,
        layers: Sequence[tuple[int, int, int, int]],
        size: int,
        activation: str,
    ) -> None:
        super().__init__()
        channels, height, width, self.channels_first = image_shape(spec, name, min_side)
        self.small = max(height, width) <= SMALL_IMAGE
        named = get_activation(activation)
        self.activation = IN_PLACE.get(named, named)
        self.layers = nn.ModuleList()
        for out, kernel, stride, padding in layers:
            layer = nn.Conv2d(channels, out, kernel, stride, padding)
            init_orthogonal(layer, math.sqrt(2))
            self.layers.append(layer)
            channels = out
            height, width = ((side + 2 * padding - kernel) // stride + 1 for side in (height, width))
        self.out = nn.Linear(channels * height * width, size)
        init_orthogonal(self.out, math.sqrt(2))
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        is_bytes, rest = x.dtype is torch.uint8, self.layers[1:]
        if self.channels_first and self.small and not torch.is_grad_enabled():
            # Without a backward pass it is cheaper to reorder the first layer's output than its input.
            x = self._first(x.to(torch.float32), is_bytes).contiguous(memory_format=torch.channels_last)
        else:
            x = self._first(channels_last(x, self.channels_first).to(torch.float32), is_bytes)
        for layer in rest:
            x = self.activation(layer(x))
        return self.activation(self.out(x.flatten(1)))

    def _first(self, x: Tensor, is_bytes: bool) -> Tensor:
        """Apply the first layer. For bytes its weights are divided by 255, not the far more numerous pixels."""
        layer = cast(nn.Conv2d, self.layers[0])
        weight = layer.weight / 255.0 if is_bytes else layer.weight
        return self.activation(F.conv2d(x, weight, layer.bias, layer.stride, layer.padding))


def Simple(spec: ArraySpec, *, size: int = 256, activation: str = "relu") -> nn.Module:
    """Three padded convolutions of stride 2, for images of any size."""
    return Convolutions(spec, "simple", 1, [(32, 3, 2, 1), (64, 3, 2, 1), (64, 3, 2, 1)], size, activation)


def Nature(spec: ArraySpec, *, size: int = 512, activation: str = "relu") -> nn.Module:
    """The net of Mnih et al. 2015."""
    return Convolutions(
        spec, "nature", NATURE_MIN_SIDE, [(32, 8, 4, 0), (64, 4, 2, 0), (64, 3, 1, 0)], size, activation
    )


def Impala(spec: ArraySpec, *, size: int = 256, activation: str = "relu") -> nn.Module:
    """The small net of Espeholt et al. 2018."""
    return Convolutions(spec, "impala", IMPALA_MIN_SIDE, [(16, 8, 4, 0), (32, 4, 2, 0)], size, activation)


class ResNet(nn.Module):
    """The large net of Espeholt et al. 2018: per stage one convolution, pooling to half, two residual blocks."""

    takes_bytes = True

    def __init__(
        self, spec: ArraySpec, *, channels: Sequence[int] = (16, 32, 32), size: int = 256, activation: str = "relu"
    ) -> None:
        super().__init__()
        inputs, height, width, self.channels_first = image_shape(spec, "resnet")
        self.activation = get_activation(activation)
        self.stages = nn.ModuleList()
        for out in channels:
            stage = nn.ModuleList(
                [nn.Conv2d(inputs, out, 3, padding=1), *(nn.Conv2d(out, out, 3, padding=1) for _ in range(4))]
            )
            for layer in stage:
                assert isinstance(layer, nn.Conv2d)
                init_orthogonal(layer, math.sqrt(2))
            self.stages.append(stage)
            inputs, height, width = out, (height + 1) // 2, (width + 1) // 2
        self.out = nn.Linear(inputs * height * width, size)
        init_orthogonal(self.out, math.sqrt(2))
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        x, act = bytes_to_float(channels_last(x, self.channels_first)), self.activation
        for stage in self.stages:
            assert isinstance(stage, nn.ModuleList)
            enter, one, two, three, four = stage
            x = F.max_pool2d(enter(x), 3, stride=2, padding=1)
            x = x + two(act(one(act(x))))
            x = x + four(act(three(act(x))))
        return act(self.out(act(x).flatten(1)))
