"""Recording of an evaluation: a video of the first episode, and all episodes as data."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tiltyard.engines.policies.multi_policy import MultiPolicyActor
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


Keep = Callable[[int, Episode], None]
"""Gets the index and the data of a finished episode."""


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


@dataclass
class _Record:
    """The running episode of one row."""

    obs: list[Arrays] = field(default_factory=list)
    action: list[Array] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    info: list[dict[str, Any]] = field(default_factory=list)


class EpisodeRecorder:
    """Collects the steps of every row and passes finished episodes to `keep`."""

    def __init__(self, group: EnvGroup, keep: Keep, policies: MultiPolicyActor | None) -> None:
        self._group, self._keep, self._policies = group, keep, policies
        self._records = [_Record() for _ in range(group.rows)]
        self._seeds: list[int] = []

    def before_step(self, rows: list[int], obs: Arrays, action: Array) -> None:
        self._seeds = list(self._group.stats.seeds)
        inside = self._group.codec.inside(action)
        for row in rows:
            self._records[row].obs.append({key: array[row].copy() for key, array in obs.items()})
            self._records[row].action.append(inside[row].copy())

    def after_step(self, rows: list[int], now: Step, playing: list[int | None]) -> None:
        """`playing` is the index of each env's episode."""
        for row in rows:
            self._records[row].reward.append(float(self._group.data.raw_reward[row]))
            self._records[row].info.append(deepcopy(self._group.infos[row]))  # an env may fill the same dict again
        for row in rows:
            if now.terminated[row] or now.truncated[row]:
                index = playing[row // self._group.agents]
                assert index is not None
                self._keep(index, self._finish(row, now))

    def _finish(self, row: int, now: Step) -> Episode:
        record, self._records[row] = self._records[row], _Record()
        record.obs.append({key: array[row].copy() for key, array in now.final_obs.items()})
        return Episode(
            obs={key: np.stack([one[key] for one in record.obs]) for key in now.final_obs},
            action=np.stack(record.action),
            reward=np.asarray(record.reward, np.float32),
            terminated=bool(now.terminated[row]),
            truncated=bool(now.truncated[row]),
            seed=self._seeds[row],
            info=record.info,
            meta=self._meta(row),
        )

    def _meta(self, row: int) -> dict[str, str]:
        """The agent of a row and its policy, where there are several."""
        spec, policies = self._group.spec, self._policies
        agent = {"agent": spec.agents[row % len(spec.agents)]} if spec.parallel else {}
        return agent if policies is None else {**agent, "policy": policies.match.policies[policies.seats[row]]}
