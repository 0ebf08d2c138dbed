"""REINFORCE with a baseline (Williams 1992), as an algorithm of your own.

tiltyard train CartPole-v1 algo=examples/reinforce.py:Reinforce stop.env_steps=150000
"""

from functools import partial

import numpy as np
import torch

from tiltyard.algos.advantages import Steps, gae
from tiltyard.models.torch_distributions import TorchActionDist


class Reinforce:
    """One gradient step per rollout: log pi(a) times what followed minus the value, which is the baseline."""

    def __init__(self, net, rng, *, lr: float = 5e-3, gamma: float = 0.99, entropy: float = 0.0) -> None:
        self.net, self.rng = net, rng
        self.gamma, self.entropy = gamma, entropy
        self.optimiser = torch.optim.Adam(net.parameters(), lr=lr)

    def update(self, rollout, env_steps):
        steps = Steps(rollout.reward, rollout.value, rollout.bootstrap, rollout.terminated, rollout.truncated)
        # With lambda = 1 these are the discounted returns, bootstrapped where the rollout or an episode is cut.
        advantage, returns = gae(steps, self.gamma, 1.0)
        chosen = advantage[rollout.valid]
        advantage = (advantage - chosen.mean()) / (chosen.std() + 1e-8)

        tensor = partial(torch.as_tensor, device=self.net.device)
        params, value = self.net.unroll(rollout.obs, rollout.state0, tensor(rollout.first))
        mask = None if rollout.mask is None else tensor(rollout.mask)
        dist = TorchActionDist(self.net.spec.action, params, self.net.log_std, mask)
        valid = tensor(rollout.valid)
        log_prob = dist.log_prob(tensor(rollout.action))
        policy = -(log_prob * tensor(advantage))[valid].mean()
        baseline = (value - tensor(returns))[valid].square().mean()
        entropy = dist.entropy()[valid].mean()

        self.optimiser.zero_grad()
        (policy + 0.5 * baseline - self.entropy * entropy).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        self.optimiser.step()
        numbers = {"loss/policy": policy, "loss/value": 0.5 * baseline, "loss/entropy": entropy}
        return {name: x.item() for name, x in numbers.items()} | {"learn/gradient_norm": norm.item()}

    def save(self):
        moments = self.optimiser.state_dict()["state"]
        return {str(i): {name: x.cpu().numpy().copy() for name, x in moment.items()} for i, moment in moments.items()}

    def load(self, tree):
        state = self.optimiser.state_dict()
        state["state"] = {
            int(i): {name: torch.as_tensor(np.asarray(x)) for name, x in moment.items()} for i, moment in tree.items()
        }
        self.optimiser.load_state_dict(state)
