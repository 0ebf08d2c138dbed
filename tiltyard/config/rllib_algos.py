"""Settings of the algorithms that only RLlib has; they need engine.kind = rllib."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from tiltyard.config.fields import Count, CountOrZero, Finite, NotNegative, Positive, Settings, Unit, Whole
from tiltyard.config.schedules import Linear, Scheduled


class _Sampling(Settings):
    """Settings of algorithms whose runners sample while the learner learns."""

    id: str
    rollout: Whole = Field(default=50, ge=1, le=1_000_000)
    """Env steps per env copy that a runner sends to the learner at once."""
    batch: Count = 500
    """Env steps per update and learner."""
    lr: Scheduled = 5e-4
    """Learning rate of Adam, a number or a schedule."""
    gamma: Unit = 0.99
    """Discount factor per env step."""
    value_coef: NotNegative = 0.5
    """Weight of the value loss."""
    entropy: Scheduled = 0.01
    """Weight of the entropy bonus."""
    rho_clip: Positive = 1.0
    """Upper bound of V-trace's importance ratios."""
    max_grad_norm: Positive | None = 40.0
    """Maximum gradient norm; null turns clipping off."""
    adam_eps: Positive = 1e-5
    """Epsilon of Adam."""


class Impala(_Sampling):
    """RLlib's IMPALA: runners sample while the learner learns, and V-trace corrects for the age of the samples."""

    id: Literal["impala"]


class Appo(_Sampling):
    """RLlib's asynchronous PPO: IMPALA's sampling and V-trace with PPO's clipped loss and a target policy."""

    id: Literal["appo"]
    clip: Positive = 0.4
    """Clip range of the probability ratio."""
    kl: NotNegative = 0.0
    """Initial weight of the KL penalty towards the target policy, adapted to reach `kl_target`; 0 turns it off."""
    kl_target: Positive = 0.01
    """Target KL divergence."""
    target_every: Count = 2
    """Updates between copies of the weights into the target policy."""


class Replay(Settings):
    """The replay buffer."""

    size: Count = 50_000
    """Capacity in env steps; the oldest episodes are dropped first."""
    prioritised: bool = True
    """Prioritised replay: sample by TD error."""
    alpha: Unit = 0.6
    """Exponent of the priorities; 0 samples uniformly."""
    beta: Unit = 0.4
    """Exponent of the importance weights that correct the bias; 1 corrects it fully."""


class Dqn(Settings):
    """RLlib's DQN with optional parts of Rainbow. With `dueling`, the model's outputs are advantages and its value head
    is the value stream."""

    id: Literal["dqn"]
    rollout: Whole = Field(default=1, ge=1, le=1_000_000)
    """Env steps per env copy between updates."""
    batch: Count = 64
    """Env steps per update, sampled from the replay buffer."""
    replays: Positive = 8.0
    """How often each env step is replayed, on average."""
    lr: Scheduled = 5e-4
    """Learning rate of Adam, a number or a schedule."""
    gamma: Unit = 0.99
    """Discount factor per env step."""
    n_step: Whole = Field(default=1, ge=1, le=1000)
    """Number of rewards in an n-step return."""
    double: bool = True
    """Double DQN: choose the next action with the online network, evaluate it with the target network."""
    dueling: bool = True
    """Dueling network. With false, the model's outputs are the Q-values and its value head is not used."""
    epsilon: Scheduled = Linear(kind="linear", start=1.0, end=0.02, over=10_000)
    """Probability of a random action."""
    warmup: CountOrZero = 1000
    """Env steps before the first update."""
    target_every: Count = 500
    """Env steps between copies of the weights into the target network."""
    tau: Unit = 1.0
    """Fraction of the weights that is copied; 1 copies all."""
    replay: Replay = Replay()
    max_grad_norm: Positive | None = 40.0
    """Maximum gradient norm; null turns clipping off."""
    adam_eps: Positive = 1e-5
    """Epsilon of Adam."""


class Sac(Settings):
    """RLlib's soft actor-critic, for bounded continuous actions."""

    id: Literal["sac"]
    rollout: Whole = Field(default=1, ge=1, le=1_000_000)
    """Env steps per env copy between updates."""
    batch: Count = 256
    """Env steps per update, sampled from the replay buffer."""
    replays: Positive = 256.0
    """How often each env step is replayed, on average."""
    lr: Scheduled = 3e-4
    """Learning rate of the actor, a number or a schedule."""
    critic_lr: Scheduled = 3e-4
    """Learning rate of the critics."""
    alpha_lr: Scheduled = 3e-4
    """Learning rate of the temperature alpha."""
    gamma: Unit = 0.99
    """Discount factor per env step."""
    n_step: Whole = Field(default=1, ge=1, le=1000)
    """Number of rewards in an n-step return."""
    alpha: Positive = 1.0
    """Initial temperature: the weight of the entropy."""
    target_entropy: Finite | None = None
    """Target entropy of the temperature. Default: minus the number of action dimensions."""
    warmup: CountOrZero = 1000
    """Env steps before the first update."""
    target_every: CountOrZero = 0
    """Env steps between copies of the critics' weights into the target critics; 0: after every update."""
    tau: Unit = 0.005
    """Fraction of the weights that is copied; 1 copies all."""
    replay: Replay = Replay(size=100_000, prioritised=False)
    max_grad_norm: Positive | None = None
    """Maximum gradient norm; null turns clipping off."""


class NamedSampling(Settings):
    """An RLlib algorithm with RLlib's defaults, loss and names of options."""

    id: Literal["rllib:PPO", "rllib:APPO", "rllib:IMPALA"]
    rollout: Whole = Field(default=50, ge=1, le=1_000_000)
    """Env steps per env copy that a runner sends to the learner at once."""
    options: dict[str, Any] = {}
    """Arguments of RLlib's `AlgorithmConfig.training()`, by RLlib's names."""


class NamedReplaying(Settings):
    """An RLlib algorithm with a replay buffer, with RLlib's defaults, loss and names of options."""

    id: Literal["rllib:DQN", "rllib:SAC", "rllib:TQC"]
    rollout: Whole = Field(default=1, ge=1, le=1_000_000)
    """Env steps per env copy between updates."""
    options: dict[str, Any] = {}
    """Arguments of RLlib's `AlgorithmConfig.training()`, by RLlib's names."""


Named = NamedSampling | NamedReplaying

NAMED = tuple(f"rllib:{name}" for name in ("PPO", "APPO", "IMPALA", "DQN", "SAC", "TQC"))
ONLY_RLLIB = ("impala", "appo", "dqn", "sac", *NAMED)
NOT_NAMED = {  # RLlib's other algorithms, and why they are not supported
    **dict.fromkeys(("BC", "MARWIL", "CQL", "IQL"), "learns from recorded data, which an experiment cannot give"),
    "DreamerV3": "needs its own network and runners, and its policy cannot act without them",
}
