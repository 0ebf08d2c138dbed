"""The running episode of every row of a group: its number, seed, length, frames and return, and its time limit.

Knows nothing of envs and observations. The rows of one copy of an env with several agents begin and end together, so
their numbers, seeds and lengths are equal.

    limit   of every episode, or none        first   of each row's episode 0, with env.decorrelate
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tiltyard.types import EpisodeEnd

if TYPE_CHECKING:
    from tiltyard.types import Array, Arrays

Seeds = Callable[[int, int], int]
"""(number of the copy in the run, number of its episode) -> seed"""


def episode_seed(seed: int, role: str, row: int, number: int) -> int:
    """The seed of one episode, 31 bits: depends on the run's seed, the role, the row and the episode's number only."""
    key = (zlib.crc32(role.encode()), row, number)
    return int(np.random.SeedSequence(entropy=seed, spawn_key=key).generate_state(1)[0]) >> 1


def row_seeds(seed: int, rows: int) -> Array:
    """The seeds of all rows, 31 bits, from the first episode's: for simulators that seed each row once."""
    return (np.random.SeedSequence(seed).generate_state(rows) >> 1).astype(np.int64)


def first_limits(seed: int, role: str, copies: Sequence[int], longest: int) -> Array:
    """The env steps after which the first episode of each copy is cut, drawn from 1 .. `longest`."""
    draws = [np.random.default_rng(episode_seed(seed, f"{role}/first", copy, 0)) for copy in copies]
    return np.array([each.integers(1, longest, endpoint=True) for each in draws], np.int64)


class EpisodeStats:
    """Counters of `rows` rows, `agents` per copy. Limits are in env steps; `frames` are frames per env step."""

    def __init__(
        self,
        rows: int,
        agents: int,
        first_row: int,
        seeds: Seeds,
        frames: int,
        limit: int | None = None,
        first: Array | None = None,
    ) -> None:
        self.agents, self.first_row = agents, first_row
        self._seeds, self._frames = seeds, frames
        self._limit = sys.maxsize if limit is None else limit
        self._first = None if first is None else np.repeat(first, agents)
        self.number = np.full(rows, -1, np.int64)  # episodes begun by each row, minus one
        self.length = np.zeros(rows, np.int64)  # env steps of the running episode
        self.saved_frames = np.zeros(rows, np.int64)  # frames not taken because the episode ended within an env step
        self.total = np.zeros(rows, np.float64)  # return so far: raw rewards
        self.seeds = [0] * rows
        self._ended_frames = 0
        self.set_countdown()

    @property
    def counters(self) -> Arrays:
        """The arrays that a checkpoint keeps, by name."""
        return {"number": self.number, "length": self.length, "saved_frames": self.saved_frames, "total": self.total}

    def step(self, raw: Array) -> None:
        """Count an env step of every row with rewards `raw`, float64 [B]."""
        self.total += raw
        self.length += 1
        self.countdown -= 1

    def set_countdown(self) -> None:
        """Set the number of steps in which no row can reach its limit; rows that are reset meanwhile only add to it."""
        if self._first is None:
            self.countdown = self._limit - int(self.length.max())
        else:
            self.countdown = int((self._limits() - self.length).min())

    def _limits(self) -> Array | int:
        """The limits of the running episodes; a first one is known by its number, also after a resume."""
        if self._first is None:
            return self._limit
        return np.where(self.number == 0, np.minimum(self._first, self._limit), self._limit)

    def late(self) -> Array | None:
        """Which rows have reached their limit; None if none can have."""
        return None if self.countdown > 0 else self.length >= self._limits()

    def shortened(self, ended: Array) -> Array | None:
        """Which rows are late only because env.decorrelate shortens their first episode; not those that `ended`."""
        if self._first is None:
            return None
        late: Array = (self.number == 0) & (self.length >= self._first) & (self.length < self._limit)
        return late & ~ended

    def span(self, copy: int) -> slice:
        """The rows of one copy."""
        return slice(copy * self.agents, (copy + 1) * self.agents)

    def begin(self, copy: int) -> int:
        """Reset the counters of a copy for its next episode and return that episode's seed."""
        rows = self.span(copy)
        self.number[rows] += 1
        seed = self._seeds(self.first_row // self.agents + copy, int(self.number[rows.start]))
        self.seeds[rows] = [seed] * self.agents
        self.length[rows] = self.saved_frames[rows] = 0
        self.total[rows] = 0.0
        return seed

    def end(self, row: int, total: float, metrics: dict[str, float]) -> EpisodeEnd:
        """The summary of the episode of the copy whose first row is `row`; counts its frames as taken."""
        frames = self.frames(row)
        self._ended_frames += frames
        return EpisodeEnd(
            row=self.first_row + row,
            number=int(self.number[row]),
            seed=self.seeds[row],
            total=total,
            length=int(self.length[row]),
            frames=frames,
            metrics=metrics,
        )

    def frames(self, row: int) -> int:
        """Simulator frames of a row's running episode."""
        return int(self.length[row]) * self._frames - int(self.saved_frames[row])

    @property
    def frames_taken(self) -> int:
        """Simulator frames of all copies. A load may change it: compare values of one process only."""
        running = self.length[:: self.agents].sum() * self._frames - self.saved_frames[:: self.agents].sum()
        return self._ended_frames + int(running)
