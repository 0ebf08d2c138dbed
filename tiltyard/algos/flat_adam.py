"""Adam on one vector that holds all parameters of a net, so that a gradient step is a dozen operations.

    vector   |-- a.weight --|- a.bias -|.|---- b.weight ----|...      each parameter of the net is a view into it
    moments  |-- a.weight --|- a.bias -|.|---- b.weight ----|...      saved by parameter name

Load weights in place, and choose the device before. Each parameter starts at a cache line, padded with zeros: elsewhere
a matrix library may sum in another order, and a worker's copy of the net must give the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from tiltyard.errors import UseError
from tiltyard.processes.resources import CACHE_LINE
from tiltyard.types import Arrays, Tree

BETA1, BETA2 = 0.9, 0.999


class Adam:
    """Kingma & Ba 2015, algorithm 1, with bias correction."""

    def __init__(self, net: nn.Module, eps: float) -> None:
        named = [(name, parameter) for name, parameter in net.named_parameters() if parameter.requires_grad]
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.eps = eps
        line = CACHE_LINE // self.parameters[0].element_size()
        self._gaps = [self.parameters[0].new_zeros(-parameter.numel() % line) for parameter in self.parameters]
        self.vector = torch.cat(self._padded([parameter.detach() for parameter in self.parameters]))
        self.on_cpu = self.vector.device.type == "cpu"
        self._count = torch.zeros((), device=self.vector.device)  # gradient steps taken
        self.skip = torch.zeros((), dtype=torch.bool, device=self.vector.device)
        """take no more steps in this update"""
        for parameter, part in zip(self.parameters, self.parts(self.vector), strict=True):
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

    def parts(self, vector: Tensor) -> list[Tensor]:
        """Views of a vector with the parameters' shapes."""
        sizes = [parameter.numel() + len(gap) for parameter, gap in zip(self.parameters, self._gaps, strict=True)]
        return [
            part[: parameter.numel()].view(parameter.shape)
            for part, parameter in zip(torch.split(vector, sizes), self.parameters, strict=True)
        ]

    def differentiate(self, loss: Tensor) -> None:
        """Compute the gradient by autograd; unused parameters get zeros. It is NaN if the loss is not finite."""
        parts = torch.autograd.grad(loss, self.parameters, allow_unused=True, materialize_grads=True)
        torch.cat(self._padded(parts), out=self.gradient)
        self.gradient[0] += 0.0 * loss.detach()  # every learner sees it in the summed gradient

    def gradient_parts(self) -> list[Tensor]:
        """The gradient by parameter, in the order of `names`."""
        return self.parts(self.gradient)

    def step(self, lr: float, max_norm: float | None = None) -> float | Tensor:
        """Take one step down the gradient, clipped to `max_norm`; returns its norm before the clipping.

        A norm that is not finite sets `skip`. On an accelerator the norm is a tensor, to be read after the update.
        """
        norm: float | Tensor = torch.linalg.vector_norm(self.gradient)
        skipped = None
        if self.on_cpu:
            norm = float(norm)
            if not math.isfinite(norm):
                self.skip.fill_(True)
                return norm
            if max_norm is not None and norm > max_norm:
                self.gradient.mul_(max_norm / norm)
        else:
            assert isinstance(norm, Tensor)
            self.skip |= ~norm.isfinite()
            skipped = self.skip.float()
            if max_norm is not None:
                self.gradient.mul_((max_norm / norm).clamp(max=1.0))
        self._count += 1
        # The kernel of torch.optim.Adam(fused=True); the class around it costs more than the step. It is private:
        # pyproject.toml limits torch to versions in which tests have compared it with torch.optim.Adam.
        torch._fused_adam_(
            [self.vector],
            [self.gradient],
            [self.first],
            [self.second],
            [],
            [self._count],
            lr=lr,
            beta1=BETA1,
            beta2=BETA2,
            weight_decay=0.0,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
            found_inf=skipped,
        )
        if skipped is not None:
            self._count -= skipped
        return norm

    @property
    def steps(self) -> int:
        """Gradient steps taken; exact up to 2**24, from where on Adam does not depend on it."""
        return int(self._count)

    def tensors(self) -> list[Tensor]:
        """All of its state, the parameters included."""
        return [self.vector, self.first, self.second, self._count]

    def save(self) -> Tree:
        """Its state; on the CPU the arrays share its memory."""
        return {"steps": self.steps, "first": self._named(self.first), "second": self._named(self.second)}

    def _named(self, vector: Tensor) -> Arrays:
        return {name: part.cpu().numpy() for name, part in zip(self.names, self.parts(vector), strict=True)}

    def load(self, tree: Tree) -> None:
        """Continue from `save`; other parameters raise a UseError."""
        for vector, moments in ((self.first, tree["first"]), (self.second, tree["second"])):
            for name, part in zip(self.names, self.parts(vector), strict=True):
                found = np.shape(moments[name]) if name in moments else None
                if found != tuple(part.shape):
                    raise UseError(
                        f"the saved optimiser has {name} with shape {found}, but the model has {tuple(part.shape)}",
                        "resume with the model settings of the checkpoint, or start a new run with model.init",
                    )
                part.copy_(torch.as_tensor(moments[name]))
        self._count.fill_(int(tree["steps"]))


class Backup:
    """A copy of the policy and its optimiser from before an update, to go back to."""

    def __init__(self, net: nn.Module, adam: Adam) -> None:
        self._net, self._adam = net, adam
        self._copies = [torch.empty_like(each) for each in self._tensors()]

    def _tensors(self) -> list[torch.Tensor]:
        """The tensors to copy, looked up each time: a model may replace a buffer."""
        return [*self._adam.tensors(), *self._net.buffers()]

    def save(self) -> None:
        """Copy everything, a few megabytes at most."""
        for kept, live in zip(self._copies, self._tensors(), strict=True):
            kept.copy_(live)

    def restore(self) -> None:
        for live, kept in zip(self._tensors(), self._copies, strict=True):
            live.copy_(kept)
