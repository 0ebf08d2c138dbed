"""The manifests of a dataset: a line for each committed episode. Every writer has its own; readers merge them.

    manifests/WRITER-0000.open.jsonl   while it is being written; without `open` it has a seal, or is damaged
    manifests/WRITER-0000.jsonl    {"episode", "agent", "file", "offset", "bytes", "sha256", "rows", "length", "seed",
                                    "return", "terminated", "truncated", "meta", "crc"}
                                   {"seal": SHA-256 of all lines before it, "lines": 1000}

An episode is a range of bytes in a file: a whole Parquet file, or a member of a tar. Lines end with their own checksum.
After SEALED_AFTER lines a writer seals its manifest and begins the next one; a sealed manifest is verified as a whole
and parsed by Arrow, so that a million episodes open in a second. `return` is null if it is not finite, `meta` is JSON
in a string. Of two lines for one episode, one is in effect: that of a shard, else the first.

The manifest of a folder from before datasets (manifest.jsonl, schema 1) is read, too.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from tiltyard.processes.resources import usable_cores
from tiltyard.run import atomic, mutex
from tiltyard.types import Array

FOLDER = "manifests"
OLD = "manifest.jsonl"  # of schema 1
OPEN = ".open.jsonl"  # locked (flock) by its writer, as long as that lives
SEALED_AFTER = 1_000
_LISTINGS = 100  # of the folder, at most, until nothing changes meanwhile
# A name could lead to another folder.
FILE = re.compile(r"episodes/\d{5,}/\d{9,}\.(parquet|tar)|shards/[a-z0-9-]+\.tar|episode-\d{6,}\.parquet")
FIELDS = pa.schema(
    [
        ("episode", pa.int64()),
        ("agent", pa.string()),
        ("file", pa.string()),
        ("offset", pa.int64()),
        ("bytes", pa.int64()),
        ("sha256", pa.string()),
        ("rows", pa.int64()),
        ("length", pa.int64()),
        ("seed", pa.int64()),
        ("return", pa.float64()),
        ("terminated", pa.bool_()),
        ("truncated", pa.bool_()),
        ("meta", pa.string()),
    ]
)
_SEAL = re.compile(rb'\{"seal": "([0-9a-f]{64})", "lines": (\d+)\}\n')
_CHECKED = re.compile(rb'.*, "crc": "[0-9a-f]{8}"\}', re.DOTALL)
_KINDS: dict[str, tuple[type, ...]] = {
    field.name: {pa.int64(): (int,), pa.string(): (str,), pa.bool_(): (bool,)}.get(field.type, (float, int, type(None)))
    for field in FIELDS
}


@dataclass(frozen=True)
class Entry:
    """A line: where an episode is, and what it is."""

    episode: int
    """its number; its seed follows from it in a collected dataset"""
    agent: str
    """of an env with several agents, else empty"""
    file: str
    offset: int
    bytes: int
    sha256: str
    rows: int
    seed: int
    total: float
    """its return"""
    terminated: bool
    truncated: bool
    meta: str
    """JSON: the policy, and where it comes from"""

    @property
    def length(self) -> int:
        return self.rows - 1

    @property
    def key(self) -> tuple[int, str]:
        return self.episode, self.agent

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"episode {self.episode}" + (f" of agent {self.agent}" if self.agent else "")

    def line(self) -> str:
        values = {name: getattr(self, "total" if name == "return" else name) for name in FIELDS.names}
        values["return"] = self.total if math.isfinite(self.total) else None
        return atomic.to_line(values)


@dataclass(frozen=True)
class Damage:
    """Something wrong in a dataset: a file, the place in it, and what is wrong."""

    file: str
    place: str
    """such as `line 12` or `row group 3`; empty for the whole file"""
    what: str
    episode: str = ""
    """the episodes concerned, where they are known"""

    def __str__(self) -> str:
        where = ", ".join(each for each in (self.file, self.place, self.episode) if each)
        return f"{where}: {self.what}"


class Manifest:
    """The merged manifests: columns, one row per episode and agent, ordered by episode."""

    def __init__(self, table: pa.Table, damages: Sequence[Damage] = ()) -> None:
        self.table, self.damages = table, list(damages)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def column(self, name: str) -> Array:
        """A column of numbers, by its name in the file; a missing return is NaN."""
        return np.asarray(self.table.column(name).to_numpy())

    def entry(self, index: int) -> Entry:
        return _entry({name: self.table.column(name)[index].as_py() for name in FIELDS.names})

    def __iter__(self) -> Iterator[Entry]:
        for batch in self.table.to_batches(max_chunksize=4096):
            yield from map(_entry, batch.to_pylist())

    def numbers(self) -> Array:
        """The numbers of all episodes, each once."""
        return np.unique(self.column("episode"))

    def take(self, rows: Array) -> Manifest:
        """Some rows, in the order given."""
        return Manifest(self.table.take(pa.array(rows, pa.int64())), self.damages)


def _entry(values: Mapping[str, Any]) -> Entry:
    total = math.nan if values["return"] is None else float(values["return"])
    kept = {name: value for name, value in values.items() if name not in ("return", "length")}
    return Entry(**kept, total=total)


def from_entries(entries: Sequence[Entry], damages: Sequence[Damage] = ()) -> Manifest:
    """A manifest of these entries, merged as those of a folder are."""
    columns = {
        name: [getattr(each, "total" if name == "return" else name) for each in entries] for name in FIELDS.names
    }
    columns["return"] = [value if math.isfinite(value) else None for value in columns["return"]]
    return merge([pa.table(columns, FIELDS)], damages)


def merge(tables: Sequence[pa.Table], damages: Sequence[Damage] = ()) -> Manifest:
    """One manifest of these tables, with one row per episode and agent."""
    return Manifest(_merge(tables), damages)


# ---------------------------------------------------------------------------------------------- reading


def files(folder: Path) -> list[Path]:
    """The manifests of a dataset, in a fixed order."""
    found = sorted(path for path in (folder / FOLDER).glob("*.jsonl") if not path.name.startswith("."))
    return [folder / OLD, *found] if (folder / OLD).is_file() else found


def read(folder: Path) -> Manifest:
    """The merged manifests. Damaged lines are left out and named in `damages`."""
    found: dict[Path, tuple[pa.Table, list[Damage]]] = {}
    with ThreadPoolExecutor(usable_cores()) as pool:  # hashing and Arrow's parsing release the interpreter
        # A pack replaces manifests by those of shards, and writers rename theirs: read on until all listed are read.
        for _ in range(_LISTINGS):
            listed = files(folder)
            if found.keys() == set(listed):
                break
            found = {path: found[path] for path in listed if path in found}
            new = [path for path in listed if path not in found]
            read_new = pool.map(lambda path: read_file(path, path.relative_to(folder).as_posix()), new)
            found |= zip(new, read_new, strict=True)
    tables = [found[path] for path in sorted(found, key=lambda path: (path.name != OLD, path))]
    return merge([table for table, _ in tables], [each for _, damages in tables for each in damages])


def read_file(path: Path, name: str) -> tuple[pa.Table, list[Damage]]:
    """The lines of one manifest and what is wrong with it. A torn last line was never committed."""
    try:
        data = path.read_bytes()
    except OSError as error:
        return FIELDS.empty_table(), [Damage(name, "", f"cannot be read: {error.strerror}")]
    end = data.rfind(b"\n", 0, max(0, len(data) - 1)) + 1  # where the last line begins
    seal = _SEAL.fullmatch(data, end)
    if seal is not None:
        body = memoryview(data)[:end]
        if hashlib.sha256(body).hexdigest().encode() == seal[1] and data.count(b"\n", 0, end) == int(seal[2]):
            try:
                return _parsed(body), []
            except (pa.ArrowException, ValueError) as error:
                return FIELDS.empty_table(), [Damage(name, "", f"is not a manifest: {error}")]
    table, damages = _lines(data, name, seal is not None)
    if seal is not None and not damages:
        damages = [Damage(name, "last line", "the seal differs from the lines above it")]
    if seal is None and name != OLD and not name.endswith(OPEN):
        damages.append(Damage(name, "last line", "the seal is missing"))
    return table, damages


def _parsed(body: memoryview) -> pa.Table:
    """A verified manifest, read by Arrow."""
    if not len(body):
        return FIELDS.empty_table()
    options = pa.json.ParseOptions(explicit_schema=FIELDS, unexpected_field_behavior="ignore")
    reading = pa.json.ReadOptions(use_threads=False, block_size=max(1 << 20, len(body)))
    table = pa.json.read_json(pa.BufferReader(pa.py_buffer(body)), reading, options)
    pattern = f"^({FILE.pattern})$".replace(r"\d", "[0-9]")
    if not pc.all(pc.match_substring_regex(table.column("file"), pattern)).as_py():
        raise ValueError("it names a file outside of the dataset")
    return table.select(FIELDS.names)


def _lines(data: bytes, name: str, sealed: bool) -> tuple[pa.Table, list[Damage]]:
    """Line by line: of a manifest that is being written, of schema 1, or damaged."""
    lines = data.split(b"\n")
    lines.pop()  # torn, after the last line break
    if sealed:
        lines.pop()
    rows, damages = [], []
    for number, line in enumerate(lines, 1):
        values = _values(atomic.parse_line(line), name) if name == OLD or _CHECKED.fullmatch(line) else None
        if values is None:
            damages.append(Damage(name, f"line {number}", "is damaged"))
        else:
            rows.append(values)
    return pa.Table.from_pylist(rows, FIELDS), damages


def _values(record: dict[str, Any] | None, name: str) -> dict[str, Any] | None:
    """The fields of a line, or None if one is missing or wrong."""
    if record is None:
        return None
    if name == OLD and isinstance(record.get("file"), str) and isinstance(record.get("rows"), int):
        number = record["file"].removeprefix("episode-").removesuffix(".parquet")
        record = {"agent": "", "offset": 0, "meta": "{}", "length": record["rows"] - 1, **record}
        record |= {"episode": int(number) if number.isdecimal() else None}
        record["return"] = atomic.number(record.get("return"))
    for field, kinds in _KINDS.items():
        if type(record.get(field)) not in kinds:
            return None
    sound = FILE.fullmatch(record["file"]) and min(record["episode"], record["offset"], record["bytes"]) >= 0
    whole = sound and record["rows"] == record["length"] + 1 > 0 and re.fullmatch("[0-9a-f]{64}", record["sha256"])
    return {field: record[field] for field in FIELDS.names} if whole else None


def _merge(tables: Sequence[pa.Table]) -> pa.Table:
    """One row per episode and agent, ordered by both."""
    table = pa.concat_tables([FIELDS.empty_table(), *tables])
    numbers = table.column("episode").to_numpy()
    if np.all(np.diff(numbers) > 0):  # usual after packing, and with one writer
        return table
    packed = pc.starts_with(table.column("file"), "shards/").to_numpy()
    agents = pc.dictionary_encode(table.column("agent").combine_chunks())
    names = (
        np.argsort(np.argsort(np.asarray(agents.dictionary.to_pylist(), object))) if len(agents) else np.zeros(0, int)
    )
    codes = names[np.asarray(agents.indices)] if len(agents) else names
    order = np.lexsort((np.arange(len(numbers)), ~packed, codes, numbers))
    first = np.ones(len(order), bool)
    first[1:] = (np.diff(numbers[order]) != 0) | (np.diff(codes[order]) != 0)
    chosen = order[first]
    return table if np.array_equal(chosen, np.arange(len(numbers))) else table.take(pa.array(chosen))


# ---------------------------------------------------------------------------------------------- writing


class ManifestWriter:
    """Appends lines to a writer's own manifests."""

    def __init__(self, folder: Path, writer: str) -> None:
        self._folder, self._writer = folder / FOLDER, writer
        self._folder.mkdir(exist_ok=True)
        self._part, self._count = 0, 0
        self._held = self._open()

    @property
    def path(self) -> Path:
        return self._folder / f"{self._writer}-{self._part:04d}{OPEN}"

    def _open(self) -> BinaryIO:
        """Create the next manifest and lock it, so that others know that its writer lives."""
        while True:
            file = self.path.open("ab")
            if mutex.try_lock(file.fileno()) and self.path.exists():
                return file
            file.close()  # another process has just looked at the empty file, or removed it

    def add(self, entries: Sequence[Entry]) -> None:
        """Append the lines of a commit at once, so that a kill leaves all or none of them, and sync them."""
        atomic.append_line(self.path, "\n".join(entry.line() for entry in entries))
        os.fsync(self._held.fileno())
        if self._count == 0:
            atomic.sync_folder(self._folder)
        self._count += len(entries)
        if self._count >= SEALED_AFTER:
            self.close()
            self._part, self._count = self._part + 1, 0
            self._held = self._open()

    def close(self, *, seal: bool = True) -> None:
        """Seal the present manifest, or remove it if it is empty. Without `seal` it is left as a killed writer does."""
        if self._held.closed:
            return
        if not seal:
            pass
        elif self._count:
            atomic.append_line(self.path, seal_line(self.path.read_bytes()).decode().rstrip("\n"))
            os.fsync(self._held.fileno())
            self.path.rename(self.path.with_name(self.path.name.removesuffix(OPEN) + ".jsonl"))
        else:
            self.path.unlink(missing_ok=True)
        self._held.close()


def seal_line(data: bytes) -> bytes:
    """The last line of a sealed manifest."""
    seal = {"seal": hashlib.sha256(data).hexdigest(), "lines": data.count(b"\n")}
    return json.dumps(seal).encode() + b"\n"


def write_sealed(path: Path, entries: Sequence[Entry]) -> None:
    """Write a whole manifest at once."""
    data = "".join(f"{entry.line()}\n" for entry in entries)
    atomic.write_text(path, data + seal_line(data.encode()).decode())
    atomic.sync_folder(path.parent)


def is_live(path: Path) -> bool:
    """Whether the writer of an open manifest lives."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(file, fcntl.LOCK_UN)
    except BlockingIOError:
        return True
    except FileNotFoundError:  # sealed meanwhile
        return False
    return False


def abandoned(folder: Path) -> list[Path]:
    """Open manifests whose writers were killed: their last episodes may be in no manifest."""
    return [path for path in (folder / FOLDER).glob(f"*{OPEN}") if not is_live(path)]
