"""Encoders: one observation in, one feature vector out. actor_critic chooses the encoder of each observation.

An encoder is an nn.Module, `Encoder(spec, *, options)`, with `size`; forward maps [N, *shape] to [N, size].
Numbers and binaries arrive as float32 (bytes scaled to 0..1), categories and words as int64.

    flat     numbers unchanged, categories one-hot          nature   3 convolutions, the Atari DQN
    mlp      flat, then dense layers                        impala   2 convolutions, IMPALA's small net
    simple   3 convolutions of stride 2, any image size     resnet   residual blocks, IMPALA's large net
    text     word embeddings through a GRU                  auto     text, simple, nature or flat
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
# For activations that nothing else reads: a third less memory traffic.
IN_PLACE: dict[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] = {F.relu: F.relu_}
MAX_ONE_HOT = 1024  # categories; beyond it they get a learned embedding
EMBEDDING = 64
WORDS = 4096  # hashed word ids are 1..4095, 0 is padding
SMALL_IMAGE = 64  # pixels: larger images are faster with channels last in the first convolution too
NATURE_MIN_SIDE = 36  # pixels: smaller images leave nothing for the third convolution
IMPALA_MIN_SIDE = 20
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


class Flat(nn.Module):
    """Numbers flattened; categories one-hot, or embedded when there are very many."""

    starts: Tensor

    def __init__(self, spec: ArraySpec) -> None:
        super().__init__()
        if spec.kind == "text":
            raise UseError("the flat and mlp encoders cannot read text", "use the encoder text or auto")
        self.elements = math.prod(spec.shape)
        self.categories: tuple[int, ...] = ()
        self.table: nn.Embedding | None = None
        self.size = self.elements
        self.is_identity = spec.kind not in ("discrete", "multi_discrete") and len(spec.shape) == 1
        if spec.kind in ("discrete", "multi_discrete"):
            options = spec.options if len(spec.options) == self.elements else spec.options[:1] * self.elements
            self.categories = options
            self.size = sum(options)
            if self.size > MAX_ONE_HOT:
                self.table = nn.Embedding(self.size, EMBEDDING)
                self.size = EMBEDDING * self.elements
            starts = torch.tensor([sum(options[:at]) for at in range(len(options))])
            self.register_buffer("starts", starts, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.categories:
            return x if self.is_identity else x.reshape(x.shape[0], self.elements)
        places = x.reshape(x.shape[0], self.elements) + self.starts  # [N, elements]: every element has its own range
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
                f"the mlp encoder's hidden = {list(hidden)} must be a list of widths", "for example hidden: [64, 64]"
            )
        self.flat = Flat(spec)
        self.layers = Mlp([self.flat.size, *hidden], activation)
        self.size = hidden[-1]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers.forward(self.flat.forward(x))


# ------------------------------------------------------------------------------------------------- images


def image_shape(spec: ArraySpec, name: str, min_side: int = 1) -> tuple[int, int, int, bool]:
    """Channels, height, width, and whether channels come first. Raises UseError if it is not an image or too small."""
    if not spec.image or len(spec.shape) != 3:
        raise UseError(
            f"the {name} encoder needs an image, but the observation is a {spec.kind} of shape {spec.shape}",
            "use encoder: auto, or name the image under model.encoders",
        )
    first = spec.shape[0] < spec.shape[2]
    channels, height, width = spec.shape if first else (spec.shape[2], spec.shape[0], spec.shape[1])
    if min(height, width) < min_side:
        raise UseError(
            f"the {name} encoder needs at least {min_side} x {min_side} pixels, but the image has {height} x {width}",
            "use the encoder simple or resnet",
        )
    return channels, height, width, first


def bytes_to_float(x: Tensor) -> Tensor:
    """Scale bytes to 0..1; other types stay unchanged."""
    return x.to(torch.float32).div_(255.0) if x.dtype is torch.uint8 else x


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


# --------------------------------------------------------------------------------------------------- words


class Text(nn.Module):
    """Hashed words [N, words], padded with 0: embeddings, then the state of a GRU after the last word."""

    def __init__(self, spec: ArraySpec, *, size: int = 64, embedding: int = 32) -> None:
        super().__init__()
        if spec.kind != "text":
            raise UseError(f"the text encoder needs text, but the observation is a {spec.kind}", "use encoder: auto")
        self.table = nn.Embedding(spec.options[0] if spec.options else WORDS, embedding, padding_idx=0)
        self.core = nn.GRU(embedding, size, batch_first=True)
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.core(self.table(x))  # [N, words, size]
        length = (x != 0).sum(1)
        last = (length - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, self.size)
        return torch.gather(out, 1, last).squeeze(1) * (length > 0).unsqueeze(1)


def auto(spec: ArraySpec) -> nn.Module:
    """Choose by the observation: text, small or large image, or numbers."""
    if spec.kind == "text":
        return Text(spec)
    if spec.image:
        _, height, width, _ = image_shape(spec, "auto")
        return Nature(spec) if min(height, width) >= NATURE_MIN_SIDE else Simple(spec)
    return Flat(spec)
