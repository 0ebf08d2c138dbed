"""What populations and past versions of policies are told. What follows from it is algos.population's, and engines'."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tiltyard.config.fields import Count, CountOrZero, NotNegative, Settings, Unit, Whole

Factor = Annotated[float, Field(ge=1, le=100, allow_inf_nan=False)]


class PopulationRules(Settings):
    """When a member of a population is replaced by a copy of a better one, and how far the copy's settings move."""

    period: Count = 5_000_000
    """Env steps that a member trains between two decisions about it."""
    start: CountOrZero = 20_000_000
    """Env steps before the first decision about a member."""
    replace: float = Field(default=0.3, gt=0, le=0.5)
    """This share of the members is the worst, and as many are the best: one of those may become a copy of one of
    these."""
    gap: NotNegative = 1e-6
    """The better score must be ahead by more than this."""
    relative_gap: float = Field(default=0.1, ge=0, lt=1)
    """And by more than this share of the larger of both scores without their signs."""
    rate: Unit = 0.15
    """Each setting of a copy is changed with this probability."""
    factors: list[Factor] = Field(default=[1.1, 1.5], min_length=2, max_length=2)
    """A changed number is multiplied or divided by a factor drawn from between these two."""
    resample: Unit = 0.0
    """A changed setting is drawn anew from its whole span or choices with this probability."""
    explore: Literal["perturb", "pb2"] = "perturb"
    """How a copy's settings are found: perturb moves them at random; pb2 asks a Gaussian process what has brought most
    so far, which pays with few members."""


class Population(PopulationRules):
    """The policies that learn are a population: the worst become copies of the best, with other numbers of `algo`. Env
    steps are each policy's own. Off when left out."""

    space: dict[str, Any] = Field(default={}, max_length=100)
    """Numbers of `algo` that differ between policies and move: `algo.lr: {log: [1e-5, 1e-2]}`, `{range: [a, b]}` or a
    list of choices; lr, clip, entropy, kl, gamma (by its distance from 1), gae_lambda, value_coef. Policies begin
    spread over it, except for numbers of their own under `policies`."""
    metric: str = Field(default="return", min_length=1, max_length=200)
    """What policies are compared by: `return` is the mean of the last 100 training episodes of each, `episode/NAME` of
    what the env reported at their ends (where one policy plays a whole episode), `loss/...` and `learn/...` of its
    newest update."""
    goal: Literal["maximise", "minimise"] = "maximise"
    """Whether more of the metric is better, or less."""


class Past(Settings):
    """A pool of versions of a policy that learns, as it was at earlier env steps."""

    of: str = Field(min_length=1, max_length=80)
    """The policy whose versions these are."""
    every: Count = 50_000
    """Env steps between two versions; the first is the policy as it starts."""
    keep: Whole = Field(default=10, ge=1, le=1000)
    """How many there are at most; the oldest makes room."""
    fade: float = Field(default=1.0, gt=0, le=1)
    """Each version is drawn this many times as often as the next newer one: 1 draws all alike."""
