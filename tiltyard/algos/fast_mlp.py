"""PPO's loss and its gradient written out for plain MLPs on the CPU, two to three times as fast as autograd.

`ppo_loss` is the definition, and a test holds this equal to it. `by_x` is the derivative of the loss by x. Each layer
needs two operations forwards and four backwards, into preallocated memory:

    x --W1,b1--> h1 --W2,b2--> h2 --head--> out          by_W2 = by_z2' h1     by_z1 = (by_z2 W2) * act'(h1)
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tiltyard.algos.flat_adam import Adam
from tiltyard.algos.minibatches import Minibatch
from tiltyard.models.dense import Dense, Layer, Layers
from tiltyard.models.distributions import ActionDist, bounded, flat_index, sum_last
from tiltyard.models.policy_net import PolicyNet
from tiltyard.types import Array

BUFFERS = 8  # batch sizes with preallocated memory: minibatches of one update differ by one


def fast_mlp(net: PolicyNet, adam: Adam) -> FastMlp | None:
    """The fast path for this net; None unless it is plain, on the CPU and has no frozen parameters."""
    plain = net.dense is not None and net.dense.layers() is not None
    return FastMlp(net, adam) if plain and len(adam.names) == len([*net.parameters()]) else None


class FastMlp:
    """`ppo_loss` of one net, with its gradient in Adam's vector."""

    def __init__(self, net: PolicyNet, adam: Adam) -> None:
        assert net.dense is not None
        gradients = dict(zip(adam.parameters, adam.gradient_parts(), strict=True))
        self._net, self._dense, self._gradient = net, net.dense, adam.gradient
        self._by_log_std = gradients[net.log_std]
        self._layers = Backprop(net.dense, net.dense.views(gradients))

    def differentiate(self, batch: Minibatch, now: Mapping[str, float]) -> list[float]:
        """Write the gradient; returns the numbers of `Losses` without the total."""
        params, value = self._layers.forward(self._dense.encoded({name: x[0] for name, x in batch.obs.items()}))
        dist = self._net.distribution(params, None if batch.mask is None else batch.mask.numpy()[0])
        action, old_log_prob, advantage = (x.numpy()[0] for x in (batch.action, batch.log_prob, batch.advantage))
        target, valid = batch.target.numpy()[0], None if batch.valid is None else batch.valid.numpy()[0]
        # Means over valid samples are sums with this weight; it is one number if all are valid.
        weight = 1 / batch.count if valid is None else valid / np.float32(batch.count)

        log_ratio = dist.log_prob(action) - old_log_prob
        if valid is not None:
            log_ratio = np.where(valid > 0, log_ratio, np.float32(0))
        ratio = np.exp(log_ratio)
        gain, capped = ratio * advantage, _clip(ratio, 1 - now["clip"], 1 + now["clip"]) * advantage
        policy_loss = -_mean(np.minimum(gain, capped), weight)
        # d ratio / d log_prob = ratio; beyond the clip the gradient is zero.
        by_log_prob = np.where(gain <= capped, -gain, np.float32(0)) * weight

        error = value - target
        squares = np.square(error)
        if "value_clip" in now:
            limit, old_value = now["value_clip"], batch.value.numpy()[0]
            cut = np.square(old_value + _clip(value - old_value, -limit, limit) - target)
            error = np.where((squares > cut) | (np.abs(value - old_value) <= limit), error, 0)
            squares = np.maximum(squares, cut)
        value_loss = 0.5 * _mean(squares, weight)
        by_value = error * (weight * now["value_coef"])

        entropy, excess = _mean(dist.entropy(), weight), ratio - np.float32(1)
        by_entropy = np.full_like(value, -now["entropy"]) * weight if now["entropy"] else None
        if now["kl"]:
            by_log_prob += excess * weight * now["kl"]
        by_params, by_log_std = distribution_gradient(dist, action, by_log_prob, by_entropy)
        self._layers.backward(by_params, by_value)
        if by_log_std.size:
            self._by_log_std.copy_(torch.from_numpy(by_log_std))
        if not math.isfinite(policy_loss + value_loss + entropy):
            self._gradient.fill_(math.nan)  # every learner sees it in the summed gradient
        clip_fraction = _mean(np.abs(excess) > now["clip"], weight)
        return [policy_loss, value_loss, entropy, _mean(excess - log_ratio, weight), clip_fraction]


