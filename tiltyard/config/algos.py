"""Settings of the algorithms; those that only RLlib has are in rllib_algos.py, those of clone in clone_algo.py.

ppo, a2c                  Tiltyard's own, on every engine (a2c: not on rllib)
clone                     Tiltyard's own, from a dataset, in one process
appo, impala, dqn, sac    RLlib's; they select engine.kind = rllib
rllib:NAME                RLlib's algorithm with RLlib's own names and defaults
path/file.py:Name         the user's own
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Discriminator, Field, Tag

from tiltyard.config.clone_algo import Clone
from tiltyard.config.fields import Count, NotNegative, Options, PluginRef, Positive, Settings, Unit, Whole
from tiltyard.config.rllib_algos import Appo, Dqn, Impala, Named, NamedReplaying, NamedSampling, Sac
from tiltyard.config.schedules import Scheduled
from tiltyard.plugins.resolve import is_own_algo


class Ppo(Settings):
    """Proximal policy optimisation."""

    id: Literal["ppo"] = "ppo"
    rollout: Whole = Field(default=128, ge=1, le=1_000_000)
    """Env steps per env copy and update; the batch is this times the number of copies."""
    minibatch: Count = 256
    """Env steps per gradient step."""
    epochs: Whole = Field(default=10, ge=1, le=1000)
    """Passes over the batch per update."""
    lr: Scheduled = 1e-3
    """Learning rate of Adam, a number or a schedule."""
    gamma: Unit = 0.99
    """Discount factor per env step."""
    gae_lambda: Unit = 0.95
    """GAE lambda, the bias-variance trade-off of advantages: 0 is one-step, 1 is Monte Carlo."""
    advantage: Literal["gae", "vtrace", "clipped_gae"] = "gae"
    """Advantage estimator: GAE, V-trace, or GAE with clipped importance ratios (for samples from older weights)."""
    rho_clip: Positive = 1.0
    """Upper bound of the importance ratios in V-trace and clipped GAE."""
    clip: Scheduled = 0.2
    """Clip range of the probability ratio."""
    value_clip: Positive | None = None
    """Clip range of the value function per update, in normalised units. Default: off."""
    value_coef: NotNegative = 0.5
    """Weight of the value loss."""
    entropy: Scheduled = 0.0
    """Weight of the entropy bonus."""
    kl: Scheduled = 0.0
    """Weight of the penalty on the KL divergence from the policy that collected the samples."""
    kl_stop: Positive | None = None
    """Skip the remaining epochs of an update once the KL divergence exceeds this. Default: off."""
    max_grad_norm: Positive | None = 0.5
    """Maximum gradient norm; null turns clipping off."""
    normalise_advantage: bool = True
    """Normalise the advantages of each minibatch to mean 0 and variance 1."""
    adam_eps: Positive = 1e-5
    """Epsilon of Adam."""
    loss: PluginRef | None = None
    """Your own term of the loss, `path/file.py:name`, added to the others. Default: none."""


class A2c(Settings):
    """Advantage actor-critic: PPO's update with one epoch, one minibatch and no clipping."""

    id: Literal["a2c"]
    rollout: Whole = Field(default=16, ge=1, le=1_000_000)
    """Env steps per env copy and update."""
    lr: Scheduled = 1e-3
    """Learning rate of Adam, a number or a schedule."""
    gamma: Unit = 0.99
    """Discount factor per env step."""
    gae_lambda: Unit = 1.0
    """GAE lambda, the bias-variance trade-off of advantages: 0 is one-step, 1 is Monte Carlo."""
    value_coef: NotNegative = 0.5
    """Weight of the value loss."""
    entropy: Scheduled = 0.0
    """Weight of the entropy bonus."""
    max_grad_norm: Positive | None = 0.5
    """Maximum gradient norm; null turns clipping off."""
    normalise_advantage: bool = False
    """Normalise the advantages of the batch to mean 0 and variance 1."""
    adam_eps: Positive = 1e-5
    """Epsilon of Adam."""
    loss: PluginRef | None = None
    """Your own term of the loss, `path/file.py:name`, added to the others. Default: none."""


class OwnAlgo(Settings):
    """Your own algorithm: a class in your own code, on the local and serial engines."""

    id: str = Field(min_length=1, max_length=500)
    """`path/file.py:Name` or `package.module:Name`."""
    rollout: Whole = Field(default=128, ge=1, le=1_000_000)
    """Env steps per env copy and update."""
    options: Options = {}
    """Keyword arguments, checked against the signature before anything starts."""


def ids_of(model: type[Settings]) -> tuple[str, ...]:
    """The words that select an algorithm's settings."""
    return get_args(model.model_fields["id"].annotation)


Own = Ppo | A2c
BUILT_IN = {
    word: model for model in (Ppo, A2c, Clone, Impala, Appo, Dqn, Sac, *get_args(Named)) for word in ids_of(model)
}


def _tag(value: Any) -> str | None:
    """The class of settings that an id selects."""
    word = value.get("id") if isinstance(value, Mapping) else getattr(value, "id", None)
    if isinstance(word, str) and word in BUILT_IN:
        return ids_of(BUILT_IN[word])[0]
    return "own" if is_own_algo(word) else None if word is None else str(word)


Algo = Annotated[
    Annotated[Ppo, Tag("ppo")]
    | Annotated[A2c, Tag("a2c")]
    | Annotated[Clone, Tag("clone")]
    | Annotated[Impala, Tag("impala")]
    | Annotated[Appo, Tag("appo")]
    | Annotated[Dqn, Tag("dqn")]
    | Annotated[Sac, Tag("sac")]
    | Annotated[NamedSampling, Tag("rllib:PPO")]
    | Annotated[NamedReplaying, Tag("rllib:DQN")]
    | Annotated[OwnAlgo, Tag("own")],
    Discriminator(_tag),
]
