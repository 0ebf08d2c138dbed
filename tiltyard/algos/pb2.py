"""PB2 (Parker-Holder et al. 2020): choose a copy's settings by a bandit, a Gaussian process over settings and time.

The covariance of two results falls with their distance in either:

    exp(-distance^2 / 2 length^2) (1 - forgetting)^(time / 2)      plus noise on each result

Length, forgetting and noise are the most likely of a few values. Points are coordinates of about [0, 1], values are
standardised, and one unit of time is one period.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tiltyard.algos.pbt import Rules, Settings
from tiltyard.algos.tunables import Tunable, random_settings, require_bounded, settings_at
from tiltyard.types import Array

_LENGTHS, _FORGETTING, _NOISES = (0.1, 0.2, 0.4, 0.8), (0.01, 0.05, 0.2), (0.02, 0.3)


@dataclass(frozen=True)
class Gain:
    """The improvement of one member in one period that ended at these env steps. More is better."""

    settings: Settings
    env_steps: int
    gain: float


_MAX_GAINS = 60  # older ones have almost no weight
_CANDIDATES, _KEPT, _WIDTHS = 256, 8, (0.1, 0.03, 0.01)


def propose(
    tunables: Sequence[Tunable],
    gains: Sequence[Gain],
    others: Sequence[Settings],
    rules: Rules,
    rng: np.random.Generator,
) -> Settings:
    """The settings with the highest upper confidence bound for the next period; random ones while data is scarce.

    `others` are the settings that other members use in that period: trying them again would add little.
    """
    gains = [each for each in sorted(gains, key=lambda each: each.env_steps) if math.isfinite(each.gain)]
    gains = gains[-_MAX_GAINS:]
    if len(gains) < 2 * (len(require_bounded(tunables)) + 1):
        return random_settings(tunables, rng)
    times = np.array([each.env_steps for each in gains]) / rules.period
    bandit = Bandit(_coordinates(tunables, [each.settings for each in gains]), times, _standard(gains))
    if others:
        bandit.add_pending(_coordinates(tunables, others), times[-1] + 1)

    def bound(shares: Array) -> Array:
        return bandit.bound(_columns(tunables, shares), times[-1] + 1)

    best = rng.random((_CANDIDATES, len(tunables)))
    for width in _WIDTHS:
        best = best[np.argsort(-bound(best), kind="stable")[:_KEPT]]
        near = best[:, None] + width * rng.normal(size=(_KEPT, _KEPT, len(tunables)))
        best = np.concatenate([best, np.clip(near.reshape(-1, len(tunables)), 0, 1)])
    return settings_at(tunables, best[np.argmax(bound(best))])


def _standard(gains: Sequence[Gain]) -> Array:
    values = np.array([each.gain for each in gains])
    deviation = values.std()
    return np.asarray((values - values.mean()) / (deviation if deviation > 0 else 1.0))


def _coordinates(tunables: Sequence[Tunable], settings: Sequence[Settings]) -> Array:
    return _columns(tunables, np.array([[tunable.share(each) for tunable in tunables] for each in settings]))


def _columns(tunables: Sequence[Tunable], shares: Array) -> Array:
    return np.concatenate([tunable.columns(shares[:, i]) for i, tunable in enumerate(tunables)], axis=1)


class Bandit:
    """Points [N, D], the times [N] when they were tried, and their values [N]."""

    def __init__(self, points: Array, times: Array, values: Array) -> None:
        self.points, self.times, self.values = points, times, values
        self.results = len(values)
        self.length, self.forgetting, self.noise = self._most_likely()
        self._solve()

    def add_pending(self, points: Array, time: float) -> None:
        """Add points that are being tried, with their expected values: that makes them less uncertain."""
        mean, _ = self._predict(points, time)
        self.points = np.concatenate([self.points, points])
        self.times = np.concatenate([self.times, np.full(len(points), time)])
        self.values = np.concatenate([self.values, mean])
        self._solve()

    def bound(self, points: Array, time: float) -> Array:
        """The upper confidence bound of the value at each point."""
        mean, deviation = self._predict(points, time)
        return mean + math.sqrt(0.4 * math.log(2 * self.results)) * deviation

    def _predict(self, points: Array, time: float) -> tuple[Array, Array]:
        apart, ago = self._distances(points, np.full(len(points), time))
        common = _kernel(apart, ago, self.length, self.forgetting)
        explained = np.einsum("ij,kj->ik", common, self.inverse)  # not @: starting its threads takes longer
        left = np.maximum(1.0 - (explained**2).sum(axis=1), 0.0)
        return explained @ self.solved, np.sqrt(left)

    def _solve(self) -> None:
        covariance = _kernel(*self._distances(self.points, self.times), self.length, self.forgetting)
        self.inverse = np.linalg.inv(cholesky(covariance + self.noise * np.eye(len(self.times))))
        self.solved = self.inverse @ self.values

    def _most_likely(self) -> tuple[float, float, float]:
        apart, ago = self._distances(self.points, self.times)
        found, best = (_LENGTHS[0], _FORGETTING[0], _NOISES[0]), -math.inf
        for length, forgetting in itertools.product(_LENGTHS, _FORGETTING):
            kernel = _kernel(apart, ago, length, forgetting)
            for noise in _NOISES:
                likelihood = _log_likelihood(kernel, noise, self.values)
                if likelihood > best:
                    found, best = (length, forgetting, noise), likelihood
        return found

    def _distances(self, points: Array, times: Array) -> tuple[Array, Array]:
        squares = (points**2).sum(axis=1)[:, None] + (self.points**2).sum(axis=1)
        apart = np.maximum(squares - 2 * points @ self.points.T, 0.0)
        return apart, np.abs(times[:, None] - self.times[None])


def _kernel(apart: Array, ago: Array, length: float, forgetting: float) -> Array:
    return np.asarray(np.exp(-apart / (2 * length**2) + math.log1p(-forgetting) * ago / 2))


def _log_likelihood(kernel: Array, noise: float, values: Array) -> float:
    """Log likelihood of values from a Gaussian of mean 0, up to a constant.

    With the values as one more row and column of the covariance, the last row of its Cholesky factor is the solution,
    which saves a solve; the corner only has to be large enough.
    """
    count = len(values)
    bordered = np.zeros((count + 1, count + 1))
    bordered[:count, :count] = kernel
    bordered[:count, count] = bordered[count, :count] = values
    bordered.flat[:: count + 2] += noise  # the diagonal
    bordered[count, count] = 2 * values @ values / noise + 1
    factor = cholesky(bordered)
    solved = factor[count, :count]
    return float(-0.5 * solved @ solved - np.log(np.diag(factor)[:count]).sum())


def cholesky(matrix: Array) -> Array:
    """The Cholesky factor, with jitter added to the diagonal if needed."""
    jitter = 0.0
    while True:
        try:
            return np.linalg.cholesky(matrix + jitter * np.eye(len(matrix)) if jitter else matrix)
        except np.linalg.LinAlgError:
            jitter = max(10 * jitter, 1e-10)
            if jitter > 1:
                raise
