"""What an update changes, as it was before: an update that fails half-way leaves the policy that began it.

Owns copies of the parameters, Adam's moments and the net's statistics. Not schedules and random streams, which an
update that failed has hardly moved.
"""

from __future__ import annotations

import torch
from torch import nn

from tiltyard.algos.adam import Adam


class Undo:
    """`remember`, and then maybe `restore`."""

    def __init__(self, net: nn.Module, adam: Adam) -> None:
        self._adam = adam
        self._live = [adam.vector, adam.first, adam.second, *net.buffers()]
        self._kept = [torch.empty_like(each) for each in self._live]
        self._steps = 0

    def remember(self) -> None:
        """A copy of some megabytes at most, in one call."""
        torch._foreach_copy_(self._kept, self._live)
        self._steps = self._adam.steps

    def restore(self) -> None:
        torch._foreach_copy_(self._live, self._kept)
        self._adam.steps = self._steps
