"""Envs with one agent: row = copy. Copies are stepped one after the other (or side by side with env.isolate), or all of
them by one call of a vector env, if there is one.

`SingleAgentEpisodes` begins and ends the episodes of both. CartPole's vector env starts each episode from its own seed,
so its episodes equal those of single envs; Atari's and EnvPool's seed each row once (see there why). An env with
wrappers, env.frameskip, env.frame_stack or env.isolate is stepped copy by copy.
"""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any, Protocol

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.utils import seeding

from tiltyard.config.sections import Env
from tiltyard.envs.actions import ActionCodec
from tiltyard.envs.checks import info_scalars, reset_fault, reward_fault
from tiltyard.envs.env_errors import InvalidEnvData
from tiltyard.envs.row_data import RowData
from tiltyard.envs.spaces import MASK
from tiltyard.envs.watchdog import RESETTING
from tiltyard.plugins import resolve
from tiltyard.types import Array, Arrays, EpisodeEnd, Tree


class SingleAgentEpisodes:
    """Starts and ends the episodes of rows, each with its own env."""

    def __init__(self, data: RowData, envs: list[Any]) -> None:
        self._data, self._envs = data, envs

    def finish(self, before_reset: Callable[[int], None] | None) -> list[EpisodeEnd]:
        """Set terminated, truncated and first; close the episodes that ended and begin their rows' next ones."""
        data, stats = self._data, self._data.stats
        late = stats.late()
        if data.any_first:
            data.terminated[:] = data.truncated[:] = data.first[:] = data.any_first = False
        if late is None and not (True in data.raw_terminated or True in data.raw_truncated):
            return []
        data.terminated[:] = data.raw_terminated
        data.truncated[:] = data.raw_truncated
        short = None
        if late is not None:
            short = stats.shortened(data.terminated | data.truncated)
            data.truncated |= late
        data.truncated &= ~data.terminated  # after a terminal state there is nothing to bootstrap from
        np.logical_or(data.terminated, data.truncated, out=data.first)
        ends = [self._finish(row, before_reset) for row in np.flatnonzero(data.first).tolist()]
        if ends:
            data.any_first = True
            data.check_finite({})
        stats.set_countdown()
        return data.without_shortened(ends, short)

    def _finish(self, row: int, before_reset: Callable[[int], None] | None) -> EpisodeEnd:
        data, stats = self._data, self._data.stats
        data.keep_final(row)
        if before_reset is not None:
            before_reset(row)
        info = data.infos[row]
        end = stats.end(row, float(stats.total[row]), info_scalars(info) if info else {})
        self.reset(row, data.begin_episode(row))
        return end

    def reset(self, row: int, seed: int) -> None:
        """Reset a row's env and store its first observation."""
        data, beat = self._data, self._data.heartbeat
        beat[0] += 1
        before, beat[1] = beat[1], RESETTING
        try:
            data.options.before_reset(row, self._envs[row])
            answer = self._envs[row].reset(seed=seed)
            beat[1] = before
            fault = reset_fault(answer)
            if fault:
                raise InvalidEnvData(fault, "", answer)
            data.buffer.restart(row, answer[0])
            if data.mask is not None:
                data.store_mask(row, *answer)
        except BaseException as error:
            raise data.env_error(error, row, "reset") from error


