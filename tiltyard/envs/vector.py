"""Many copies of one env stepped together as arrays [B, ...]: the only place that makes a `Step`.

    step(action): row t goes on      -> obs[t] = next observation, first[t] false
                  row t has ended    -> final_obs[t] = its last observation, obs[t] = first one of the next episode,
                                        first[t] true, terminated[t] or truncated[t] true (never both)

Every array of a Step belongs to the group and is overwritten by the next call: keep copies. The arrays are in
row_data.py. Three classes step the envs: SingleAgentStepping, NativeStepping (all rows in one call) and
MultiAgentStepping.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import numpy as np

from tiltyard.envs import episodes
from tiltyard.envs.actions import ActionCodec
from tiltyard.envs.checks import shown
from tiltyard.envs.episodes import episode_seed
from tiltyard.envs.make import make_copies
from tiltyard.envs.multi_agent_vector import MultiAgentStepping
from tiltyard.envs.pettingzoo import Parallel
from tiltyard.envs.row_data import GroupConfig, RowData, all_finite
from tiltyard.envs.single_agent_vector import EXACT, NativeStepping, SingleAgentStepping, make_native
from tiltyard.envs.spaces import PREVIOUS_ACTION, PREVIOUS_REWARD
from tiltyard.errors import UseError
from tiltyard.types import Array, Arrays, EpisodeEnd, Step, Tree


class Stepping(Protocol):
    """How the envs of a group are stepped and reset. Works on the group's RowData."""

    envs: list[Any]  # one per copy
    counters: Arrays  # arrays [B] of its own that a checkpoint keeps

    def step(self, actions: list[Any]) -> None:
        """Step every row: write its observation, mask, info, reward and ends."""

    def finish(self, before_reset: Callable[[int], None] | None) -> list[EpisodeEnd]:
        """Set terminated, truncated and first, and start the next episode where one has ended."""

    def reset(self, copy: int, seed: int) -> None:
        """Reset a copy and store its first observations."""

    def rerun(self, copy: int, actions: list[Array]) -> list[float] | None:
        """Repeat the actions of each row of a copy; the returns, or None if the episode ends on the way."""

    def close(self) -> None: ...


