"""Advantages and returns: pure functions on [T, B] numpy arrays. They know rewards and values, not policies.

What follows step t is worth:

    terminated[t]            0             the episode is over
    truncated[t]             bootstrap[t]  it would have gone on: the value of its last observation
    t = T - 1                bootstrap[t]  the rollout ends, the episode does not
    otherwise                value[t + 1]

and nothing flows backwards across an end of either kind. Each gives (advantage, return), both float32 [T, B].
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def next_values(value: Array, bootstrap: Array, terminated: Array, truncated: Array) -> Array:
    """[T, B]: what follows each step is worth, by the table above."""
    follows = np.concatenate([value[1:], bootstrap[-1:]])
    follows = np.where(truncated, bootstrap, follows)
    return np.where(terminated, 0.0, follows).astype(np.float32)


def _backwards(delta: Array, keep: Array) -> Array:
    """x[t] = delta[t] + keep[t] * x[t + 1], in float64 so that long rollouts add up exactly enough."""
    out = np.empty(delta.shape, np.float64)
    running = np.zeros(delta.shape[1], np.float64)
    for t in range(len(delta) - 1, -1, -1):
        running = delta[t] + keep[t] * running
        out[t] = running
    return out


def gae(
    reward: Array, value: Array, bootstrap: Array, terminated: Array, truncated: Array, gamma: float, lam: float
) -> tuple[Array, Array]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16)."""
    delta = reward + gamma * next_values(value, bootstrap, terminated, truncated) - value
    advantage = _backwards(delta, gamma * lam * ~(terminated | truncated))
    return advantage.astype(np.float32), (advantage + value).astype(np.float32)


def clipped_gae(
    reward: Array,
    value: Array,
    bootstrap: Array,
    terminated: Array,
    truncated: Array,
    ratio: Array,
    gamma: float,
    lam: float,
    clip: float,
) -> tuple[Array, Array]:
    """GAE for samples of an older policy: each later error counts by its clipped importance ratio.

    ratio[t] = pi(a[t]) / mu(a[t]). The error of step t itself is not weighted: PPO's own ratio does that.
    """
    delta = reward + gamma * next_values(value, bootstrap, terminated, truncated) - value
    capped = np.minimum(ratio, clip)
    # A[t] = delta[t] + gamma lam capped[t + 1] A[t + 1]; at t = T - 1 nothing follows.
    after = np.concatenate([capped[1:], np.zeros_like(capped[:1])])
    advantage = _backwards(delta, gamma * lam * after * ~(terminated | truncated))
    return advantage.astype(np.float32), (advantage + value).astype(np.float32)


def vtrace(
    reward: Array,
    value: Array,
    bootstrap: Array,
    terminated: Array,
    truncated: Array,
    ratio: Array,
    gamma: float,
    lam: float,
    clip: float,
) -> tuple[Array, Array]:
    """V-trace (Espeholt et al. 2018, eq. 1): returns corrected towards the current policy.

    The traces are cut at min(1, ratio) times `lam`, the errors at `clip`. The advantage of step t is
    reward + gamma * corrected value of what follows - value, unweighted: PPO's own ratio does that.
    """
    follows = next_values(value, bootstrap, terminated, truncated)
    rho = np.minimum(ratio, clip)
    trace = lam * np.minimum(ratio, 1.0)
    going = ~(terminated | truncated)
    corrected = value + _backwards(rho * (reward + gamma * follows - value), gamma * trace * going)
    within = going.copy()
    within[-1] = False  # the step after the last is not in the rollout: its value is the bootstrap
    after = np.where(within, np.concatenate([corrected[1:], corrected[-1:]]), follows)
    advantage = reward + gamma * after - value
    return advantage.astype(np.float32), corrected.astype(np.float32)
