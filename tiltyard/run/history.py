"""Read metrics.jsonl in bounded memory: the one reader for all who want curves, newest values or records.

    metrics.jsonl   | block | block | ... | block | tail |
    metrics_index     a summary of each metric, per block    the tail, up to one block of lines, is read every time

A rewind makes earlier records above its env step void. Of a block with void records only the rest is summarised, from
its lines; `Block.limit` is the lowest rewind after it. Without an index the first reading summarises the whole file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tiltyard.run import atomic
from tiltyard.run.curve import Curve, Part, Points, increasing, summarize
from tiltyard.run.metrics_index import Block, Index, lacks_much
from tiltyard.run.regular_files import open_regular

if TYPE_CHECKING:
    from tiltyard.run.folder import Run

FILE = "metrics.jsonl"
EXACT = 2**53  # integers up to here are exact as floats, which the index has
BROKEN = 1000  # most numbers of broken lines that are kept
BACKLOG = 8 * 2**20  # most bytes that one call of `update_index` reads

Record = dict[str, Any]
Row = tuple[int, int, Any]  # env steps, attempt, and what was kept of the record


def path_of(where: Run | Path) -> Path:
    """metrics.jsonl of a run or of a run folder, or the path itself."""
    folder = where if isinstance(where, Path) else where.folder
    return folder / FILE if folder.suffix != ".jsonl" else folder


# ---------------------------------------------------------------------------------------------- lines


@dataclass
class Replay:
    """The valid records of consecutive lines, before the rewinds that follow them."""

    since: float
    """env step at which the next record begins"""
    limit: float = math.inf
    """lowest rewind among them: records before these lines are void above it"""
    kept: list[Row] = field(default_factory=list)
    lines: int = 0
    broken: list[int] = field(default_factory=list)
    """numbers of broken lines, from 1"""


def replay(lines: Iterable[bytes], since: float, keep: Callable[[Record], Any]) -> Replay:
    """Read lines in order; `keep` chooses what is kept of a record."""
    found = Replay(since)
    for line in lines:
        found.lines += 1
        record = _parse(line)
        if record is None:
            found.broken.append(found.lines)
            continue
        if "rewind_to" in record:
            limit = atomic.number(record["rewind_to"])
            if limit is not None and not math.isnan(limit):
                found.kept = [row for row in found.kept if row[0] <= limit]
                found.limit, found.since = min(found.limit, limit), limit
            continue
        steps, attempt = record.get("env_steps"), record.get("attempt")
        if type(steps) is not int or not -EXACT <= steps <= EXACT or not isinstance(record.get("metrics"), dict):
            continue
        record["since"], found.since = found.since, float(steps)
        found.kept.append((steps, attempt if type(attempt) is int and 0 < attempt < EXACT else 0, keep(record)))
    return found


def _parse(line: bytes) -> Record | None:
    """The object in a line; None if it is broken, and {} for an empty line."""
    return atomic.parse_line(line.removesuffix(b"\n")) if line != b"\n" else {}


def _whole(record: Record) -> Record:
    """The record with its metrics as floats, without metrics that are not numbers."""
    numbers = {name: atomic.number(value) for name, value in record["metrics"].items()}
    return {**record, "metrics": {name: value for name, value in numbers.items() if value is not None}}


def _one(name: str, record: Record) -> float | None:
    return atomic.number(record["metrics"].get(name))


class _Rows:
    """Keeps names and values of a record; records with the same names share a tuple of them."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}

    def __call__(self, record: Record) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        names = tuple(record["metrics"])
        return self._names.setdefault(names, names), tuple(record["metrics"].values())


def _parts(kept: list[Row]) -> dict[str, Part]:
    """The part of each metric in rows that `_Rows` kept. Works on columns, which is faster than value by value."""
    groups: dict[tuple[str, ...], list[tuple[Any, ...]]] = {}
    for number, (steps, _, (names, values)) in enumerate(kept):
        groups.setdefault(names, []).append((number, steps, *values))
    columns: dict[str, list[tuple[Any, ...]]] = {}
    for names, rows in groups.items():
        order, at, *values = zip(*rows, strict=True)
        for name, column in zip(names, values, strict=True):
            columns.setdefault(name, []).append((order, at, column))
    found = {}
    for name, pieces in columns.items():
        _, at, column = pieces[0]
        if len(pieces) > 1:  # records with different sets of names: back to the order of the file
            rows = sorted((row for piece in pieces for row in zip(*piece, strict=True)), key=itemgetter(0))
            _, at, column = zip(*rows, strict=True)
        if set(map(type, column)) != {float}:
            pairs = [(step, atomic.number(value)) for step, value in zip(at, column, strict=True)]
            pairs = [pair for pair in pairs if pair[1] is not None]
            at, column = tuple(step for step, _ in pairs), tuple(value for _, value in pairs)
        if column:
            found[name] = summarize(at, column)
    return found


# ---------------------------------------------------------------------------------------------- blocks


