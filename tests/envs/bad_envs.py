"""Envs that violate the contract in one way, selected by the option `fault`."""

import ctypes
import os
import signal
import sys
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class BadEnv(gymnasium.Env):
    """Without a fault, a valid env without end: observes the step number as float32 [2], reward 1."""

    def __init__(self, *, fault: str = "", at: int = 3) -> None:
        self.fault, self.at = fault, at
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        if fault == "sequence_space":
            self.observation_space = spaces.Sequence(spaces.Discrete(2))
        if fault == "constructor":
            raise RuntimeError("no licence found")
        if fault == "hang":
            time.sleep(60)
        if fault == "greets":
            print("hello from its constructor")
        if fault == "constructor interrupt":
            raise KeyboardInterrupt

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        if self.fault == "old_reset":
            return np.zeros(2, np.float32)
        if self.fault == "unseeded":
            return np.full(2, time.monotonic_ns() % 1000, np.float32), {}
        if self.fault == "prints":
            print("hello from the simulator")
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        obs: Any = np.full(2, self.steps, np.float32)
        reward: Any = 1.0
        if self.steps >= self.at:
            match self.fault:
                case "float64":
                    obs = obs.astype(np.float64)
                case "list":
                    obs = obs.tolist()
                case "nan":
                    obs[1] = np.nan
                case "inf":
                    obs[0] = np.inf
                case "shape":
                    obs = np.zeros(3, np.float32)
                case "reward_nan":
                    reward = float("nan")
                case "reward_array":
                    reward = np.ones(2)
                case "prints from C":
                    ctypes.CDLL(None).printf(b"hello from C\n")
                case "sys.exit":
                    sys.exit("no licence")
                case "interrupt":
                    raise KeyboardInterrupt
                case "generator":
                    raise GeneratorExit
                case "raise":
                    raise RuntimeError("the wheel came off")
                case "old_step":
                    return obs, reward, False, {}
                case "flag":
                    return obs, reward, "no", False, {}
                case "segv":
                    os.kill(os.getpid(), signal.SIGSEGV)
                case "exit":
                    os._exit(3)
        return obs, reward, False, False, {}


class NotAnEnv:
    def __init__(self, *, size: int = 1) -> None:
        self.size = size


class Unrepeatable(gymnasium.Env):
    """An env that is deterministic for 20 steps, so the probe finds no fault, and then differs in every copy."""

    made = 0

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        Unrepeatable.made += 1
        self.own = Unrepeatable.made

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        seen = np.array([self.steps if self.steps <= 20 else 1000 * self.own + self.steps], np.float32)
        return seen, 1.0, False, False, {}


class Recorder(gymnasium.Env):
    """An env that ends after `length` frames and reports the sum of its actions; observes a counter as image [8, 8, 1]."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 8}

    def __init__(self, *, length: int = 5, ending: str = "terminated", render_mode: str | None = None) -> None:
        self.length, self.ending, self.render_mode = length, ending, render_mode
        self.observation_space = spaces.Box(0, 255, (8, 8, 1), np.uint8)
        self.action_space = spaces.Box(-2, 6, (1,), np.float32)
        self.seeds: list[int | None] = []

    def _seen(self) -> np.ndarray:
        return np.full((8, 8, 1), self.frames, np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.frames, self.sum = 0, 0.0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self.frames += 1
        self.sum += float(action[0])
        end = self.frames == self.length
        both = self.ending == "both"
        info = {"sum": self.sum, "won": True, "name": "x", "bad": float("nan"), "episode_extra_stats": {"depth": 3}}
        over, cut = end and (both or self.ending == "terminated"), end and (both or self.ending == "truncated")
        return self._seen(), float(action[0]), over, cut, info if end else {}

    def render(self) -> Any:
        return np.full((4, 6, 3), self.frames, np.uint8)
