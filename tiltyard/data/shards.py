"""Packs the files of episodes into tars of a given size, while collectors write and readers read.

    .tmp/NAME, synced -> shards/shard-NNNNNN-HASH.tar -> manifests/shard-NNNNNN-HASH.jsonl -> single files removed

An episode's bytes do not change. A line of a shard is in effect before that of a single file, so an episode is there at
every moment. A pack that is killed is continued by the next: a shard without a manifest gets one if its episodes are
still there as single files, and files that are in a shard are removed.

Reading does not depend on the size of shards: 3,000 episodes of 75 kB gave 1,500 to 1,700 windows of 16 steps per CPU
second as single files and in shards of 4, 16, 64 and 256 MiB, all within the noise. So the default is large, for few
files (1 TB has 4,000), but small enough that a pack needs little free space and a repair rewrites little.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow.compute as pc

from tiltyard.data import dataset_file, manifest, partition
from tiltyard.data import folder as layout
from tiltyard.data.claims import Claims
from tiltyard.data.folder import HEADER
from tiltyard.data.manifest import Entry, Manifest
from tiltyard.data.writer import remove_leftovers, temporary_path
from tiltyard.errors import TiltyardError, UseError
from tiltyard.run import atomic, mutex

LOCK = ".packing"
MEGABYTES = 256
_NAME = re.compile(r"shard-(\d{6,})-([0-9a-f]{12})\.(tar|jsonl)")
_LOCK_WAIT = 1.0  # seconds
_SPARE = 1 << 20  # bytes for the manifest of a shard, and more


@dataclass(frozen=True)
class Packed:
    """What a pack did."""

    shards: int
    episodes: int
    bytes: int
    removed: int
    """single files that are now in shards"""
    skipped: list[str]
    """what stays as it is, and why"""


def pack(folder: Path, size: int = MEGABYTES << 20, *, report: Callable[[str], object] = lambda line: None) -> Packed:
    """Pack all listed episodes that have a file of their own into shards of about `size` bytes."""
    layout.require_dataset(folder)
    if dataset_file.read(folder) is None:
        hint = f"copy its episodes into a new dataset: tiltyard data merge {folder} --out FOLDER"
        raise UseError(f"{folder} is from before datasets, and cannot be packed", hint)
    with exclusive(folder), Claims(folder) as claims:
        remove_leftovers(folder)
        (folder / layout.SHARDS).mkdir(exist_ok=True)
        known = manifest.read(folder)
        if known.damages:
            raise TiltyardError(f"{folder}: {known.damages[0]}", f"tiltyard data repair {folder}")
        adopted = _adopt(folder, known)
        known = manifest.read(folder) if adopted else known
        groups = _groups(_in(known, layout.EPISODES), size)
        sizes = [sum(_in_tar(entry.bytes) for unit in group for entry in unit) for group in groups]
        require_space(folder, max(sizes, default=0), "pack into smaller shards with --shard-mb")
        skipped: list[str] = []
        shards = episodes = total = removed = 0
        for group in groups:
            # A collector at work on a number checks whether its file exists.
            ready = [unit for unit in group if claims.take(unit[0].episode)]
            name, lines = write_shard(folder, ready, skipped)
            if lines:
                report(f"{name}: {len(lines):,} episode{'s' if len(lines) > 1 else ''}")
                shards, episodes, total = shards + 1, episodes + len(lines), total + (folder / name).stat().st_size
                packed = {line.key for line in lines}
                for file in {unit[0].file for unit in ready if unit[0].key in packed}:
                    (folder / file).unlink(missing_ok=True)
                    removed += 1
            for unit in ready:
                claims.release(unit[0].episode)
        removed += _remove_packed(folder, claims)
        _drop_manifests(folder)
    return Packed(shards + adopted, episodes, total, removed, skipped)


def _in(known: Manifest, place: str) -> Manifest:
    """The rows with files below `episodes` or `shards`."""
    return Manifest(known.table.filter(pc.starts_with(known.table.column("file"), f"{place}/")))


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Keep other packs and repairs away. What the disk refuses is an error with a sentence; nothing is lost by it."""
    try:
        with mutex.hold(folder / LOCK, _LOCK_WAIT):
            yield
    except OSError as error:
        reason = error.strerror or error
        hint = "no episode was lost; free some space or check the folder's permissions, and try again"
        raise UseError(f"cannot write to {folder}: {reason}", hint) from error