def _lines(file: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    """The lines from one offset to another; a new line begins at both."""
    file.seek(start)
    while start < end:
        line = file.readline()
        if not line:
            return
        start += len(line)
        yield line


def _fill(block: Block, kept: list[Row]) -> None:
    """Summarise the valid rows of a block."""
    kept = [row for row in kept if row[0] <= block.limit]
    steps, attempts = [row[0] for row in kept], [row[1] for row in kept]
    block.low, block.high = min(steps, default=math.inf), max(steps, default=-math.inf)
    block.attempts = min(attempts, default=0), max(attempts, default=0)
    block.parts = _parts(kept)


def _read_again(file: BinaryIO, block: Block) -> None:
    _fill(block, replay(_lines(file, block.start, block.end), block.since, _Rows()).kept)


def _void(file: BinaryIO, blocks: list[Block], limit: float) -> None:
    """Apply a rewind that follows the blocks."""
    for block in reversed(blocks):
        if block.limit <= limit:  # and so have all before it
            return
        block.limit = limit
        if block.low > limit:
            _fill(block, [])
        elif block.high > limit:
            _read_again(file, block)


def _extend(index: Index, file: BinaryIO, size: int, most: float = math.inf) -> None:
    """Add all whole blocks of the file, or those of `most` bytes."""
    until = min(size, index.end + most)
    while until - index.end >= index.block_size:
        file.seek(index.end + index.block_size - 1)
        if not file.readline().endswith(b"\n"):
            return
        block = Block(index.end, file.tell(), index.since)
        found = replay(_lines(file, block.start, block.end), index.since, _Rows())
        _fill(block, found.kept)
        _void(file, index.blocks, found.limit)
        index.add(block, file)
        index.since = found.since
        index.broken_count += len(found.broken)
        index.broken += [index.lines + number for number in found.broken][: BROKEN - len(index.broken)]
        index.lines += found.lines
        for merged in index.merge():
            _read_again(file, merged)


def update_index(where: Run | Path) -> None:
    """Bring the index up to date, for the process that writes the file: a piece at a time, and without errors."""
    path = path_of(where)
    with suppress(OSError):
        if lacks_much(path):
            with open_regular(path, follow=True) as file:
                index, size = Index.of(path, file)
                _extend(index, file, size, BACKLOG)
                index.save(path, file)


class History:
    """The valid records of a run. Reads the index and what follows it; `refresh` reads what is new since then."""

    def __init__(self, where: Run | Path) -> None:
        self.path = path_of(where)
        self._index = Index()
        self._tail: list[Row] = []
        self.broken: list[int] = []
        self.broken_count = 0
        self.refresh()

    def refresh(self) -> None:
        """Read what is new; the index is saved if that is worthwhile and the folder belongs to this user."""
        try:
            file = open_regular(self.path, follow=True)
        except FileNotFoundError:
            self._index, self._tail, self.broken, self.broken_count = Index(), [], [], 0
            return
        with file:
            self._index, size = Index.of(self.path, file, self._index)
            index = self._index
            _extend(index, file, size)
            found = replay(_lines(file, index.end, size), index.since, _whole)
            _void(file, index.blocks, found.limit)
            index.save(self.path, file)
        self._tail = found.kept
        self.broken = [*index.broken, *(index.lines + number for number in found.broken)][:BROKEN]
        self.broken_count = index.broken_count + len(found.broken)

    # -- questions

    @property
    def names(self) -> list[str]:
        """The names of all metrics, in the order in which they first appear."""
        parts = (name for block in self._index.blocks for name in block.parts)
        return list(dict.fromkeys([*parts, *(name for row in self._tail for name in row[2]["metrics"])]))

    @property
    def env_steps(self) -> int | None:
        """The highest env step; None without records."""
        steps = [block.high for block in self._index.blocks if block.low <= block.high]
        steps += (row[0] for row in self._tail)
        return int(max(steps)) if steps else None

    def newest(self) -> dict[str, float]:
        """The newest value of each metric."""
        found = {name: part.newest for block in self._index.blocks for name, part in block.parts.items()}
        return found | {name: value for row in self._tail for name, value in row[2]["metrics"].items()}

    def curve(self, name: str, above: float = -math.inf, until: float = math.inf) -> Curve:
        """One metric; of attempts above the first number and up to the second, if they are given."""
        parts: list[tuple[Part, Any]] = []
        for block in self._index.blocks:
            part, (first, last) = block.parts.get(name), block.attempts
            if part is None or last <= above or first > until:
                continue
            if above < first and last <= until:
                parts.append((part, partial(self._points, block, name)))
            else:
                parts += _some([row for row in self._rows(block, name) if above < row[1] <= until])
        rows = [(steps, attempt, record["metrics"].get(name)) for steps, attempt, record in self._tail]
        parts += _some([row for row in rows if row[2] is not None and above < row[1] <= until])
        newest = next(((int(part.newest_step), part.newest) for part, _ in reversed(parts)), None)
        return Curve(parts, newest)

    def records(self) -> Iterator[Record]:
        """All valid records, oldest first, with metrics as floats. Each has `since`, the env step at which it begins:
        that of the previous record or of the resume."""
        for block in self._index.blocks:
            for row in self._replay(block, _whole):
                yield row[2]
        for row in self._tail:
            yield row[2]

    def recent(self, count: int) -> list[Record]:
        """The newest valid records, oldest first."""
        found = [row[2] for row in reversed(self._tail)]
        for block in reversed(self._index.blocks):
            if len(found) >= count:
                break
            found += (row[2] for row in reversed(self._replay(block, _whole)))
        return found[:count][::-1]

    # -- reading again

    def _replay(self, block: Block, keep: Callable[[Record], Any]) -> list[Row]:
        if block.low > block.high:
            return []
        with open_regular(self.path, follow=True) as file:
            kept = replay(_lines(file, block.start, block.end), block.since, keep).kept
        return [row for row in kept if row[0] <= block.limit]

    def _rows(self, block: Block, name: str) -> list[Row]:
        return [row for row in self._replay(block, partial(_one, name)) if row[2] is not None]

    def _points(self, block: Block, name: str) -> Points:
        return increasing((steps, value) for steps, _, value in self._rows(block, name))


def _some(rows: list[Row]) -> list[tuple[Part, Points]]:
    """The part of the rows of one metric, and its points; nothing without rows."""
    if not rows:
        return []
    steps, values = [row[0] for row in rows], [row[2] for row in rows]
    return [(summarize(steps, values), increasing(zip(steps, values, strict=True)))]
