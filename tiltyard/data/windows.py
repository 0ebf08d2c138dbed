"""Batches of random windows or single observations of a dataset's episodes: which, in which order, and from where on.

    epoch = every read once, in random order     read = the starts in one row group of an episode: some are drawn
    pool  = reads whose windows are mixed        batch = the next windows of the pool, then of the next pool

A read with 64 possible starts gives `per_read` windows, a smaller one proportionally fewer, rounded, but at least one.
Within a read all starts are equally likely, and no window occurs twice in an epoch. So each window has the same chance
of being drawn, except for rounding in the last read of an episode. All of it follows from seed and epoch: the windows
of an epoch are the same for any number of processes, which divide the reads among themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc

from tiltyard.data.episode_file import ROW_GROUP
from tiltyard.data.episode_reader import Columns, Reader
from tiltyard.data.partition import part
from tiltyard.errors import UseError, did_you_mean
from tiltyard.types import Array, Arrays

if TYPE_CHECKING:
    from tiltyard.data.torch_loader import TorchWindows

MEMORY = 512 << 20  # bytes: a pool whose rows could take more is smaller than asked for
_ORDER, _DRAW, _MIX = range(3)  # random streams
_ENDS = ("action", "reward", "terminated", "truncated")

Batch = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What batches are wanted."""

    length: int
    """env steps of a window; 0 for single observations"""
    batch: int
    seed: int
    per_read: int
    pool: int
    """reads whose windows are mixed"""
    names: tuple[str, ...]
    """columns: obs.NAME, action, reward, terminated, truncated"""
    final_obs: bool
    """whether windows have the observation after their last step, too"""
    epochs: int | None
    shard: tuple[int, int]
    """this process and the number of processes that divide an epoch among themselves"""

    @property
    def rows(self) -> int:
        """Rows of a window."""
        return self.length + self.final_obs if self.length else 1


