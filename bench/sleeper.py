"""An env whose step takes 2 ms without using a core, like a simulator on another machine."""

import time
from typing import Any

import gymnasium
import numpy as np

SECONDS = 0.002
LENGTH = 100


class Sleeper(gymnasium.Env[Any, Any]):
    observation_space = gymnasium.spaces.Box(0.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._left = LENGTH
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(SECONDS)
        self._left -= 1
        return self._seen(), float(action), False, self._left == 0, {}

    def _seen(self) -> Any:
        return self.np_random.random(4, np.float32)
