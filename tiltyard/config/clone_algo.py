"""Settings of behaviour cloning, which learns from a dataset of recorded episodes instead of an env.

engines/cloning.py does it; the env of the experiment is only stepped by evaluations.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tiltyard.config.fields import Count, NotNegative, Positive, Settings, Unit, Whole
from tiltyard.config.schedules import Scheduled


class Clone(Settings):
    """Behaviour cloning: the policy learns the recorded actions of a dataset by maximum likelihood. Env steps count
    recorded steps that were learned from."""

    id: Literal["clone"]
    dataset: str = Field(min_length=1, max_length=4096)
    """Folder of the dataset, as `tiltyard data collect` makes it; relative to the working folder."""
    agents: list[Annotated[str, Field(min_length=1, max_length=200)]] = Field(default=[], max_length=1000)
    """Agents whose episodes are learned from, in a dataset of an env with several. Default: all, by one policy."""
    validation: float = Field(default=0.1, ge=0, lt=1)
    """Fraction of the episodes that is only measured (`loss/validation`) and never learned from; chosen by their seeds,
    so that it stays the same when the dataset grows."""
    batch: Count = 4096
    """Env steps per update."""
    minibatch: Count = 256
    """Env steps per gradient step. With memory, this many are read as `minibatch / model.memory.bptt` episodes in
    parallel."""
    lr: Scheduled = 1e-3
    """Learning rate of Adam, a number or a schedule."""
    entropy: Scheduled = 0.0
    """Weight of the entropy bonus."""
    value_coef: NotNegative = 0.5
    """Weight of the value loss: the critic learns the recorded returns, so that a fork to ppo does not start from a
    random one."""
    gamma: Unit = 0.99
    """Discount factor per env step of these returns."""
    min_log_std: Annotated[float, Field(ge=-20, le=2)] = -3.0
    """Lower bound of the log standard deviation of continuous actions: without noise, a fork to ppo could not
    explore."""
    max_grad_norm: Positive | None = 0.5
    """Maximum gradient norm; null turns clipping off."""
    adam_eps: Positive = 1e-5
    """Epsilon of Adam."""

    @property
    def rollout(self) -> Whole:
        """No rollout: the samples of an update are the batch, whatever the number of envs."""
        return self.batch
