"""Envs that step many rows in one call, as a group like any other: the rows of vector.py without its loop.

A `Stepper` steps all rows at once and resets single ones. CartPole's begins each episode with its own seed, so that
episodes are those of the env stepped one by one; Atari's and EnvPool's seed each row once (see there why). Everything
else (episodes, limits, rewards, statistics) is EnvGroup's. Which env has a stepper is `stepper_for`; with wrappers,
frameskip or a frame stack of ours none has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.utils import seeding

from tiltyard.config.experiment import Env
from tiltyard.envs.multi_agent_vector import group_class
from tiltyard.envs.spaces import MASK
from tiltyard.envs.vector import EnvGroup
from tiltyard.plugins import resolve
from tiltyard.types import EnvSpec, Tree

if TYPE_CHECKING:
    from tiltyard.types import Array


class Stepper(Protocol):
    """All rows of a group as one env. Never resets by itself."""

    observation_space: gymnasium.Space[Any]
    """of one row"""
    restore_mode: str
    """`state` when there are get_state(row) and set_state(row, state), else `fresh`"""

    def step(self, actions: list[Any]) -> tuple[Any, Array, Array, Array]:
        """One action per row: observations [B, ...], or dicts of them as the space has, rewards, terminated, truncated.
        Arrays may be used again."""

    def reset_row(self, row: int, seed: int | None) -> Any:
        """Begin an episode in one row; its first observation. The seed is the episode's own; without one, after a
        first one, random numbers go on where they are."""

    def close(self) -> None: ...


class Row(gymnasium.Env[Any, Any]):
    """One row of a stepper, as far as a group needs single envs: to begin episodes and to keep their state."""

    def __init__(self, stepper: Stepper, row: int) -> None:
        self._stepper: Any = stepper
        self._row = row
        self.observation_space = stepper.observation_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self._stepper.reset_row(self._row, seed), {}

    def get_state(self) -> Tree:
        state: Tree = self._stepper.get_state(self._row)
        return state

    def set_state(self, state: Tree) -> None:
        self._stepper.set_state(self._row, state)


class NativeGroup(EnvGroup):
    """An EnvGroup, made from the same arguments without `base`, whose rows are stepped by one call."""

    def __init__(self, stepper: Stepper, *group: Any, **more: Any) -> None:
        self.stepper = stepper
        super().__init__(*group, base=(), **more)

    def _make_envs(self, base: Sequence[Path], render: bool) -> list[gymnasium.Env[Any, Any]]:
        self.restore_mode = self.stepper.restore_mode  # type: ignore[assignment]
        return [Row(self.stepper, row) for row in range(self.rows)]

    def _advance_all(self, actions: list[Any]) -> None:
        try:
            obs, reward, terminated, truncated = self.stepper.step(actions)
            self.buffer.write_all(obs)
            if self.mask is not None:
                for row in np.flatnonzero(~(terminated | truncated)).tolist():
                    self._store_mask(row, {MASK: obs[MASK][row]}, {})
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise self._attributed(error, 0, "step") from error
        self._raw = reward.tolist()
        self._over, self._cut = terminated.tolist(), truncated.tolist()
        self._beats[0] += 1

    def close(self) -> None:
        self.stepper.close()
        self.envs = []


class _Anything:
    def contains(self, action: object) -> bool:
        return True


class CartPoles:
    """Gymnasium's vectorised CartPole, told not to reset by itself: rows begin as the single env does for that seed."""

    restore_mode = "state"

    def __init__(self, name: str, rows: int, options: dict[str, Any], threads: int | None) -> None:
        self._all: Any = CartPoleVectorEnv(rows, max_episode_steps=np.iinfo(np.int32).max, **options)
        self._all.state = np.zeros((4, rows))  # type: ignore[assignment]
        # Actions are what the policy chose from: to look at them again costs a fifth of a step.
        self._all.action_space = _Anything()  # type: ignore[assignment]
        self.observation_space = self._all.single_observation_space
        self._none = np.zeros(rows, bool)
        self._random = np.random.default_rng()

    def step(self, actions: list[Any]) -> tuple[Array, Array, Array, Array]:
        self._all.prev_done = self._none
        obs, reward, terminated, truncated, _ = self._all.step(np.asarray(actions))
        return obs, reward, terminated, truncated

    def reset_row(self, row: int, seed: int | None) -> Array:
        if seed is not None:
            self._random, _ = seeding.np_random(seed)
        begin: Array = self._random.uniform(self._all.low, self._all.high, size=(4,))
        self._all.state[:, row] = begin
        return begin.astype(np.float32)

    def get_state(self, row: int) -> Tree:
        return {"state": self._all.state[:, row].copy()}

    def set_state(self, row: int, state: Tree) -> None:
        self._all.state[:, row] = state["state"]

    def close(self) -> None:
        self._all.close()


def _ataris(name: str, rows: int, options: dict[str, Any], threads: int | None) -> Stepper:
    """Imported only when asked for: ale-py is an extra."""
    from tiltyard.envs.suites.atari import Ataris

    return Ataris(name, rows, options, threads)


def _envpools(name: str, rows: int, options: dict[str, Any], threads: int | None) -> Stepper:
    """Imported only when asked for: envpool is an extra."""
    from tiltyard.envs.suites.envpool import EnvPools

    return EnvPools(name, rows, options, threads)


# id or family -> what steps many rows of it: (id or name in the family, rows, env.options, threads) -> Stepper
STEPPERS: dict[str, Callable[[str, int, dict[str, Any], int | None], Stepper]] = {
    "CartPole-v1": CartPoles,
    "CartPole-v0": CartPoles,
    "atari": _ataris,
    "envpool": _envpools,
}
EXACT = ("CartPole-v1", "CartPole-v0")  # an episode is the one that the single env plays with its seed


def stepper_for(env: Env, rows: int, threads: int | None = None) -> Stepper | None:
    """The stepper of an env whose rows need nothing of ours in between; None when there is none.

    `threads` is for simulators that step rows in threads of their own: one per usable core when not said.
    """
    key, name = resolve.family_of(env.id) or (env.id, env.id)
    return STEPPERS[key](name, rows, dict(env.options), threads) if has_stepper(env) else None


def has_stepper(env: Env) -> bool:
    """Whether all rows will be stepped in one call."""
    plain = not env.wrappers and env.frameskip == 1 and env.frame_stack == 1 and env.isolate == "none"
    key, _ = resolve.family_of(env.id) or (env.id, env.id)
    return env.native and plain and key in STEPPERS


def make_group(
    env: Env,
    spec: EnvSpec,
    rows: int,
    seed: int,
    *,
    base: Sequence[Path],
    threads: int | None = None,
    exact: bool = False,
    **more: Any,
) -> EnvGroup:
    """Rows stepped by one call where the env can and `env.native` allows, else copy by copy; `more` is EnvGroup's.

    With `exact` only by a call that plays the same episodes as the single env does.
    """
    stepper = stepper_for(env, rows, threads) if env.id in EXACT or not exact else None
    if stepper is not None:
        return NativeGroup(stepper, env, spec, rows, seed, **more)
    return group_class(spec)(env, spec, rows, seed, base=base, **more)
