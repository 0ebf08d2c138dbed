"""Copies of an env with several agents as rows of a group: row = copy x agents + the agent's index.

An agent acts while it is in the env's `agents`; its row is valid then. Otherwise the row observes zeros, the action
chosen for it is dropped, and `valid` is false. An episode belongs to the env, an end to an agent:

    terminated or truncated   the agent is done: its row stays invalid until the env's episode ends
    absent without either     counts as truncated where it left; it may return, and then starts like a new agent
    joins (late, or again)    `first` is true: it has no memory and no history
    none left or time limit   the env is reset with its next seed, and every row begins

All rows of a copy have the same episode number, seed and length (calls of the env, not decisions of the agent).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tiltyard.envs.actions import ActionCodec
from tiltyard.envs.checks import info_scalars
from tiltyard.envs.env_errors import InvalidEnvData
from tiltyard.envs.row_data import RowData
from tiltyard.envs.single_agent_vector import close_envs
from tiltyard.envs.spaces import PREVIOUS_ACTION, PREVIOUS_REWARD
from tiltyard.envs.watchdog import RESETTING
from tiltyard.errors import TiltyardError
from tiltyard.types import Array, Arrays, EpisodeEnd


class MultiAgentStepping:
    """Steps copies of an env that have a row per agent."""

    def __init__(self, data: RowData, envs: list[Any]) -> None:
        config = data.config
        rows, self._agents = config.rows, config.agents
        self._data, self.envs = data, envs
        self._frameskip, self._isolated = config.env.frameskip, config.env.isolate != "none"
        self._done = np.zeros(rows, bool)  # agents that are done for the running episode
        self._decisions = np.zeros(rows, np.int64)  # of each agent in the running episode
        self._answers: list[tuple[Any, Any]] = [({}, {})] * len(envs)  # obs and infos as the env last returned them
        self.counters: Arrays = {"acting": data.acting, "over": self._done, "decisions": self._decisions}

    # ------------------------------------------------------------------------------------------ stepping

    def step(self, actions: list[Any]) -> None:
        data = self._data
        data.valid[:] = data.acting
        self._decisions += data.acting
        copy = 0
        try:
            for copy, env in enumerate(self.envs if self._isolated else ()):  # isolated envs step side by side
                at = copy * self._agents
                acting = [place for place in range(self._agents) if data.acting[at + place]]
                env.send_step({place: actions[at + place] for place in acting}, self._frameskip)
            for copy in range(len(self.envs)):
                data.heartbeat[0] += 1
                self._step_copy(copy, actions[data.stats.span(copy)])
        except BaseException as error:
            raise self._copy_error(error, copy, "step") from error

    def _step_copy(self, copy: int, actions: list[Any]) -> None:
        """One env step of one copy: `frameskip` calls, fewer if an agent ends, joins or leaves."""
        data, env, at = self._data, self.envs[copy], copy * self._agents
        rows = data.stats.span(copy)
        acting = np.flatnonzero(data.acting[rows]).tolist()
        rewards = dict.fromkeys(acting, 0.0)
        left, over, cut = self._frameskip, {}, {}
        while left:
            answer = env.step({place: actions[place] for place in acting})
            left -= 1
            fault = env.step_fault(answer, acting)
            if fault:
                raise InvalidEnvData(fault, "", answer)
            obs, reward, terminated, truncated, infos = answer
            for place in acting:
                rewards[place] += float(env.of(reward, place))
            over = {place: bool(env.of(terminated, place)) for place in acting}
            cut = {place: bool(env.of(truncated, place)) for place in acting}
            present = {place for place in env.present() if not self._done[at + place]}
            if present != set(acting) or any(over.values()) or any(cut.values()):
                break
        data.stats.saved_frames[rows] += left * (data.config.spec.frameskip // self._frameskip)
        for place in range(self._agents):
            row, acted = at + place, place in rewards
            data.raw_reward[row] = rewards[place] if acted else 0.0
            data.raw_terminated[row] = acted and over[place]
            self._done[row] |= acted and (over[place] or cut[place])
            data.raw_truncated[row] = acted and (cut[place] or place not in present)
            if acted:
                data.infos[row] = env.of(infos, place) or {}
                if env.of(obs, place) is not None or not over[place]:
                    self._store(copy, place, obs, infos, data.buffer.write)
        self._answers[copy] = obs, infos

    def _store(self, copy: int, place: int, obs: Any, infos: Any, write: Callable[[int, Any], None]) -> None:
        """Store an agent's observation and action mask."""
        data, env, row = self._data, self.envs[copy], copy * self._agents + place
        try:
            write(row, env.of(obs, place))
            if data.mask is not None and not (data.raw_terminated[row] or data.raw_truncated[row]):
                data.store_mask(row, env.of(obs, place), env.of(infos, place) or {})
        except InvalidEnvData as error:
            raise data.env_error(error, row, "step") from None

    # ------------------------------------------------------------------------------------------ agents join and leave

    def finish(self, before_reset: Callable[[int], None] | None) -> list[EpisodeEnd]:
        """Set terminated, truncated and first; let agents leave and join; reset the copies with no agent left."""
        data, stats = self._data, self._data.stats
        late = stats.late()
        short = None
        if late is not None:
            over, cut = np.asarray(data.raw_terminated), np.asarray(data.raw_truncated)
            short = stats.shortened(over | cut | ~data.acting)
            data.raw_truncated = [bool(each) for each in cut | (late & data.acting)]
            self._done |= late
        data.terminated[:] = data.raw_terminated
        data.truncated[:] = data.raw_truncated
        data.truncated &= ~data.terminated
        data.first[:] = False
        over_now = [copy for copy in range(len(self.envs)) if not self._update_agents(copy)]
        ends = [self._finish(copy, before_reset) for copy in over_now]
        if data.config.previous:
            data.obs[PREVIOUS_ACTION][~data.acting | data.first] = 0
            data.obs[PREVIOUS_REWARD][~data.acting | data.first] = 0
        if data.first.any():
            data.check_finite({})
        stats.set_countdown()
        if short is not None:  # if one agent was cut short, the whole episode was
            short = np.repeat(short.reshape(-1, self._agents).any(axis=1), self._agents)
        return data.without_shortened(ends, short)

    def _update_agents(self, copy: int) -> bool:
        """Let agents leave and join; whether any is left to act."""
        data, env, at = self._data, self.envs[copy], copy * self._agents
        for place in range(self._agents):
            row = at + place
            if data.raw_terminated[row] or data.raw_truncated[row]:
                data.keep_final(row)
                data.last_infos[row] = info_scalars(data.infos[row])
                self._clear(row)
        try:
            for place in env.present():
                row = at + place
                if not data.acting[row] and not self._done[row]:
                    self._join(copy, place)
        except BaseException as error:
            raise self._copy_error(error, copy, "step") from error
        return bool(data.acting[data.stats.span(copy)].any())

    def _clear(self, row: int) -> None:
        """Mark a row as not acting: it observes zeros."""
        data = self._data
        data.acting[row] = False
        data.buffer.clear(row)
        if data.mask is not None:
            data.mask[row] = True

    def _join(self, copy: int, place: int) -> None:
        data, row = self._data, copy * self._agents + place
        data.raw_terminated[row] = data.raw_truncated[row] = False
        data.acting[row] = data.first[row] = True
        self._store(copy, place, *self._answers[copy], data.buffer.restart)

    # ------------------------------------------------------------------------------------------ episodes

    def _finish(self, copy: int, before_reset: Callable[[int], None] | None) -> EpisodeEnd:
        """Report a copy's episode and begin the next one."""
        data, stats = self._data, self._data.stats
        rows = stats.span(copy)
        if before_reset is not None:
            before_reset(rows.start)
        total = float(stats.total[rows][self._decisions[rows] > 0].mean())
        end = stats.end(rows.start, total, self._metrics(rows))
        self.reset(copy, data.begin_episode(copy))
        data.first[rows] = True
        return end

    def _metrics(self, rows: slice) -> dict[str, float]:
        """The agents' last info scalars, averaged by name, and the return of each agent that acted."""
        found: dict[str, list[float]] = {}
        for info in self._data.last_infos[rows]:
            for name, value in info.items():
                found.setdefault(name, []).append(value)
        means = {name: sum(values) / len(values) for name, values in found.items()}
        totals, names = self._data.stats.total[rows].tolist(), self._data.config.spec.agents
        acted = np.flatnonzero(self._decisions[rows] > 0).tolist()
        return means | {f"{names[place]}_return": totals[place] for place in acted}

    def reset(self, copy: int, seed: int) -> None:
        """Reset a copy: the agents that are present observe its start, the rows of the others are empty."""
        data, beat = self._data, self._data.heartbeat
        beat[0] += 1
        before, beat[1] = beat[1], RESETTING
        rows = data.stats.span(copy)
        self._done[rows], self._decisions[rows] = False, 0
        data.raw_terminated[rows] = data.raw_truncated[rows] = [False] * self._agents
        data.last_infos[rows] = [{} for _ in range(self._agents)]
        for row in range(rows.start, rows.stop):
            self._clear(row)
        try:
            data.options.before_reset(copy, self.envs[copy])
            answer = self.envs[copy].reset(seed=seed)
            beat[1] = before
            fault = self.envs[copy].reset_fault(answer)
            if fault:
                raise InvalidEnvData(fault, "", answer)
            self._answers[copy] = answer
            for place in self.envs[copy].present():
                self._join(copy, place)
        except BaseException as error:
            raise self._copy_error(error, copy, "reset") from error

    def rerun(self, copy: int, actions: list[Array]) -> list[float] | None:
        """Repeat the actions of a copy's agents; their returns, or None if the episode ends on the way."""
        data, codec = self._data, ActionCodec(self._data.config.spec.action)
        rows = data.stats.span(copy)
        totals = np.zeros(self._agents)
        data.stats.saved_frames[rows] = 0
        for together in zip(*(codec.decode_rows(own) for own in actions), strict=True):
            data.heartbeat[0] += 1
            self._decisions[rows] += data.acting[rows]
            for row in range(rows.start, rows.stop):
                data.buffer.shift_row(row)
            self._step_copy(copy, list(together))
            totals += data.raw_reward[rows]
            if not self._update_agents(copy):
                return None
        return [float(total) for total in totals]

    def _copy_error(self, error: BaseException, copy: int, method: str) -> TiltyardError:
        """An error that belongs to no single agent."""
        return self._data.env_error(error, self._data.stats.span(copy).start, method, agent=False)

    def close(self) -> None:
        close_envs(self.envs)