class SingleAgentStepping:
    """Steps the envs in a loop over rows."""

    def __init__(self, data: RowData, envs: list[Any]) -> None:
        env, episodes = data.config.env, SingleAgentEpisodes(data, envs)
        self._data, self.envs = data, envs
        self._frameskip = env.frameskip  # calls of the env's step per env step
        self._calls = [made.step for made in envs]
        self._send_steps = [made.send_step for made in envs] if env.isolate != "none" else []
        self.counters: Arrays = {}
        self.finish, self.reset = episodes.finish, episodes.reset

    def step(self, actions: list[Any]) -> None:
        """One env step of every row: the hot loop. Most envs need none of its three branches."""
        data = self._data
        raw, terminated, truncated, infos = data.raw_reward, data.raw_terminated, data.raw_truncated, data.infos
        masks, plain, row, write = data.mask is not None, self._frameskip == 1, 0, data.buffer.write
        target, shape, dtype = data.buffer.plain
        beat = data.heartbeat
        try:
            for send_step, action in zip(self._send_steps, actions, strict=False):  # isolated envs step side by side
                send_step(action, self._frameskip)
            for row, call in enumerate(self._calls):
                beat[0] += 1
                if plain:
                    obs, reward, terminated[row], truncated[row], infos[row] = call(actions[row])
                    raw[row] = reward if type(reward) is float else _number(reward)
                else:
                    obs = self._step_frames(row, actions[row])
                if type(obs) is np.ndarray and obs.dtype == dtype and obs.shape == shape:
                    target[row] = obs
                else:
                    write(row, obs)
                if masks and not (terminated[row] or truncated[row]):
                    data.store_mask(row, obs, infos[row])
        except BaseException as error:
            raise data.env_error(error, row, "step") from error

    def _step_frames(self, row: int, action: Any) -> Any:
        """One env step of several frames: rewards are summed; the end of the episode ends the step."""
        data, total, left = self._data, 0.0, self._frameskip
        while left:
            obs, reward, terminated, truncated, info = self._calls[row](action)
            total += _number(reward)
            left -= 1
            if terminated or truncated:
                break
        data.stats.saved_frames[row] += left * (data.config.spec.frameskip // self._frameskip)
        data.raw_reward[row], data.infos[row] = total, info
        data.raw_terminated[row], data.raw_truncated[row] = terminated, truncated
        return obs

    def rerun(self, row: int, actions: list[Array]) -> list[float] | None:
        """Repeat the actions of a row's episode; its return, or None if the episode ends on the way."""
        data, total = self._data, 0.0
        data.stats.saved_frames[row] = 0
        for action in ActionCodec(data.config.spec.action).decode_rows(actions[0]):
            data.heartbeat[0] += 1
            obs = self._step_frames(row, action)
            if data.raw_terminated[row] or data.raw_truncated[row]:
                return None
            total += data.raw_reward[row]
            data.buffer.shift_row(row)
            data.buffer.write(row, obs)
        return [total]

    def close(self) -> None:
        close_envs(self.envs)
        self._calls, self._send_steps = [], []


def close_envs(envs: list[Any]) -> None:
    """Close every env and empty the list. Errors on closing are ignored: the results are complete by then."""
    for made in envs:
        try:
            made.close()
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001
            continue
    envs.clear()


def _number(reward: Any) -> float:
    fault = reward_fault(reward)
    if fault and "instead" in fault:
        raise InvalidEnvData(fault, "reward", reward)
    return float(reward)


# ---------------------------------------------------------------------------------------------- all rows in one call


class VectorEnv(Protocol):
    """All rows of a group as one env. Never resets a row by itself."""

    observation_space: gymnasium.Space[Any]  # of one row
    restore_mode: str  # `state` if there are get_state(row) and set_state(row, state), else `fresh`

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
        return self._vector.get_state(self._row)

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
        except BaseException as error:
            raise data.env_error(error, 0, "step") from error
        data.raw_reward = reward.tolist()
        data.raw_terminated, data.raw_truncated = terminated.tolist(), truncated.tolist()
        data.heartbeat[0] += 1

    def rerun(self, row: int, actions: list[Array]) -> list[float] | None:
        raise NotImplementedError(f"restore_mode is {self.vector.restore_mode}, never rerun")

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


# env id or family -> its vector env: (id or name in the family, rows, env.options, threads) -> VectorEnv
VECTOR_ENVS = {
    "CartPole-v1": "tiltyard.envs.single_agent_vector:CartPoleVector",
    "CartPole-v0": "tiltyard.envs.single_agent_vector:CartPoleVector",
    "atari": "tiltyard.envs.suites.atari:AtariVector",  # these two need extras
    "envpool": "tiltyard.envs.suites.envpool:EnvPoolVector",
}
EXACT = ("CartPole-v1", "CartPole-v0")  # episodes equal those of the single env with the same seed


def make_native(env: Env, rows: int, threads: int | None = None) -> VectorEnv | None:
    """The vector env for these settings; None if there is none. `threads`: by default one per usable core."""
    if not has_native(env):
        return None
    key, name = resolve.family_of(env.id) or (env.id, env.id)
    made: VectorEnv = resolve_name(VECTOR_ENVS[key])(name, rows, dict(env.options), threads)
    return made


def has_native(env: Env) -> bool:
    """Whether one call can step all rows of this env."""
    plain = not env.wrappers and env.frameskip == 1 and env.frame_stack == 1 and env.isolate == "none"
    key, _ = resolve.family_of(env.id) or (env.id, env.id)
    return env.native and plain and key in VECTOR_ENVS
