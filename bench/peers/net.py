"""Networks and loss of our own baselines: the Nature CNN for images, two tanh networks for vectors."""

import torch
from torch import nn


def orthogonal(layer: nn.Linear | nn.Conv2d, gain: float = 2**0.5) -> nn.Module:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Net(nn.Module):
    """A shared Nature CNN for images; two separate tanh networks for vectors."""

    def __init__(self, shape: tuple[int, ...], actions: int, channels_last: bool = False) -> None:
        super().__init__()
        self.channels_last = channels_last
        if len(shape) == 3:
            layers = [(shape[0], 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)]
            convolutions = [x for sizes in layers for x in (orthogonal(nn.Conv2d(*sizes)), nn.ReLU())]
            dense = [nn.Flatten(), orthogonal(nn.Linear(64 * 7 * 7, 512)), nn.ReLU()]
            self.body, self.critic = nn.Sequential(*convolutions, *dense), orthogonal(nn.Linear(512, 1), 1.0)
            self.actor = orthogonal(nn.Linear(512, actions), 0.01)
        else:
            self.body = nn.Identity()
            self.actor = self._tower(shape[0], actions, 0.01)
            self.critic = self._tower(shape[0], 1, 1.0)
        if channels_last:
            self.to(memory_format=torch.channels_last)

    @staticmethod
    def _tower(inputs: int, outputs: int, gain: float) -> nn.Module:
        first, second = orthogonal(nn.Linear(inputs, 64)), orthogonal(nn.Linear(64, 64))
        return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), orthogonal(nn.Linear(64, outputs), gain))

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if obs.dtype == torch.uint8:
            obs = obs.float().div_(255)
            if self.channels_last:
                obs = obs.contiguous(memory_format=torch.channels_last)
        hidden = self.body(obs)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


def loss(net: Net, batch: tuple[torch.Tensor, ...], clip: float, entropy: float) -> torch.Tensor:
    """PPO loss of one minibatch: observations, actions, their old log-probabilities, advantages, returns."""
    obs, action, old, advantage, target = batch
    logits, value = net(obs)
    logs = logits.log_softmax(-1)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    ratio = (logs.gather(1, action[:, None]).squeeze(1) - old).exp()
    gain = torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    spread = -(logs.exp() * logs).sum(-1)
    return -gain.mean() + 0.5 * (value - target).square().mean() - entropy * spread.mean()
