"""A term that keeps the policy close to the one that training started from, for example that of `model.init`.

tiltyard train CartPole-v1 algo.loss=examples/kl_to_reference.py:KlToReference algo.loss.options.weight=0.5
"""

import copy

import torch
from torch import nn

from tiltyard.algos.ppo_loss import net_outputs


class KlToReference(nn.Module):
    """weight * KL(reference || policy). As a module, it is saved with every checkpoint, the reference in it."""

    def __init__(self, net, *, weight: float = 0.1) -> None:
        super().__init__()
        self.reference = copy.deepcopy(net).requires_grad_(False)
        self.weight = weight

    def forward(self, batch, outputs, settings):
        with torch.no_grad():
            reference = net_outputs(self.reference, batch)
        kl = batch.mean(reference.dist.kl(outputs.dist))
        return self.weight * kl, {"kl": kl}
