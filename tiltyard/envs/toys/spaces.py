"""Toy envs that use every kind of space at once, with exactly known best returns. Plain tasks are in single.py.

name           observations                                    actions                                best return
masked         vector, and a mask of allowed options           Discrete, some forbidden               length
kitchen_sink   image, vector, category, tuple, words           all four kinds in a Tuple and a Dict   5 x length
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

if TYPE_CHECKING:
    from tiltyard.types import Array

Answer = tuple[Any, float, bool, bool, dict[str, Any]]


class Masked(gymnasium.Env[Any, int]):
    """The lowest allowed option gets 1, other allowed ones 0; a forbidden one is an error. Best return: `length`.

    Only the mask shows what is allowed, not the vector. It is a key of the observation or of info.
    """

    def __init__(self, *, options: int = 4, length: int = 8, mask_in: Literal["obs", "info"] = "obs") -> None:
        if options < 2:
            raise ValueError(f"options must be at least 2, not {options}")
        self._options, self._length, self._mask_in = options, length, mask_in
        self.action_space = spaces.Discrete(options)
        vector: spaces.Space[Any] = spaces.Box(0, 1, (2,), np.float32)
        mask = spaces.Box(0, 1, (options,), np.int8)
        self.observation_space = spaces.Dict({"vector": vector, "action_mask": mask}) if mask_in == "obs" else vector

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return self._answer()

    def step(self, action: int) -> Answer:
        if not self._allowed[action]:
            raise ValueError(f"action {action} is forbidden here: {self._allowed.tolist()}")
        reward = float(action == int(self._allowed.argmax()))
        self._step += 1
        obs, info = self._answer()
        return obs, reward, self._step == self._length, False, info

    def _answer(self) -> tuple[Any, dict[str, Any]]:
        """Two options are allowed, so the mask alone does not decide."""
        self._allowed = np.zeros(self._options, np.int8)
        self._allowed[self.np_random.choice(self._options, 2, replace=False)] = 1
        vector: Array = np.full(2, self._step / self._length, np.float32)
        if self._mask_in == "obs":
            return {"vector": vector, "action_mask": self._allowed.copy()}, {}
        return vector, {"action_mask": self._allowed.copy()}


class KitchenSink(gymnasium.Env[Any, Any]):
    """Each of five observations shows what one part of the action must be; each right part gets 1.

    observation                               action that gets 1
    picture  uint8 [16, 16, 3], one half lit  Dict gates: MultiBinary(2), the lit half set and the other not
    vector   float64 [2] in [-1, 1]           Box [2] in [0, 10]: 5 + 5 x vector; reward 1 - mean |error| / 10
    code     Discrete(3) from 5               Discrete(3) from 1: the code - 4
    pair     Tuple(MultiDiscrete [2, 3],      MultiDiscrete [2, 3]: the first of the pair
                   MultiBinary(3))            (the second of the pair is irrelevant)
    words    Text: "left" or "right"          Dict side: Discrete(2), 1 for right
    """

    def __init__(self, *, length: int = 4) -> None:
        self._length = length
        self.observation_space = spaces.Dict(
            {
                "picture": spaces.Box(0, 255, (16, 16, 3), np.uint8),
                "vector": spaces.Box(-1, 1, (2,), np.float64),
                "code": spaces.Discrete(3, start=5),
                "pair": spaces.Tuple((spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(3))),
                "words": spaces.Text(20),
            }
        )
        extras = spaces.Dict({"gates": spaces.MultiBinary(2), "side": spaces.Discrete(2)})
        self.action_space = spaces.Tuple(
            (spaces.Discrete(3, start=1), spaces.Box(0, 10, (2,), np.float32), spaces.MultiDiscrete([2, 3]), extras)
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return self._draw(), {}

    def step(self, action: Any) -> Answer:
        code, box, pair, extras = action
        lit = int(self._now["picture"][0, 0, 0] == 0)
        error = np.abs(np.asarray(box, np.float64) - (5 + 5 * self._now["vector"])).mean()
        reward = 1.0 - float(error) / 10
        reward += float(code == self._now["code"] - 4)
        reward += float(np.array_equal(pair, self._now["pair"][0]))
        reward += float(np.array_equal(extras["gates"], [lit == 0, lit == 1]))
        reward += float(extras["side"] == (self._now["words"] == "right"))
        self._step += 1
        return self._draw(), reward, self._step == self._length, False, {"episode_extra_stats": {"steps": self._step}}

    def _draw(self) -> dict[str, Any]:
        rng = self.np_random
        picture = np.zeros((16, 16, 3), np.uint8)
        lit = int(rng.integers(2))
        picture[:, 8 * lit : 8 * lit + 8] = 255
        self._now: dict[str, Any] = {
            "picture": picture,
            "vector": rng.uniform(-1, 1, 2),
            "code": 5 + int(rng.integers(3)),
            "pair": (rng.integers(0, [2, 3]), rng.integers(0, 2, 3).astype(np.int8)),
            "words": ("left", "right")[int(rng.integers(2))],
        }
        return self._now
