"""Advantages and returns of a rollout: pure functions on [T, B] numpy arrays.

The value of what follows step t, by which every estimate bootstraps:

    terminated[t]            0             the episode is over
    truncated[t]             bootstrap[t]  value of the episode's last observation
    t = T - 1                bootstrap[t]  the rollout ends, the episode does not
    otherwise                value[t + 1]

Nothing flows back across an end of either kind. Each estimate returns (advantage, return), both float32 [T, B].
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tiltyard.types import Array


class Steps(NamedTuple):
    """What an estimate needs of a rollout, each [T, B]; values in units of reward."""

    reward: Array
    value: Array
    bootstrap: Array
    terminated: Array
    truncated: Array


def next_values(steps: Steps) -> Array:
    """The value of what follows each step, by the table above."""
    follows = np.concatenate([steps.value[1:], steps.bootstrap[-1:]])
    follows = np.where(steps.truncated, steps.bootstrap, follows)
    return np.where(steps.terminated, 0.0, follows).astype(np.float32)


def _backwards(delta: Array, keep: Array) -> Array:
    """x[t] = delta[t] + keep[t] * x[t + 1], in float64 for long rollouts."""
    out = np.empty(delta.shape, np.float64)
    running = np.zeros(delta.shape[1], np.float64)
    for t in range(len(delta) - 1, -1, -1):
        running = delta[t] + keep[t] * running
        out[t] = running
    return out


def gae(steps: Steps, gamma: float, lam: float) -> tuple[Array, Array]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16)."""
    delta = steps.reward + gamma * next_values(steps) - steps.value
    advantage = _backwards(delta, gamma * lam * ~(steps.terminated | steps.truncated))
    return advantage.astype(np.float32), (advantage + steps.value).astype(np.float32)


def clipped_gae(steps: Steps, ratio: Array, gamma: float, lam: float, clip: float) -> tuple[Array, Array]:
    """GAE for samples of an older policy: later errors are weighted by their clipped importance ratio.

    ratio[t] = pi(a[t]) / mu(a[t]). The error of step t itself is not weighted: PPO's ratio does that.
    """
    delta = steps.reward + gamma * next_values(steps) - steps.value
    capped = np.minimum(ratio, clip)
    # A[t] = delta[t] + gamma lam capped[t + 1] A[t + 1]; at t = T - 1 nothing follows.
    after = np.concatenate([capped[1:], np.zeros_like(capped[:1])])
    advantage = _backwards(delta, gamma * lam * after * ~(steps.terminated | steps.truncated))
    return advantage.astype(np.float32), (advantage + steps.value).astype(np.float32)


def vtrace(steps: Steps, ratio: Array, gamma: float, lam: float, clip: float) -> tuple[Array, Array]:
    """V-trace (Espeholt et al. 2018, eq. 1): returns corrected towards the current policy.

    Traces are cut at min(1, ratio) times `lam`, errors at `clip`. The advantage of step t is
    reward + gamma * corrected next value - value, unweighted: PPO's ratio does that.
    """
    reward, value = steps.reward, steps.value
    follows = next_values(steps)
    rho = np.minimum(ratio, clip)
    trace = lam * np.minimum(ratio, 1.0)
    continues = ~(steps.terminated | steps.truncated)
    corrected = value + _backwards(rho * (reward + gamma * follows - value), gamma * trace * continues)
    within = continues.copy()
    within[-1] = False  # the step after the last is not in the rollout: its value is the bootstrap
    after = np.where(within, np.concatenate([corrected[1:], corrected[-1:]]), follows)
    advantage = reward + gamma * after - value
    return advantage.astype(np.float32), corrected.astype(np.float32)
