"""Population-based training without the training: who is replaced by whom, with which settings, and what became of it.

    rank ──> source_for: who copies whom ──> perturbed or pb2: the copy's settings ──> Exploit ──> schedule

Pure functions on numbers: whoever trains the members, in one process or in many, calls these and does the copying.
Every random draw is the given generator's, so whoever decides again with the same one decides the same.

    Number      a span of numbers; multiplied or divided by a factor. Gamma is, by its distance from 1; where 0 lies
                inside the span a factor leads nowhere, and it is moved by a share of the span instead
    Options     choices; numbers move to a neighbour, others are redrawn

PB2 (Parker-Holder et al. 2020) replaces chance by a bandit: what each settings brought in a period, by a Gaussian
process over settings and time that forgets, and the settings with the highest upper confidence bound come next.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiltyard.algos.pb2 import Bandit
from tiltyard.config.policies import PopulationRules
from tiltyard.config.search_space import Choices, Dimension, dimension
from tiltyard.errors import UseError

Array = NDArray[Any]
Settings = dict[str, Any]

# ------------------------------------------------------------------------------------------------ who copies whom


@dataclass(frozen=True)
class Rules:
    """When a member is replaced, and how far a copy's settings move."""

    period: int = 5_000_000
    """Env steps that a member trains between two decisions about it."""
    start: int = 20_000_000
    """Env steps before the first decision about a member."""
    maximise: bool = True
    replace: float = 0.3
    """This share of the members is the worst, and as many are the best; never more than half."""
    gap: float = 1e-6
    """The better score must be ahead by more than this."""
    relative_gap: float = 0.1
    """And by more than this share, below 1, of the larger of both scores without their signs."""
    rate: float = 0.15
    """Each setting of a copy is changed with this probability."""
    factors: tuple[float, float] = (1.1, 1.5)
    """A changed number is multiplied or divided by a factor from here; both are at least 1."""
    resample: float = 0.0
    """A changed setting is drawn anew from its span or choices with this probability."""


def rules_of(said: PopulationRules, maximise: bool) -> Rules:
    """Settings as rules."""
    low, high = sorted(said.factors)
    gaps = {"gap": said.gap, "relative_gap": said.relative_gap}
    moves = {"rate": said.rate, "resample": said.resample}
    return Rules(said.period, said.start, maximise, said.replace, **gaps, **moves, factors=(low, high))


@dataclass(frozen=True)
class Member:
    """A member as a decision sees it. No score yet, or none that is a finite number: neither best nor worst."""

    number: int
    env_steps: int
    score: float | None
    decided: int = 0
    """Its env steps at the last decision about it; after a copy, those that it counts from."""


def rank(members: Iterable[Member], maximise: bool = True) -> list[Member]:
    """Those that have a score, the best first; the lower number first where scores are equal."""
    scored = [(_score(member, maximise), member) for member in members]
    known = [(-score, member.number, member) for score, member in scored if score is not None]
    return [member for *_, member in sorted(known, key=lambda each: each[:2])]


def _score(member: Member, maximise: bool) -> float | None:
    """More is better here."""
    if member.score is None or not math.isfinite(member.score):
        return None
    return member.score if maximise else -member.score


def is_due(rules: Rules, member: Member) -> bool:
    """Whether a decision about this member is to be made."""
    return member.env_steps >= rules.start and member.env_steps - member.decided >= rules.period


def is_ahead(rules: Rules, better: Member, worse: Member) -> bool:
    """Whether one is better than the other by more than both gaps. Signs do not matter: only distance and size do."""
    high, low = _score(better, rules.maximise), _score(worse, rules.maximise)
    if high is None or low is None:
        return False
    return high - low > max(rules.gap, rules.relative_gap * max(abs(high), abs(low)))


