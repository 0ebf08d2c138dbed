"""Settings that may change while training: a number, or a schedule in env steps.

kind          value at env step s
number        itself
linear        start -> end over `over` env steps (the run's length when left out), then end
piecewise     straight lines between points, constant outside
kl_adaptive   scaled by a factor after updates whose KL divergence is outside [target / 2, target * 2]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

from tiltyard.config.fields import Settings, is_number
from tiltyard.config.schedules import KlAdaptive, Linear, Piecewise
from tiltyard.errors import UseError, did_you_mean
from tiltyard.types import Tree


class ScheduledValue:
    """A setting's value over a run. It has state to save if it is KL-adaptive or was changed while training.

    `rises_with_kl`: a penalty grows when the divergence is too large; a step size shrinks.
    """

    def __init__(
        self,
        setting: float | Linear | Piecewise | KlAdaptive,
        total_env_steps: int | None,
        *,
        rises_with_kl: bool = False,
    ) -> None:
        self.setting = setting
        self.total = total_env_steps
        self.rises_with_kl = rises_with_kl
        self.moved: float | None = setting.start if isinstance(setting, KlAdaptive) else None
        self.fixed: float | None = None

    def at(self, env_steps: int) -> float:
        """The value at this many env steps."""
        if self.fixed is not None:
            return self.fixed
        setting = self.setting
        if isinstance(setting, Linear):
            over = setting.over or self.total or 1
            done = min(1.0, env_steps / over)
            return setting.start + (setting.end - setting.start) * done
        if isinstance(setting, Piecewise):
            return _interpolate(setting.points, env_steps)
        if isinstance(setting, KlAdaptive):
            return setting.start if self.moved is None else self.moved
        return float(setting)

    @property
    def adapts(self) -> bool:
        """Whether it needs the KL divergence of each update."""
        return isinstance(self.setting, KlAdaptive)

    def observe_kl(self, kl: float) -> None:
        """Adapt to the KL divergence of an update; no effect on other kinds."""
        setting = self.setting
        if not isinstance(setting, KlAdaptive) or self.moved is None:
            return
        if setting.target / 2 <= kl <= setting.target * 2:
            return
        grow = (kl > setting.target) == self.rises_with_kl
        moved = self.moved * setting.factor if grow else self.moved / setting.factor
        self.moved = min(max(moved, setting.lowest), setting.highest)

    def fix(self, value: float) -> None:
        """Use this number from now on; a KL-adaptive value continues to adapt from it."""
        if isinstance(self.setting, KlAdaptive):
            self.moved = value
        else:
            self.fixed = value

    def save(self) -> Tree:
        return {"setting": self._to_json(), "moved": self.moved, "fixed": self.fixed}

    def load(self, tree: Tree) -> None:
        """Continue from `save`, unless the setting has changed: then the new one starts from its beginning."""
        if tree["setting"] == self._to_json():
            self.moved, self.fixed = tree["moved"], tree["fixed"]

    def _to_json(self) -> Tree:
        return self.setting if isinstance(self.setting, int | float) else self.setting.model_dump(mode="json")


def fix_values(values: Mapping[str, ScheduledValue], changes: Mapping[str, float]) -> None:
    """Set some values of an algorithm to numbers, in place of their schedules: all of them, or none and UseError."""
    for name, number in changes.items():
        if name not in values:
            raise UseError(f"algo.{name} cannot change during training", did_you_mean(name, values))
        if not math.isfinite(number) or number < 0:
            raise UseError(f"algo.{name} cannot become {number}", "give a finite number of at least 0")
    for name, number in changes.items():
        values[name].fix(float(number))


def numbers_now(settings: Settings, values: Mapping[str, ScheduledValue], env_steps: int) -> dict[str, float]:
    """All numeric settings of an algorithm, the scheduled ones with their present values."""
    fixed = {name: value for name, value in settings if is_number(value)}
    return fixed | {name: value.at(env_steps) for name, value in values.items()}


def _interpolate(points: list[list[float]], env_steps: int) -> float:
    if env_steps <= points[0][0]:
        return points[0][1]
    for (step, value), (later, towards) in pairwise(points):
        if env_steps < later:
            return value + (towards - value) * (env_steps - step) / (later - step)
    return points[-1][1]
