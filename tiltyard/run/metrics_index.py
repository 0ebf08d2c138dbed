"""metrics.index: a summary of every metric for each block of metrics.jsonl. Derived from it, so it may be deleted.

    1a2b3c4d                                                      checksum of all that follows
    {"inode": 17, "size": 9000, "names": ["train/return"], ...}   what it is about
    (blocks, then the parts of each metric, as doubles)           in the order of the fields below

It is used only if the inode, the size and bytes at the ends of some blocks are those of metrics.jsonl, and only if it
belongs to the owner of metrics.jsonl. It is replaced as a whole, only in a folder and for a file of this user.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from tiltyard.run import atomic
from tiltyard.run.curve import Part, join
from tiltyard.run.regular_files import open_regular

NAME = "metrics.index"
SCHEMA = 1
BLOCKS = 2048  # more are merged in pairs
BLOCK_SIZE = 16 * 1024  # bytes of the first blocks
WORTHWHILE = 256 * 1024  # bytes of metrics.jsonl after which the index is saved again
SAMPLES = 16  # ends of blocks that are compared with the file
SAMPLE = 64  # bytes of each
_BLOCK = struct.Struct("<9d")
_PART = struct.Struct(f"<{1 + len(Part._fields)}d")  # the number of its block first


@dataclass(slots=True)
class Block:
    """Consecutive lines, and the summary of those of their records that are valid."""

    start: int
    end: int
    since: float
    """env step at which its first record begins"""
    limit: float = math.inf
    """records above it are void"""
    low: float = math.inf
    """lowest and highest env step; low > high if no record is valid"""
    high: float = -math.inf
    attempts: tuple[float, float] = (0, 0)
    """lowest and highest"""
    sample: int = 0
    """checksum of its last bytes"""
    parts: dict[str, Part] = field(default_factory=dict)


@dataclass
class Index:
    """The blocks of a file, from its first byte on. `saved` is the end of the blocks on disk, `weight` their bytes."""

    blocks: list[Block] = field(default_factory=list)
    block_size: int = BLOCK_SIZE
    since: float = 0.0
    lines: int = 0
    broken: list[int] = field(default_factory=list)
    broken_count: int = 0
    inode: int = 0
    seen: tuple[int, int] = (0, 0)
    """size and modification time of the file when it was last read"""
    saved: int = 0
    weight: int = 0

    @property
    def end(self) -> int:
        return self.blocks[-1].end if self.blocks else 0

    @classmethod
    def of(cls, path: Path, file: BinaryIO, known: Index | None = None) -> tuple[Index, int]:
        """The index that fits the file, and the file's size: the known one, the one on disk, or an empty one."""
        found = os.fstat(file.fileno())
        index = known
        if index is None or not index._fits(file, found):
            index = _load(path, found)
        if index is None or not index._fits(file, found):
            index = cls()
            while found.st_size // index.block_size > BLOCKS // 2:
                index.block_size *= 2
        index.inode, index.seen = found.st_ino, (found.st_size, found.st_mtime_ns)
        return index, found.st_size

    def _fits(self, file: BinaryIO, found: os.stat_result) -> bool:
        if not self.blocks or self.inode != found.st_ino or self.end > found.st_size:
            return False
        if self.seen[0] == found.st_size and self.seen[1] != found.st_mtime_ns:
            return False
        chosen = {round(i * (len(self.blocks) - 1) / (SAMPLES - 1)) for i in range(SAMPLES)}
        return all(_sample(file, self.blocks[i].end) == self.blocks[i].sample for i in chosen)

    def add(self, block: Block, file: BinaryIO) -> None:
        block.sample = _sample(file, block.end)
        self.blocks.append(block)

    def merge(self) -> list[Block]:
        """Merge blocks in pairs if there are too many; returns those whose records must be read again."""
        unknown: list[Block] = []
        if len(self.blocks) < BLOCKS:
            return unknown
        pairs, self.blocks, self.block_size = zip(*[iter(self.blocks)] * 2, strict=True), [], 2 * self.block_size
        for first, second in pairs:
            low, high = min(first.low, second.low), max(first.high, second.high)
            known = [each.attempts for each in (first, second) if each.low <= each.high] or [(0, 0)]
            attempts = min(each[0] for each in known), max(each[1] for each in known)
            sample, parts = second.sample, {**first.parts, **second.parts}
            merged = Block(first.start, second.end, first.since, second.limit, low, high, attempts, sample, parts)
            self.blocks.append(merged)
            for name in first.parts.keys() & second.parts.keys():
                joined = join(first.parts[name], second.parts[name])
                if joined is None:
                    unknown.append(merged)
                    break
                parts[name] = joined
        return unknown

    def save(self, path: Path, file: BinaryIO) -> None:
        """Write the index beside the file if enough is new and both belong to this user. A failure is no loss."""
        if self.end - self.saved < max(WORTHWHILE, self.weight // 2):
            return
        found = os.fstat(file.fileno())
        temporary = path.with_name(f".{NAME}.{atomic.unique()}.tmp")
        with suppress(OSError):
            if {found.st_uid, path.parent.stat().st_uid} != {os.geteuid()}:
                return
            data = self._dump()
            try:
                handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, found.st_mode & 0o666)
                with os.fdopen(handle, "wb") as draft:
                    draft.write(data)
                temporary.replace(path.with_name(NAME))
                self.saved, self.weight = self.end, len(data)
            finally:
                temporary.unlink(missing_ok=True)

    def _dump(self) -> bytes:
        names = list(dict.fromkeys(name for block in self.blocks for name in block.parts))
        rows: dict[str, list[bytes]] = {name: [] for name in names}
        for number, block in enumerate(self.blocks):
            for name, part in block.parts.items():
                rows[name].append(_PART.pack(number, *part))
        facts = {
            "schema": SCHEMA,
            "inode": self.inode,
            "seen": self.seen,
            "block_size": self.block_size,
            "end": self.end,
            "since": self.since,
            "lines": self.lines,
            "broken": self.broken,
            "broken_count": self.broken_count,
            "blocks": len(self.blocks),
            "names": names,
            "parts": [len(rows[name]) for name in names],
        }
        blocks = [
            _BLOCK.pack(each.start, each.end, each.since, each.limit, each.low, each.high, *each.attempts, each.sample)
            for each in self.blocks
        ]
        data = json.dumps(facts).encode() + b"\n" + b"".join([*blocks, *(row for name in names for row in rows[name])])
        return b"%08x\n" % zlib.crc32(data) + data


