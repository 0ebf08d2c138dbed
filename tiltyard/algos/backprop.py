"""Forward and backward pass of a policy net: plain MLPs with `fast_mlp`, everything else with autograd.

The gradient goes into Adam's vector; the loss is computed elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from tiltyard.algos.fast_mlp import Learning
from tiltyard.algos.flat_adam import Adam
from tiltyard.models.policy_net import PolicyNet

Array = NDArray[Any]


class Backprop:
    """One `forward`, then one `backward` for the same minibatch."""

    def __init__(self, net: PolicyNet, adam: Adam) -> None:
        self._net, self._adam = net, adam
        gradients = dict(zip(adam.parameters, adam.gradient_parts(), strict=True))
        self._by_log_std = gradients.get(net.log_std)
        self._graph: tuple[Tensor, Tensor] | None = None
        # Frozen parameters are not in Adam's vector; only autograd can leave them out.
        plain = net.dense is not None and net.dense.layers() is not None and len(gradients) == len([*net.parameters()])
        self.dense = Learning(net.dense, net.dense.views(gradients)) if net.dense is not None and plain else None

    def forward(self, obs: dict[str, Tensor], state0: dict[str, Tensor], first: Array) -> tuple[Array, Array]:
        """Prepared observations [T, B, ...] -> parameters [T, B, outputs] and normalised value [T, B]."""
        if self.dense is not None and self._net.dense is not None:
            params, value = self.dense.forward(self._net.dense.encoded({name: x[0] for name, x in obs.items()}))
            return params[None], value[None]
        self._graph = self._net.unroll(obs, state0, torch.from_numpy(first).to(self._net.log_std.device), prepared=True)
        return self._graph[0].detach().cpu().numpy(), self._graph[1].detach().cpu().numpy()

    def backward(self, by_params: Array, by_value: Array, by_log_std: Array) -> None:
        """Put the gradient into Adam's vector."""
        if self.dense is not None:
            self.dense.backward(by_params[0], by_value[0])
        else:
            assert self._graph is not None
            device = self._net.log_std.device
            by = [torch.from_numpy(array).to(device) for array in (by_params, by_value)]
            self._adam.differentiate(self._graph, by)
            self._graph = None
        if self._by_log_std is not None and by_log_std.size:
            self._by_log_std.copy_(torch.from_numpy(by_log_std))
