"""Encoders: one observation in, one vector of features out. Not which observation gets which: that is actor_critic.

An encoder is an nn.Module built as `Encoder(spec, *, options)` with an attribute `size`; forward takes [N, *shape] and
gives [N, size]. Box observations and binaries arrive as float32 (bytes scaled to 0..1), categories and words as int64.

    flat     numbers as they are, categories as one-hot vectors        nature   3 convolutions of the Atari DQN
    mlp      flat, then dense layers                                   impala   2 convolutions, IMPALA's small net
    simple   3 convolutions of stride 2, for images of any size        resnet   residual blocks, IMPALA's large net
    text     word vectors through a GRU                                auto     text, simple, nature or flat
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiltyard.errors import UseError, did_you_mean
from tiltyard.types import ArraySpec

BUILTIN_ENCODERS = {
    "auto": "tiltyard.models.encoders:auto",
    "mlp": "tiltyard.models.encoders:MlpEncoder",
    "simple": "tiltyard.models.encoders:Simple",
    "nature": "tiltyard.models.encoders:Nature",
    "impala": "tiltyard.models.encoders:Impala",
    "resnet": "tiltyard.models.encoders:ResNet",
    "text": "tiltyard.models.encoders:Text",
}
IMAGE_ENCODERS = ("simple", "nature", "impala", "resnet")

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": F.relu,
    "elu": F.elu,
    "silu": F.silu,
    "gelu": F.gelu,
    "leaky_relu": F.leaky_relu,
}
# For what nobody else will look at: a third less memory to go through.
IN_PLACE: dict[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] = {F.relu: F.relu_}
ONE_HOT_MOST = 1024  # categories beyond this get a learned vector: a one-hot of them would be mostly zeros to multiply
EMBEDDING = 64
WORDS = 4096  # hashed word ids are 1..4095, 0 is padding
SMALL = 64  # pixels: of larger pictures the first convolution is faster with channels innermost
NATURE_LEAST = 36  # pixels: below this the third convolution has nothing left to see
IMPALA_LEAST = 20
EXACT_MOST = 1024  # widths beyond this start from independent rows, whose angles are right to within 2 degrees


def activation_named(name: str) -> Callable[[Tensor], Tensor]:
    """The function behind a setting."""
    if name not in ACTIVATIONS:
        raise UseError(f"there is no activation {name!r}", did_you_mean(name, ACTIVATIONS))
    return ACTIVATIONS[name]


def orthogonal_(weight: Tensor, gain: float = 1.0) -> None:
    """Orthogonal rows or columns; nearly so where making them exactly so would take minutes (cost: width cubed)."""
    columns = weight[0].numel()
    if min(weight.shape[0], columns) <= EXACT_MOST:
        nn.init.orthogonal_(weight, gain)
    else:
        nn.init.normal_(weight, std=gain / math.sqrt(max(weight.shape[0], columns)))


def orthogonal(layer: nn.Linear | nn.Conv2d, gain: float) -> None:
    """Orthogonal weights, zero biases."""
    orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


class Mlp(nn.Module):
    """Dense layers; the last one plain (a head) when `last_gain` is given, activated like the others otherwise."""

    def __init__(self, sizes: Sequence[int], activation: str, last_gain: float | None = None) -> None:
        super().__init__()
        self.size = sizes[-1]
        self.activation = activation_named(activation)
        self.plain_last = last_gain is not None
        for at, (inputs, outputs) in enumerate(pairwise(sizes)):
            layer = nn.Linear(inputs, outputs)
            orthogonal(layer, last_gain if last_gain is not None and at == len(sizes) - 2 else math.sqrt(2))
            self.add_module(str(at), layer)

    def forward(self, x: Tensor) -> Tensor:
        # Straight to the weights: calling a module per layer costs as much as the layer when rows are few.
        layers = list(self._modules.values())
        for layer in layers[:-1] if self.plain_last else layers:
            weights = layer._parameters  # type: ignore[union-attr]
            x = self.activation(F.linear(x, weights["weight"], weights["bias"]))  # type: ignore[arg-type]
        if self.plain_last:
            weights = layers[-1]._parameters  # type: ignore[union-attr]
            x = F.linear(x, weights["weight"], weights["bias"])  # type: ignore[arg-type]
        return x


class Flat(nn.Module):
    """Numbers end to end; a category as a one-hot vector, or a learned one when there are very many."""

    starts: Tensor

    def __init__(self, spec: ArraySpec) -> None:
        super().__init__()
        if spec.kind == "text":
            raise UseError("words cannot be taken as plain numbers", "use the encoder text or auto")
        self.elements = math.prod(spec.shape)
        self.categories: tuple[int, ...] = ()
        self.table: nn.Embedding | None = None
        self.size = self.elements
        self.passes = spec.kind not in ("discrete", "multi_discrete") and len(spec.shape) == 1
        if spec.kind in ("discrete", "multi_discrete"):
            options = spec.options if len(spec.options) == self.elements else spec.options[:1] * self.elements
            self.categories = options
            self.size = sum(options)
            if self.size > ONE_HOT_MOST:
                self.table = nn.Embedding(self.size, EMBEDDING)
                self.size = EMBEDDING * self.elements
            starts = torch.tensor([sum(options[:at]) for at in range(len(options))])
            self.register_buffer("starts", starts, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.categories:
            return x if self.passes else x.reshape(x.shape[0], self.elements)
        places = x.reshape(x.shape[0], self.elements) + self.starts  # [N, elements]: each element has its own range
        if self.table is not None:
            return F.embedding(places, self.table.weight).flatten(1)
        hot = torch.zeros(x.shape[0], self.size, device=x.device)
        return hot.scatter_(1, places, 1.0)


class MlpEncoder(nn.Module):
    """Dense layers on the flat observation."""

    def __init__(self, spec: ArraySpec, *, hidden: Sequence[int] = (64, 64), activation: str = "tanh") -> None:
        super().__init__()
        if not hidden or any(not isinstance(width, int) or width < 1 for width in hidden):
            raise UseError(
                f"an mlp encoder cannot have the layers {list(hidden)}", "give widths, like hidden: [64, 64]"
            )
        self.flat = Flat(spec)
        self.layers = Mlp([self.flat.size, *hidden], activation)
        self.size = hidden[-1]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers.forward(self.flat.forward(x))


# ------------------------------------------------------------------------------------------------- images


def image_shape(spec: ArraySpec, name: str, least: int = 1) -> tuple[int, int, int, bool]:
    """Channels, height, width, and whether channels come first. Not an image, or too small: UseError."""
    if not spec.image or len(spec.shape) != 3:
        raise UseError(
            f"the {name} encoder needs an image, and this observation is a {spec.kind} of shape {spec.shape}",
            "use encoder: auto, or name the image under model.encoders",
        )
    first = spec.shape[0] < spec.shape[2]
    channels, height, width = spec.shape if first else (spec.shape[2], spec.shape[0], spec.shape[1])
    if min(height, width) < least:
        raise UseError(
            f"the {name} encoder needs images of at least {least} x {least}, and this one is {height} x {width}",
            "use the encoder simple or resnet",
        )
    return channels, height, width, first


def as_numbers(x: Tensor) -> Tensor:
    """Bytes as 0..1."""
    return x.to(torch.float32).div_(255.0) if x.dtype is torch.uint8 else x


def innermost(x: Tensor, channels_first: bool) -> Tensor:
    """[N, image] -> [N, channels, height, width] with channels innermost in memory: convolutions are a third faster
    that way. Bytes stay bytes: moved now, before they become four times as large."""
    x = x if channels_first else x.permute(0, 3, 1, 2)
    return x.contiguous(memory_format=torch.channels_last)


class Convolutions(nn.Module):
    """[N, image] -> [N, size]: convolutions (channels, kernel, stride, padding), then one dense layer."""

    takes_bytes = True

    def __init__(
        self,
        spec: ArraySpec,
        name: str,
        least: int,
        layers: Sequence[tuple[int, int, int, int]],
        size: int,
        activation: str,
    ) -> None:
        super().__init__()
        channels, height, width, self.channels_first = image_shape(spec, name, least)
        self.small = max(height, width) <= SMALL
        named = activation_named(activation)
        self.activation = IN_PLACE.get(named, named)
        self.layers = nn.ModuleList()
        for out, kernel, stride, padding in layers:
            layer = nn.Conv2d(channels, out, kernel, stride, padding)
            orthogonal(layer, math.sqrt(2))
            self.layers.append(layer)
            channels = out
            height, width = ((side + 2 * padding - kernel) // stride + 1 for side in (height, width))
        self.out = nn.Linear(channels * height * width, size)
        orthogonal(self.out, math.sqrt(2))
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        bytes_, rest = x.dtype is torch.uint8, self.layers[1:]
        if self.channels_first and self.small and not torch.is_grad_enabled():
            # Without a backward pass it is cheaper to move what the first convolution leaves than what it takes.
            x = self._first(x.to(torch.float32), bytes_).contiguous(memory_format=torch.channels_last)
        else:
            x = self._first(innermost(x, self.channels_first).to(torch.float32), bytes_)
        for layer in rest:
            x = self.activation(layer(x))
        return self.activation(self.out(x.flatten(1)))

    def _first(self, x: Tensor, bytes_: bool) -> Tensor:
        """The first layer. Of bytes its weights are divided by 255, which are fewer than the pixels."""
        layer = cast(nn.Conv2d, self.layers[0])
        weight = layer.weight / 255.0 if bytes_ else layer.weight
        return self.activation(F.conv2d(x, weight, layer.bias, layer.stride, layer.padding))


def Simple(spec: ArraySpec, *, size: int = 256, activation: str = "relu") -> nn.Module:
    """Three convolutions of stride 2, padded: images of any size."""
    return Convolutions(spec, "simple", 1, [(32, 3, 2, 1), (64, 3, 2, 1), (64, 3, 2, 1)], size, activation)


def Nature(spec: ArraySpec, *, size: int = 512, activation: str = "relu") -> nn.Module:
    """The net of Mnih et al. 2015."""
    return Convolutions(spec, "nature", NATURE_LEAST, [(32, 8, 4, 0), (64, 4, 2, 0), (64, 3, 1, 0)], size, activation)


def Impala(spec: ArraySpec, *, size: int = 256, activation: str = "relu") -> nn.Module:
    """The small net of Espeholt et al. 2018."""
    return Convolutions(spec, "impala", IMPALA_LEAST, [(16, 8, 4, 0), (32, 4, 2, 0)], size, activation)


class ResNet(nn.Module):
    """The large net of Espeholt et al. 2018: per stage one convolution, pooling to half, two residual blocks."""

    takes_bytes = True

    def __init__(
        self, spec: ArraySpec, *, channels: Sequence[int] = (16, 32, 32), size: int = 256, activation: str = "relu"
    ) -> None:
        super().__init__()
        inputs, height, width, self.channels_first = image_shape(spec, "resnet")
        self.activation = activation_named(activation)
        self.stages = nn.ModuleList()
        for out in channels:
            stage = nn.ModuleList(
                [nn.Conv2d(inputs, out, 3, padding=1), *(nn.Conv2d(out, out, 3, padding=1) for _ in range(4))]
            )
            for layer in stage:
                assert isinstance(layer, nn.Conv2d)
                orthogonal(layer, math.sqrt(2))
            self.stages.append(stage)
            inputs, height, width = out, (height + 1) // 2, (width + 1) // 2
        self.out = nn.Linear(inputs * height * width, size)
        orthogonal(self.out, math.sqrt(2))
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        x, act = as_numbers(innermost(x, self.channels_first)), self.activation
        for stage in self.stages:
            assert isinstance(stage, nn.ModuleList)
            enter, one, two, three, four = stage
            x = F.max_pool2d(enter(x), 3, stride=2, padding=1)
            x = x + two(act(one(act(x))))
            x = x + four(act(three(act(x))))
        return act(self.out(act(x).flatten(1)))


# --------------------------------------------------------------------------------------------------- words


class Text(nn.Module):
    """Hashed words [N, words], 0 after the last: a vector per word, a GRU over them, its memory after the last word."""

    def __init__(self, spec: ArraySpec, *, size: int = 64, embedding: int = 32) -> None:
        super().__init__()
        if spec.kind != "text":
            raise UseError(f"the text encoder needs text, and this observation is a {spec.kind}", "use encoder: auto")
        self.table = nn.Embedding(spec.options[0] if spec.options else WORDS, embedding, padding_idx=0)
        self.core = nn.GRU(embedding, size, batch_first=True)
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.core(self.table(x))  # [N, words, size]
        length = (x != 0).sum(1)
        last = (length - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, self.size)
        return torch.gather(out, 1, last).squeeze(1) * (length > 0).unsqueeze(1)


def auto(spec: ArraySpec) -> nn.Module:
    """What suits the observation: words, image (small, large) or plain numbers."""
    if spec.kind == "text":
        return Text(spec)
    if spec.image:
        _, height, width, _ = image_shape(spec, "auto")
        return Nature(spec) if min(height, width) >= NATURE_LEAST else Simple(spec)
    return Flat(spec)
