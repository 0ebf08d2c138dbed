"""Envs that step many rows in one call: which envs have such a vector env, and how a group steps it.

A `VectorEnv` steps all rows at once and resets single ones. CartPole's starts each episode from its own seed, so its
episodes equal those of single envs; Atari's and EnvPool's seed each row once (see there why). Everything else
(episodes, limits, rewards, statistics) is the same as for single envs. An env with wrappers, env.frameskip,
env.frame_stack or env.isolate is stepped copy by copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.utils import seeding

from tiltyard.config.experiment import Env
from tiltyard.envs.row_data import RowData
from tiltyard.envs.single_agent_vector import SingleAgentEpisodes
from tiltyard.envs.spaces import MASK
from tiltyard.plugins import resolve
from tiltyard.types import Tree

if TYPE_CHECKING:
    from tiltyard.types import Array, Arrays


class VectorEnv(Protocol):
    """All rows of a group as one env. Never resets a row by itself."""

    observation_space: gymnasium.Space[Any]
    """of one row"""
    restore_mode: str
    """`state` if there are get_state(row) and set_state(row, state), else `fresh`"""

    def step(self, actions: list[Any]) -> tuple[Any, Array, Array, Array]:
        """One action per row -> observations [B, ...] (a dict of them for a Dict space), rewards, terminated,
        truncated. The next call may overwrite these arrays."""

    def reset_row(self, row: int, seed: int | None) -> Any:
        """Begin an episode in one row and return its first observation. Without a seed, which the first episode always
        has, the row's random stream continues."""

    def close(self) -> None: ...


class Row(gymnasium.Env[Any, Any]):
    """One row of a vector env: begins episodes and keeps their state."""

    def __init__(self, vector: VectorEnv, row: int) -> None:
        self._vector: Any = vector
        self._row = row
        self.observation_space = vector.observation_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self._vector.reset_row(self._row, seed), {}

    def get_state(self) -> Tree:
        state: Tree = self._vector.get_state(self._row)
        return state

    def set_state(self, state: Tree) -> None:
        self._vector.set_state(self._row, state)


class NativeStepping:
    """Steps all rows of a group by one call."""

    def __init__(self, data: RowData, vector: VectorEnv) -> None:
        self._data, self.vector = data, vector
        self.envs: list[Any] = [Row(vector, row) for row in range(data.config.rows)]
        self.counters: Arrays = {}
        episodes = SingleAgentEpisodes(data, self.envs)
        self.finish, self.reset = episodes.finish, episodes.reset

    def step(self, actions: list[Any]) -> None:
        data = self._data
        try:
            obs, reward, terminated, truncated = self.vector.step(actions)
            data.buffer.write_all(obs)
            if data.mask is not None:
                for row in np.flatnonzero(~(terminated | truncated)).tolist():
                    data.store_mask(row, {MASK: obs[MASK][row]}, {})
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise data.env_error(error, 0, "step") from error
        data.raw_reward = reward.tolist()
        data.raw_terminated, data.raw_truncated = terminated.tolist(), truncated.tolist()
        data.heartbeat[0] += 1

    def rerun(self, row: int, actions: list[Array]) -> list[float] | None:
        raise NotImplementedError(f"restore_mode is {self.vector.restore_mode}, never rerun")

    def save(self) -> dict[str, Tree]:
        return {}

    def load(self, tree: Tree) -> None:
        """Nothing is kept beyond what all groups keep."""

    def close(self) -> None:
        self.vector.close()
        self.envs.clear()


class _AnyAction:
    def contains(self, action: object) -> bool:
        return True


class CartPoleVector:
    """Gymnasium's vectorised CartPole without its autoreset: a row starts as the single env does for that seed."""

    restore_mode = "state"

    def __init__(self, name: str, rows: int, options: dict[str, Any], threads: int | None) -> None:
        self._all: Any = CartPoleVectorEnv(rows, max_episode_steps=np.iinfo(np.int32).max, **options)
        self._all.state = np.zeros((4, rows))  # type: ignore[assignment]
        # The policy's actions are valid; checking them again would take a fifth of a step.
        self._all.action_space = _AnyAction()  # type: ignore[assignment]
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
        state: Array = self._random.uniform(self._all.low, self._all.high, size=(4,))
        self._all.state[:, row] = state
        return state.astype(np.float32)

    def get_state(self, row: int) -> Tree:
        return {"state": self._all.state[:, row].copy()}

    def set_state(self, row: int, state: Tree) -> None:
        self._all.state[:, row] = state["state"]

    def close(self) -> None:
        self._all.close()


def _atari(name: str, rows: int, options: dict[str, Any], threads: int | None) -> VectorEnv:
    """Imported only when needed: ale-py is an extra."""
    from tiltyard.envs.suites.atari import AtariVector

    return AtariVector(name, rows, options, threads)


def _envpool(name: str, rows: int, options: dict[str, Any], threads: int | None) -> VectorEnv:
    """Imported only when needed: envpool is an extra."""
    from tiltyard.envs.suites.envpool import EnvPoolVector

    return EnvPoolVector(name, rows, options, threads)


# env id or family -> its vector env: (id or name in the family, rows, env.options, threads) -> VectorEnv
VECTOR_ENVS: dict[str, Callable[[str, int, dict[str, Any], int | None], VectorEnv]] = {
    "CartPole-v1": CartPoleVector,
    "CartPole-v0": CartPoleVector,
    "atari": _atari,
    "envpool": _envpool,
}
EXACT = ("CartPole-v1", "CartPole-v0")  # episodes equal those of the single env with the same seed


def make_native(env: Env, rows: int, threads: int | None = None) -> VectorEnv | None:
    """The vector env for these settings; None if there is none. `threads`: by default one per usable core."""
    key, name = resolve.family_of(env.id) or (env.id, env.id)
    return VECTOR_ENVS[key](name, rows, dict(env.options), threads) if has_native(env) else None


def has_native(env: Env) -> bool:
    """Whether one call can step all rows of this env."""
    plain = not env.wrappers and env.frameskip == 1 and env.frame_stack == 1 and env.isolate == "none"
    key, _ = resolve.family_of(env.id) or (env.id, env.id)
    return env.native and plain and key in VECTOR_ENVS
