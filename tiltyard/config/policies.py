"""Settings of experiments with several policies: their own numbers, past versions and populations.

The rules of a population are applied in algos/pbt.py, pools of past versions in engines/policies/.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from tiltyard.config.fields import Count, CountOrZero, NotNegative, Settings, Unit, Whole

Factor = Annotated[float, Field(ge=1, le=100, allow_inf_nan=False)]


class PopulationRules(Settings):
    """When a member of a population is replaced by a copy of a better one, and how far the copy's settings move."""

    period: Count = 5_000_000
    """Env steps that a member trains between two comparisons."""
    start: CountOrZero = 20_000_000
    """Env steps before a member is first compared."""
    replace: float = Field(default=0.3, gt=0, le=0.5)
    """Fraction of members that count as the worst, and as the best: one of the worst may become a copy of one of the
    best."""
    gap: NotNegative = 1e-6
    """Minimum difference of the two scores for a copy."""
    relative_gap: float = Field(default=0.1, ge=0, lt=1)
    """Minimum difference for a copy, as a fraction of the larger absolute score."""
    rate: Unit = 0.15
    """Probability that a setting of the copy is changed."""
    factors: list[Factor] = Field(default=[1.1, 1.5], min_length=2, max_length=2)
    """A changed number is multiplied or divided by a factor drawn from this range."""
    resample: Unit = 0.0
    """Probability that a changed setting is drawn from its whole range or choices instead."""
    explore: Literal["perturb", "pb2"] = "perturb"
    """How a copy's settings are chosen. perturb: at random. pb2: by a Gaussian process fitted to the results so far,
    which helps with few members."""


class Population(PopulationRules):
    """Population-based training of the policies that learn: the worst become copies of the best, with other numbers of
    `algo`. Env steps are counted per policy. Default: off."""

    space: dict[str, Any] = Field(default={}, max_length=100)
    """Numbers of `algo` that vary: `algo.lr: {log: [1e-5, 1e-2]}`, `{range: [a, b]}` or a list of choices, for lr,
    clip, entropy, kl, gamma (changed by its distance from 1), gae_lambda and value_coef. Policies start spread over
    this space; numbers given under `policies` are kept."""
    metric: str = Field(default="return", min_length=1, max_length=200)
    """Metric that policies are compared by: `return` is the mean return of each policy's last 100 training episodes,
    `episode/NAME` the mean of what the env reported at their ends (if one policy plays the whole episode), `loss/...`
    and `learn/...` the value of its newest update."""
    goal: Literal["maximise", "minimise"] = "maximise"
    """Whether a higher or lower metric is better."""


class Past(Settings):
    """A pool of earlier versions of a policy that learns."""

    of: str = Field(min_length=1, max_length=80)
    """Name of the policy whose versions are kept."""
    every: Count = 50_000
    """Env steps between two versions; the first is the initial policy."""
    keep: Whole = Field(default=10, ge=1, le=1000)
    """Maximum number of versions; the oldest is dropped first."""
    fade: float = Field(default=1.0, gt=0, le=1)
    """How often a version is drawn, relative to the next newer one; 1 draws all equally."""


class Changes(Settings):
    """Numbers of `algo` that one policy overrides; they replace schedules too."""

    lr: NotNegative | None = None
    """Learning rate of this policy. Default: algo.lr."""
    clip: NotNegative | None = None
    """Clip range of this policy (not a2c). Default: algo.clip."""
    entropy: NotNegative | None = None
    """Weight of this policy's entropy bonus. Default: algo.entropy."""
    kl: NotNegative | None = None
    """Weight of this policy's KL penalty (not a2c). Default: algo.kl."""
    gamma: Unit | None = None
    """Discount factor of this policy. Default: algo.gamma."""
    gae_lambda: Unit | None = None
    """GAE lambda of this policy. Default: algo.gae_lambda."""
    value_coef: NotNegative | None = None
    """Weight of this policy's value loss. Default: algo.value_coef."""


class PolicySettings(Settings):
    """One of several policies. It learns unless `from` or `past` is set."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    algo: Changes = Changes()
    """Numbers of `algo` that this policy overrides: lr, clip, entropy, kl, gamma, gae_lambda, value_coef."""
    from_: Annotated[str | None, Field(alias="from", min_length=1, max_length=4096)] = None
    """Use a frozen policy: of a run's newest checkpoint (RUN), of another of its checkpoints (RUN@STEP, RUN@best) or of
    a checkpoint folder. It never learns; a copy is kept in the run folder."""
    past: Past | None = None
