"""Adam on one vector that holds all parameters of a net, so that a gradient step is a dozen operations.

    vector   |-- a.weight --|- a.bias -|.|---- b.weight ----|...      each parameter of the net is a view into it
    moments  |-- a.weight --|- a.bias -|.|---- b.weight ----|...      saved by parameter name

Load weights in place, and choose the device before. Each parameter starts at a cache line, padded with zeros: elsewhere
a matrix library may sum in another order, and a worker's copy of the net must give the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tiltyard.errors import UseError
from tiltyard.processes.resources import CACHE_LINE
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
        line = CACHE_LINE // self.parameters[0].element_size()
        self._gaps = [self.parameters[0].new_zeros(-parameter.numel() % line) for parameter in self.parameters]
        self.vector = torch.cat(self._padded([parameter.detach() for parameter in self.parameters]))
        self._count = torch.zeros((), device=self.vector.device)  # `steps` for the kernel
        for parameter, part in zip(self.parameters, self._parts(self.vector), strict=True):
            parameter.data = part
        self.gradient = torch.zeros_like(self.vector)
        self.first = torch.zeros_like(self.vector)
        self.second = torch.zeros_like(self.vector)

    def _padded(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The parts and gaps to concatenate into a vector."""
        pieces = []
        for part, gap in zip(parts, self._gaps, strict=True):
            pieces.append(part.reshape(-1))
            if len(gap):
                pieces.append(gap)
        return pieces

    def _parts(self, vector: Tensor) -> list[Tensor]:
        """Views of a vector with the parameters' shapes."""
        sizes = [parameter.numel() + len(gap) for parameter, gap in zip(self.parameters, self._gaps, strict=True)]
        return [
            part[: parameter.numel()].view(parameter.shape)
            for part, parameter in zip(torch.split(vector, sizes), self.parameters, strict=True)
        ]

    def differentiate(self, outputs: Sequence[Tensor], by_outputs: Sequence[Tensor]) -> None:
        """Compute the gradient by autograd, given that by the net's outputs; unused parameters get zeros."""
        parts = torch.autograd.grad(outputs, self.parameters, by_outputs, allow_unused=True, materialize_grads=True)
        torch.cat(self._padded(parts), out=self.gradient)

    def norm(self) -> float:
        """Norm of the gradient."""
        return float(torch.linalg.vector_norm(self.gradient))

    def gradient_parts(self) -> list[Tensor]:
        """The gradient by parameter, in the order of `names`."""
        return self._parts(self.gradient)

    def step(self, lr: float, scale: float = 1.0) -> None:
        """Take one step down `scale` times the gradient."""
        self.steps += 1
        if scale != 1.0:
            self.gradient.mul_(scale)
        # The kernel of torch.optim.Adam(fused=True); the class around it costs more than the step. It is private:
        # pyproject.toml limits torch to versions in which tests have compared it with torch.optim.Adam.
        torch._fused_adam_(
            [self.vector],
            [self.gradient],
            [self.first],
            [self.second],
            [],
            [self._count.fill_(self.steps)],
            lr=lr,
            beta1=BETA1,
            beta2=BETA2,
            weight_decay=0.0,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )

    def save(self) -> Tree:
        return {"steps": self.steps, "first": self._named(self.first), "second": self._named(self.second)}

    def _named(self, vector: Tensor) -> dict[str, NDArray[Any]]:
        return {name: part.cpu().numpy().copy() for name, part in zip(self.names, self._parts(vector), strict=True)}

    def load(self, tree: Tree) -> None:
        """Continue from `save`; other parameters raise a UseError."""
        for vector, moments in ((self.first, tree["first"]), (self.second, tree["second"])):
            for name, part in zip(self.names, self._parts(vector), strict=True):
                found = np.shape(moments[name]) if name in moments else None
                if found != tuple(part.shape):
                    raise UseError(
                        f"the saved optimiser has {name} with shape {found}, but the model has {tuple(part.shape)}",
                        "resume with the model settings of the checkpoint, or start a new run with model.init",
                    )
                part.copy_(torch.as_tensor(moments[name]))
        self.steps = int(tree["steps"])


class Backup:
    """A copy of the policy and its optimiser from before an update, to go back to."""

    def __init__(self, net: nn.Module, adam: Adam) -> None:
        self._net, self._adam = net, adam
        self._copies = [torch.empty_like(each) for each in self._tensors()]
        self._steps = 0

    def _tensors(self) -> list[torch.Tensor]:
        """The tensors to copy, looked up each time: a model may replace a buffer."""
        return [self._adam.vector, self._adam.first, self._adam.second, *self._net.buffers()]

    def save(self) -> None:
        """Copy everything, a few megabytes at most."""
        for kept, live in zip(self._copies, self._tensors(), strict=True):
            kept.copy_(live)
        self._steps = self._adam.steps

    def restore(self) -> None:
        for live, kept in zip(self._tensors(), self._copies, strict=True):
            live.copy_(kept)
        self._adam.steps = self._steps
