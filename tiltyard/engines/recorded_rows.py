"""Recorded episodes as rows of steps, the way a group of envs gives them: [T, B] steps, and where episodes begin.

    row 0   |-- episode 17 ---------|-- episode 4 --|-- episode 90 ...      each row reads one episode after another
    row 1   |-- episode 55 --|-- episode 8 -----------------|-- ...         from its first step, so that a recurrent
    ...                                                                     model has the memory it will have in the env

Each pass over the data has its own random order, in which a row that is done takes the next episode: no step is left
out, none is padded. The position is a few numbers, so that a resumed run reads what an uninterrupted one would. A
dataset that fits into `BUFFER` is decoded once, a larger one again in every pass, block by block.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tiltyard.data.episode_file import ROW_GROUP, EpisodeFile
from tiltyard.data.folder import open_episode
from tiltyard.data.manifest import Manifest
from tiltyard.errors import TiltyardError
from tiltyard.types import Array, Arrays, EnvSpec, Tree

MOST_ROWS = 64
BUFFER = 256 << 20  # bytes of decoded steps
LONGEST_BLOCK = 4096  # steps of an episode that are decoded at once


@dataclass
class Steps:
    """T recorded steps of B rows; arrays are [T, B, ...]."""

    obs: Arrays
    action: Array  # float32 [T, B, columns]
    returns: Array  # float32: discounted sum of the rewards from here on
    first: Array  # bool: an episode begins here


class _Place(NamedTuple):
    """Where a row continues: a step of an episode, and what its returns were computed with."""

    episode: int
    offset: int
    gamma: float
    bootstrap: float | None
    """value of the last observation, if the episode was truncated; None before it is opened"""


class _Opened(NamedTuple):
    """An episode, checked; all of its observations are decoded if `obs` has them."""

    file: EpisodeFile
    action: Array
    reward: Array
    obs: Arrays | None


@dataclass
class _Row:
    """What a row is reading."""

    place: _Place
    opened: _Opened
    returns: Array
    offset: int
    block: Arrays = field(default_factory=dict)  # decoded observations of steps start .. end
    start: int = 0
    end: int = 0


@dataclass(frozen=True)
class Source:
    """What the rows read: some episodes of a dataset, with the rewards as they are learned from."""

    folder: Path
    episodes: Manifest
    spec: EnvSpec
    reward: Callable[[Array], Array]
    """scaled and clipped as in the env"""
    value: Callable[[Arrays], float]
    """the critic's value of one observation, [1, ...]"""

    @property
    def steps(self) -> int:
        return int(self.episodes.column("length").sum())

    @property
    def digest(self) -> str:
        """Changes with the episodes."""
        columns = [self.episodes.column(name) for name in ("episode", "seed", "rows")]
        return hashlib.sha256(b"".join(np.ascontiguousarray(each).tobytes() for each in columns)).hexdigest()

    @property
    def fits(self) -> bool:
        """Whether all of it can be kept in memory."""
        each = step_bytes(self.spec) + 8 * self.spec.action.columns + 8
        return (self.steps + len(self.episodes)) * each + int(self.episodes.column("bytes").sum()) <= BUFFER

    def rows(self, wanted: int) -> int:
        """As many rows as wanted, unless there are fewer episodes or their observations do not fit into memory."""
        return max(1, min(wanted, len(self.episodes), BUFFER // (ROW_GROUP * step_bytes(self.spec))))


def step_bytes(spec: EnvSpec) -> int:
    """Bytes of the observations of one env step."""
    return sum(math.prod(item.shape) * np.dtype(item.dtype).itemsize for item in spec.obs.values())


class RecordedRows:
    """Reads the episodes of a source in `rows` rows, in an order that follows from the seed."""

    def __init__(self, source: Source, rows: int, seed: int) -> None:
        self.source, self.seed = source, seed
        self.position = 0  # episodes begun, over all passes
        self.finished = 0
        block = BUFFER // (rows * step_bytes(source.spec)) // ROW_GROUP * ROW_GROUP
        self._block = min(LONGEST_BLOCK, max(ROW_GROUP, block))
        self._rows: list[_Row | _Place | None] = [None] * rows
        self._decoded: dict[int, _Opened] | None = {} if source.fits else None
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def passes(self) -> float:
        """Passes over the data that were begun, as a fraction."""
        return self.position / len(self.source.episodes)

    def _shuffled(self, number: int) -> Array:
        """The order of a pass."""
        return np.random.default_rng([self.seed, number]).permutation(len(self.source.episodes))

    def read(self, steps: int, gamma: float) -> Steps:
        """The next steps of every row."""
        spec, rows = self.source.spec, len(self._rows)
        found = Steps(
            {name: np.empty((steps, rows, *item.shape), item.dtype) for name, item in spec.obs.items()},
            np.empty((steps, rows, spec.action.columns), np.float32),
            np.empty((steps, rows), np.float32),
            np.zeros((steps, rows), np.bool_),
        )
        for at in range(rows):
            done = 0
            while done < steps:
                row = self._rows[at] or self._next(gamma)
                if isinstance(row, _Place):
                    row = self._rows[at] = self._open(row)
                found.first[done, at] = row.offset == 0
                done += self._copy(row, found, at, done)
                if row.offset == len(row.returns):
                    self._rows[at] = None
                    self.finished += 1
        return found

    def _copy(self, row: _Row, found: Steps, at: int, done: int) -> int:
        """Copy steps of a row's episode, at most to the end of a decoded block; returns how many."""
        if row.offset >= row.end:
            self._decode(row)
        count = min(len(found.first) - done, row.end - row.offset)
        own, there = slice(row.offset, row.offset + count), slice(done, done + count)
        for name, array in found.obs.items():
            array[there, at] = row.block[name][row.offset - row.start : row.offset - row.start + count]
        found.action[there, at], found.returns[there, at] = row.opened.action[own], row.returns[own]
        row.offset += count
        return count

    def _decode(self, row: _Row) -> None:
        if row.opened.obs is not None:
            row.block, row.start, row.end = row.opened.obs, 0, len(row.returns)
            return
        row.start = row.offset // ROW_GROUP * ROW_GROUP
        row.end = min(row.start + self._block, len(row.returns))
        row.block = self._observations(row.opened.file, row.start, row.end)

    def _observations(self, file: EpisodeFile, start: int, end: int) -> Arrays:
        specs = self.source.spec.obs
        arrays = file.read(start, end, [f"obs.{name}" for name in specs])
        found = {name: arrays[f"obs.{name}"].astype(item.dtype, copy=False) for name, item in specs.items()}
        for name, array in found.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                message = f"{file.name}: observation {name} has a number that is not finite"
                raise TiltyardError(message, "remove the episode from the dataset")
        return found

    # ------------------------------------------------------------------------------------------ episodes

    def _next(self, gamma: float) -> _Place:
        """The beginning of the next episode."""
        count = len(self.source.episodes)
        episode = int(self._order(self.position // count)[self.position % count])
        self.position += 1
        return _Place(episode, 0, gamma, None)

    def _open(self, place: _Place) -> _Row:
        opened = self._opened(place.episode)
        if place.bootstrap is None:
            place = place._replace(bootstrap=0.0 if opened.file.about["terminated"] else self._last_value(opened))
        returns = discounted(opened.reward, place.gamma, place.bootstrap or 0.0)
        return _Row(place, opened, returns, place.offset)

    def _opened(self, episode: int) -> _Opened:
        if self._decoded is not None and episode in self._decoded:
            return self._decoded[episode]
        source = self.source
        file = open_episode(source.folder, source.episodes.entry(episode))
        self._check_columns(file)
        columns = file.read(0, file.rows, ["action", "reward"])
        action = columns["action"][: file.steps].reshape(file.steps, -1).astype(np.float32)
        self._check_actions(file, action)
        reward = source.reward(columns["reward"][: file.steps])
        if not np.isfinite(reward).all():
            raise TiltyardError(f"{file.name}: a reward is not finite", "remove the episode from the dataset")
        if self._decoded is None:
            return _Opened(file, action, reward, None)
        obs = self._observations(file, 0, file.rows)
        self._decoded[episode] = found = _Opened(file, action, reward, obs)
        return found

    def _last_value(self, opened: _Opened) -> float:
        file, obs = opened.file, opened.obs
        last = self._observations(file, file.steps, file.rows) if obs is None else {n: x[-1:] for n, x in obs.items()}
        return self.source.value(last)

    def _check_columns(self, file: EpisodeFile) -> None:
        """TiltyardError if an episode differs from what the dataset says it holds."""
        spec = self.source.spec
        wanted = {f"obs.{name}": (item.dtype, item.shape) for name, item in spec.obs.items()}
        there = {name: (dtype.newbyteorder("=").name, shape) for name, (dtype, shape) in file.columns.items()}
        for name, (dtype, shape) in wanted.items():
            if there.get(name) != (dtype, shape):
                message = f"{file.name} has {there.get(name, 'nothing')} as {name}, but the env has {(dtype, shape)}"
                raise TiltyardError(message, f"tiltyard data verify {self.source.folder}")

    def _check_actions(self, file: EpisodeFile, action: Array) -> None:
        """TiltyardError for recorded actions that the env does not have."""
        columns, at = self.source.spec.action.columns, 0
        wrong = action.shape[1] != columns or not np.isfinite(action).all()
        for part in [] if wrong else self.source.spec.action.parts:
            if part.kind != "continuous":
                options = part.options if part.kind == "categorical" else 2
                taken = action[:, at : at + part.columns]
                wrong |= bool(((taken < 0) | (taken >= options) | (taken != np.floor(taken))).any())
            at += part.columns
        if wrong:
            raise TiltyardError(
                f"{file.name} has actions that the env does not have", f"tiltyard data verify {self.source.folder}"
            )

    # ------------------------------------------------------------------------------------------ state

    def save(self) -> Tree:
        """The position, as JSON values."""
        places = [row.place._replace(offset=row.offset) if isinstance(row, _Row) else row for row in self._rows]
        rows = [None if place is None else list(place) for place in places]
        return {"seed": self.seed, "position": self.position, "finished": self.finished, "rows": rows}

    def load(self, tree: Tree) -> None:
        """Continue from `save`, with the same episodes. They are opened when they are read."""
        self.seed, self.position, self.finished = tree["seed"], tree["position"], tree["finished"]
        self._order.cache_clear()
        self._rows = [None if saved is None else _Place(*saved) for saved in tree["rows"]]


def discounted(reward: Array, gamma: float, last: float) -> Array:
    """The discounted sum of rewards from each step to the end, after which `last` follows."""
    found, total = np.empty(len(reward), np.float32), last
    for step in range(len(reward) - 1, -1, -1):
        total = float(reward[step]) + gamma * total
        found[step] = total
    return found
