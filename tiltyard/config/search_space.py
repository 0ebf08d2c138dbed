"""Dimensions of a search space, each written as one line of YAML: choices, or a range of numbers. Pure.

    {log: [1e-5, 1e-2]}         a range; also {range: ...}, {int: ...}
    [0.98, 0.99]                choices
    [[64, 128], [128, 256]]     choices of several settings that change together

Used by sweep plans and by populations of policies.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiltyard.config.fields import is_number
from tiltyard.plugins.resolve import short

Point = dict[str, Any]

_FORMS = "write a list of choices, {range: [a, b]}, {log: [a, b]} or {int: [a, b]}"


@dataclass(frozen=True)
class Choices:
    """One of several values; with several keys, one value for each of them."""

    keys: tuple[str, ...]
    values: tuple[tuple[Any, ...], ...]

    def grid(self) -> list[Point]:
        return [dict(zip(self.keys, value, strict=True)) for value in self.values]

    def count(self) -> int:
        return len(self.values)

    def draw(self, rng: random.Random) -> Point:
        return dict(zip(self.keys, rng.choice(self.values), strict=True))


@dataclass(frozen=True)
class Span:
    """A range of numbers from low to high, inclusive, on a linear or logarithmic scale."""

    key: str
    low: float
    high: float
    log: bool = False
    whole: bool = False
    step: float | None = None
    points: int | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)

    def grid(self) -> list[Point]:
        return [{self.key: value} for value in self.spread()]

    def spread(self) -> list[float]:
        """The values of a grid; none without a step or a number of points."""
        if self.points is not None:
            shares = [i / (self.points - 1) for i in range(self.points)]
            return list(dict.fromkeys(self.at(share) for share in shares))
        return [self.after(i) for i in range(self.count())]

    def count(self) -> int:
        """Number of values of a grid, computed without listing them: there may be billions."""
        if self.points is not None:
            return len(self.spread())
        return 0 if self.step is None else math.floor((self.high - self.low) / self.step + 1e-9) + 1

    def draw(self, rng: random.Random) -> Point:
        if self.points is not None:
            return {self.key: rng.choice(self.spread())}
        if self.step is not None:
            return {self.key: self.after(rng.randrange(self.count()))}
        return {self.key: self.at(rng.random())}

    def after(self, steps: int) -> float:
        """The value this many steps above `low`."""
        assert self.step is not None
        return self._rounded(self.low + steps * self.step)

    def at(self, share: float) -> float:
        """The value at a fraction of the range."""
        if self.log:
            found = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        else:
            found = self.low + share * (self.high - self.low)
        return self._rounded(min(max(found, self.low), self.high))

    def _rounded(self, value: float) -> float:
        return round(value) if self.whole else float(f"{value:.10g}")


Dimension = Choices | Span


def dimension(keys: tuple[str, ...], value: Any, as_grid: bool = False) -> Dimension:
    """Parse one line of a search space. ValueError with a message and a hint."""
    if not all(keys):
        raise ValueError("has an empty name", "write dotted names: algo.lr")
    if isinstance(value, list):
        return _choices(keys, value)
    if len(keys) > 1:
        raise ValueError("settings that change together need a list", "write [[64, 128], [128, 256]]")
    if not isinstance(value, Mapping):
        raise ValueError("must be choices or a range", _FORMS)
    span = _span(keys[0], value)
    if as_grid and not span.count():
        raise ValueError("has infinitely many values for a grid", "give points: 5 or a step, or set search: random")
    return span


def _choices(keys: tuple[str, ...], value: list[Any]) -> Choices:
    if not value:
        raise ValueError("must have at least one choice", "write a value")
    if len(keys) == 1:
        rows = [(each,) for each in value]
    else:
        wrong = [each for each in value if not isinstance(each, list) or len(each) != len(keys)]
        if wrong:
            hint = "write [[64, 128], [128, 256]]"
            raise ValueError(f"{short(wrong[0])} must have a value for each of {len(keys)} settings", hint)
        rows = [tuple(each) for each in value]
    if len({fingerprint(row) for row in rows}) != len(rows):
        raise ValueError("has a choice twice", "each choice is tried once")
    return Choices(keys, tuple(rows))


def _span(key: str, value: Mapping[str, Any]) -> Span:
    unknown = sorted(set(value) - {"range", "log", "int", "step", "points"})
    if unknown:
        raise ValueError(f"has an unknown key {unknown[0]!r}", _FORMS)
    named = [name for name in ("range", "log", "int") if isinstance(value.get(name), list)]
    if len(named) != 1 or not isinstance(value.get("log", False), bool | list):
        raise ValueError("must be choices or one range", _FORMS)
    bounds, log, whole = value[named[0]], bool(value.get("log")), named[0] == "int"
    if len(bounds) != 2 or not all(is_number(each) for each in bounds) or not bounds[0] < bounds[1]:
        raise ValueError("needs two numbers, the smaller first", "write [1e-5, 1e-2]")
    if whole and any(each != int(each) for each in bounds):
        raise ValueError("needs whole numbers", "write {int: [1, 8]}")
    if log and bounds[0] <= 0:
        raise ValueError("has a log scale but starts at or below 0", "use a lower bound above 0")
    step, points = value.get("step"), value.get("points")
    if whole and step is None and points is None and not log:
        step = 1
    if step is not None and (log or points is not None or not is_number(step) or step <= 0):
        raise ValueError("step must be a positive number and cannot be combined with log or points", "step: 0.1")
    if step is not None and whole and step != int(step):
        raise ValueError("step must be a whole number with int", "step: 2, or range instead of int")
    if points is not None and (type(points) is not int or not 2 <= points <= 100_000):
        raise ValueError("points must be a whole number from 2 to 100,000", "points: 5")
    return Span(key, bounds[0], bounds[1], log, whole, step, points)


def fingerprint(value: Any) -> str:
    """A string that is equal for equal values, regardless of the order of keys."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
