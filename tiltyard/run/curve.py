"""One metric of a run over env steps: exact answers from summaries of its parts, and a thinned curve to draw.

    Part    consecutive records in numbers: how many values, their sum, the first, last, lowest and highest of them
    Curve   parts in the order of env steps; a question about one env step reads the records of at most one part again

Env steps increase strictly: a value at an env step that was passed before supersedes all values from there on, because
a program that restarts may begin at env step 0 again. Values that are not finite are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter, lt
from typing import NamedTuple

Points = list[tuple[int, float]]  # env steps and values
Source = Points | Callable[[], Points]  # the points of a part, or a function that reads them


class Part(NamedTuple):
    """One metric in consecutive records. Without finite values, `size` is 0 and all fields after it are nan."""

    low: float  # lowest env step of any value, finite or not
    newest_step: float  # of the newest value, finite or not
    newest: float
    size: float
    total: float  # total + rest is the sum of the values, to twice the precision of a float
    rest: float
    first_step: float
    first: float
    last_step: float
    last: float
    min_step: float
    min: float
    max_step: float
    max: float


def increasing(points: Iterable[tuple[int, float]]) -> Points:
    """The finite values at increasing env steps, from values in the order in which they were recorded."""
    found: Points = []
    for step, value in points:
        while found and found[-1][0] >= step:
            found.pop()
        if math.isfinite(value):
            found.append((step, value))
    return found


def summarize(steps: Sequence[int], values: Sequence[float]) -> Part:
    """The part of some values, in the order in which they were recorded."""
    low, newest = min(steps), (steps[-1], values[-1])
    if not math.isfinite(sum(values)) or not all(map(lt, steps, steps[1:])):
        points = increasing(zip(steps, values, strict=True))
        if not points:
            return Part(low, *newest, 0, *[math.nan] * 10)
        steps, values = zip(*points, strict=True)
    least, most = min(values), max(values)
    total = _sum(values)
    ends = steps[0], values[0], steps[-1], values[-1]
    extremes = steps[values.index(least)], least, steps[values.index(most)], most
    return Part(low, *newest, len(values), total, _sum((*values, -total)), *ends, *extremes)


def _sum(values: Iterable[float]) -> float:
    """The sum, rounded once; nan if it overflows."""
    try:
        return math.fsum(values)
    except OverflowError:
        return math.nan


def join(first: Part, second: Part) -> Part | None:
    """The part of both; None if the second supersedes values of the first, because then records must be read again."""
    if first.size and first.last_step >= second.low:
        return None
    low, newest = min(first.low, second.low), (second.newest_step, second.newest)
    if not first.size or not second.size:
        return (first if first.size else second)._replace(low=low, newest_step=newest[0], newest=newest[1])
    sums = first.total, first.rest, second.total, second.rest
    total = _sum(sums)
    ends = first.first_step, first.first, second.last_step, second.last
    least, most = min(first, second, key=lambda part: part.min), max(first, second, key=lambda part: part.max)
    extremes = least.min_step, least.min, most.max_step, most.max
    return Part(low, *newest, first.size + second.size, total, _sum((*sums, -total)), *ends, *extremes)


def thin(points: Points, most: int) -> Points:
    """At most so many of the points, plus the ends: the lowest and the highest of each of equal groups."""
    if len(points) <= most:
        return points
    size = math.ceil(2 * len(points) / most)
    kept = {points[0], points[-1]}
    for start in range(0, len(points), size):
        group = points[start : start + size]
        kept |= {min(group, key=itemgetter(1)), max(group, key=itemgetter(1))}
    return sorted(kept)


class Curve:
    """The values of one metric. `newest` is its newest env step and value, finite or not; None without any."""

    def __init__(self, parts: Iterable[tuple[Part, Source]] = (), newest: tuple[int, float] | None = None) -> None:
        self.newest = newest
        self._parts: list[tuple[Part, Source]] = []
        self._known: tuple[int, Points] = (-1, [])  # the part that was read last, and its points
        bound = math.inf
        for part, source in reversed(list(parts)):
            if part.size and part.last_step < bound:
                self._parts.append((part, source))
            elif part.size and part.first_step < bound:
                self._parts.append(_known_part([point for point in _read(source) if point[0] < bound]))
            bound = min(bound, part.low)
        self._parts.reverse()

    @classmethod
    def of(cls, points: Iterable[tuple[int, float]]) -> Curve:
        """The curve of values that are in memory."""
        points = list(points)
        found = increasing(points)
        return cls([_known_part(found)] if found else [], points[-1] if points else None)

    def __bool__(self) -> bool:
        return bool(self._parts)

    @property
    def size(self) -> int:
        """The number of values."""
        return int(sum(part.size for part, _ in self._parts))

    @property
    def first_step(self) -> int:
        return int(self._parts[0][0].first_step)

    @property
    def last_step(self) -> int:
        return int(self._parts[-1][0].last_step)

    @property
    def last(self) -> float:
        return self._parts[-1][0].last

    def best(self, better: float) -> float:
        """The highest value, or the lowest if `better` is negative."""
        return max(part.max for part, _ in self._parts) if better > 0 else min(part.min for part, _ in self._parts)

    def mean_until(self, step: int) -> float:
        """The mean of the values up to an env step, which is at least that of the first."""
        whole = [part for part, _ in self._parts if part.last_step <= step]
        rest = [value for at, value in self._points_of(len(whole)) if at <= step]
        sums = (number for part in whole for number in (part.total, part.rest))
        return math.fsum([*sums, *rest]) / (sum(part.size for part in whole) + len(rest))

    def until(self, step: int) -> Curve:
        """The curve up to the first value at this env step or beyond it."""
        number = sum(part.last_step < step for part, _ in self._parts)
        points = self._points_of(number)
        end = sum(at < step for at, _ in points) + 1
        found = Curve()
        found._parts = [*self._parts[:number], *([_known_part(points[:end])] if points else [])]
        return found

    def points(self, most: int | None = None) -> Points:
        """The points to draw: at most `most` and the ends, or all. Where a part's records are not in memory, these are
        its first, last, lowest and highest."""
        found: Points = []
        for part, source in self._parts:
            if isinstance(source, list):
                found += source
            else:
                ends = (part.first_step, part.first), (part.last_step, part.last)
                extremes = (part.min_step, part.min), (part.max_step, part.max)
                found += sorted({(int(step), value) for step, value in (*ends, *extremes)})
        return found if most is None else thin(found, most)

    def _points_of(self, number: int) -> Points:
        """The points of a part, empty if there is no such part. The last one read is kept, for the next question."""
        if number >= len(self._parts):
            return []
        if self._known[0] != number:
            self._known = number, _read(self._parts[number][1])
        return self._known[1]


def _known_part(points: Points) -> tuple[Part, Points]:
    steps, values = zip(*points, strict=True)
    return summarize(steps, values), points


def _read(source: Source) -> Points:
    return source if isinstance(source, list) else source()
