"""Small envs whose best return is known exactly: a learner that misses it is wrong. No dependencies.

name           task                                                       best return      otherwise
identity       act as the observation shows                               length           length / options at random
basic          pull the third of five levers                              1                -1 for every other lever
memory         recall the cue of the first step                           1                0 without memory
delay          actions whose reward comes steps later                     length           length / 2 at random
timeout        prefer an endless reward to a prize                        "stayed" is 1    0 if truncation terminates
masked         choose among the options that a mask allows                length
kitchen_sink   every kind of space at once, in nested Tuples and Dicts    5 x length
"""

from __future__ import annotations

import string
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from tiltyard.types import Array

Answer = tuple[Any, float, bool, bool, dict[str, Any]]
WORDS = ("north", "south", "east", "west", "up", "down", "here", "there")


class Identity(gymnasium.Env[Any, Any]):
    """Every step shows one of `options` categories; the action of the same number gets 1. Best return: `length`.

    `shows` is the form of the observation: the number, a one-hot vector, an image with one bright band, or words.
    With `number` the observation is a number in [-1, 1] and the action one in [-2, 2]; the reward is 1 - |difference|.
    """

    def __init__(
        self,
        *,
        options: int = 4,
        length: int = 10,
        shows: Literal["category", "vector", "image", "words", "number"] = "category",
    ) -> None:
        if shows == "words" and options > len(WORDS):
            raise ValueError(f"there are {len(WORDS)} words and options is {options}")
        self._options, self._length, self._shows = options, length, shows
        self.observation_space: spaces.Space[Any]
        self.action_space: spaces.Space[Any] = spaces.Discrete(options)
        if shows == "category":
            self.observation_space = spaces.Discrete(options)
        elif shows == "vector":
            self.observation_space = spaces.Box(0, 1, (options,), np.float32)
        elif shows == "image":
            self.observation_space = spaces.Box(0, 255, (1, 36, 36), np.uint8)
        elif shows == "words":
            self.observation_space = spaces.Text(60, charset=frozenset(string.ascii_lowercase + " "))
        else:
            self.observation_space = spaces.Box(-1, 1, (1,), np.float32)
            self.action_space = spaces.Box(-2, 2, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return self._draw(), {}

    def step(self, action: Any) -> Answer:
        if self._shows == "number":
            reward = 1.0 - abs(float(action[0]) - float(self._shown[0]))
        else:
            reward = float(action == self._wanted)
        self._step += 1
        return self._draw(), reward, self._step == self._length, False, {}

    def _draw(self) -> Any:
        if self._shows == "number":
            self._shown = self.np_random.uniform(-1, 1, 1).astype(np.float32)
            return self._shown
        self._wanted = int(self.np_random.integers(self._options))
        if self._shows == "vector":
            return np.eye(self._options, dtype=np.float32)[self._wanted]
        if self._shows == "image":
            image = np.zeros((1, 36, 36), np.uint8)
            image[:, :, self._wanted * 36 // self._options : (self._wanted + 1) * 36 // self._options] = 255
            return image
        return f"please go {WORDS[self._wanted]} now" if self._shows == "words" else self._wanted


class Basic(gymnasium.Env[int, int]):
    """One step, five levers: the third gives 1, the others -1, whatever the observation is. Best return: 1."""

    def __init__(self) -> None:
        self.observation_space = spaces.Discrete(2)
        self.action_space = spaces.Discrete(5)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        return int(self.np_random.integers(2)), {}

    def step(self, action: int) -> Answer:
        return 0, 1.0 if action == 2 else -1.0, True, False, {}


class Memory(gymnasium.Env[Any, int]):
    """The first observation shows a cue; `length` steps later, at the signal, the action must be the cue's number.

    Observation: float32 [cues + 1], the cue as one-hot at the start, 1 in the last place at the signal, zeros between.
    The reward is 1 for the cue and -1 / (cues - 1) for another, so the mean return without memory is exactly 0.
    """

    def __init__(self, *, length: int = 4, cues: int = 2) -> None:
        if length < 1 or cues < 2:
            raise ValueError(f"length must be at least 1 and cues at least 2, not {length} and {cues}")
        self._length, self._cues = length, cues
        self.observation_space = spaces.Box(0, 1, (cues + 1,), np.float32)
        self.action_space = spaces.Discrete(cues)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        self._cue = int(self.np_random.integers(self._cues))
        return self._observe(), {}

    def step(self, action: int) -> Answer:
        last = self._step == self._length
        right = action == self._cue
        reward = 0.0 if not last else 1.0 if right else -1.0 / (self._cues - 1)
        self._step += 1
        return self._observe(), reward, last, False, {"recalled": float(right)} if last else {}

    def _observe(self) -> Array:
        seen = np.zeros(self._cues + 1, np.float32)
        if self._step == 0:
            seen[self._cue] = 1
        elif self._step == self._length:
            seen[-1] = 1
        return seen


class Delay(gymnasium.Env[Any, int]):
    """Each of `length` steps wants one of two actions; the right one gets 1, but `delay` steps later.

    Observation: float32 [4], the wanted action as one-hot (zeros while only rewards are due), the elapsed fraction of
    the episode, and the rewards due divided by `delay`. Best return: `length`.
    """

    def __init__(self, *, length: int = 10, delay: int = 3) -> None:
        if length < 1 or delay < 1:
            raise ValueError(f"length and delay must be at least 1, not {length} and {delay}")
        self._length, self._delay = length, delay
        self.observation_space = spaces.Box(0, 1, (4,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        self._due = [0.0] * self._delay
        return self._observe(), {}

    def step(self, action: int) -> Answer:
        earned = float(self._step < self._length and action == self._wanted)
        self._due.append(earned)
        reward = self._due.pop(0)
        self._step += 1
        return self._observe(), reward, self._step == self._length + self._delay, False, {}

    def _observe(self) -> Array:
        seen = np.zeros(4, np.float32)
        self._wanted = int(self.np_random.integers(2))
        if self._step < self._length:
            seen[self._wanted] = 1
        seen[2] = self._step / (self._length + self._delay)
        seen[3] = sum(self._due) / self._delay
        return seen


class Timeout(gymnasium.Env[int, int]):
    """Outside (observation 0), action 0 takes `prize` and terminates, action 1 goes inside (observation 1).

    Inside, every step gives 1 for ever, whatever the action; episodes are truncated after `limit` steps. A learner that
    bootstraps at truncation values the inside at 1 / (1 - gamma) and enters if that exceeds the prize (prize 5:
    gamma > 0.8). One that takes truncation for termination finds at most `limit` there, less than the prize. Half of
    all episodes begin inside, so its value is learned whatever the policy is outside. The metric `stayed` of episodes
    that began outside shows the result, 1 entered and 0 left: the return of truncated episodes, at most
    max(prize, limit), favours the wrong choice on purpose.
    """

    def __init__(self, *, prize: float = 5.0, limit: int = 4) -> None:
        if limit < 2 or prize <= limit:
            raise ValueError(f"limit must be at least 2 and prize more than limit, not {limit} and {prize}")
        self._prize, self._limit = prize, limit
        self.observation_space = spaces.Discrete(2)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        self._place = self._began = int(self.np_random.integers(2))
        return self._place, {}

    def step(self, action: int) -> Answer:
        if self._place == 0 and action == 0:
            return 0, self._prize, True, False, {"stayed": 0.0}
        self._place = 1
        self._step += 1
        cut = self._step == self._limit
        return 1, 1.0, False, cut, {"stayed": 1.0} if cut and self._began == 0 else {}


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
