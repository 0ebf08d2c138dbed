"""The folder of a dataset: where its files are, which episodes it has, and the bytes of each.

    FOLDER/dataset.json                        what it holds (dataset_file.py)
    FOLDER/manifests/WRITER-0000.jsonl         a line for each episode (manifest.py)
    FOLDER/episodes/00000/000000123.parquet    one episode (episode_file.py); .tar for the agents of one env
    FOLDER/shards/shard-000000-abc123.tar      many of those files, after `tiltyard data pack`
    FOLDER/quarantine/                         what `tiltyard data repair` has put aside
    FOLDER/.claims, .lock, .tmp/               collectors at work

A tar holds the files of episodes unchanged, so an episode is always a range of bytes with the same checksum. Folders
from before datasets (episode-000000.parquet and manifest.jsonl) are read, too.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import tarfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any
from warnings import warn

import numpy as np

from tiltyard.data import dataset_file, manifest
from tiltyard.data.dataset_file import About
from tiltyard.data.episode_file import EpisodeFile
from tiltyard.data.manifest import Damage, Entry, Manifest
from tiltyard.envs.spaces import spec_from_json
from tiltyard.errors import TiltyardError, TiltyardWarning, UseError
from tiltyard.run import atomic
from tiltyard.types import Episode

EPISODES, SHARDS, QUARANTINE = "episodes", "shards", "quarantine"
PER_FOLDER = 1_000  # files in a folder: shared file systems are slow with more
HEADER = 512  # bytes before each member of a tar


def episode_path(number: int, suffix: str = "parquet") -> str:
    return f"{EPISODES}/{number // PER_FOLDER:05d}/{number:09d}.{suffix}"


def require_dataset(folder: Path) -> None:
    """UseError if the folder does not exist or is not a dataset."""
    if not folder.is_dir():
        raise UseError(f"there is no dataset {folder}", "make one with: tiltyard data collect ENV --out FOLDER")
    if not ((folder / dataset_file.NAME).exists() or manifest.files(folder)):
        hint = f"a dataset has a {dataset_file.NAME}; make one with: tiltyard data collect ENV --out FOLDER"
        raise UseError(f"{folder} is not a dataset", hint)


def read_manifest(folder: Path) -> Manifest:
    """All episodes. If a manifest is damaged or all are gone, files that no sound line names are read instead, with a
    warning."""
    require_dataset(folder)
    found = manifest.read(folder)
    missing = not len(found) and next(files_on_disk(folder), None) is not None
    if found.damages or missing or manifest.abandoned(folder):
        more = unlisted(folder, found)
        what = str(found.damages[0]) if found.damages else "no manifest" if missing else "a writer was killed"
        lost = f"; episodes taken from their files: {len(more)}" if more else ""
        if found.damages or more:
            warn(f"{folder}: {what}{lost} (tiltyard data repair {folder})", TiltyardWarning, stacklevel=2)
            found = manifest.from_entries([*found, *more], found.damages)
    return found


def read_about(folder: Path) -> About:
    """What the dataset holds; of a folder with a damaged dataset.json or without one, as its episodes say."""
    require_dataset(folder)
    try:
        if (there := dataset_file.read(folder)) is not None:
            return there
    except UseError:
        raise
    except TiltyardError as error:
        warn(f"{error.message}; its contents are taken from an episode", TiltyardWarning, stacklevel=2)
    return about_from_episodes(folder)


def about_from_episodes(folder: Path) -> About:
    """The contents of dataset.json as far as the episodes' own files tell."""
    for entry in manifest.read(folder):
        try:
            about = open_episode(folder, entry).about
            meta = about["meta"]
            known = meta.get("env_settings") or {"id": meta.get("env", "unknown"), "options": meta.get("options", {})}
            digest = meta.get("env_digest", "")
            return About(known, spec_from_json(about["spec"]), digest, meta.get("dataset_seed"), [], schema=1)
        except (TiltyardError, KeyError, TypeError, ValueError, AttributeError):
            continue
    raise TiltyardError(f"{folder} has no readable episode", f"tiltyard data verify {folder}")


# ---------------------------------------------------------------------------------------------- bytes


def read_bytes(folder: Path, entry: Entry, *, check: bool = True) -> bytes:
    """The bytes of an episode's file. TiltyardError if they are missing, or differ from the manifest."""
    path = folder / entry.file
    try:
        with path.open("rb") as file:
            content = os.pread(file.fileno(), entry.bytes, entry.offset)
            rest = entry.bytes - len(content)
            while rest > 0 and (more := os.pread(file.fileno(), rest, entry.offset + len(content))):
                content, rest = content + more, rest - len(more)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        if isinstance(error, FileNotFoundError) and (moved := in_shard(folder, entry)) is not None:
            return read_bytes(folder, moved, check=check)
        reason = error.strerror or error
        raise TiltyardError(f"cannot read {path}, listed in the manifest: {reason}", "restore it") from error
    alone = path.suffix == ".parquet"
    if len(content) < entry.bytes or (alone and size != entry.bytes):
        size = size if alone else max(0, size - entry.offset)
        wrong = f"its size is {size} instead of {entry.bytes} bytes"
    elif check and hashlib.sha256(content).hexdigest() != entry.sha256:
        wrong = "its checksum differs from the manifest"
    else:
        return content
    what = path if alone else f"{entry.name} in {path}"
    raise TiltyardError(f"{what} is damaged: {wrong}", f"restore it from a copy, or: tiltyard data repair {folder}")


