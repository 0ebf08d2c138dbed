"""Population-based training (Jaderberg et al. 2017): which member copies which, and the history that results.

    rank ──> source_for: the member to copy ──> perturb or propose: the copy's settings ──> Exploit ──> schedule

Pure functions on numbers: the caller trains the members and copies their weights. All randomness comes from the given
generator, so that a repeated decision is the same. Settings are changed by `tunables` (at random) or `pb2` (a bandit).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from tiltyard.config.policies import PopulationRules

Settings = dict[str, Any]


@dataclass(frozen=True)
class Rules:
    """When a member is replaced, and how far the settings of its copy move."""

    period: int = 5_000_000
    """Env steps of training between two decisions about a member."""
    start: int = 20_000_000
    """Env steps before the first decision about a member."""
    maximise: bool = True
    replace: float = 0.3
    """The share of members that count as the worst, and as the best; at most half."""
    gap: float = 1e-6
    """The better score must be higher by more than this."""
    relative_gap: float = 0.1
    """And by more than this share, below 1, of the larger absolute score."""
    rate: float = 0.15
    """Probability that a setting of a copy is changed."""
    factors: tuple[float, float] = (1.1, 1.5)
    """Range of the factor that a changed number is multiplied or divided by; both at least 1."""
    resample: float = 0.0
    """Probability that a changed setting is sampled again from its range or choices."""


def rules_of(settings: PopulationRules, maximise: bool) -> Rules:
    """The rules of a population's settings."""
    shared = settings.model_dump(include={field.name for field in fields(Rules)})
    low, high = sorted(settings.factors)
    return Rules(**{**shared, "maximise": maximise, "factors": (low, high)})


@dataclass(frozen=True)
class Member:
    """A member at a decision. Without a finite score it is neither best nor worst."""

    number: int
    env_steps: int
    score: float | None
    decided: int = 0
    """Its env steps at the last decision; after a copy, those it continues from."""


def rank(members: Iterable[Member], maximise: bool = True) -> list[Member]:
    """Members with a score, best first; ties by number."""
    scored = [(_score(member, maximise), member) for member in members]
    known = [(-score, member.number, member) for score, member in scored if score is not None]
    return [member for *_, member in sorted(known, key=lambda each: each[:2])]


def _score(member: Member, maximise: bool) -> float | None:
    """The score with its sign changed if less is better; None if it is not finite."""
    if member.score is None or not math.isfinite(member.score):
        return None
    return member.score if maximise else -member.score


def is_due(rules: Rules, member: Member) -> bool:
    """Whether it is time to decide about this member."""
    return member.env_steps >= rules.start and member.env_steps - member.decided >= rules.period


def is_ahead(rules: Rules, better: Member, worse: Member) -> bool:
    """Whether one is better than the other by more than both gaps."""
    high, low = _score(better, rules.maximise), _score(worse, rules.maximise)
    if high is None or low is None:
        return False
    return high - low > max(rules.gap, rules.relative_gap * max(abs(high), abs(low)))


def source_for(rules: Rules, members: Sequence[Member], number: int, rng: np.random.Generator) -> int | None:
    """The member to copy: a random one of the best, if this one is due, among the worst and far behind."""
    ranked = rank(members, rules.maximise)
    count = min(math.ceil(rules.replace * len(ranked) - 1e-9), len(ranked) // 2)
    own = next((member for member in ranked[len(ranked) - count :] if member.number == number), None)
    if own is None or not is_due(rules, own):
        return None
    source = ranked[int(rng.integers(count))]
    return source.number if is_ahead(rules, source, own) else None


def replacements(rules: Rules, members: Sequence[Member], rng: np.random.Generator) -> dict[int, int]:
    """All replacements {member: source} of one decision. No member is both copied and replaced."""
    found = {each.number: source_for(rules, members, each.number, rng) for each in rank(members, rules.maximise)}
    return {number: source for number, source in found.items() if source is not None}


# ------------------------------------------------------------------------------------------------ lineage


@dataclass(frozen=True)
class Exploit:
    """One member became a copy of another, or of itself with other settings."""

    member: int
    source: int
    env_steps: int
    """Of the member when it was replaced."""
    source_env_steps: int
    """Of the source when the copied state was written."""
    counts_from: int
    """Of the member afterwards: the source's count if that was copied too, otherwise its own."""
    before: Settings
    after: Settings


def schedule(member: int, exploits: Sequence[Exploit], first: Mapping[int, Settings]) -> list[tuple[int, Settings]]:
    """The settings schedule [(env step, settings)] with which a single run repeats the history of a member.

    Exploits are in order of time; `first` has the initial settings of each member. Only env steps that the member's
    weights were trained on count, not those of replaced members.
    """
    segments: list[tuple[int, Settings]] = []  # (env steps, settings), the latest first
    current, until, earlier = member, None, list(exploits)
    while True:
        found = _latest(current, until, earlier)
        began, settings = (0, first[current]) if found is None else (earlier[found].counts_from, earlier[found].after)
        if until is None or until > began:
            segments.append((0 if until is None else until - began, settings))
        if found is None:
            break
        last = earlier[found]
        current, until, earlier = last.source, last.source_env_steps, earlier[:found]
    made: list[tuple[int, Settings]] = []
    now = 0
    for length, settings in reversed(segments):
        if not made or made[-1][1] != settings:
            made.append((now, dict(settings)))
        now += length
    return made


def _latest(member: int, until: int | None, exploits: Sequence[Exploit]) -> int | None:
    """Index of the last exploit of a member before it reached `until` env steps; None if there is none."""
    indices = [i for i, each in enumerate(exploits) if each.member == member]
    return next((i for i in reversed(indices) if until is None or exploits[i].counts_from <= until), None)
