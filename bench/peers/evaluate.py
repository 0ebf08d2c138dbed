"""Greedy evaluation for the runners that train to a score: mean return of 20 episodes with fixed seeds."""

from collections.abc import Callable
from functools import partial

import gymnasium
import numpy as np

SEEDS = [1_000_003 + i for i in range(20)]


class Evaluation:
    def __init__(self, env_id: str) -> None:
        self.envs = gymnasium.vector.SyncVectorEnv([partial(gymnasium.make, env_id) for _ in SEEDS])

    def __call__(self, act: Callable[[np.ndarray], np.ndarray]) -> float:
        """`act` maps the observations of 20 envs to their most likely actions."""
        obs, _ = self.envs.reset(seed=SEEDS)
        returns, running = np.zeros(len(SEEDS)), np.ones(len(SEEDS), bool)
        while running.any():
            obs, reward, terminated, truncated, _ = self.envs.step(act(obs))
            returns += reward * running
            running &= ~(terminated | truncated)
        return float(returns.mean())
