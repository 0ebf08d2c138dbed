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
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiltyard.errors import UseError
from tiltyard.models.image_encoders import NATURE_MIN_SIDE, Nature, Simple, image_shape
from tiltyard.models.layers import Mlp
from tiltyard.types import ArraySpec

BUILTIN_ENCODERS = {
    "auto": "tiltyard.models.encoders:auto",
    "mlp": "tiltyard.models.encoders:MlpEncoder",
    "simple": "tiltyard.models.image_encoders:Simple",
    "nature": "tiltyard.models.image_encoders:Nature",
    "impala": "tiltyard.models.image_encoders:Impala",
    "resnet": "tiltyard.models.image_encoders:ResNet",
    "text": "tiltyard.models.encoders:Text",
}
IMAGE_ENCODERS = ("simple", "nature", "impala", "resnet")
MAX_ONE_HOT = 1024  # categories; beyond it they get a learned embedding
EMBEDDING = 64
WORDS = 4096  # hashed word ids are 1..4095, 0 is padding


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
