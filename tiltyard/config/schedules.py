"""Schedules: settings whose value changes while training. algos/schedules.py evaluates them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tiltyard.config.fields import Count, NotNegative, Positive, Settings


class Linear(Settings):
    """A straight line from `start` to `end`, then constant."""

    kind: Literal["linear"]
    start: NotNegative
    """Value at env step 0."""
    end: NotNegative = 0.0
    """Value from env step `over` on."""
    over: Count | None = None
    """Env steps from start to end. Default: `stop.env_steps`."""


class Piecewise(Settings):
    """Straight lines between points; constant before the first and after the last."""

    kind: Literal["piecewise"]
    points: list[Annotated[list[NotNegative], Field(min_length=2, max_length=2)]] = Field(min_length=1, max_length=1000)
    """[[env steps, value], ...] with increasing env steps."""


class KlAdaptive(Settings):
    """Multiplied or divided by `factor` whenever the measured KL leaves [target / 2, target * 2].

    If the policy changes too fast, lr and clip shrink, while kl and entropy grow.
    """

    kind: Literal["kl_adaptive"]
    start: Positive
    """Value before the first update."""
    target: Positive = 0.01
    """Target KL divergence between the policy before and after an update."""
    factor: float = Field(default=1.5, gt=1, le=10)
    """Factor of each change."""
    min: NotNegative | None = None
    """Lower bound. Default: `start` / 100."""
    max: Positive | None = None
    """Upper bound. Default: `start` x 100."""

    @property
    def lowest(self) -> float:
        return self.start / 100 if self.min is None else self.min

    @property
    def highest(self) -> float:
        return self.start * 100 if self.max is None else self.max


Schedule = Annotated[Linear | Piecewise | KlAdaptive, Field(discriminator="kind")]
Scheduled = Annotated[NotNegative, Field(strict=True)] | Schedule
