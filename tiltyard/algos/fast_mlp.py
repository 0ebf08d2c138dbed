"""Dense nets by hand: forward and backward of the plain case without autograd, two to three times as fast.

The plain case is the built-in model without memory, on the CPU, whose encoders have nothing to learn (vectors of
numbers, categories) and whose activation is tanh or relu; everything else goes through autograd. Small nets spend most
of their time between operations: here are two per layer forwards, four backwards, into memory that is kept.

    x --W1,b1--> h1 --W2,b2--> h2 --head--> out          by_W2 = by_z2' h1     by_z1 = (by_z2 W2) * act'(h1)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from tiltyard.models.actor_critic import ActorCritic

Array = NDArray[Any]

ALONE = 64**3  # multiplications up to which numpy's matrix product starts no threads and costs less than torch's
ROOMS = 8  # batch sizes that memory is kept for: minibatches of one update differ by one


class Layer(NamedTuple):
    """A linear layer's parameters where they are now, or their gradients: [outputs, inputs] and [outputs]."""

    weight: Tensor
    bias: Tensor
    turned: Tensor  # the weight as [inputs, outputs]
    turned_array: Array  # the same memory as an array
    bias_array: Array


class Layers(NamedTuple):
    """The policy head sits on the first tower, the value head on the last: maybe the same."""

    towers: list[list[Layer]]
    policy: Layer
    value: Layer


class Dense:
    """The layers of one model, wherever its parameters are: they move into the learner's vector, or to a device."""

    def __init__(self, model: ActorCritic) -> None:
        towers = [model.actor.hidden] if model.critic is None else [model.actor.hidden, model.critic.hidden]
        self._linears = [_linears(tower) for tower in towers]
        self._heads = _linears(model.policy_head) + _linears(model.value_head)
        self._weights = [linear.weight for group in (*self._linears, self._heads) for linear in group]
        self._homes: list[int] = []
        self._layers: Layers | None = None
        self.squash, self.unsquash = RULES[model.actor.hidden.activation]
        self.identity_obs = model.actor.identity_obs  # the one observation that needs no encoder, if it is so
        self.encoded = model.actor.encoded

    def layers(self) -> Layers | None:
        """Views of the parameters; None unless they are on the CPU."""
        homes = [weight.data_ptr() for weight in self._weights]
        if homes != self._homes:
            self._homes = homes
            own = {x: x.detach() for group in (*self._linears, self._heads) for y in group for x in y.parameters()}
            self._layers = self.views(own) if self._weights[0].device.type == "cpu" else None
        return self._layers

    def views(self, tensors: Mapping[Any, Tensor]) -> Layers:
        """Tensors that are given by parameter, put in order."""
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
        """The parameters alone."""
        return _linear(self._top(x, layers.towers[0]), layers.policy)

    def value(self, x: Array, layers: Layers) -> Array:
        """The value alone."""
        return _linear(self._top(x, layers.towers[-1]), layers.value)[:, 0]

    def _top(self, x: Array, tower: list[Layer]) -> Array:
        for layer in tower:
            x = _linear(x, layer)
            self.squash(x, out=x)
        return x


class Buffers:
    """Memory for batches of one size: what layers put out, and gradients on their way back."""

    def __init__(self, rows: int, layers: Layers) -> None:
        def both(width: int) -> tuple[Tensor, Array]:
            tensor = torch.empty(rows, width)
            return tensor, tensor.numpy()

        self.outs = [[both(len(layer.bias)) for layer in tower] for tower in layers.towers]
        self.params, self.value = both(len(layers.policy.bias)), both(1)
        flows = [torch.empty(rows, layer.weight.shape[1]) for layer in (*layers.towers[0][1:], layers.policy)]
        self.flows = [(flow, flow.t()) for flow in flows]  # by what came into each layer; towers are equally wide