def distribution_gradient(
    dist: ActionDist, action: Array, by_log_prob: Array, by_entropy: Array | None
) -> tuple[Array, Array]:
    """Gradients of a loss by the parameters [..., outputs] and by log_std, given those by each log probability and
    each entropy (None: zero), both [...].

    categorical   d log p(a) = [a] - p          dH = -p (log p + H)
    binary        d log p(a) = a - p            dH = -p (1 - p) logit
    continuous    d log p(a) = (a - m) / s^2    dH = 0           and by log_std: ((a - m) / s)^2 - 1, and 1
    """
    by_params, by_log_std = [], []
    log_prob_grad = by_log_prob[..., None]
    entropy_grad = None if by_entropy is None else by_entropy[..., None]
    for part, at, params, probs_or_std, _ in dist.parts:
        actions = action[..., at : at + part.columns]
        if part.kind == "categorical":
            by = probs_or_std * -log_prob_grad
            by.reshape(-1)[flat_index(actions, part.options)] += by_log_prob.reshape(-1)
            if entropy_grad is not None:
                surprise = probs_or_std * params
                by -= (surprise - probs_or_std * sum_last(surprise)[..., None]) * entropy_grad
        elif part.kind == "binary":
            by = (actions - probs_or_std) * log_prob_grad
            if entropy_grad is not None:
                by -= probs_or_std * (1 - probs_or_std) * params * entropy_grad
        else:
            scaled = (actions - params) / probs_or_std
            by = scaled / probs_or_std * log_prob_grad
            inside = np.array(bounded(part))
            if inside.any():
                by *= np.where(inside, 1 - np.square(params), np.float32(1))  # through the tanh
            rows = ((np.square(scaled) - 1) * log_prob_grad).reshape(-1, part.columns)
            by_log_std.append(rows.sum(0) + (0.0 if by_entropy is None else by_entropy.sum()))
        by_params.append(by)
    none = np.zeros(0, np.float32)
    return (
        by_params[0] if len(by_params) == 1 else np.concatenate(by_params, -1),
        np.concatenate(by_log_std) if by_log_std else none,
    )


class Buffers:
    """Memory for batches of one size: layer outputs and gradients."""

    def __init__(self, rows: int, layers: Layers) -> None:
        def both(width: int) -> tuple[Tensor, Array]:
            tensor = torch.empty(rows, width)
            return tensor, tensor.numpy()

        self.outs = [[both(len(layer.bias)) for layer in tower] for tower in layers.towers]
        self.params, self.value = both(len(layers.policy.bias)), both(1)
        flows = [torch.empty(rows, layer.weight.shape[1]) for layer in (*layers.towers[0][1:], layers.policy)]
        self.flows = [(flow, flow.t()) for flow in flows]  # gradient by each layer's input; towers are equally wide


class Backprop:
    """`forward`, then `backward` on the same batch; gradients are written to `into`."""

    def __init__(self, dense: Dense, into: Layers) -> None:
        self._dense, self._into = dense, into
        self._buffers: dict[int, Buffers] = {}

    def forward(self, x: Tensor) -> tuple[Array, Array]:
        """[N, inputs] -> parameters [N, outputs] and value [N]; valid until the next call."""
        layers = self._dense.layers()
        assert layers is not None
        if len(x) not in self._buffers:
            if len(self._buffers) == BUFFERS:
                self._buffers.clear()
            self._buffers[len(x)] = Buffers(len(x), layers)
        buffers, squash = self._buffers[len(x)], self._dense.squash
        tops = []
        for tower, outs in zip(layers.towers, buffers.outs, strict=True):
            top = x
            for layer, (out, array) in zip(tower, outs, strict=True):
                torch.addmm(layer.bias, top, layer.transposed, out=out)
                squash(array, out=array)
                top = out
            tops.append(top)
        torch.addmm(layers.policy.bias, tops[0], layers.policy.transposed, out=buffers.params[0])
        torch.addmm(layers.value.bias, tops[-1], layers.value.transposed, out=buffers.value[0])
        self._last = x, buffers, tops, layers
        return buffers.params[1], buffers.value[1][:, 0]

    def backward(self, by_params: Array, by_value: Array) -> None:
        """Write the gradients of all layers, given those by the parameters and by the value."""
        x, buffers, tops, layers = self._last
        by_policy, by_values = torch.from_numpy(by_params), torch.from_numpy(by_value).unsqueeze(1)
        _differentiate(by_policy, by_policy.t(), tops[0], self._into.policy)
        _differentiate(by_values, by_values.t(), tops[-1], self._into.value)
        for at, tower in enumerate(layers.towers):
            flow, transposed = buffers.flows[-1]
            if at == 0:
                torch.mm(by_policy, layers.policy.weight, out=flow)
            if at == len(layers.towers) - 1:
                value_weight = layers.value.weight
                torch.mm(by_values, value_weight, out=flow) if at else flow.addmm_(by_values, value_weight)
            for depth in range(len(tower) - 1, -1, -1):
                self._dense.unsquash(flow, buffers.outs[at][depth][0])
                fed = buffers.outs[at][depth - 1][0] if depth else x
                _differentiate(flow, transposed, fed, self._into.towers[at][depth])
                if depth:
                    by, (flow, transposed) = flow, buffers.flows[depth - 1]
                    torch.mm(by, tower[depth].weight, out=flow)


def _differentiate(by: Tensor, transposed: Tensor, x: Tensor, found: Layer) -> None:
    """Gradients of a layer with input x, given that of its output as [N, outputs] and as [outputs, N]."""
    torch.mm(transposed, x, out=found.weight)
    torch.sum(by, 0, out=found.bias)


def _mean(x: Array, weight: Array | float) -> float:
    return float(x.sum()) * weight if isinstance(weight, float) else float((x * weight).sum())


def _clip(x: Array, low: float, high: float) -> Array:
    return np.minimum(np.maximum(x, low), high)  # twice as fast as np.clip on short arrays
