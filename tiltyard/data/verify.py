"""Finds damage in a dataset: which file, which row group, which episode.

    dataset.json             its checksum, and byte for byte what was written
    manifests                every line, and the seal of those that are not being written
    episodes                 the SHA-256 of every one; if it differs, page checksums name the row groups
    tars                     headers, padding and end
    files on disk            each is in a manifest, unless a collector is writing it now

Nothing is written. Files are read by one thread per core: hashing and reading release the interpreter.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from tiltyard.data import claims, dataset_file, manifest, partition
from tiltyard.data import folder as layout
from tiltyard.data.episode_file import EpisodeFile
from tiltyard.data.folder import HEADER
from tiltyard.data.locate import locate
from tiltyard.data.manifest import Damage, Entry, Manifest
from tiltyard.errors import TiltyardError, UseError
from tiltyard.processes.resources import usable_cores
from tiltyard.run import atomic
from tiltyard.types import Array

WAIT = 2.0  # seconds: a live writer lists a file milliseconds after it appears
_PAUSE = 0.1  # seconds between looks for that line
_FILES = 64  # single files that a thread checks at a time
_RANGE = 8 << 20  # bytes of a tar that a thread checks at a time; they stay in the cache while they are hashed
_MEMBER = re.compile(r"(\d{9,})(\.\d+)?\.parquet")
_DIFFERS = "its checksum differs from the manifest"
_LOST = "is in no manifest"


@dataclass
class Findings:
    """What is wrong in a dataset, for people (`damages`) and for repair."""

    manifest: Manifest
    """its sound lines"""
    damages: list[Damage] = field(default_factory=list)
    episodes: list[Entry] = field(default_factory=list)
    """listed, but damaged or missing"""
    tars: set[str] = field(default_factory=set)
    """with damaged headers, padding, end or members"""
    unlisted: list[str] = field(default_factory=list)
    """files with episodes that no sound line names"""
    manifests: set[str] = field(default_factory=set)
    """with damaged lines or seals"""
    about: bool = False
    """whether dataset.json is damaged or missing"""

    @property
    def bytes(self) -> int:
        return int(self.manifest.column("bytes").sum())


@dataclass(frozen=True)
class _Problem:
    damage: Damage
    row: int = -1  # of the manifest, if the episode itself is damaged
    tar: bool = False  # whether the structure of a tar is damaged
    unlisted: str = ""


def examine(folder: Path, *, wait: float = WAIT, alone: bool = False) -> Findings:
    """Check everything in a dataset. `wait` is for files that live writers are about to list.

    `alone`: the caller holds all claims, so that there are no such writers.
    """
    layout.require_dataset(folder)
    about = about_damages(folder)
    known = manifest.read(folder)
    problems = _checked(folder, known, np.arange(len(known)), structure=True)
    if any(problem.row >= 0 for problem in problems):
        known, problems = _again(folder, known, problems)
    found = Findings(known, [*about, *known.damages], about=bool(about))
    found.manifests = {each.file for each in known.damages}
    for problem in problems:
        found.damages.append(problem.damage)
        if problem.row >= 0:
            found.episodes.append(known.entry(problem.row))
        if (problem.tar or problem.row >= 0) and problem.damage.file.endswith(".tar"):
            found.tars.add(problem.damage.file)
        if problem.unlisted:
            found.unlisted.append(problem.unlisted)
    for problem in _unlisted_files(folder, 0.0 if alone else wait, alone):
        found.damages.append(problem.damage)
        found.unlisted.append(problem.unlisted)
    found.unlisted = sorted(set(found.unlisted))
    if found.unlisted:
        _find_torn(folder, found)
    return found


def _again(folder: Path, before: Manifest, problems: list[_Problem]) -> tuple[Manifest, list[_Problem]]:
    """Check episodes that seem damaged once more, where they are now: a pack may have moved them meanwhile."""
    known = manifest.read(folder)
    now = {entry.key: row for row, entry in enumerate(known)}
    rows, kept = [], [problem for problem in problems if problem.row < 0]
    for problem in problems:
        if problem.row >= 0 and (row := now.get(before.entry(problem.row).key)) is not None:
            rows.append(row)
    return known, kept + _checked(folder, known, np.array(rows, np.int64), structure=False)


def about_damages(folder: Path) -> list[Damage]:
    """What is wrong with dataset.json. UseError if a newer Tiltyard wrote it."""
    path = folder / dataset_file.NAME
    try:
        if dataset_file.read(folder) is None:
            new = any((folder / manifest.FOLDER).glob("*.jsonl"))
            return [Damage(dataset_file.NAME, "", "is missing")] if new else []
        written = atomic.to_json(atomic.read_json(path), indent=2) + "\n"
        if path.read_bytes() != written.encode("utf-8", "backslashreplace"):
            return [Damage(dataset_file.NAME, "", "differs from what was written")]
    except UseError:
        raise
    except TiltyardError as error:
        return [Damage(dataset_file.NAME, "", error.message.partition(" is damaged: ")[2] or error.message)]
    return []


# ---------------------------------------------------------------------------------------------- episodes


class _Listed:
    """The rows of a manifest for threads, and its episodes, which few of them need."""

    def __init__(self, known: Manifest) -> None:
        self.manifest = Manifest(known.table.combine_chunks())

    @cached_property
    def keys(self) -> set[tuple[int, str]]:
        table = self.manifest.table
        return set(zip(table.column("episode").to_pylist(), table.column("agent").to_pylist(), strict=True))

    @cached_property
    def numbers(self) -> set[int]:
        return set(self.manifest.numbers().tolist())


def _checked(folder: Path, known: Manifest, rows: Array, *, structure: bool) -> list[_Problem]:
    """Check the bytes of these rows of a manifest and, with all rows, headers and padding of tars."""
    listed = _Listed(known)
    in_tar = np.asarray(pc.ends_with(listed.manifest.take(rows).table.column("file"), ".tar").to_numpy(), bool)
    single, packed = rows[~in_tar], rows[in_tar]
    batches = partition.parts(len(single), -(-len(single) // _FILES))
    ranges = _ranges(listed.manifest, packed, structure)
    with ThreadPoolExecutor(usable_cores()) as pool:
        jobs = [pool.submit(_check_files, folder, listed, single[batch.start : batch.stop]) for batch in batches]
        jobs += [pool.submit(_check_range, folder, listed, each) for each in ranges]
        return [problem for job in jobs for problem in job.result()]


def _check_files(folder: Path, listed: _Listed, rows: Array) -> list[_Problem]:
    """Episodes with a file each."""
    found, part = [], listed.manifest.take(rows)
    names, sizes, sums = (part.table.column(name).to_pylist() for name in ("file", "bytes", "sha256"))
    for index, (file, size, expected) in enumerate(zip(names, sizes, sums, strict=True)):
        place, what = "", ""
        try:
            handle = os.open(folder / file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                actual = os.fstat(handle).st_size
                content = _read(handle, 0, size) if actual == size else b""
            finally:
                os.close(handle)
            if actual != size:
                what = f"its size is {actual:,} instead of {size:,} bytes"
            elif hashlib.sha256(content).hexdigest() != expected:
                place, what = locate(bytes(content)), _DIFFERS
        except FileNotFoundError:
            what = "is missing"
        except OSError as error:
            what = f"cannot be read: {error.strerror}"
        if what:
            found.append(_Problem(Damage(file, place, what, part.entry(index).name), int(rows[index])))
    return found


@dataclass(frozen=True)
class _Range:
    """Consecutive members of a tar."""

    file: str
    rows: Array
    start: int
    """byte after the member before"""
    last: bool
    structure: bool
    """whether to check headers and padding"""


def _ranges(known: Manifest, rows: Array, structure: bool) -> Iterator[_Range]:
    if not len(rows):
        return
    part = known.take(rows)
    names = pc.dictionary_encode(part.table.column("file").combine_chunks())
    codes, offsets, sizes = np.asarray(names.indices), part.column("offset"), part.column("bytes")
    order = np.lexsort((offsets, codes))
    ends = offsets[order] + -(-sizes[order] // HEADER) * HEADER
    lasts = np.append(np.diff(codes[order]) != 0, True)
    first, start = 0, 0
    for place, (end, last) in enumerate(zip(ends.tolist(), lasts.tolist(), strict=True)):
        if last or end - start >= _RANGE or not structure:
            members = order[first : place + 1]
            begin = start if structure else int(offsets[members[0]])
            yield _Range(names.dictionary[int(codes[members[0]])].as_py(), rows[members], begin, last, structure)
            first, start = place + 1, 0 if last else end


def _check_range(folder: Path, listed: _Listed, part: _Range) -> list[_Problem]:
    """Some members of a tar, and the bytes between them."""
    entries = list(listed.manifest.take(part.rows))
    end = entries[-1].offset + _padded(entries[-1].bytes)
    try:
        handle = os.open(folder / part.file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            stop = os.fstat(handle).st_size if part.last and part.structure else end
            data = _read(handle, part.start, max(0, stop - part.start))
        finally:
            os.close(handle)
    except OSError as error:
        what = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        named = zip(part.rows.tolist(), entries, strict=True)
        return [_Problem(Damage(part.file, "", what, entry.name), row) for row, entry in named]
    return list(_check_members(part, entries, data, listed))


def _check_members(part: _Range, entries: Sequence[Entry], data: memoryview, listed: _Listed) -> Iterator[_Problem]:
    place = base = part.start
    cut = False
    for row, entry in zip(part.rows.tolist(), entries, strict=True):
        begin, end = entry.offset - base, entry.offset - base + entry.bytes
        content = data[begin:end]
        if len(content) < entry.bytes:
            what = f"is cut off after {len(content):,} of {entry.bytes:,} bytes"
            cut = True
            yield _Problem(Damage(part.file, "", what, entry.name), row)
            continue
        if part.structure:
            before = entry.offset - HEADER
            yield from _between(part.file, bytes(data[place - base : max(place, before) - base]), place, listed)
            if not _is_header(bytes(data[max(0, begin - HEADER) : begin]), entry):
                yield _Problem(Damage(part.file, "tar header", "is damaged", entry.name), tar=True)
            place = entry.offset + _padded(entry.bytes)
            padding = bytes(data[end : place - base])
            if padding.strip(b"\0") or len(padding) != place - base - end:
                cut = cut or len(padding) != place - base - end
                yield _Problem(Damage(part.file, "padding after the episode", "is damaged", entry.name), tar=True)
        if hashlib.sha256(content).hexdigest() != entry.sha256:
            yield _Problem(Damage(part.file, locate(bytes(content)), _DIFFERS, entry.name), row)
    if part.last and part.structure and not cut:
        yield from _end(part.file, bytes(data[place - base :]), place, listed)


def _end(file: str, data: bytes, base: int, listed: _Listed) -> Iterator[_Problem]:
    """After the last listed member: perhaps members that are not listed, then two empty blocks."""
    rest = data[: -2 * HEADER] if len(data) > 2 * HEADER else b""
    yield from _between(file, rest, base, listed)
    if data[len(rest) :] != bytes(2 * HEADER):
        yield _Problem(Damage(file, "end", "is damaged or cut off"), tar=True)


def _between(file: str, data: bytes, base: int, listed: _Listed) -> Iterator[_Problem]:
    """Members of a tar that the manifest does not list. That is fine for those which it lists elsewhere."""
    place = 0
    for offset, size, name in layout.members(data):
        named = _MEMBER.fullmatch(name)
        if named is None or layout.tar_header(name, size) != data[offset - HEADER : offset]:
            break
        place = offset + _padded(size)
        if _key(data[offset : offset + size], int(named[1])) not in listed.keys:
            yield _Problem(Damage(file, name, _LOST, f"episode {int(named[1])}"), unlisted=file)
    if place != len(data):
        yield _Problem(Damage(file, f"byte {base + place:,}", "is neither an episode nor its header"), tar=True)


def _key(content: bytes, number: int) -> tuple[int, str]:
    """Number and agent of an episode that is not listed; one that cannot be read has no agent."""
    try:
        return number, str(EpisodeFile(content, "").about["meta"].get("agent", ""))
    except (TiltyardError, KeyError, AttributeError):
        return number, "?"


def _is_header(data: bytes, entry: Entry) -> bool:
    name = data[:100].rstrip(b"\0").decode("ascii", "replace")
    named = _MEMBER.fullmatch(name)
    return named is not None and int(named[1]) == entry.episode and data == layout.tar_header(name, entry.bytes)


def _padded(size: int) -> int:
    return -(-size // HEADER) * HEADER


_memory = threading.local()


def _read(handle: int, start: int, size: int) -> memoryview:
    """Bytes of a file, in memory that the thread uses again for the next ones; fewer if the file ends before."""
    buffer: bytearray = getattr(_memory, "buffer", bytearray())
    if len(buffer) < size:
        buffer = _memory.buffer = bytearray(max(size, _RANGE))
    view, done = memoryview(buffer), 0
    while done < size and (more := os.preadv(handle, [view[done:size]], start + done)):
        done += more
    return view[:done]


# ---------------------------------------------------------------------------------------------- files on disk


def _unlisted_files(folder: Path, wait: float, alone: bool) -> list[_Problem]:
    """Episodes in files that no sound line names, and that no writer is about to list."""
    until = time.monotonic() + wait
    while True:
        # In this order: what is on disk now is listed now, or will be.
        disk = list(layout.files_on_disk(folder))
        known = manifest.read(folder)
        listed = set(known.table.column("file").unique().to_pylist())
        lines = _Listed(known)
        new = [file for file in disk if file not in listed]
        found = [problem for file in new for problem in _in_file(folder, file, lines, alone)]
        if not found or time.monotonic() >= until:
            return found
        time.sleep(_PAUSE)


def _in_file(folder: Path, file: str, listed: _Listed, alone: bool) -> Iterator[_Problem]:
    if file.startswith(layout.SHARDS):
        # Left by a pack that was killed, if its episodes are listed elsewhere.
        try:
            data = (folder / file).read_bytes()
        except FileNotFoundError:
            return
        for problem in _end(file, data, 0, listed):
            yield _Problem(problem.damage, unlisted=file)
        return
    number = int(re.sub(r"\D", "", Path(file).stem))
    if number in listed.numbers or (not alone and claims.holder(folder, number) is not None):
        return  # packed, or being committed now
    if (folder / file).exists():
        yield _Problem(Damage(file, "", _LOST, f"episode {number}"), unlisted=file)


def _find_torn(folder: Path, found: Findings) -> None:
    """Name the manifests that end in a torn line: it may have named an episode that is not listed."""
    for path in manifest.abandoned(folder):
        try:
            lines = path.read_bytes().split(b"\n")
        except FileNotFoundError:  # superseded by a pack
            continue
        if lines[-1]:
            name = path.relative_to(folder).as_posix()
            found.damages.append(Damage(name, f"line {len(lines)}", "is torn"))
            found.manifests.add(name)
