"""Settings that a population varies: how each is sampled, perturbed and mapped to coordinates.

Number      within a range: multiplied or divided by a factor; gamma by its distance from 1; ranges with 0 inside
            are shifted by a share of their width instead
Options     choices: sorted numbers move to a neighbour, others are sampled again
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiltyard.algos.pbt import Rules, Settings
from tiltyard.config.search_space import Choices, Dimension, dimension
from tiltyard.errors import UseError
from tiltyard.types import Array


@dataclass(frozen=True)
class Number:
    """A number within two inclusive bounds; without bounds it is only multiplied."""

    key: str
    low: float = -math.inf
    high: float = math.inf
    log: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise UseError(f"{self.key} has the bounds {self.low:g} and {self.high:g}", "give the smaller bound first")
        if self.from_one and self.high >= 1:
            hint = "use a bound such as 0.9999"
            raise UseError(f"{self.key} is changed by its distance from 1 and must stay below 1", hint)
        if self.log and self.low <= 0:
            raise UseError(f"{self.key} has a log scale but starts at {self.low:g}", "use a lower bound above 0")

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)

    @property
    def bounded(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def from_one(self) -> bool:
        """Whether its distance from 1 is changed: true for gamma."""
        return self.bounded and self.key.rpartition(".")[2] == "gamma"

    def perturb(self, settings: Settings, rules: Rules, rng: np.random.Generator) -> Settings:
        factor, up = rng.uniform(*rules.factors), bool(rng.integers(2))
        value = settings[self.key]
        if self.from_one:
            moved = 1 - (1 - value) * (1 / factor if up else factor)
        elif self.bounded and (self.low < 0 < self.high or value == 0):
            moved = value + (factor - 1) * (self.high - self.low) / 2 * (1 if up else -1)
        else:
            moved = value * (factor if up else 1 / factor)
        if self.whole and moved != value:
            moved = max(round(moved), value + 1) if moved > value else min(round(moved), value - 1)
        return {self.key: self._inside(moved)}

    def at(self, share: float) -> Settings:
        """The setting at a share (0..1) of the way from the lower bound to the upper."""
        return {self.key: self._inside(float(self._value(np.array(share))))}

    def share(self, settings: Settings) -> float:
        """The share (0..1) at which the setting lies."""
        low, high = self._scaled(self.low), self._scaled(self.high)
        inside = min(max(settings[self.key], self.low), self.high)
        return float((self._scaled(inside) - low) / (high - low))

    def columns(self, shares: Array) -> Array:
        """Shares [N] as coordinates [N, 1]; whole numbers are rounded to their grid."""
        if self.whole:
            low, high = self._scaled(self.low), self._scaled(self.high)
            whole = np.clip(np.rint(self._value(shares)), self.low, self.high)
            shares = (self._scaled(whole) - low) / (high - low)
        return shares[:, None]

    def _scaled(self, value: Any) -> Any:
        if self.from_one:
            return -np.log(1 - value)
        return np.log(value) if self.log else value

    def _value(self, share: Array) -> Array:
        low, high = self._scaled(self.low), self._scaled(self.high)
        scaled = low + share * (high - low)
        if self.from_one:
            return np.asarray(1 - np.exp(-scaled))
        return np.asarray(np.exp(scaled) if self.log else scaled)

    def _inside(self, value: float) -> float:
        rounded = round(value) if self.whole else float(f"{value:.10g}")
        return min(max(rounded, self.low), self.high)


@dataclass(frozen=True)
class Options:
    """One of several values, in order; with several keys, a tuple of values."""

    keys: tuple[str, ...]
    values: tuple[tuple[Any, ...], ...]

    bounded = True

    @property
    def ordered(self) -> bool:
        """Whether the first values are sorted numbers: then neighbours are similar."""
        first = [value[0] for value in self.values]
        if any(isinstance(each, bool) or not isinstance(each, int | float) for each in first):
            return False
        return first == sorted(first) or first == sorted(first, reverse=True)

    def perturb(self, settings: Settings, rules: Rules, rng: np.random.Generator) -> Settings:
        index, last = self._index(settings), len(self.values) - 1
        if index is None or not self.ordered:
            return self.at(float(rng.random()))
        near = [each for each in (index - 1, index + 1) if 0 <= each <= last]
        return self._settings(near[int(rng.integers(len(near)))] if near else index)

    def at(self, share: float) -> Settings:
        return self._settings(min(int(share * len(self.values)), len(self.values) - 1))

    def share(self, settings: Settings) -> float:
        index = self._index(settings)
        return 0.5 if index is None else (index + 0.5) / len(self.values)

    def columns(self, shares: Array) -> Array:
        """Shares [N] as coordinates: one column if ordered, else one-hot, so that all choices are equally far apart."""
        count = len(self.values)
        index = np.minimum((shares * count).astype(int), count - 1)
        return np.asarray((index[:, None] + 0.5) / count if self.ordered else np.eye(count)[index] / math.sqrt(2))

    def _index(self, settings: Settings) -> int | None:
        value = tuple(settings[key] for key in self.keys)
        return self.values.index(value) if value in self.values else None

    def _settings(self, index: int) -> Settings:
        return dict(zip(self.keys, self.values[index], strict=True))


Tunable = Number | Options


def tunables_of(space: Iterable[Dimension]) -> list[Tunable]:
    """The tunables of a search space."""
    return [_tunable(each) for each in space]


def parse_tunables(space: Mapping[str, Any]) -> list[Tunable]:
    """The tunables of a space as written: one line per setting, or per group of settings that change together."""
    return tunables_of(
        dimension(tuple(part.strip() for part in line.split(",")), value) for line, value in space.items()
    )


def _tunable(each: Dimension) -> Tunable:
    if isinstance(each, Choices):
        return Options(each.keys, each.values)
    return Number(each.key, each.low, each.high, each.log, each.whole)


def random_settings(tunables: Sequence[Tunable], rng: np.random.Generator) -> Settings:
    """Settings drawn uniformly from their ranges and choices."""
    return settings_at(require_bounded(tunables), rng.random(len(tunables)))


def latin_hypercube(tunables: Sequence[Tunable], count: int, rng: np.random.Generator) -> list[Settings]:
    """Initial settings of `count` members: a Latin hypercube, so that every part of each range is used."""
    require_bounded(tunables)
    shares = np.array([(rng.permutation(count) + rng.random(count)) / count for _ in tunables]).reshape(
        len(tunables), count
    )
    return [settings_at(tunables, shares[:, i]) for i in range(count)]


def perturb(tunables: Sequence[Tunable], settings: Settings, rules: Rules, rng: np.random.Generator) -> Settings:
    """The settings with some tunables changed; all others stay."""
    made = dict(settings)
    for tunable in tunables:
        if rng.random() >= rules.rate:
            continue
        resample = rng.random() < rules.resample and tunable.bounded
        made |= tunable.at(float(rng.random())) if resample else tunable.perturb(settings, rules, rng)
    return made


def reward_weights(tree: Mapping[str, Any], key: str) -> Settings:
    """The numbers in a nested reward-shaping mapping, by dotted names that begin with `key`."""
    found: Settings = {}
    for name, value in tree.items():
        if "." in name:
            raise UseError(f"{key} has the name {name!r}, but dots separate names", "write it without a dot")
        if isinstance(value, Mapping):
            found |= reward_weights(value, f"{key}.{name}")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{key}.{name}"] = float(value)
    return found


def with_reward_weights(tree: Mapping[str, Any], key: str, settings: Settings) -> dict[str, Any]:
    """A reward-shaping mapping with its numbers replaced by those in the settings."""
    return {
        name: with_reward_weights(value, f"{key}.{name}", settings)
        if isinstance(value, Mapping)
        else settings.get(f"{key}.{name}", value)
        for name, value in tree.items()
    }


def require_bounded(tunables: Sequence[Tunable]) -> Sequence[Tunable]:
    unbounded = [tunable.keys[0] for tunable in tunables if not tunable.bounded]
    if unbounded:
        raise UseError(f"{unbounded[0]} has no bounds to sample between", "give it a range")
    return tunables


def settings_at(tunables: Sequence[Tunable], shares: Array) -> Settings:
    return {k: v for tunable, share in zip(tunables, shares, strict=True) for k, v in tunable.at(float(share)).items()}
