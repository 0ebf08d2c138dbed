"""What a population says, over runs of a sweep or over policies of one run. What follows from it is algos.population's."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tiltyard.config.fields import Count, CountOrZero, NotNegative, Settings, Unit

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
