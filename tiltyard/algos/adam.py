"""Adam on one vector: all parameters of a net laid end to end, so that a gradient step is a dozen operations.

Owns the vector, its gradient and the two moments; not learning rates or what is minimised. Each parameter of the net
becomes a view into the vector (load weights in place, move devices before):

    vector   |-- a.weight --|- a.bias -|---- b.weight ----|...
    moments  |-- a.weight --|- a.bias -|---- b.weight ----|...      saved by parameter name
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tiltyard.errors import UseError
from tiltyard.types import Tree

BETA1, BETA2 = 0.9, 0.999


class Adam:
    """Kingma & Ba 2015, algorithm 1, with bias correction."""

    def __init__(self, net: nn.Module, eps: float) -> None:
        named = [(name, parameter) for name, parameter in net.named_parameters() if parameter.requires_grad]
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.eps = eps
        self.steps = 0
        self.vector = torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters])
        for parameter, part in zip(self.parameters, self._parts(self.vector), strict=True):
            parameter.data = part
        self.gradient = torch.zeros_like(self.vector)
        self.first = torch.zeros_like(self.vector)
        self.second = torch.zeros_like(self.vector)

    def _parts(self, vector: Tensor) -> list[Tensor]:
        """Views of a vector with the parameters' shapes."""
        sizes = [parameter.numel() for parameter in self.parameters]
        return [
            part.view(parameter.shape)
            for part, parameter in zip(torch.split(vector, sizes), self.parameters, strict=True)
        ]

    def differentiate(self, loss: Tensor) -> float:
        """Put the gradient of `loss` into the vector; returns its norm. Parameters that took no part get zeros."""
        parts = torch.autograd.grad(loss, self.parameters, allow_unused=True, materialize_grads=True)
        torch.cat([part.reshape(-1) for part in parts], out=self.gradient)
        return float(torch.linalg.vector_norm(self.gradient))

    def gradient_parts(self) -> list[Tensor]:
        """The gradient by parameter, in the order of `names`."""
        return self._parts(self.gradient)

    def step(self, lr: float, scale: float = 1.0) -> None:
        """Move against `scale` times the gradient."""
        self.steps += 1
        if scale != 1.0:
            self.gradient.mul_(scale)
        self.first.lerp_(self.gradient, 1 - BETA1)
        self.second.mul_(BETA2).addcmul_(self.gradient, self.gradient, value=1 - BETA2)
        # m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps), the corrections gathered into two numbers.
        unbias = math.sqrt(1 - BETA2**self.steps)
        spread = self.second.sqrt().add_(self.eps * unbias)
        self.vector.addcdiv_(self.first, spread, value=-lr * unbias / (1 - BETA1**self.steps))

    def save(self) -> Tree:
        return {"steps": self.steps, "first": self._named(self.first), "second": self._named(self.second)}

    def _named(self, vector: Tensor) -> dict[str, NDArray[Any]]:
        return {name: part.cpu().numpy().copy() for name, part in zip(self.names, self._parts(vector), strict=True)}

    def load(self, tree: Tree) -> None:
        """Continue from `save`; another set of parameters is a UseError."""
        for vector, moments in ((self.first, tree["first"]), (self.second, tree["second"])):
            for name, part in zip(self.names, self._parts(vector), strict=True):
                found = np.shape(moments[name]) if name in moments else None
                if found != tuple(part.shape):
                    raise UseError(
                        f"the saved optimiser has {name} of shape {found}, and the model's is {tuple(part.shape)}",
                        "resume with the model settings of the checkpoint, or start a new run with model.init",
                    )
                part.copy_(torch.as_tensor(moments[name]))
        self.steps = int(tree["steps"])
