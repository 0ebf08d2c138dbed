"""Mean, spread and range of numbers that come block by block, and counts of actions.

Bytes (images) are counted by value, which is exact. Of other arrays the mean and the squared deviations of each block
are merged (Chan, Golub and LeVeque, 1979), so that nothing is lost if the mean is large and the spread is small.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiltyard.types import ActionSpec, Array

MOST_OPTIONS = 1_000  # of a categorical action whose unused options are listed


@dataclass(frozen=True)
class Summary:
    """Numbers in short; NaN if there are none."""

    count: int
    mean: float
    std: float
    min: float
    max: float


def summary(values: Array) -> Summary:
    if not len(values):
        return Summary(0, *[math.nan] * 4)
    wide = np.asarray(values, np.float64)
    return Summary(len(wide), float(wide.mean()), float(wide.std()), float(wide.min()), float(wide.max()))


class Moments:
    """Count, mean, spread and range of each of some features, added block by block."""

    def __init__(self, features: int) -> None:
        self._count = 0
        self._bytes: Array | None = None  # int64 [features, 256]: how often each value occurs
        self._mean, self._squares = np.zeros(features), np.zeros(features)
        self._low, self._high = np.full(features, np.inf), np.full(features, -np.inf)

    def add(self, block: Array) -> None:
        """Add values [features, N]."""
        if not block.shape[1]:
            return
        if block.dtype == np.uint8:
            counts = np.stack([np.bincount(row, minlength=256) for row in block])
            self._bytes = counts if self._bytes is None else self._bytes + counts
            return
        wide = np.ascontiguousarray(block, np.float64)
        with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinity give NaN
            mean = wide.mean(axis=1)
            self._merge(wide.shape[1], mean, np.square(wide - mean[:, None]).sum(axis=1), wide.min(1), wide.max(1))

    def _merge(self, count: int, mean: Array, squares: Array, low: Array, high: Array) -> None:
        whole, between = self._count + count, mean - self._mean
        self._squares = self._squares + squares + between**2 * (self._count * count / whole)
        self._mean = self._mean + between * (count / whole)
        self._count, self._low, self._high = whole, np.minimum(self._low, low), np.maximum(self._high, high)

    def summaries(self) -> list[Summary]:
        """One for each feature."""
        if self._bytes is not None:
            return [_of_bytes(counts) for counts in self._bytes.tolist()]
        if not self._count:
            return [summary(np.zeros(0)) for _ in self._mean]
        columns = (self._mean, np.sqrt(self._squares / self._count), self._low, self._high)
        return [Summary(self._count, *map(float, row)) for row in zip(*columns, strict=True)]

    def total(self) -> Summary:
        """All features as one."""
        if self._bytes is not None:
            return _of_bytes(self._bytes.sum(axis=0).tolist())
        if not self._count:
            return summary(np.zeros(0))
        whole = Moments(1)
        with np.errstate(invalid="ignore"):
            for place in range(len(self._mean)):
                one = slice(place, place + 1)
                columns = (self._mean[one], self._squares[one], self._low[one], self._high[one])
                whole._merge(self._count, *columns)
        return whole.summaries()[0]


def _of_bytes(counts: Sequence[int]) -> Summary:
    """From how often each value occurs; integers, so that nothing is rounded before the end."""
    count = sum(counts)
    total = sum(value * number for value, number in enumerate(counts))
    squares = sum(value * value * number for value, number in enumerate(counts))
    there = [value for value, number in enumerate(counts) if number]
    std = math.sqrt((count * squares - total * total) / (count * count))
    return Summary(count, total / count, std, float(there[0]), float(there[-1]))


class ActionNumbers:
    """How often each option was chosen, and the range and spread of other columns, as recorded."""

    def __init__(self, spec: ActionSpec) -> None:
        self._spec = spec
        self._options: dict[int, dict[int, int]] = {}
        self._moments = Moments(spec.columns)

    def add(self, rows: Array) -> None:
        """Add actions [N, columns]."""
        if not len(rows):  # the final observation alone in a row group
            return
        flat = rows.reshape(len(rows), -1)
        self._moments.add(flat.T)
        for column, part in self._columns():
            if part["kind"] == "categorical":
                chosen = self._options.setdefault(column, {})
                values, numbers = np.unique(flat[:, column].astype(np.int64), return_counts=True)
                for value, number in zip(values.tolist(), numbers.tolist(), strict=True):
                    chosen[value] = chosen.get(value, 0) + number

    def _columns(self) -> list[tuple[int, Mapping[str, Any]]]:
        """Each column and the part that it belongs to."""
        parts = [part for part in self._spec.parts for _ in range(part.columns)]
        return [(column, {"kind": part.kind, "options": part.options}) for column, part in enumerate(parts)]

    def numbers(self) -> list[dict[str, Any]]:
        """For each column: the counts of its options, or its numbers."""
        moments, found = self._moments.summaries(), []
        for column, part in self._columns():
            if part["kind"] == "categorical":
                chosen = self._options.get(column, {})
                listed = {*chosen, *range(min(part["options"], MOST_OPTIONS))}
                found.append(
                    {"kind": part["kind"], "counts": {str(each): chosen.get(each, 0) for each in sorted(listed)}}
                )
            else:
                found.append({"kind": part["kind"], "numbers": moments[column]})
        return found