class EnvGroup:
    """The rows of an env, stepped together. Built by `make_group`."""

    def __init__(self, data: RowData, stepping: Stepping) -> None:
        config = data.config
        self.data, self.stepping, self.stats = data, stepping, data.stats
        self.env, self.spec, self.envs = config.env, config.spec, stepping.envs
        self.rows, self.agents, self.copies = config.rows, config.agents, config.copies
        self.first_row = config.first_row
        self.codec = ActionCodec(config.spec.action)
        self.obs, self.final_obs, self.mask = data.obs, data.final_obs, data.mask
        self.first, self.acting, self.infos = data.first, data.acting, data.infos

    def reset(self) -> Step:
        """Begin the next episode in every row."""
        data = self.data
        for copy in range(self.copies):
            self.begin(copy)
        data.reward[:] = 0
        data.terminated[:] = data.truncated[:] = False
        data.first[:] = data.any_first = True
        self.stats.set_countdown()
        data.check_finite({})
        return self.current()

    def begin(self, copy: int) -> None:
        """Begin the next episode of a copy, with its own seed."""
        self.stepping.reset(copy, self.data.begin_episode(copy))

    def current(self, episodes: list[EpisodeEnd] | None = None) -> Step:
        """The state of the rows after the last reset, step or load."""
        data = self.data
        return Step(
            data.obs, data.reward, data.terminated, data.truncated, data.first, data.valid,
            data.final_obs, data.mask, [] if episodes is None else episodes,
        )  # fmt: skip

    def step(self, action: Array, before_reset: Callable[[int], None] | None = None) -> Step:
        """Act in every row: float32 [B, columns]. Costs about 1 us per row and 15 us per call beyond the envs' time.

        `before_reset` is called with each row whose episode has ended while its env still shows the end.
        """
        data, env = self.data, self.env
        if not all_finite(action):
            row = int(np.flatnonzero(~np.isfinite(action).all(axis=1))[0])
            raise data.diverged(f"the action is {shown(action[row])}", row, {"action": action})
        if data.history is not None:
            data.history.append(action)
        data.buffer.shift()
        self.stepping.step(self.codec.decode_rows(action))
        raw = np.array(data.raw_reward, np.float64)
        self.stats.step(raw)
        if not math.isfinite(sum(data.raw_reward)) and not np.isfinite(raw).all():
            row = int(np.flatnonzero(~np.isfinite(raw))[0])
            raise data.diverged(f"the reward is {raw[row]}", row, {"reward": raw, "action": action})
        data.check_finite({"action": action, "reward": raw})
        scaled = raw * env.reward_scale if env.reward_scale != 1.0 else raw
        data.reward[:] = scaled if env.reward_clip is None else np.clip(scaled, -env.reward_clip, env.reward_clip)
        if data.config.previous:
            data.obs[PREVIOUS_ACTION][:] = action
            data.obs[PREVIOUS_REWARD][:, 0] = data.reward
        return self.current(self.stepping.finish(before_reset))

    # ------------------------------------------------------------------------------------------ checkpoints

    @property
    def counters(self) -> Arrays:
        """The arrays [B] that a checkpoint keeps, by name."""
        data = self.data
        ends = {"terminated": data.terminated, "truncated": data.truncated, "first": data.first}
        return {**self.stats.counters, "reward": data.reward, **ends, **self.stepping.counters}

    def save(self) -> Tree:
        """Everything needed to continue exactly here; running episodes are not disturbed."""
        return episodes.save(self)

    def load(self, tree: Tree) -> list[str]:
        """Continue where `save` was called; returns warnings about episodes that could not be restored."""
        warnings = episodes.load(self, tree)
        self.data.any_first = True
        self.stats.set_countdown()
        return warnings

    def set_options(self, options: Mapping[str, Any]) -> None:
        """Give every env these options before its next reset."""
        self.env = self.env.model_copy(update={"options": dict(options)})
        self.data.options.change(options)

    def skip_episodes(self, count: int) -> None:
        """Skip the next episodes of every row, because their seeds were used elsewhere."""
        self.stats.number += count

    # ------------------------------------------------------------------------------------------ rendering and the rest

    @property
    def fps(self) -> float:
        """Env steps per second of the env's own time, for videos."""
        metadata = self.envs[0].metadata or {}
        frames = metadata.get("render_fps")
        per_step = self.spec.frameskip
        return max(1.0, float(frames) / per_step) if isinstance(frames, int | float) and frames > 0 else 30.0

    def render_row(self, row: int) -> Array | None:
        """A row's current image, as its env draws it."""
        try:
            frame: Any = self.envs[row // self.agents].render()
        except BaseException as error:
            raise self.data.env_error(error, row, "render") from error
        if isinstance(frame, list):
            frame = frame[-1] if frame else None
        return None if frame is None else np.asarray(frame)

    def close(self) -> None:
        self.stepping.close()


def make_group(
    config: GroupConfig, *, native: Literal["any", "exact", "never"] = "any", threads: int | None = None
) -> EnvGroup:
    """Make the envs and their group.

    `native` says whether one call may step all rows, where the env can and `env.native` allows it: "exact" only if the
    episodes equal those of single envs. `threads` limits the threads of such an env.
    """
    if native == "any" or (native == "exact" and config.env.id in EXACT):
        vector = make_native(config.env, config.rows, threads)
        if vector is not None:
            data = RowData(config, vector.observation_space, vector.restore_mode)
            return EnvGroup(data, NativeStepping(data, vector))
    return _make_group_of_copies(config)


def _make_group_of_copies(config: GroupConfig) -> EnvGroup:
    envs = make_copies(
        config.env,
        config.base,
        config.copies,
        render=config.render,
        seed=episode_seed(config.seed, f"{config.role}/make", config.first_copy, 0),
        heartbeat=config.heartbeat,
    )
    if isinstance(envs[0], Parallel) != config.spec.parallel:
        now, before = ("one agent", "several") if config.spec.parallel else ("several agents", "one")
        raise UseError(f"env.id = {config.env.id} has {now} now and had {before} before", "the env itself changed")
    data = RowData(config, envs[0].observation_space, config.spec.restore_mode)
    if config.spec.parallel:
        return EnvGroup(data, MultiAgentStepping(data, envs))
    return EnvGroup(data, SingleAgentStepping(data, envs))
