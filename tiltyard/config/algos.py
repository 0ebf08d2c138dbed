"""Algorithms and their numbers, and schedules for numbers that change while training.

ppo, a2c                  ours, on every engine (a2c: not on rllib)
appo, impala, dqn, sac    RLlib's: they choose engine.kind = rllib by themselves
rllib:NAME                RLlib's as RLlib has them, with its own names and defaults
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tiltyard.config.fields import Count, CountOrZero, Finite, NotNegative, Positive, Settings, Unit, Whole

# ------------------------------------------------------------------------------------------------ schedules


class Linear(Settings):
    """From `start` to `end` in a straight line, then `end`."""

    kind: Literal["linear"]
    start: NotNegative
    """Value at env step 0."""
    end: NotNegative = 0.0
    """Value from env step `over` on."""
    over: Count | None = None
    """Env steps the line takes; `stop.env_steps` when left out."""


class Piecewise(Settings):
    """Straight lines between points; constant before the first and after the last."""

    kind: Literal["piecewise"]
    points: list[Annotated[list[NotNegative], Field(min_length=2, max_length=2)]] = Field(min_length=1, max_length=1000)
    """[[env steps, value], ...] with growing env steps."""


class KlAdaptive(Settings):
    """Multiplied or divided by `factor` whenever the measured KL leaves [target / 2, target * 2].

    When the policy moves too fast, what sets its step (lr, clip) shrinks and what holds it back (kl, entropy) grows.
    """

    kind: Literal["kl_adaptive"]
    start: Positive
    """Value before the first update."""
    target: Positive = 0.01
    """KL divergence between the policy before and after an update to aim for."""
    factor: float = Field(default=1.5, gt=1, le=10)
    """How much the value changes at a time."""
    min: NotNegative | None = None
    """Never below this; a hundredth of `start` when left out."""
    max: Positive | None = None
    """Never above this; a hundred times `start` when left out."""

    @property
    def lowest(self) -> float:
        return self.start / 100 if self.min is None else self.min

    @property
    def highest(self) -> float:
        return self.start * 100 if self.max is None else self.max


Schedule = Annotated[Linear | Piecewise | KlAdaptive, Field(discriminator="kind")]
Scheduled = Annotated[NotNegative, Field(strict=True)] | Schedule


# ------------------------------------------------------------------------------------------------ ours


class Ppo(Settings):
    """Proximal policy optimisation."""

    id: Literal["ppo"] = "ppo"
    rollout: Whole = Field(default=128, ge=1, le=1_000_000)
    """Env steps of each row per update; the batch is this times the rows."""
    minibatch: Count = 256
    """Env steps per gradient step."""
    epochs: Whole = Field(default=10, ge=1, le=1000)
    """Passes over the batch per update."""
    lr: Scheduled = 1e-3
    """Learning rate of Adam: a number or a schedule."""
    gamma: Unit = 0.99
    """Discount factor per env step."""
    gae_lambda: Unit = 0.95
    """Bias against variance of the advantages: 0 is one-step, 1 is Monte Carlo."""
    advantage: Literal["gae", "vtrace", "clipped_gae"] = "gae"
    """How advantages are made: GAE, V-trace, or GAE with clipped importance ratios (for samples of older policies)."""
    rho_clip: Positive = 1.0
    """Cap of the importance ratios of V-trace and clipped GAE."""
    clip: Scheduled = 0.2
    """How far the probability ratio may move before its gradient is cut."""
    value_clip: Positive | None = None
    """How far a value may move per update, in normalised units; off when left out."""
    value_coef: NotNegative = 0.5
    """Weight of the value loss."""
    entropy: Scheduled = 0.0
    """Weight of the entropy bonus."""
    kl: Scheduled = 0.0
    """Weight of the penalty on the KL divergence from the policy that acted."""
    kl_stop: Positive | None = None
    """Leave the remaining epochs out once the KL divergence exceeds this."""
    max_grad_norm: Positive | None = 0.5
    """Gradients are scaled down to this norm; off with null."""
    normalise_advantage: bool = True
    """Bring the advantages of each minibatch to mean 0 and variance 1."""
    adam_eps: Positive = 1e-5
    """Adam's epsilon."""