def in_shard(folder: Path, entry: Entry) -> Entry | None:
    """Where an episode is now, if it was packed after its manifest was read."""
    found = _shards(folder, tuple(path.name for path in sorted((folder / manifest.FOLDER).glob("shard-*.jsonl"))))
    first, last = np.searchsorted(found.column("episode"), [entry.episode, entry.episode + 1])
    for moved in map(found.entry, range(int(first), int(last))):
        if moved.key == entry.key and moved.sha256 == entry.sha256 and moved.file != entry.file:
            return moved
    return None


@lru_cache(2)
def _shards(folder: Path, names: tuple[str, ...]) -> Manifest:
    files = [manifest.read_file(folder / manifest.FOLDER / name, name)[0] for name in names]
    return manifest.merge(files)


def open_episode(folder: Path, entry: Entry, *, check: bool = True) -> EpisodeFile:
    return EpisodeFile(read_bytes(folder, entry, check=check), f"{folder / entry.file} ({entry.name})")


def read_episodes(folder: str | Path) -> Iterator[Episode]:
    """All episodes in the order of their numbers, each checked against the manifest first.

    A damaged episode raises TiltyardError; use `tiltyard.Dataset` to go on after it.
    """
    folder = Path(folder)
    for entry in read_manifest(folder):
        yield open_episode(folder, entry).episode()


# ---------------------------------------------------------------------------------------------- files on disk


def entry_of(content: bytes, number: int, file: str, offset: int = 0) -> Entry:
    """The manifest line of an episode's file, from the file itself."""
    opened = EpisodeFile(content, file)
    if groups := opened.damaged_row_groups():
        raise TiltyardError(f"{file} is damaged: row group {groups[0]} cannot be read")
    episode, about = opened.episode(), opened.about
    return Entry(
        episode=number,
        agent=str(about["meta"].get("agent", "")),
        file=file,
        offset=offset,
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        rows=opened.rows,
        seed=episode.seed,
        total=total_reward(episode),
        terminated=episode.terminated,
        truncated=episode.truncated,
        meta=meta_text(about["meta"]),
    )


def total_reward(episode: Episode) -> float:
    return math.fsum(np.asarray(episode.reward, np.float64).tolist())


def meta_text(meta: Any) -> str:
    """What the manifest keeps of an episode's meta data: not what dataset.json says for all of them."""
    common = ("env_settings", "env_digest", "dataset_seed", "agent")
    return atomic.to_json({name: value for name, value in meta.items() if name not in common})


def members(content: bytes) -> Iterator[tuple[int, int, str]]:
    """(offset, size, name) of the files in a tar, up to the first damaged header."""
    offset = 0
    while offset + HEADER <= len(content):
        try:
            header = tarfile.TarInfo.frombuf(content[offset : offset + HEADER], "utf-8", "surrogateescape")
        except tarfile.HeaderError:
            return
        yield offset + HEADER, header.size, header.name
        offset += HEADER + -(-header.size // HEADER) * HEADER


def to_tar(files: list[tuple[str, Any]]) -> bytes:
    """A tar of these files. The same files always give the same bytes."""
    sink = io.BytesIO()
    for name, content in files:
        sink.write(tar_header(name, len(content)))
        sink.write(content)
        sink.write(bytes(-len(content) % HEADER))
    sink.write(bytes(2 * HEADER))
    return sink.getvalue()


def tar_header(name: str, size: int) -> bytes:
    header = tarfile.TarInfo(name)
    header.size = size
    return header.tobuf(tarfile.USTAR_FORMAT)


def entries_in(folder: Path, file: str) -> tuple[list[Entry], list[Damage]]:
    """The manifest lines of the episodes in a file, from the file itself, and what in it cannot be read."""
    path, found, damages = folder / file, [], []
    try:
        content = path.read_bytes()
    except OSError as error:
        return [], [Damage(file, "", f"cannot be read: {error.strerror}")]
    places = members(content) if path.suffix == ".tar" else [(0, len(content), path.name)]
    for offset, size, name in places:
        number = Path(name).name.partition(".")[0].removeprefix("episode-")
        try:
            if not number.isdecimal():
                raise TiltyardError(f"{name!r} is not the name of an episode")
            found.append(entry_of(content[offset : offset + size], int(number), file, offset))
        except TiltyardError as error:
            damages.append(Damage(file, "" if path.suffix == ".parquet" else name, error.message))
    return found, damages


def files_on_disk(folder: Path) -> Iterator[str]:
    """All files of episodes, listed or not."""
    for pattern in (f"{EPISODES}/*/*", f"{SHARDS}/*", "episode-*.parquet"):
        for path in sorted(folder.glob(pattern)):
            if manifest.FILE.fullmatch(name := path.relative_to(folder).as_posix()):
                yield name


def _covered(known: Manifest) -> dict[str, int]:
    """The size of each file as the manifest's lines explain it: of a tar, with headers, padding and end."""
    sizes: dict[str, int] = {}
    for file, size in zip(known.table.column("file").to_pylist(), known.column("bytes").tolist(), strict=True):
        sizes[file] = sizes.get(file, 2 * HEADER) + HEADER + -(-size // HEADER) * HEADER
    return sizes


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # packed or repaired meanwhile
        return -1


def unlisted(folder: Path, known: Manifest) -> list[Entry]:
    """Readable episodes that no sound line of a manifest names."""
    keys = {entry.key for entry in known}
    listed = _covered(known)
    found: list[Entry] = []
    for file in files_on_disk(folder):
        if file not in listed or (file.endswith(".tar") and _size(folder / file) != listed[file]):
            more = [entry for entry in entries_in(folder, file)[0] if entry.key not in keys]
            keys |= {entry.key for entry in more}
            found += more
    return found