def lacks_much(path: Path) -> bool:
    """Whether an update of a file's index is worthwhile; reads only the beginning of the index."""
    end = weight = block_size = 0
    with suppress(OSError, ValueError, LookupError, TypeError), open_regular(path.with_name(NAME)) as file:
        _, facts = file.readline(), json.loads(file.readline())
        end, block_size, weight = int(facts["end"]), int(facts["block_size"]), os.fstat(file.fileno()).st_size
    return path.stat().st_size - end >= max(WORTHWHILE, weight // 2, block_size)


def _load(path: Path, owner: os.stat_result) -> Index | None:
    """The index beside a file; None if there is none, or it is damaged, or another user's."""
    try:
        with open_regular(path.with_name(NAME)) as file:
            own = os.fstat(file.fileno()).st_uid == owner.st_uid
            return _parse(file.read()) if own else None
    except (OSError, ValueError, LookupError, TypeError, struct.error, StopIteration, OverflowError):
        return None


def _parse(data: bytes) -> Index | None:
    checksum, _, rest = data.partition(b"\n")
    line, _, numbers = rest.partition(b"\n")
    facts = json.loads(line)
    if checksum != b"%08x" % zlib.crc32(rest) or facts["schema"] != SCHEMA:
        return None
    middle = facts["blocks"] * _BLOCK.size
    blocks = [
        Block(int(start), int(end), since, limit, low, high, (first, last), int(sample))
        for start, end, since, limit, low, high, first, last, sample in _BLOCK.iter_unpack(numbers[:middle])
    ]
    rows = _PART.iter_unpack(numbers[middle:])
    for name, count in zip(facts["names"], facts["parts"], strict=True):
        for _ in range(count):
            number, *part = next(rows)
            blocks[int(number)].parts[name] = Part._make(part)
    broken, lines, count = facts["broken"], facts["lines"], facts["broken_count"]
    index = Index(blocks, facts["block_size"], facts["since"], lines, broken, count, facts["inode"])
    index.seen, index.saved, index.weight = (facts["seen"][0], facts["seen"][1]), index.end, len(data)
    return index


def _sample(file: BinaryIO, end: int) -> int:
    """Checksum of the bytes before an offset."""
    start = max(0, end - SAMPLE)
    return zlib.crc32(os.pread(file.fileno(), end - start, start))
