"""Copies of an env with one agent, stepped one after the other (or side by side with env.isolate): row = copy.

`SingleAgentEpisodes` resets rows and closes their episodes, also for envs that step all rows in one call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tiltyard.envs.actions import ActionCodec
from tiltyard.envs.checks import info_scalars, reset_fault, reward_fault
from tiltyard.envs.env_errors import InvalidEnvData
from tiltyard.envs.row_data import RowData
from tiltyard.envs.watchdog import RESETTING
from tiltyard.types import EpisodeEnd, Tree

if TYPE_CHECKING:
    from tiltyard.types import Array, Arrays


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
            answer = self._envs[row].reset(seed=seed)
            beat[1] = before
            fault = reset_fault(answer)
            if fault:
                raise InvalidEnvData(fault, "", answer)
            data.buffer.restart(row, answer[0])
            if data.mask is not None:
                data.store_mask(row, *answer)
        except KeyboardInterrupt:
            raise
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
        except KeyboardInterrupt:  # from the user
            raise
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

    def save(self) -> dict[str, Tree]:
        return {}

    def load(self, tree: Tree) -> None:
        """Nothing is kept beyond what all groups keep."""

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