class A2c(Settings):
    """Advantage actor-critic: the PPO update with one epoch, the whole batch at once and no clipping."""

    id: Literal["a2c"]
    rollout: Whole = Field(default=16, ge=1, le=1_000_000)
    """Env steps of each row per update."""
    lr: Scheduled = 1e-3
    """Learning rate of Adam: a number or a schedule."""
    gamma: Unit = 0.99
    """Discount factor per env step."""
    gae_lambda: Unit = 1.0
    """Bias against variance of the advantages: 0 is one-step, 1 is Monte Carlo."""
    value_coef: NotNegative = 0.5
    """Weight of the value loss."""
    entropy: Scheduled = 0.0
    """Weight of the entropy bonus."""
    max_grad_norm: Positive | None = 0.5
    """Gradients are scaled down to this norm; off with null."""
    normalise_advantage: bool = False
    """Bring the advantages of the batch to mean 0 and variance 1."""
    adam_eps: Positive = 1e-5
    """Adam's epsilon."""


# ------------------------------------------------------------------------------------------------ RLlib's


class Impala(Settings):
    """RLlib's IMPALA: runners act on while the learner learns, and V-trace corrects for the age of their samples."""

    id: Literal["impala"]
    rollout: Whole = Field(default=50, ge=1, le=1_000_000)
    """Env steps of each row that are sent to the learner at a time."""
    batch: Count = 500
    """Env steps per update, of each learner."""
    lr: Scheduled = 5e-4
    """Learning rate of Adam: a number or a schedule."""
    gamma: Unit = 0.99
    """Discount factor per env step."""
    value_coef: NotNegative = 0.5
    """Weight of the value loss."""
    entropy: Scheduled = 0.01
    """Weight of the entropy bonus."""
    rho_clip: Positive = 1.0
    """Cap of V-trace's importance ratios."""
    max_grad_norm: Positive | None = 40.0
    """Gradients are scaled down to this norm; off with null."""
    adam_eps: Positive = 1e-5
    """Adam's epsilon."""


class Appo(Settings):
    """RLlib's asynchronous PPO: IMPALA's samples and V-trace with PPO's clipped loss and a slower target policy."""

    id: Literal["appo"]
    rollout: Whole = Field(default=50, ge=1, le=1_000_000)
    """Env steps of each row that are sent to the learner at a time."""
    batch: Count = 500
    """Env steps per update, of each learner."""
    lr: Scheduled = 5e-4
    """Learning rate of Adam: a number or a schedule."""
    gamma: Unit = 0.99
    """Discount factor per env step."""
    clip: Positive = 0.4
    """How far the probability ratio may move before its gradient is cut."""
    value_coef: NotNegative = 0.5
    """Weight of the value loss."""
    entropy: Scheduled = 0.01
    """Weight of the entropy bonus."""
    kl: NotNegative = 0.0
    """First weight of the penalty on the KL divergence from the target policy; adapted to `kl_target`. 0 is none."""
    kl_target: Positive = 0.01
    """KL divergence to aim for."""
    rho_clip: Positive = 1.0
    """Cap of V-trace's importance ratios."""
    target_every: Count = 2
    """Updates between copies of the weights into the target policy."""
    max_grad_norm: Positive | None = 40.0
    """Gradients are scaled down to this norm; off with null."""
    adam_eps: Positive = 1e-5
    """Adam's epsilon."""


class Replay(Settings):
    """The replay buffer."""

    size: Count = 50_000
    """Env steps it holds; the oldest episodes make room."""
    prioritised: bool = True
    """Replay what surprised most more often."""
    alpha: Unit = 0.6
    """How much: 0 is not at all."""
    beta: Unit = 0.4
    """How much of the bias this makes is taken back by weights."""


class Dqn(Settings):
    """RLlib's DQN, with the Rainbow parts that can be switched. The model's outputs are advantages, its value the value
    stream of a dueling network."""

    id: Literal["dqn"]
    rollout: Whole = Field(default=1, ge=1, le=1_000_000)
    """Env steps of each row between updates."""
    batch: Count = 64
    """Env steps per update, drawn from the replay buffer."""
    replays: Positive = 8.0
    """How often an env step is learned from, on average."""
    lr: Scheduled = 5e-4
    """Learning rate of Adam: a number or a schedule."""
    gamma: Unit = 0.99
    """Discount factor per env step."""
    n_step: Whole = Field(default=1, ge=1, le=1000)
    """Rewards that are added up before the rest is estimated."""
    double: bool = True
    """Choose the next action by the online network and judge it by the target network."""
    dueling: bool = True
    """Value and advantages apart; else the model's outputs are the Q-values and its value is not used."""
    epsilon: Scheduled = Linear(kind="linear", start=1.0, end=0.02, over=10_000)
    """Share of actions drawn at random."""
    warmup: CountOrZero = 1000
    """Env steps before the first update."""
    target_every: Count = 500
    """Env steps between copies of the weights into the target network."""
    tau: Unit = 1.0
    """How much of the weights is copied: 1 is all."""
    replay: Replay = Replay()
    max_grad_norm: Positive | None = 40.0
    """Gradients are scaled down to this norm; off with null."""
    adam_eps: Positive = 1e-5
    """Adam's epsilon."""


