"""Adam on one vector: all parameters of a net laid end to end, so that a gradient step is a dozen operations.

Owns the vector, its gradient and the two moments; not learning rates or what is minimised. Each parameter of the net
becomes a view into the vector (load weights in place, move devices before):

    vector   |-- a.weight --|- a.bias -|.|---- b.weight ----|...
    moments  |-- a.weight --|- a.bias -|.|---- b.weight ----|...      saved by parameter name

Each parameter begins at a full cache line, as it would by itself, with zeros before it where needed: a matrix library
may sum in another order where a matrix begins elsewhere, and a worker's own copy of the net must give the same numbers.
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
        self.vector = torch.cat(self._spaced([parameter.detach() for parameter in self.parameters]))
        self._count = torch.zeros((), device=self.vector.device)  # `steps` for the kernel
        for parameter, part in zip(self.parameters, self._parts(self.vector), strict=True):
            parameter.data = part
        self.gradient = torch.zeros_like(self.vector)
        self.first = torch.zeros_like(self.vector)
        self.second = torch.zeros_like(self.vector)

    def _spaced(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """What makes a vector of parts with the parameters' shapes, laid end to end."""
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
        """Put the gradient of a loss into the vector, given what the loss changes by with each of these outputs of the
        net. Parameters that took no part get zeros."""
        parts = torch.autograd.grad(outputs, self.parameters, by_outputs, allow_unused=True, materialize_grads=True)
        torch.cat(self._spaced(parts), out=self.gradient)

    def norm(self) -> float:
        """Length of the gradient."""
        return float(torch.linalg.vector_norm(self.gradient))

    def gradient_parts(self) -> list[Tensor]:
        """The gradient by parameter, in the order of `names`."""
        return self._parts(self.gradient)

    def step(self, lr: float, scale: float = 1.0) -> None:
        """Move against `scale` times the gradient."""
        self.steps += 1
        if scale != 1.0:
            self.gradient.mul_(scale)
        # The kernel of torch.optim.Adam(fused=True), without that class, which costs more than the step itself. It is
        # private: pyproject.toml limits torch to versions in which the tests have compared it with torch.optim.Adam.
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


class Backup:
    """A copy of the policy and its optimiser from before an update, to go back to."""

    def __init__(self, net: nn.Module, adam: Adam) -> None:
        self._net, self._adam = net, adam
        self._kept = [torch.empty_like(each) for each in self._live()]
        self._steps = 0

    def _live(self) -> list[torch.Tensor]:
        """Looked up each time: a model may put another tensor in the place of a buffer."""
        return [self._adam.vector, self._adam.first, self._adam.second, *self._net.buffers()]

    def save(self) -> None:
        """A copy of some megabytes at most."""
        for kept, live in zip(self._kept, self._live(), strict=True):
            kept.copy_(live)
        self._steps = self._adam.steps

    def restore(self) -> None:
        for live, kept in zip(self._live(), self._kept, strict=True):
            live.copy_(kept)
        self._adam.steps = self._steps
