"""Stepping envs for nothing but speed: random actions, ended episodes begun anew, nothing kept of what comes back.

What training adds to an env's own time (observations stored, returns counted, episodes seeded one by one) is of
vector.py and left out here: the sampler says what the env can do, not what Tiltyard makes of it. Copies with several
agents, with action masks or in processes of their own are stepped as in training, which is how they step at all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tiltyard.envs.env_errors import blamed
from tiltyard.envs.native_vector import NativeGroup
from tiltyard.envs.vector import EnvGroup
from tiltyard.types import Step

if TYPE_CHECKING:
    from tiltyard.types import Array

DRAWN = 256  # env steps whose actions are drawn beforehand


class Walk:
    """A group on its way, from its first observations on."""

    def __init__(self, group: EnvGroup, now: Step) -> None:
        self.group, self.now = group, now
        self.env_steps = self.frames = 0
        self._rng = np.random.default_rng(0)
        self._limit = group.env.time_limit or group.spec.episode_limit or sys.maxsize
        self._turn = 0
        self._actions: list[Any] = []
        self.step = self._way()
        """One env step of every row."""

    def _way(self) -> Callable[[], None]:
        group = self.group
        if group.spec.parallel or group.spec.masked or group.env.isolate != "none":
            return self._as_training
        self._actions = [group.codec.random_rows(self._rng, group.rows) for _ in range(DRAWN)]
        if isinstance(group, NativeGroup):
            self._actions = [np.asarray(group.codec.decode_rows(actions)) for actions in self._actions]
            self._lengths: Array = np.zeros(group.rows, np.int64)
            return self._all_at_once
        self._calls = [made.step for made in group.envs]
        self._left = [self._limit] * group.rows
        return self._one_by_one

    def _next_actions(self) -> Any:
        self._turn = (self._turn + 1) % DRAWN
        return self._actions[self._turn]

    def _one_by_one(self) -> None:
        calls, envs, left = self._calls, self.group.envs, self._left
        actions = self.group.codec.decode_rows(self._next_actions())  # anew: an env may change what it is given
        skip, each, row, doing = self.group.env.frameskip, self.group.spec.frameskip, 0, "step"
        each //= skip
        try:
            for row, call in enumerate(calls):
                for _ in range(skip):
                    _, _, over, cut, _ = call(actions[row])
                    self.frames += each
                    if over or cut:
                        break
                left[row] -= 1
                if over or cut or not left[row]:
                    doing, left[row] = "reset", self._limit
                    envs[row].reset(seed=None)
                    doing = "step"
        except KeyboardInterrupt:  # the user's own
            raise
        except BaseException as error:
            raise self._blamed(error, row, doing) from error
        self.env_steps += len(calls)

    def _all_at_once(self) -> None:
        group = self.group
        assert isinstance(group, NativeGroup)
        lengths, doing, row = self._lengths, "step", 0
        try:
            _, _, terminated, truncated = group.stepper.step(self._next_actions())
            lengths += 1
            ended = terminated | truncated | (lengths >= self._limit)
            if ended.any():
                lengths[ended] = 0
                doing = "reset"
                for row in np.flatnonzero(ended).tolist():
                    group.envs[row].reset(seed=None)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise self._blamed(error, row, doing) from error
        self.env_steps += group.rows
        self.frames += group.rows * group.spec.frameskip

    def _as_training(self) -> None:
        before = self.group.frames_taken
        self.now = self.group.step(self.group.codec.random_rows(self._rng, self.group.rows, self.now.mask))
        self.env_steps += int(self.now.valid.sum())
        self.frames += self.group.frames_taken - before

    def _blamed(self, error: BaseException, row: int, doing: str) -> Exception:
        where = f"env {self.group.env.id}, row {self.group.first_row + row}, env step {self.env_steps}"
        return blamed(error, where, doing)