class Sac(Settings):
    """RLlib's soft actor-critic, for actions that are bounded numbers."""

    id: Literal["sac"]
    rollout: Whole = Field(default=1, ge=1, le=1_000_000)
    """Env steps of each row between updates."""
    batch: Count = 256
    """Env steps per update, drawn from the replay buffer."""
    replays: Positive = 256.0
    """How often an env step is learned from, on average."""
    lr: Scheduled = 3e-4
    """Learning rate of the actor's Adam: a number or a schedule."""
    critic_lr: Scheduled = 3e-4
    """Learning rate of the critics."""
    alpha_lr: Scheduled = 3e-4
    """Learning rate of the temperature."""
    gamma: Unit = 0.99
    """Discount factor per env step."""
    n_step: Whole = Field(default=1, ge=1, le=1000)
    """Rewards that are added up before the rest is estimated."""
    alpha: Positive = 1.0
    """First temperature: the weight of the entropy."""
    target_entropy: Finite | None = None
    """Entropy that the temperature aims for; minus the number of action columns when left out."""
    warmup: CountOrZero = 1000
    """Env steps before the first update."""
    target_every: CountOrZero = 0
    """Env steps between copies of the critics' weights into the target critics; 0 after every update."""
    tau: Unit = 0.005
    """How much of the weights is copied: 1 is all."""
    replay: Replay = Replay(size=100_000, prioritised=False)
    max_grad_norm: Positive | None = None
    """Gradients are scaled down to this norm; off with null."""


class NamedSampling(Settings):
    """An algorithm as RLlib has it: its defaults, its loss and its names for numbers."""

    id: Literal["rllib:PPO", "rllib:APPO", "rllib:IMPALA"]
    rollout: Whole = Field(default=50, ge=1, le=1_000_000)
    """Env steps of each row that are sent to the learner at a time."""
    options: dict[str, Any] = {}
    """What RLlib's `training()` of that algorithm takes, by RLlib's names."""


class NamedReplaying(Settings):
    """An algorithm with a replay buffer as RLlib has it: its defaults, its loss and its names for numbers."""

    id: Literal["rllib:DQN", "rllib:SAC", "rllib:TQC"]
    rollout: Whole = Field(default=1, ge=1, le=1_000_000)
    """Env steps of each row between updates."""
    options: dict[str, Any] = {}
    """What RLlib's `training()` of that algorithm takes, by RLlib's names."""


Own = Ppo | A2c
Named = NamedSampling | NamedReplaying
Algo = Own | Impala | Appo | Dqn | Sac | Named

NAMED = tuple(f"rllib:{name}" for name in ("PPO", "APPO", "IMPALA", "DQN", "SAC", "TQC"))
ONLY_RLLIB = ("impala", "appo", "dqn", "sac", *NAMED)
NOT_NAMED = {  # what else RLlib has, and why it cannot be had here
    **dict.fromkeys(("BC", "MARWIL", "CQL", "IQL"), "learns from recorded data, which an experiment cannot name"),
    "DreamerV3": "brings a network and runners of its own, and its policy could not act without them",
}


def family(algo: Algo) -> str:
    """Which of ppo, a2c, impala, appo, dqn and sac it is, under whatever name."""
    word = algo.id.removeprefix("rllib:").lower()
    return "sac" if word == "tqc" else word


# ------------------------------------------------------------------------------------------------ of one policy


class Changes(Settings):
    """Numbers of `algo` that are others for one policy, over their schedules."""

    lr: NotNegative | None = None
    """Learning rate of this policy; algo.lr when left out."""
    clip: NotNegative | None = None
    """Clip range of this policy (not a2c); algo.clip when left out."""
    entropy: NotNegative | None = None
    """Weight of this policy's entropy bonus; algo.entropy when left out."""
    kl: NotNegative | None = None
    """Weight of this policy's KL penalty (not a2c); algo.kl when left out."""
    gamma: Unit | None = None
    """Discount factor of this policy; algo.gamma when left out."""
    gae_lambda: Unit | None = None
    """Bias against variance of this policy's advantages; algo.gae_lambda when left out."""
    value_coef: NotNegative | None = None
    """Weight of this policy's value loss; algo.value_coef when left out."""

    def given(self) -> dict[str, float]:
        """Those that are."""
        return {name: value for name, value in self.model_dump().items() if value is not None}
