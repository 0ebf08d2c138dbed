"""A model small enough to commit with a run folder."""

from torch import nn


class CustomModel(nn.Module):
    def __init__(self, spec, outputs, *, width=3):
        super().__init__()
        self.body = nn.Linear(4, width)
        self.actor = nn.Linear(width, outputs)
        self.critic = nn.Linear(width, 1)

    def forward(self, obs):
        features = self.body(obs["obs"]).tanh()
        return self.actor(features), self.critic(features).squeeze(-1)