def checked(plan: Plan, columns: Columns) -> Plan:
    """The plan with its names and a pool that fits into memory. UseError if a setting is wrong."""
    for name in ("batch", "per_read", "pool"):
        if type(value := getattr(plan, name)) is not int or value < 1:
            raise UseError(f"{name} = {value!r} must be an integer of 1 or more", f"set {name} to 1 or more")
    if type(plan.length) is not int or plan.length < 0:
        raise UseError(f"length = {plan.length!r} must be an integer of 1 or more", "a window of 32 steps: length=32")
    if type(plan.seed) is not int or plan.seed < 0:
        raise UseError(f"seed = {plan.seed!r} must be an integer of 0 or more", "seed=0")
    if plan.epochs is not None and (type(plan.epochs) is not int or plan.epochs < 1):
        raise UseError(f"epochs = {plan.epochs!r} must be an integer of 1 or more", "None repeats without an end")
    index, count = plan.shard
    if not 0 <= index < count:
        raise UseError(f"shard = {plan.shard} must be (index, count) with 0 <= index < count", "shard=(0, 1)")
    known = [name for name in columns if plan.length or name.startswith("obs.")]
    for name in plan.names:
        if name not in known:
            raise UseError(f"names: unknown column {name!r}", did_you_mean(name, known))
    names = plan.names or tuple(known)
    width = sum(columns[name][0].itemsize * int(np.prod(columns[name][1], dtype=np.int64)) for name in names)
    largest = width * ROW_GROUP * (1 + -(-(plan.rows - 1) // ROW_GROUP))
    return replace(plan, names=names, pool=min(plan.pool, max(1, MEMORY // max(1, largest))))


class Reads:
    """The reads of a set of episodes, numbered in order, and the windows that are drawn from each."""

    def __init__(self, lengths: Array, plan: Plan) -> None:
        """`lengths` are the env steps of the episodes."""
        self._plan, self._lengths = plan, lengths
        # An episode shorter than a window gives one window, which is padded; one without a step gives none.
        whole = lengths - plan.length + 1
        self._starts = np.maximum(whole, np.minimum(lengths, 1)) if plan.length else lengths + 1
        self._first = np.concatenate([[0], np.cumsum(-(-self._starts // ROW_GROUP))])

    def __len__(self) -> int:
        return int(self._first[-1])

    def order(self, epoch: int) -> Array:
        """The reads of this process in an epoch."""
        numbers = np.arange(len(self), dtype=np.uint32 if len(self) < 2**32 else np.uint64)
        _stream(self._plan.seed, _ORDER, epoch).shuffle(numbers)
        mine = part(len(self), self._plan.shard[1], self._plan.shard[0])
        return numbers[mine.start : mine.stop].copy()

    def places(self, reads: Array) -> tuple[Array, Array, Array]:
        """Of each read: its episode, its row group, and the number of possible starts."""
        episodes = np.searchsorted(self._first, reads, "right") - 1
        groups = reads - self._first[episodes]
        return episodes, groups, np.minimum(ROW_GROUP, self._starts[episodes] - groups * ROW_GROUP)

    def counts(self, reads: Array) -> Array:
        """The number of windows drawn from each read."""
        possible = self.places(reads)[2]
        rounded = (2 * self._plan.per_read * possible + ROW_GROUP) // (2 * ROW_GROUP)
        return np.asarray(np.minimum(np.maximum(rounded, 1), possible))

    def draw(self, epoch: int, reads: Array) -> tuple[Array, Array, Array]:
        """The windows of some reads: the position of the read in `reads`, the episode and the start of each."""
        episodes, groups, possible = self.places(reads)
        counts = self.counts(reads)
        drawn = [
            _stream(self._plan.seed, _DRAW, epoch, int(read)).permutation(int(among))[:count]
            for read, among, count in zip(reads, possible, counts, strict=True)
        ]
        slots = np.repeat(np.arange(len(reads)), counts)
        starts = np.concatenate(drawn) if drawn else np.zeros(0, np.int64)
        return slots, episodes[slots], starts + groups[slots] * ROW_GROUP

    def steps(self, episodes: Array, starts: Array) -> Array:
        """The number of steps in the windows that begin there."""
        return np.asarray(np.minimum(self._plan.length, self._lengths[episodes] - starts))


class Windows:
    """An endless or finite iterator of batches, which continues where it is: `for` may be left and entered again.

    A batch has new arrays: obs {name: [B, L, ...]} (one more with final_obs), action [B, L, ...], reward, terminated,
    truncated and valid [B, L], and where the windows come from: episode and start [B]. Of single observations: obs
    {name: [B, ...]}, episode and start. The last batch of an epoch may be smaller.
    """

    def __init__(self, reader: Reader, plan: Plan) -> None:
        if not len(reader.manifest):
            raise UseError(
                f"{reader.folder} has no episodes here", "collect some: tiltyard data collect ENV --out FOLDER"
            )
        self._reader, self._columns = reader, reader.columns()
        self.plan = checked(plan, self._columns)
        self._reads = Reads(reader.lengths, self.plan)
        if not len(self._reads):
            raise UseError(f"the episodes of {reader.folder} have no steps", "choose other episodes")
        self.begin(0)

    def begin(self, epoch: int) -> None:
        """Continue with the beginning of an epoch; `epochs` counts from there."""
        self._stop = None if self.plan.epochs is None else epoch + self.plan.epochs
        self._begin(epoch, 0, 0)

    def _begin(self, epoch: int, pool: int, offset: int) -> None:
        self._epoch, self._pool, self._offset = epoch, pool, offset
        self._order: Array | None = None
        self._mixed: _Pool | None = None

    def sharded(self, index: int, count: int) -> Windows:
        """The same windows from the beginning, for one of `count` processes."""
        return Windows(self._reader, replace(self.plan, shard=(index, count)))

    def torch(self) -> TorchWindows:
        """The same windows as a torch IterableDataset of whole batches."""
        from tiltyard.data.torch_loader import TorchWindows

        return TorchWindows(self)

    # ------------------------------------------------------------------------------------------ iteration

    def __iter__(self) -> Windows:
        return self

    def __next__(self) -> Batch:
        picked: list[tuple[Arrays, int, int, int]] = []
        while len(picked) < self.plan.batch:
            pool = self._current()
            if pool is None:  # the epoch ends
                if picked:
                    break
                raise StopIteration
            more = min(self.plan.batch - len(picked), len(pool) - self._offset)
            picked += [pool.take(self._offset + each) for each in range(more)]
            self._offset += more
            if self._offset == len(pool):
                self._pool, self._offset, self._mixed = self._pool + 1, 0, None
                if self._pool * self.plan.pool >= len(self._epoch_order()):
                    self._begin(self._epoch + 1, 0, 0)
                    break
        return self._assemble(picked)

    def _epoch_order(self) -> Array:
        if self._order is None:
            self._order = self._reads.order(self._epoch)
        return self._order

    def _current(self) -> _Pool | None:
        """The pool that the next window is in; None after the last epoch, or if there is no read for this process."""
        if self._stop is not None and self._epoch >= self._stop:
            return None
        if self._mixed is None:
            order, size = self._epoch_order(), self.plan.pool
            if not len(order):
                return None
            reads = order[self._pool * size : (self._pool + 1) * size]
            self._mixed = _Pool(self._reader, self._reads, self.plan, self._epoch, self._pool, reads)
            self._mixed.forget(self._offset)
        return self._mixed

    def _assemble(self, picked: list[tuple[Arrays, int, int, int]]) -> Batch:
        """Copy windows from the rows that were read: (rows, the first row in them, episode, start)."""
        length, rows = self.plan.length, self.plan.rows
        episodes, starts = np.array([each[2:] for each in picked], np.int64).T
        steps = self._reads.steps(episodes, starts)
        out: Arrays = {}
        for name in self.plan.names:
            dtype, shape = self._columns[name]
            extra = self.plan.final_obs and name.startswith("obs.")
            size = rows if name.startswith("obs.") else length
            array = np.empty((len(picked), size, *shape), dtype.newbyteorder("="))
            for place, (source, first, _, start) in enumerate(picked):
                count = int(steps[place]) + extra if length else 1
                array[place, :count] = source[name][start - first : start - first + count]
                array[place, count:] = 0
            out[name] = array if length else array[:, 0]
        batch: Batch = {"obs": {name[4:]: out[name] for name in out if name.startswith("obs.")}}
        batch |= {name: out[name] for name in _ENDS if name in out}
        if length:
            batch["valid"] = np.arange(length) < steps[:, None]
        return {**batch, "episode": episodes, "start": starts}

    # ------------------------------------------------------------------------------------------ position

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._epoch

    def batches_left(self) -> int | None:
        """The number of batches from the beginning of this epoch on; None without an end."""
        if self._stop is None:
            return None if len(self._epoch_order()) else 0
        sums = [self._reads.counts(self._reads.order(epoch)).sum() for epoch in range(self._epoch, self._stop)]
        return sum(-(-int(each) // self.plan.batch) for each in sums)

    def skip(self, batches: int) -> None:
        """Leave out the next batches, without reading them."""
        while batches > 0:
            order, size = self._epoch_order(), self.plan.pool
            if not len(order) or (self._stop is not None and self._epoch >= self._stop):
                return
            ends = np.cumsum(self._reads.counts(order))
            before = int(ends[self._pool * size - 1]) if self._pool else 0
            wanted = before + self._offset + batches * self.plan.batch
            if wanted < ends[-1]:
                read = int(np.searchsorted(ends, wanted, "right"))
                pool = read // size
                self._begin(self._epoch, pool, wanted - (int(ends[pool * size - 1]) if pool else 0))
                self._order = order
                return
            batches -= -(-int(ends[-1] - before - self._offset) // self.plan.batch)
            self._begin(self._epoch + 1, 0, 0)

    def state(self) -> dict[str, Any]:
        """The position before the next batch, as JSON values."""
        position = {"epoch": self._epoch, "pool": self._pool, "offset": self._offset}
        return {"schema": 1, **position, **self.identity()}

    def identity(self) -> dict[str, Any]:
        """What a position refers to: the set of episodes and the plan. Packing does not change it."""
        plan = asdict(self.plan)
        del plan["epochs"]
        return {
            "episodes": _digest(self._reader),
            "plan": {**plan, "names": list(plan["names"]), "shard": list(plan["shard"])},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue at a position. UseError if it is of other episodes or another plan."""
        require_identity(state, self.identity(), str(self._reader.folder))
        position = [state.get(name) for name in ("epoch", "pool", "offset")]
        if not all(type(value) is int and value >= 0 for value in position):
            raise UseError(
                f"the state of windows is damaged: epoch, pool, offset = {position}", "start from the beginning"
            )
        self._stop = self.plan.epochs
        self._begin(*position)  # type: ignore[arg-type]


def require_identity(state: Mapping[str, Any], mine: Mapping[str, Any], folder: str) -> None:
    if state.get("schema") != 1:
        raise UseError(f"schema = {state.get('schema')!r}: not a state of windows", "give what state() returned")
    if state.get("episodes") != mine["episodes"]:
        hint = "choose the same episodes, or start from the beginning"
        raise UseError(f"the state is of another set of episodes than {folder} has now", hint)
    plan = state.get("plan")
    for name, value in mine["plan"].items():
        other = plan.get(name) if isinstance(plan, Mapping) else None
        if other != value:
            message = f"the state is of windows with {name} = {other!r}, but these have {name} = {value!r}"
            raise UseError(message, f"set {name} as before, or start from the beginning")


class _Pool:
    """The windows of some reads, mixed. Rows are read when a window needs them, and dropped after the last one."""

    def __init__(self, reader: Reader, reads: Reads, plan: Plan, epoch: int, number: int, chosen: Array) -> None:
        self._reader, self._plan = reader, plan
        slots, episodes, starts = reads.draw(epoch, chosen)
        mixed = _stream(plan.seed, _MIX, epoch, *plan.shard, number).permutation(len(slots))
        self._slots, self._episodes, self._starts = slots[mixed], episodes[mixed], starts[mixed]
        self._left = np.bincount(slots, minlength=len(chosen))
        self._low = np.full(len(chosen), np.iinfo(np.int64).max)
        np.minimum.at(self._low, slots, starts)
        self._high = np.zeros(len(chosen), np.int64)
        np.maximum.at(self._high, slots, starts)
        self._loaded: dict[int, Arrays] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def forget(self, count: int) -> None:
        """Drop the first windows, which were handed out before."""
        self._left -= np.bincount(self._slots[:count], minlength=len(self._left))

    def take(self, place: int) -> tuple[Arrays, int, int, int]:
        """The rows of a window: the arrays, the row that they begin with, the episode and the start."""
        slot, episode, start = int(self._slots[place]), int(self._episodes[place]), int(self._starts[place])
        first = int(self._low[slot])
        rows = self._loaded.get(slot)
        if rows is None:
            last = min(int(self._high[slot]) + self._plan.rows, int(self._reader.lengths[episode]) + 1)
            rows = self._loaded[slot] = self._reader.rows(episode, first, last, self._plan.names)
        self._left[slot] -= 1
        if not self._left[slot]:
            del self._loaded[slot]
        return rows, first, episode, start


def _stream(seed: int, *key: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(entropy=seed, spawn_key=key))


def _digest(reader: Reader) -> str:
    """The checksum of a set of episodes: numbers, agents, lengths and seeds."""
    found = hashlib.sha256()
    for name in ("episode", "rows", "seed"):
        found.update(np.ascontiguousarray(reader.manifest.column(name), np.int64).tobytes())
    agents = pc.unique(reader.manifest.table.column("agent")).to_pylist()
    if agents != [""]:
        found.update("\n".join(reader.manifest.table.column("agent").to_pylist()).encode())
    return found.hexdigest()