class Learning:
    """`forward` and then `backward` on the same batch; gradients are written where `into` says."""

    def __init__(self, dense: Dense, into: Layers) -> None:
        self._dense, self._into = dense, into
        self._rooms: dict[int, Buffers] = {}

    def forward(self, x: Tensor) -> tuple[Array, Array]:
        """[N, inputs] -> parameters [N, outputs] and value [N]; valid until the next call."""
        layers = self._dense.layers()
        assert layers is not None
        if len(x) not in self._rooms:
            if len(self._rooms) == ROOMS:
                self._rooms.clear()
            self._rooms[len(x)] = Buffers(len(x), layers)
        room, squash = self._rooms[len(x)], self._dense.squash
        tops = []
        for tower, outs in zip(layers.towers, room.outs, strict=True):
            top = x
            for layer, (out, array) in zip(tower, outs, strict=True):
                torch.addmm(layer.bias, top, layer.turned, out=out)
                squash(array, out=array)
                top = out
            tops.append(top)
        torch.addmm(layers.policy.bias, tops[0], layers.policy.turned, out=room.params[0])
        torch.addmm(layers.value.bias, tops[-1], layers.value.turned, out=room.value[0])
        self._last = x, room, tops, layers
        return room.params[1], room.value[1][:, 0]

    def backward(self, by_params: Array, by_value: Array) -> None:
        """The gradients of all layers, from what the loss changes by with the parameters and with the value."""
        x, room, tops, layers = self._last
        by_policy, by_worth = torch.from_numpy(by_params), torch.from_numpy(by_value).unsqueeze(1)
        _differentiate(by_policy, by_policy.t(), tops[0], self._into.policy)
        _differentiate(by_worth, by_worth.t(), tops[-1], self._into.value)
        for at, tower in enumerate(layers.towers):
            flow, turned = room.flows[-1]
            if at == 0:
                torch.mm(by_policy, layers.policy.weight, out=flow)
            if at == len(layers.towers) - 1:
                worth = layers.value.weight
                torch.mm(by_worth, worth, out=flow) if at else flow.addmm_(by_worth, worth)
            for depth in range(len(tower) - 1, -1, -1):
                self._dense.unsquash(flow, room.outs[at][depth][0])
                fed = room.outs[at][depth - 1][0] if depth else x
                _differentiate(flow, turned, fed, self._into.towers[at][depth])
                if depth:
                    by, (flow, turned) = flow, room.flows[depth - 1]
                    torch.mm(by, tower[depth].weight, out=flow)


def is_plain(model: nn.Module) -> bool:
    """Whether `Dense` computes what the model does."""
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
    if len(x) * layer.turned_array.size > ALONE:
        return torch.addmm(layer.bias, torch.from_numpy(x), layer.turned).numpy()
    out = x @ layer.turned_array
    out += layer.bias_array
    return out


def _differentiate(by: Tensor, turned: Tensor, x: Tensor, found: Layer) -> None:
    """The gradients of a layer that was fed x, from that of what it put out, [N, outputs] and [outputs, N]."""
    torch.mm(turned, x, out=found.weight)
    torch.sum(by, 0, out=found.bias)


# Looked up once: torch.ops finds its operations anew at every call.
TANH_BACKWARD = torch.ops.aten.tanh_backward.grad_input
RELU_BACKWARD = torch.ops.aten.threshold_backward.grad_input


def _from_tanh(flow: Tensor, out: Tensor) -> None:
    TANH_BACKWARD(flow, out, grad_input=flow)


def _from_relu(flow: Tensor, out: Tensor) -> None:
    RELU_BACKWARD(flow, out, 0.0, grad_input=flow)


def _relu(x: Array, out: Array) -> None:
    np.maximum(x, np.float32(0), out=out)


# Activation: in place forwards, and backwards through it given what it put out.
RULES: dict[Callable[[Tensor], Tensor], tuple[Callable[..., Any], Callable[[Tensor, Tensor], None]]] = {
    torch.tanh: (np.tanh, _from_tanh),
    F.relu: (_relu, _from_relu),
}
