"""Forward pass of a plain MLP without torch's modules, for acting; `algos.fast_mlp` adds the backward pass.

Plain means: the built-in model on the CPU, without memory or learned encoders, with tanh or relu. Small nets spend most
of their time between operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiltyard.models.actor_critic import ActorCritic
from tiltyard.types import Array

SINGLE_THREAD = 64**3  # multiplications; up to here numpy's matrix product is single-threaded and faster than torch's


class Layer(NamedTuple):
    """Views of a linear layer's parameters or of their gradients: [outputs, inputs] and [outputs]."""

    weight: Tensor
    bias: Tensor
    transposed: Tensor  # the weight as [inputs, outputs]
    transposed_array: Array  # the same memory as an array
    bias_array: Array


class Layers(NamedTuple):
    """The policy head is on the first tower, the value head on the last, which may be the same."""

    towers: list[list[Layer]]
    policy: Layer
    value: Layer


class Dense:
    """The layers of one model. Its parameters may move, into the learner's vector or to a device."""

    def __init__(self, model: ActorCritic) -> None:
        towers = [model.actor.hidden] if model.critic is None else [model.actor.hidden, model.critic.hidden]
        self._linears = [_linears(tower) for tower in towers]
        self._heads = _linears(model.policy_head) + _linears(model.value_head)
        self._weights = [linear.weight for group in (*self._linears, self._heads) for linear in group]
        self._pointers: list[int] = []
        self._layers: Layers | None = None
        self.squash, self.unsquash = RULES[model.actor.hidden.activation]
        self.identity_obs = model.actor.identity_obs  # the only observation, if it needs no encoder
        self.encoded = model.actor.encoded

    def layers(self) -> Layers | None:
        """Views of the parameters; None unless they are on the CPU."""
        pointers = [weight.data_ptr() for weight in self._weights]
        if pointers != self._pointers:
            self._pointers = pointers
            own = {x: x.detach() for group in (*self._linears, self._heads) for y in group for x in y.parameters()}
            self._layers = self.views(own) if self._weights[0].device.type == "cpu" else None
        return self._layers

    def views(self, tensors: Mapping[Any, Tensor]) -> Layers:
        """Layers made of one tensor per parameter."""
        *towers, (policy, value) = (
            [_layer(tensors[linear.weight], tensors[linear.bias]) for linear in group]
            for group in (*self._linears, self._heads)
        )
        return Layers(towers, policy, value)

    def forward(self, x: Array, layers: Layers) -> tuple[Array, Array]:
        """[N, inputs] -> parameters [N, outputs] and value [N]."""
        tops = [self._top(x, tower) for tower in layers.towers]
        return _linear(tops[0], layers.policy), _linear(tops[-1], layers.value)[:, 0]

    def params(self, x: Array, layers: Layers) -> Array:
        """Parameters [N, outputs] without the value."""
        return _linear(self._top(x, layers.towers[0]), layers.policy)

    def value(self, x: Array, layers: Layers) -> Array:
        """Value [N] without the parameters."""
        return _linear(self._top(x, layers.towers[-1]), layers.value)[:, 0]

    def _top(self, x: Array, tower: list[Layer]) -> Array:
        for layer in tower:
            x = _linear(x, layer)
            self.squash(x, out=x)
        return x


def is_plain(model: nn.Module) -> bool:
    """Whether `Dense` can compute this model."""
    return (
        isinstance(model, ActorCritic)
        and not model.recurrent
        and not any(True for _ in model.actor.encoders.parameters())
        and model.actor.hidden.activation in RULES
    )


def _linears(layers: nn.Module) -> list[nn.Linear]:
    return [cast(nn.Linear, layer) for layer in layers.children()]


def _layer(weight: Tensor, bias: Tensor) -> Layer:
    return Layer(weight, bias, weight.t(), weight.t().numpy(), bias.numpy())


def _linear(x: Array, layer: Layer) -> Array:
    """x W' + b"""
    if len(x) * layer.transposed_array.size > SINGLE_THREAD:
        return torch.addmm(layer.bias, torch.from_numpy(x), layer.transposed).numpy()
    out = x @ layer.transposed_array
    out += layer.bias_array
    return out


# Looked up once: torch.ops searches at every access.
TANH_BACKWARD = torch.ops.aten.tanh_backward.grad_input
RELU_BACKWARD = torch.ops.aten.threshold_backward.grad_input


def _from_tanh(flow: Tensor, out: Tensor) -> None:
    TANH_BACKWARD(flow, out, grad_input=flow)


def _from_relu(flow: Tensor, out: Tensor) -> None:
    RELU_BACKWARD(flow, out, 0.0, grad_input=flow)


def _relu(x: Array, out: Array) -> None:
    np.maximum(x, np.float32(0), out=out)


# Activation: in-place forward, and backward given its output.
RULES: dict[Callable[[Tensor], Tensor], tuple[Callable[..., Any], Callable[[Tensor, Tensor], None]]] = {
    torch.tanh: (np.tanh, _from_tanh),
    F.relu: (_relu, _from_relu),
}