def source_for(rules: Rules, members: Sequence[Member], number: int, rng: np.random.Generator) -> int | None:
    """The member that this one is to copy: one of the best, drawn, if this one is due, of the worst, and far behind."""
    ranked = rank(members, rules.maximise)
    count = min(math.ceil(rules.replace * len(ranked) - 1e-9), len(ranked) // 2)
    own = next((member for member in ranked[len(ranked) - count :] if member.number == number), None)
    if own is None or not is_due(rules, own):
        return None
    source = ranked[int(rng.integers(count))]
    return source.number if is_ahead(rules, source, own) else None


def replacements(rules: Rules, members: Sequence[Member], rng: np.random.Generator) -> dict[int, int]:
    """Who copies whom when all are decided about at once. Nobody is both copied and replaced."""
    found = {each.number: source_for(rules, members, each.number, rng) for each in rank(members, rules.maximise)}
    return {number: source for number, source in found.items() if source is not None}


# ------------------------------------------------------------------------------------------------ settings


@dataclass(frozen=True)
class Number:
    """A setting between two bounds, both included; without bounds it is only ever multiplied."""

    key: str
    low: float = -math.inf
    high: float = math.inf
    log: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise UseError(f"{self.key} has bounds {self.low:g} and {self.high:g}", "give the smaller one first")
        if self.from_one and self.high >= 1:
            raise UseError(f"{self.key} is changed by its distance from 1, and reaches 1", "end below 1, as at 0.9999")
        if self.log and self.low <= 0:
            raise UseError(f"{self.key} has a logarithm, and begins at {self.low:g}", "begin above 0")

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)

    @property
    def bounded(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def from_one(self) -> bool:
        """Whether it is the distance from 1 that counts."""
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
        """The setting at a share of the way from the lower bound to the upper."""
        return {self.key: self._inside(float(self._value(np.array(share))))}

    def share(self, settings: Settings) -> float:
        """At which share of the way the setting is."""
        low, high = self._scaled(self.low), self._scaled(self.high)
        inside = min(max(settings[self.key], self.low), self.high)
        return float((self._scaled(inside) - low) / (high - low))

    def columns(self, shares: Array) -> Array:
        """[N] shares as [N, 1] coordinates of what those settings really are: whole numbers lie on a grid."""
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
    """One of several values, in the order in which they are neighbours; with several keys, one value for each."""

    keys: tuple[str, ...]
    values: tuple[tuple[Any, ...], ...]

    bounded = True

    @property
    def ordered(self) -> bool:
        """Whether the first of each are numbers that rise or fall: then neighbours are alike."""
        first = [value[0] for value in self.values]
        if any(isinstance(each, bool) or not isinstance(each, int | float) for each in first):
            return False
        return first == sorted(first) or first == sorted(first, reverse=True)

    def perturb(self, settings: Settings, rules: Rules, rng: np.random.Generator) -> Settings:
        place, last = self._place(settings), len(self.values) - 1
        if place is None or not self.ordered:
            return self.at(float(rng.random()))
        near = [each for each in (place - 1, place + 1) if 0 <= each <= last]
        return self._settings(near[int(rng.integers(len(near)))] if near else place)

    def at(self, share: float) -> Settings:
        return self._settings(min(int(share * len(self.values)), len(self.values) - 1))

    def share(self, settings: Settings) -> float:
        place = self._place(settings)
        return 0.5 if place is None else (place + 0.5) / len(self.values)

    def columns(self, shares: Array) -> Array:
        """[N] shares as coordinates: one where choices are neighbours, else one for each, all equally far apart."""
        count = len(self.values)
        place = np.minimum((shares * count).astype(int), count - 1)
        return np.asarray((place[:, None] + 0.5) / count if self.ordered else np.eye(count)[place] / math.sqrt(2))

    def _place(self, settings: Settings) -> int | None:
        value = tuple(settings[key] for key in self.keys)
        return self.values.index(value) if value in self.values else None

    def _settings(self, place: int) -> Settings:
        return dict(zip(self.keys, self.values[place], strict=True))


Tunable = Number | Options


def tunables_of(space: Iterable[Dimension]) -> list[Tunable]:
    """The dimensions of a space as what can be moved."""
    return [_tunable(each) for each in space]


def parse_tunables(space: Mapping[str, Any]) -> list[Tunable]:
    """The same of a space as it is written: a line for each setting, or for several that change together."""
    return tunables_of(
        dimension(tuple(part.strip() for part in line.split(",")), value) for line, value in space.items()
    )


def _tunable(each: Dimension) -> Tunable:
    if isinstance(each, Choices):
        return Options(each.keys, each.values)
    return Number(each.key, each.low, each.high, each.log, each.whole)


def random_settings(tunables: Sequence[Tunable], rng: np.random.Generator) -> Settings:
    """Settings from anywhere in their spans and choices."""
    return _settings_at(_bounded(tunables), rng.random(len(tunables)))


def latin_hypercube(tunables: Sequence[Tunable], count: int, rng: np.random.Generator) -> list[Settings]:
    """What so many members begin with: a Latin hypercube, in which each part of every span is somebody's."""
    _bounded(tunables)
    shares = np.array([(rng.permutation(count) + rng.random(count)) / count for _ in tunables]).reshape(
        len(tunables), count
    )
    return [_settings_at(tunables, shares[:, i]) for i in range(count)]


def perturb(tunables: Sequence[Tunable], settings: Settings, rules: Rules, rng: np.random.Generator) -> Settings:
    """The settings with some of them moved. What no dial is for stays as it is."""
    made = dict(settings)
    for tunable in tunables:
        if rng.random() >= rules.rate:
            continue
        anew = rng.random() < rules.resample and tunable.bounded
        made |= tunable.at(float(rng.random())) if anew else tunable.perturb(settings, rules, rng)
    return made


def reward_weights(tree: Mapping[str, Any], key: str) -> Settings:
    """The numbers of a reward-shaping dictionary, however deep, by dotted names that begin with `key`."""
    found: Settings = {}
    for name, value in tree.items():
        if "." in name:
            raise UseError(f"{key} has the name {name!r}, and dots separate names", "write it without a dot")
        if isinstance(value, Mapping):
            found |= reward_weights(value, f"{key}.{name}")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{key}.{name}"] = float(value)
    return found


def with_reward_weights(tree: Mapping[str, Any], key: str, settings: Settings) -> dict[str, Any]:
    """A reward-shaping dictionary with the numbers that the settings have for it."""
    return {
        name: with_reward_weights(value, f"{key}.{name}", settings)
        if isinstance(value, Mapping)
        else settings.get(f"{key}.{name}", value)
        for name, value in tree.items()
    }


def _bounded(tunables: Sequence[Tunable]) -> Sequence[Tunable]:
    endless = [tunable.keys[0] for tunable in tunables if not tunable.bounded]
    if endless:
        raise UseError(f"{endless[0]} has no bounds, and settings are drawn between bounds", "give it a range")
    return tunables


def _settings_at(tunables: Sequence[Tunable], shares: Array) -> Settings:
    return {k: v for tunable, share in zip(tunables, shares, strict=True) for k, v in tunable.at(float(share)).items()}


# ------------------------------------------------------------------------------------------------ PB2


@dataclass(frozen=True)
class Gain:
    """What one member's settings brought in one period that ended at these env steps. More is better."""

    settings: Settings
    env_steps: int
    gain: float


_REMEMBERED = 60  # the latest gains are enough: older ones are nearly forgotten
_CANDIDATES, _KEPT, _WIDTHS = 256, 8, (0.1, 0.03, 0.01)


def pb2(
    tunables: Sequence[Tunable],
    gains: Sequence[Gain],
    others: Sequence[Settings],
    rules: Rules,
    rng: np.random.Generator,
) -> Settings:
    """The settings that promise most for the next period, or any while little is known.

    `others` are in force elsewhere in that period: what they will tell need not be asked twice.
    """
    gains = [each for each in sorted(gains, key=lambda each: each.env_steps) if math.isfinite(each.gain)]
    gains = gains[-_REMEMBERED:]
    if len(gains) < 2 * (len(_bounded(tunables)) + 1):
        return random_settings(tunables, rng)
    times = np.array([each.env_steps for each in gains]) / rules.period
    bandit = Bandit(_coordinates(tunables, [each.settings for each in gains]), times, _standard(gains))
    if others:
        bandit.expect(_coordinates(tunables, others), times[-1] + 1)

    def promise(shares: Array) -> Array:
        return bandit.bound(_columns(tunables, shares), times[-1] + 1)

    best = rng.random((_CANDIDATES, len(tunables)))
    for width in _WIDTHS:
        best = best[np.argsort(-promise(best), kind="stable")[:_KEPT]]
        near = best[:, None] + width * rng.normal(size=(_KEPT, _KEPT, len(tunables)))
        best = np.concatenate([best, np.clip(near.reshape(-1, len(tunables)), 0, 1)])
    return _settings_at(tunables, best[np.argmax(promise(best))])


def _standard(gains: Sequence[Gain]) -> Array:
    values = np.array([each.gain for each in gains])
    deviation = values.std()
    return np.asarray((values - values.mean()) / (deviation if deviation > 0 else 1.0))


def _coordinates(tunables: Sequence[Tunable], settings: Sequence[Settings]) -> Array:
    return _columns(tunables, np.array([[tunable.share(each) for tunable in tunables] for each in settings]))


def _columns(tunables: Sequence[Tunable], shares: Array) -> Array:
    return np.concatenate([tunable.columns(shares[:, i]) for i, tunable in enumerate(tunables)], axis=1)


# ------------------------------------------------------------------------------------------------ lineage


@dataclass(frozen=True)
class Exploit:
    """One member became a copy of another. A member that only changed its own settings is its own source."""

    member: int
    source: int
    env_steps: int
    """The member's count when it was replaced."""
    source_env_steps: int
    """The source's count when what was copied was written."""
    counts_from: int
    """The member's count after it: the source's if that was copied along, its own if it counts on."""
    before: Settings
    after: Settings


def schedule(member: int, exploits: Sequence[Exploit], first: Mapping[int, Settings]) -> list[tuple[int, Settings]]:
    """From which env step on which settings, for one run alone that repeats what a member of today went through.

    The exploits are in the order in which they happened, and `first` has what each member began with. Env steps are
    those that the weights saw: what replaced members did is no part of it.
    """
    stretches: list[tuple[int, Settings]] = []  # how long, with what; the latest first
    who, until, earlier = member, None, list(exploits)
    while True:
        found = _latest(who, until, earlier)
        began, settings = (0, first[who]) if found is None else (earlier[found].counts_from, earlier[found].after)
        if until is None or until > began:
            stretches.append((0 if until is None else until - began, settings))
        if found is None:
            break
        last = earlier[found]
        who, until, earlier = last.source, last.source_env_steps, earlier[:found]
    made: list[tuple[int, Settings]] = []
    now = 0
    for length, settings in reversed(stretches):
        if not made or made[-1][1] != settings:
            made.append((now, dict(settings)))
        now += length
    return made


def _latest(member: int, until: int | None, exploits: Sequence[Exploit]) -> int | None:
    """Where the exploit is after which the member was what it was when it had come to `until` env steps."""
    places = [i for i, each in enumerate(exploits) if each.member == member]
    return next((i for i in reversed(places) if until is None or exploits[i].counts_from <= until), None)
