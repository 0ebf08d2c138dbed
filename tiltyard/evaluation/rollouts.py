"""Playing whole episodes with fixed seeds, many at a time.

Episode i always has the same seed, whatever runs it. Slot r of R plays episodes r, r + R, r + 2R, ... to their ends,
so short episodes are not favoured over long ones; with a budget of steps no episode is started once it is used up,
and those running are finished. The same EnvGroup and PolicyNet as in training do the work. With several agents an
episode is still the env's: its return is the mean of theirs, and it is over when nobody is left. With several policies
its return is that of the first one's agents: in a game that one wins and another loses, the mean of all says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tiltyard.config.experiment import Env
from tiltyard.engines.policies.multi_policy import MultiPolicyActor
from tiltyard.envs.episode_stats import episode_seed
from tiltyard.envs.row_data import GroupConfig
from tiltyard.envs.vector import EnvGroup, make_group
from tiltyard.envs.watchdog import RESETTING, calling_envs
from tiltyard.errors import TiltyardError, UseError
from tiltyard.evaluation.actors import Begin
from tiltyard.evaluation.video import VideoWriter
from tiltyard.types import Arrays, EnvSpec, Episode, EpisodeEnd, Step


@dataclass(frozen=True)
class EpisodeResult:
    """One finished episode of an evaluation."""

    index: int
    seed: int
    total: float
    length: int
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class _Slot:
    """One env: which episodes it still has to play."""

    queue: Iterator[int]
    playing: int | None = None


@dataclass
class _Record:
    """What was recorded of one row's running episode."""

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
    players: MultiPolicyActor | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> list[EpisodeResult]:
    """Play the episodes with these indices; with `steps`, as many of them as are begun within that many env steps.

    `video` is the film to make of the first one and who is told when that fails. `players` are those who act, where
    they are several policies. Raises Cancelled, at most one env step after `cancelled` became true.
    """
    envs, agents = min(slots, len(episodes)), len(spec.agents)
    shares = [episodes[slot::envs] for slot in range(envs)]
    table = [_Slot(iter(share[1:]), share[0]) for share in shares]
    records = [_Record() for _ in range(envs * agents)]

    def seeds(slot: int, number: int) -> int:
        share = shares[slot]  # a slot that has played its share goes on unheeded until the others are done
        return episode_seed(seed, "eval", share[number] if number < len(share) else number, int(number >= len(share)))

    config = GroupConfig(
        env, spec, envs * agents, seed, base, "eval", render=video is not None, previous=previous, seeds=seeds
    )
    with calling_envs(RESETTING):  # making an env may take as long as a reset
        # Drawing and recording need the single envs.
        group = make_group(config, native="exact" if video is None and keep is None else "never")
    film = _Film(video[0], group, video[1]) if video is not None else None
    played: list[EpisodeResult] = []
    taken = 0
    try:
        choose = begin(group)
        with calling_envs(RESETTING):
            now = group.reset()
        while any(slot.playing is not None for slot in table):
            if cancelled():
                raise Cancelled
            if film is not None:
                film.show(now.obs)
            action = choose(now.obs, now.first, now.mask)
            deciding = group.acting & np.repeat([slot.playing is not None for slot in table], agents)
            rows = np.flatnonzero(deciding).tolist()
            taken += len(rows)
            began = list(group.stats.seeds)
            if keep is not None:
                _note_before(records, rows, now.obs, group.codec.inside(action))
            with calling_envs():
                now = group.step(action, before_reset=film.end if film is not None else None)
            if keep is not None:
                _note_after(records, rows, group.raw_reward, group.infos)
                for row in [row for row in rows if now.terminated[row] or now.truncated[row]]:
                    index = table[row // agents].playing
                    assert index is not None
                    about = _about(row, spec, players)
                    keep(index, _episode(records[row], now, row, began[row], about))
            for end in now.episodes:
                slot = table[end.row // agents]
                if slot.playing is None:
                    continue
                total, returns = (end.total, {}) if players is None else _shared(end, players)
                played.append(EpisodeResult(slot.playing, end.seed, total, end.length, {**end.metrics, **returns}))
                slot.playing = next(slot.queue, None) if steps is None or taken < steps else None
    finally:
        with calling_envs(RESETTING):
            group.close()
        if film is not None:
            film.discard()
    return sorted(played, key=lambda one: one.index)


def can_record(spec: EnvSpec) -> bool:
    """Whether `picture` has anything to show."""
    return spec.renders or any(item.image for item in spec.obs.values())


def require_recordable(spec: EnvSpec, env: Env) -> None:
    """Refuse to film what can neither draw itself nor shows an image."""
    if not can_record(spec):
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


def _note_before(records: list[_Record], rows: list[int], obs: Arrays, action: np.ndarray) -> None:
    for row in rows:
        records[row].obs.append({key: array[row].copy() for key, array in obs.items()})
        records[row].action.append(action[row].copy())


def _note_after(
    records: list[_Record], rows: list[int], reward: Sequence[float], infos: Sequence[dict[str, Any]]
) -> None:
    for row in rows:
        records[row].reward.append(float(reward[row]))
        records[row].info.append(deepcopy(infos[row]))  # an env may fill the same dict again


def _shared(end: EpisodeEnd, players: MultiPolicyActor) -> tuple[float, dict[str, float]]:
    """The return of who is measured (of everybody, should none of its agents have come), and that of each."""
    returns = players.returns(end, first_row=0)
    first = players.match.policies[players.match.whom]
    return returns.get(first, end.total), {f"policy/{name}/return": value for name, value in returns.items()}


def _about(row: int, spec: EnvSpec, players: MultiPolicyActor | None) -> dict[str, str]:
    """Who a row is, and who plays it."""
    agent = {"agent": spec.agents[row % len(spec.agents)]} if spec.parallel else {}
    return agent if players is None else {**agent, "policy": players.match.policies[players.seats[row]]}


def _episode(record: _Record, now: Step, row: int, seed: int, about: dict[str, str]) -> Episode:
    """What one agent did, from where it came to where it ended."""
    record.obs.append({key: array[row].copy() for key, array in now.final_obs.items()})
    episode = Episode(
        obs={key: np.stack([one[key] for one in record.obs]) for key in now.final_obs},
        action=np.stack(record.action),
        reward=np.asarray(record.reward, np.float32),
        terminated=bool(now.terminated[row]),
        truncated=bool(now.truncated[row]),
        seed=seed,
        info=record.info,
        meta=about,
    )
    record.obs, record.action, record.reward, record.info = [], [], [], []
    return episode