def _groups(entries: Iterable[Entry], size: int) -> list[list[list[Entry]]]:
    """The files of each shard, in the order of their numbers; a file is a list of its episodes.

    A file belongs to the part of all bytes in which it begins, so that shards differ by less than one file.
    """
    files: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        files[entry.file].append(entry)
    units = [sorted(unit, key=lambda entry: entry.offset) for unit in files.values()]
    sizes = [sum(_in_tar(entry.bytes) for entry in unit) for unit in units]
    total = sum(sizes)
    parts = partition.parts(total, max(1, min(len(units), round(total / size))))
    groups: list[list[list[Entry]]] = [[] for _ in parts]
    begin, index = 0, 0
    for unit, length in zip(units, sizes, strict=True):
        while begin >= parts[index].stop:
            index += 1
        groups[index].append(unit)
        begin += length
    return [group for group in groups if group]


def _in_tar(size: int) -> int:
    return HEADER + -(-size // HEADER) * HEADER


def require_space(folder: Path, size: int, otherwise: str) -> None:
    """UseError if a new shard of this size and its manifest do not fit next to the files."""
    needed, free = size + _SPARE, shutil.disk_usage(folder).free
    if needed > free:
        message = f"{folder} needs {needed:,} bytes for new files, but the disk has {free:,} free"
        raise UseError(message, f"free some space, or {otherwise}; nothing was changed")


# ---------------------------------------------------------------------------------------------- one shard


def write_shard(
    folder: Path, units: Sequence[Sequence[Entry]], skipped: list[str], *, avoid: Collection[str] = ()
) -> tuple[str, list[Entry]]:
    """Write a tar and its manifest; return its name and its lines.

    A unit is all episodes of one file. One that is damaged is left out, and `skipped` says why. If a shard with the
    same episodes exists, it is replaced, unless `avoid` has its name.
    """
    temporary, offset, lines = temporary_path(folder), 0, []
    try:
        with temporary.open("wb") as file:
            for unit in units:
                try:
                    contents = [layout.read_bytes(folder, entry) for entry in unit]
                except TiltyardError as error:
                    skipped.append(error.message)
                    continue
                for name, entry, content in zip(_member_names(unit), unit, contents, strict=True):
                    file.write(layout.tar_header(name, len(content)))
                    file.write(content)
                    file.write(bytes(-len(content) % HEADER))
                    lines.append(replace(entry, offset=offset + HEADER))
                    offset += _in_tar(len(content))
            file.write(bytes(2 * HEADER))
            file.flush()
            os.fsync(file.fileno())
        if not lines:
            return "", []
        digest = hashlib.sha256("".join(line.sha256 for line in lines).encode()).hexdigest()[:12]
        path = _shard_path(folder, digest, avoid)
        path.parent.mkdir(exist_ok=True)
        temporary.rename(path)
        atomic.sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
    shard = f"{layout.SHARDS}/{path.name}"
    lines = [replace(line, file=shard) for line in lines]
    manifest.write_sealed(manifest_of(folder, path.name), lines)
    return shard, lines


def manifest_of(folder: Path, shard: str) -> Path:
    return folder / manifest.FOLDER / f"{Path(shard).stem}.jsonl"


def _shard_path(folder: Path, digest: str, avoid: Collection[str]) -> Path:
    numbers = [-1]
    for path in (*(folder / layout.SHARDS).glob("shard-*"), *(folder / manifest.FOLDER).glob("shard-*")):
        if named := _NAME.fullmatch(path.name):
            if named[2] == digest and f"{layout.SHARDS}/{path.stem}.tar" not in avoid:
                return folder / layout.SHARDS / f"{path.stem}.tar"
            numbers.append(int(named[1]))
    return folder / layout.SHARDS / f"shard-{max(numbers) + 1:06d}-{digest}.tar"


def _member_names(unit: Sequence[Entry]) -> list[str]:
    """NUMBER.parquet, or NUMBER.PLACE.parquet for the agents of an env, as in the files of a writer."""
    several = len(unit) > 1 or bool(unit[0].agent)
    return [f"{each.episode:09d}{f'.{place}' if several else ''}.parquet" for place, each in enumerate(unit)]


# ---------------------------------------------------------------------------------------------- after a kill


def _adopt(folder: Path, known: Manifest) -> int:
    """Write the manifest of shards whose pack was killed before it did. All their episodes are single files, too."""
    adopted = 0
    for path in sorted((folder / layout.SHARDS).glob("*.tar")):
        if manifest_of(folder, path.name).exists():
            continue
        single = {entry.key: entry for entry in _in(known, layout.EPISODES)}
        entries, damages = layout.entries_in(folder, f"{layout.SHARDS}/{path.name}")
        same = [entry.key in single and single[entry.key].sha256 == entry.sha256 for entry in entries]
        whole = path.stat().st_size == sum(_in_tar(entry.bytes) for entry in entries) + 2 * HEADER
        if damages or not same or not all(same) or not whole:
            # Its manifest may have existed and been lost: what is in it may be nowhere else.
            raise TiltyardError(f"{path} has no manifest", f"tiltyard data repair {folder}")
        manifest.write_sealed(manifest_of(folder, path.name), entries)
        adopted += 1
    return adopted


def _remove_packed(folder: Path, claims: Claims) -> int:
    """Remove single files that are in a shard, byte for byte, and whose number no collector is at work on."""
    known, removed = _in(manifest.read(folder), layout.SHARDS), 0
    numbers = set(known.numbers().tolist())
    twice = [file for file in layout.files_on_disk(folder) if _number(file) in numbers]
    packed = {entry.key: entry for entry in known} if twice else {}
    for file in twice:
        if not file.startswith(layout.EPISODES) or not claims.take(_number(file)):
            continue
        entries, damages = layout.entries_in(folder, file)
        if entries and not damages and all(_is_packed(folder, packed, entry) for entry in entries):
            (folder / file).unlink(missing_ok=True)
            removed += 1
        claims.release(_number(file))
    return removed


def _number(file: str) -> int:
    """Of a single file; a shard has none."""
    return -1 if file.startswith(layout.SHARDS) else int(re.sub(r"\D", "", Path(file).stem))


def _is_packed(folder: Path, packed: dict[tuple[int, str], Entry], entry: Entry) -> bool:
    there = packed.get(entry.key)
    if there is None or there.sha256 != entry.sha256:
        return False
    try:
        layout.read_bytes(folder, there)
    except TiltyardError:
        return False
    return True


def _drop_manifests(folder: Path) -> None:
    """Remove manifests of writers that are done, if shards list all that they do."""
    candidates = [path for path in manifest.files(folder) if path.name != manifest.OLD and not _NAME.match(path.name)]
    if not candidates:
        return
    known = manifest.read(folder)
    packed = {entry.key: entry.sha256 for entry in _in(known, layout.SHARDS)}
    listed = set(known.table.column("file").unique().to_pylist())
    # An open manifest makes readers look for episodes that its writer could not list any more.
    complete = all(file in listed for file in layout.files_on_disk(folder))
    for path in candidates:
        is_open = path.name.endswith(manifest.OPEN)
        if is_open and not complete:
            continue
        with suppress(FileNotFoundError), path.open("rb") as file:  # sealed meanwhile
            if is_open and not mutex.try_lock(file.fileno()):
                continue  # its writer lives
            table, damages = manifest.read_file(path, path.relative_to(folder).as_posix())
            if not damages and all(packed.get(entry.key) == entry.sha256 for entry in Manifest(table)):
                path.unlink()
