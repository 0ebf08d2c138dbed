"""Playing whole episodes with fixed seeds, many at a time.

Episode i always has the same seed, whatever runs it. Slot r of R plays episodes r, r + R, r + 2R, ... to their ends,
so short episodes are not favoured over long ones; with a budget of steps no episode is started once it is used up,
and those running are finished. The same EnvGroup and PolicyNet as in training do the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tiltyard.config.experiment import Env
from tiltyard.envs.vector import EnvGroup, episode_seed
from tiltyard.errors import TiltyardError, UseError
from tiltyard.evaluation.choices import Begin
from tiltyard.types import Arrays, EnvSpec, Episode
from tiltyard.video import VideoWriter


@dataclass(frozen=True)
class Played:
    """One finished episode of an evaluation."""

    index: int
    seed: int
    total: float
    length: int
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class _Slot:
    """One env row: which episodes it still has to play, and what it recorded of the running one."""

    queue: Iterator[int]
    playing: int | None = None
    obs: list[Arrays] = field(default_factory=list)
    action: list[np.ndarray] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    info: list[dict[str, Any]] = field(default_factory=list)


Keep = Callable[[int, Episode], None]
Unfilmed = Callable[[TiltyardError], None]


class Cancelled(Exception):
    """The evaluation was called off between two env steps; nothing of it counts."""


class _Film:
    """The film of row 0's first episode. What goes wrong with it is told once and leaves the episodes alone."""

    def __init__(self, path: Path, group: EnvGroup, unfilmed: Unfilmed) -> None:
        self._group, self._unfilmed = group, unfilmed
        self._writer: VideoWriter | None = None
        self._carefully(lambda: self._open(path))

    def _open(self, path: Path) -> None:
        self._writer = VideoWriter(path, fps=self._group.fps)

    def show(self, obs: Arrays) -> None:
        """The picture of now, while the film runs."""
        if (writer := self._writer) is not None:
            self._carefully(lambda: writer.add(picture(self._group, obs)))

    def end(self, row: int) -> None:
        """The last picture, and the film is complete."""
        if row == 0 and self._writer is not None:
            self.show(self._group.final_obs)
            if (writer := self._writer) is not None:
                self._carefully(writer.close)
            self._writer = None

    def discard(self) -> None:
        """Leave no film that is not complete."""
        if self._writer is not None:
            self._writer.discard()
            self._writer = None

    def _carefully(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 -- an env may raise and draw anything
            self.discard()
            told = error if isinstance(error, TiltyardError) else TiltyardError(f"{type(error).__name__}: {error}")
            self._unfilmed(told)


def play(
    begin: Begin,
    env: Env,
    spec: EnvSpec,
    *,
    base: Sequence[Path],
    previous: bool,
    episodes: range,
    slots: int,
    seed: int,
    steps: int | None = None,
    video: tuple[Path, Unfilmed] | None = None,
    keep: Keep | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> list[Played]:
    """Play the episodes with these indices; with `steps`, as many of them as are begun within that many env steps.

    `video` is the film to make of the first one and who is told when that fails. Raises Cancelled, at most one env step
    after `cancelled` became true.
    """
    rows = min(slots, len(episodes))
    shares = [episodes[row::rows] for row in range(rows)]
    table = [_Slot(iter(share[1:]), share[0]) for share in shares]

    def seeds(row: int, number: int) -> int:
        share = shares[row]  # a slot that has played its share goes on unheeded until the others are done
        return episode_seed(seed, "eval", share[number] if number < len(share) else number, int(number >= len(share)))

    group = EnvGroup(
        env, spec, rows, seed, base=base, role="eval", render=video is not None, previous=previous, seeds=seeds
    )
    film = _Film(video[0], group, video[1]) if video is not None else None
    group.at_end = film.end if film is not None else None
    played: list[Played] = []
    taken = 0
    try:
        choose = begin(group)
        now = group.reset()
        while any(slot.playing is not None for slot in table):
            if cancelled():
                raise Cancelled
            if film is not None:
                film.show(now.obs)
            action = choose(now.obs, now.first, now.mask)
            if keep is not None:
                _note_before(table, now.obs, group.codec.inside(action))
            now = group.step(action)
            taken += sum(slot.playing is not None for slot in table)
            if keep is not None:
                _note_after(table, group.raw_reward, group.infos)
            for end in now.episodes:
                slot = table[end.row]
                if slot.playing is None:
                    continue
                if keep is not None:
                    terminated, truncated = bool(now.terminated[end.row]), bool(now.truncated[end.row])
                    keep(slot.playing, _episode(slot, now.final_obs, end.row, end.seed, terminated, truncated))
                played.append(Played(slot.playing, end.seed, end.total, end.length, dict(end.metrics)))
                slot.playing = next(slot.queue, None) if steps is None or taken < steps else None
    finally:
        group.close()
        if film is not None:
            film.discard()
    return sorted(played, key=lambda one: one.index)


def can_be_filmed(spec: EnvSpec) -> bool:
    """Whether `picture` has anything to show."""
    return spec.renders or any(item.image for item in spec.obs.values())


def require_filmable(spec: EnvSpec, env: Env) -> None:
    """Refuse to film what can neither draw itself nor shows an image."""
    if not can_be_filmed(spec):
        raise UseError(
            f"env {env.id} cannot be filmed: it has no rgb_array rendering and no image observation",
            "leave the film out, or give the env render_mode='rgb_array'",
        )


def picture(group: EnvGroup, obs: Arrays) -> np.ndarray:
    """Row 0 as its env draws it, or, when it cannot, the first of its observations that is an image."""
    drawn = group.render_row(0) if group.spec.renders else None
    if drawn is not None:
        return drawn
    for name, item in group.spec.obs.items():
        if item.image:
            return np.asarray(obs[name][0])
    raise TiltyardError(f"env {group.env.id} drew nothing", "its render() must return an RGB array")


def _note_before(table: list[_Slot], obs: Arrays, action: np.ndarray) -> None:
    for row, slot in enumerate(table):
        if slot.playing is not None:
            slot.obs.append({key: array[row].copy() for key, array in obs.items()})
            slot.action.append(action[row].copy())


def _note_after(table: list[_Slot], reward: Sequence[float], infos: Sequence[dict[str, Any]]) -> None:
    for row, slot in enumerate(table):
        if slot.playing is not None:
            slot.reward.append(float(reward[row]))
            slot.info.append(deepcopy(infos[row]))  # an env may fill the same dict again


def _episode(slot: _Slot, final: Arrays, row: int, seed: int, terminated: bool, truncated: bool) -> Episode:
    slot.obs.append({key: array[row].copy() for key, array in final.items()})
    episode = Episode(
        obs={key: np.stack([one[key] for one in slot.obs]) for key in final},
        action=np.stack(slot.action),
        reward=np.asarray(slot.reward, np.float32),
        terminated=terminated,
        truncated=truncated,
        seed=seed,
        info=slot.info,
    )
    slot.obs, slot.action, slot.reward, slot.info = [], [], [], []
    return episode
