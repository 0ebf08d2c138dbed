"""An env for speed tests: it sleeps, uses memory or fails according to its options."""

import time
from typing import Any

import gymnasium
import numpy as np


class Pauses(gymnasium.Env[Any, Any]):
    def __init__(
        self,
        make: float = 0.0,
        step: float = 0.0,
        reset: float = 0.0,
        mib: int = 0,
        length: int = 5,
        fails_at: int = 0,
    ) -> None:
        time.sleep(make)
        self.observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.pause, self.beginning, self.length, self.fails_at = step, reset, length, fails_at
        self.memory = np.ones(mib << 17)
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        time.sleep(self.beginning)
        self.age = 0
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self.pause)
        self.age += 1
        self.steps += 1
        if self.steps == self.fails_at:
            raise RuntimeError("out of fuel")
        return np.full(3, action, np.float32), float(action), self.age >= self.length, False, {}
