"""What an update changes, as it was before: an update that fails half-way leaves the policies that began it.

Owns copies of a policy's parameters, Adam's moments and the net's statistics. Not schedules and random streams, which
an update that failed has hardly moved.
"""

from __future__ import annotations

import torch
from torch import nn

from tiltyard.algos.flat_adam import Adam


class Undo:
    """`remember`, and then maybe `restore`."""

    def __init__(self, net: nn.Module, adam: Adam) -> None:
        self._net, self._adam = net, adam
        self._kept = [torch.empty_like(each) for each in self._live()]
        self._steps = 0

    def _live(self) -> list[torch.Tensor]:
        """Looked up each time: a model may put another tensor in the place of a buffer."""
        return [self._adam.vector, self._adam.first, self._adam.second, *self._net.buffers()]

    def remember(self) -> None:
        """A copy of some megabytes at most, in one call."""
        torch._foreach_copy_(self._kept, self._live())
        self._steps = self._adam.steps

    def restore(self) -> None:
        torch._foreach_copy_(self._live(), self._kept)
        self._adam.steps = self._steps
