"""Envs that report their process and thread, and that exit, raise or hang on request."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Where(gymnasium.Env):
    """A counter of `length` steps that reports its process and thread, and whether it was created there."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 8, "odd": object()}

    def __init__(
        self, *, length: int = 8, fault: str = "", at: int = 10**9, flag: str = "", render_mode: str | None = None
    ) -> None:
        self.length, self.fault, self.at, self.flag, self.render_mode = length, fault, at, flag, render_mode
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.made = self._here()
        self.taken = 0
        if fault == "make":
            os._exit(4)

    @staticmethod
    def _here() -> tuple[int, int]:
        return os.getpid(), threading.get_ident()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._seen(0), {}

    def _seen(self, action: int) -> np.ndarray:
        return np.array([self.steps, action, self.np_random.random()], np.float32)

    def step(self, action: Any) -> Any:
        self.steps += 1
        self.taken += 1
        if self.taken >= self.at:
            self._fail()
        process, thread = self._here()
        info = {"process": process, "thread": thread, "same": self._here() == self.made, "odd": object(), "name": "x"}
        return self._seen(int(action)), float(action), self.steps >= self.length, False, info

    def _fail(self) -> None:
        if self.flag:
            try:
                Path(self.flag).touch(exist_ok=False)  # only once among all copies
            except FileExistsError:
                return
        match self.fault:
            case "raise":
                raise RuntimeError("the wheel came off")
            case "exit":
                os._exit(3)
            case "sys.exit":
                sys.exit("no licence")
            case "interrupt":
                raise KeyboardInterrupt
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(600)

    def render(self) -> Any:
        shown = 200 if self._here() == self.made else 0
        return np.full((4, 6, 3), shown, np.uint8)


class Strange(Where):
    """An env with an observation that cannot be sent to another process."""

    def step(self, action: Any) -> Any:
        super().step(action)
        return object(), 1.0, False, False, {}


class Pair:
    """Two agents whose episode never ends."""

    metadata: dict[str, Any] = {}
    possible_agents = ("left", "right")

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0, 1, (2,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(self.possible_agents)
        return {agent: np.zeros(2, np.float32) for agent in self.agents}, {}

    def step(self, actions: Any) -> Any:
        none = dict.fromkeys(self.agents, False)
        return {agent: np.zeros(2, np.float32) for agent in actions}, dict.fromkeys(self.agents, 1.0), none, none, {}

    def close(self) -> None:
        pass
