"""What a point is likely to bring, from what others brought before: a Gaussian process over points and time.

Two results have the less in common the further apart they are in either:

    exp(-distance^2 / 2 length^2) (1 - forgotten)^(time / 2)      and noise on each result

with the most likely of a few lengths, rates of forgetting and amounts of noise. Points are coordinates of about [0, 1],
values are standardised, and one of time is one period.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_LENGTHS, _FORGOTTEN, _NOISES = (0.1, 0.2, 0.4, 0.8), (0.01, 0.05, 0.2), (0.02, 0.3)


class Bandit:
    """Points [N, D], the times [N] at which they were tried, the values [N] that they brought."""

    def __init__(self, points: Array, times: Array, values: Array) -> None:
        self.points, self.times, self.values = points, times, values
        self.results = len(values)
        self.length, self.forgotten, self.noise = self._most_likely()
        self._solve()

    def expect(self, points: Array, time: float) -> None:
        """Points that are being tried: as if they brought what is expected of them, which makes them less uncertain."""
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
        common = _kernel(apart, ago, self.length, self.forgotten)
        explained = np.einsum("ij,kj->ik", common, self.inverse)  # not @: waking its threads takes longer than this
        left = np.maximum(1.0 - (explained**2).sum(axis=1), 0.0)
        return explained @ self.solved, np.sqrt(left)

    def _solve(self) -> None:
        covariance = _kernel(*self._distances(self.points, self.times), self.length, self.forgotten)
        self.inverse = np.linalg.inv(root(covariance + self.noise * np.eye(len(self.times))))
        self.solved = self.inverse @ self.values

    def _most_likely(self) -> tuple[float, float, float]:
        apart, ago = self._distances(self.points, self.times)
        found, best = (_LENGTHS[0], _FORGOTTEN[0], _NOISES[0]), -math.inf
        for length, forgotten in itertools.product(_LENGTHS, _FORGOTTEN):
            kernel = _kernel(apart, ago, length, forgotten)
            for noise in _NOISES:
                likelihood = _log_likelihood(kernel, noise, self.values)
                if likelihood > best:
                    found, best = (length, forgotten, noise), likelihood
        return found

    def _distances(self, points: Array, times: Array) -> tuple[Array, Array]:
        squares = (points**2).sum(axis=1)[:, None] + (self.points**2).sum(axis=1)
        apart = np.maximum(squares - 2 * points @ self.points.T, 0.0)
        return apart, np.abs(times[:, None] - self.times[None])


def _kernel(apart: Array, ago: Array, length: float, forgotten: float) -> Array:
    return np.asarray(np.exp(-apart / (2 * length**2) + math.log1p(-forgotten) * ago / 2))


def _log_likelihood(kernel: Array, noise: float, values: Array) -> float:
    """Of values from a Gaussian of mean 0, up to a constant.

    The factor of the covariance with the values as one more row and column has what solves for them as its last row,
    which saves solving; the corner only has to be large enough.
    """
    count = len(values)
    bordered = np.zeros((count + 1, count + 1))
    bordered[:count, :count] = kernel
    bordered[:count, count] = bordered[count, :count] = values
    bordered.flat[:: count + 2] += noise  # the diagonal
    bordered[count, count] = 2 * values @ values / noise + 1
    factor = root(bordered)
    solved = factor[count, :count]
    return float(-0.5 * solved @ solved - np.log(np.diag(factor)[:count]).sum())


def root(matrix: Array) -> Array:
    """The Cholesky factor, with as much added to the diagonal as it takes."""
    jitter = 0.0
    while True:
        try:
            return np.linalg.cholesky(matrix + jitter * np.eye(len(matrix)) if jitter else matrix)
        except np.linalg.LinAlgError:
            jitter = max(10 * jitter, 1e-10)
            if jitter > 1:
                raise
