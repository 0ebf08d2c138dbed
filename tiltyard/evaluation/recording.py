"""Recording of rollouts: a video of the first episode, and all episodes as data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tiltyard.envs.vector import EnvGroup
from tiltyard.errors import TiltyardError
from tiltyard.evaluation.video import VideoWriter
from tiltyard.evaluation.window import Window
from tiltyard.types import Array, Arrays, Episode, Step


class VideoTarget(NamedTuple):
    """Where the first episode is shown, and a function that gets the error if it cannot be."""

    path: Path | None
    """the file of a video; None for a window"""
    on_error: Callable[[TiltyardError], None]


Keep = Callable[[int, list[Episode]], None]
"""Gets the index of an env's finished episode and the data of its agents, in the order in which they ended."""


class VideoRecorder:
    """The video of row 0's first episode. An error is reported once and does not disturb the episodes."""

    def __init__(self, target: VideoTarget, group: EnvGroup) -> None:
        self._group, self._on_error = group, target.on_error
        self._writer: VideoWriter | Window | None = None
        self._guard(lambda: self._open(target.path))

    def _open(self, path: Path | None) -> None:
        self._writer = Window(self._group.fps) if path is None else VideoWriter(path, fps=self._group.fps)

    def add(self, obs: Arrays) -> None:
        """Add the present frame, unless the video is complete."""
        if (writer := self._writer) is not None:
            self._guard(lambda: writer.add(current_frame(self._group, obs)))

    def end(self, row: int) -> None:
        """Add the last frame and complete the video."""
        if row == 0 and self._writer is not None:
            self.add(self._group.final_obs)
            if (writer := self._writer) is not None:
                self._guard(writer.close)
            self._writer = None

    def discard(self) -> None:
        """Remove an incomplete video."""
        if self._writer is not None:
            self._writer.discard()
            self._writer = None

    def _guard(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 -- an env may raise and draw anything
            self.discard()
            known = error if isinstance(error, TiltyardError) else TiltyardError(f"{type(error).__name__}: {error}")
            self._on_error(known)


def current_frame(group: EnvGroup, obs: Arrays) -> Array:
    """Row 0 as its env renders it, or its first image observation."""
    drawn = group.render_row(0) if group.spec.renders else None
    if drawn is not None:
        return drawn
    for name, item in group.spec.obs.items():
        if item.image:
            return np.asarray(obs[name][0])
    raise TiltyardError(f"env {group.env.id} rendered nothing", "its render() must return an RGB array")


class _Record:
    """The running episode of one row: arrays that grow, so that every observation is copied once."""

    def __init__(self, obs: Arrays, columns: int, capacity: int, seed: int) -> None:
        self.seed = seed
        self.length = 0  # decisions so far
        self._obs = {name: np.empty((capacity, *array.shape[1:]), array.dtype) for name, array in obs.items()}
        self._action = np.empty((capacity, columns), np.float32)
        self.reward: list[float] = []
        self.info: list[dict[str, Any]] = []

    def add(self, row: int, obs: Arrays, action: Array | None) -> None:
        """Store the observation of a row, and the action that follows it unless the episode is over."""
        at = self.length
        if at == len(self._action):
            self._grow()
        for name, array in self._obs.items():
            array[at] = obs[name][row]
        if action is not None:
            self._action[at] = action
            self.length += 1

    def _grow(self) -> None:
        for arrays in (self._obs, own := {"action": self._action}):
            for name, array in arrays.items():
                arrays[name] = np.empty((2 * len(array), *array.shape[1:]), array.dtype)
                arrays[name][: len(array)] = array
        self._action = own["action"]

    def arrays(self) -> tuple[Arrays, Array]:
        """Observations [T + 1, ...] and actions [T, columns], without a copy."""
        return {name: array[: self.length + 1] for name, array in self._obs.items()}, self._action[: self.length]


FIRST_CAPACITY = 256  # env steps


class EpisodeRecorder:
    """Collects the steps of every row. `describe` maps row and seed to meta data; `save_info` copies infos: slow."""

    def __init__(
        self,
        group: EnvGroup,
        keep: Keep,
        describe: Callable[[int, int], dict[str, Any]],
        *,
        save_info: bool,
    ) -> None:
        self._group, self._keep, self._describe, self._save_info = group, keep, describe, save_info
        self._records: list[_Record | None] = [None] * group.rows
        self._capacity = FIRST_CAPACITY
        self._finished: list[list[Episode]] = [[] for _ in range(group.copies)]

    def before_step(self, rows: list[int], obs: Arrays, action: Array) -> None:
        for row in rows:
            record = self._records[row]
            if record is None:
                seed = self._group.stats.seeds[row]
                record = self._records[row] = _Record(obs, action.shape[1], self._capacity, seed)
            record.add(row, obs, action[row])

    def after_step(self, rows: list[int], now: Step, playing: Sequence[int | None]) -> None:
        """`playing` is the index of each env's episode."""
        group = self._group
        for row in rows:
            record = self._records[row]
            assert record is not None
            record.reward.append(float(group.data.raw_reward[row]))
            if self._save_info:
                record.info.append(deepcopy(group.infos[row]))  # an env may fill the same dict again
            if now.terminated[row] or now.truncated[row]:
                self._finished[row // group.agents].append(self._finish(row, record, now))
        for end in now.episodes:
            copy = end.row // group.agents
            index, episodes = playing[copy], self._finished[copy]
            if index is not None:
                self._finished[copy] = []
                self._keep(index, episodes)

    def _finish(self, row: int, record: _Record, now: Step) -> Episode:
        record.add(row, now.final_obs, None)
        self._records[row] = None
        self._capacity = max(FIRST_CAPACITY, record.length + record.length // 8)
        obs, action = record.arrays()
        spec = self._group.spec
        agent = {"agent": spec.agents[row % len(spec.agents)]} if spec.parallel else {}
        return Episode(
            obs=obs,
            action=self._group.codec.inside(action),
            reward=np.asarray(record.reward, np.float32),
            terminated=bool(now.terminated[row]),
            truncated=bool(now.truncated[row]),
            seed=record.seed,
            info=record.info,
            meta={**agent, **self._describe(row, record.seed)},
        )


def with_own_names(episodes: Sequence[Episode]) -> list[Episode]:
    """The agents' episodes with unique names, as a dataset needs them: one that left and joined again is NAME#2."""
    seen: dict[str, int] = {}
    named = []
    for episode in episodes:
        agent = str(episode.meta.get("agent", ""))
        seen[agent] = seen.get(agent, 0) + 1
        again = {"agent": f"{agent}#{seen[agent]}"} if seen[agent] > 1 else {}
        named.append(replace(episode, meta={**episode.meta, **again}) if again else episode)
    return named
