"""Write a dataset in other formats. Everything goes to a temporary folder first, which then gets its name.

    tfrecord     NAME.tfrecord-00003-of-00074, one tf.train.Example per episode: obs.X, action and reward as float
                 lists (float32) or little-endian bytes (other dtypes), episode, agent, seed, length, terminated,
                 truncated, and facts (JSON)
    npz          episode-000000123.npz: arrays obs.X, action, reward, and facts (JSON in an array of bytes)
    webdataset   NAME-000003.tar: members KEY.obs.X.npy, KEY.action.npy, KEY.reward.npy, KEY.facts.json
    gif          episode-000000123.gif: an image observation at 256 colours per frame; nothing else is kept
    minari       a Minari dataset (minari_format.py)

TFRecord has a record per episode, not per step: the steps stay together and in order when files are shuffled, and
reading costs one parse per episode instead of 45 us per step. The first three formats can be imported again bit for
bit, see exchange.py; WebDataset cannot be imported, but holds the same.
"""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import numpy as np

from tiltyard.data import exchange, gif, minari_format, tfrecord
from tiltyard.data import folder as layout
from tiltyard.data.dataset_file import About
from tiltyard.data.exchange import Recording
from tiltyard.data.manifest import Manifest
from tiltyard.data.partition import parts
from tiltyard.errors import DiskError, TiltyardError, UseError
from tiltyard.run import atomic
from tiltyard.types import Array

FORMATS = ("tfrecord", "minari", "npz", "webdataset", "gif")
SHARDED = ("tfrecord", "webdataset")
SHARD_MB = 128  # of arrays, before any compression

Progress = Callable[[int, int], None]
"""Called with the episodes that are done, and all of them."""


@dataclass(frozen=True)
class Wanted:
    """What to export and how. Fields that a format does not have are left out."""

    format: str
    out: Path
    name: str = ""
    """of the shards; default: the name of the dataset's folder"""
    shards: int | None = None
    shard_mb: float = SHARD_MB
    episodes: int | None = None
    """only the first ones"""
    obs: str | None = None
    fps: float = 20.0


@dataclass
class Exported:
    """What was written. Episodes of an env with several agents are counted once."""

    out: Path
    format: str
    episodes: int = 0
    recordings: int = 0
    steps: int = 0
    files: int = 0
    bytes: int = 0
    notes: list[str] = field(default_factory=list)

    def count(self, group: list[Recording]) -> None:
        self.episodes += 1
        self.recordings += len(group)
        self.steps += sum(len(each.episode.action) for each in group)


def export(folder: Path, wanted: Wanted, progress: Progress = lambda done, total: None) -> Exported:
    """Write a dataset, or its first episodes, in another format. A damaged episode raises and nothing is left."""
    about, entries = layout.read_about(folder), layout.read_manifest(folder)
    numbers = entries.numbers()
    if wanted.episodes is not None and wanted.episodes < len(numbers):
        last = numbers[wanted.episodes - 1]
        entries = entries.take(np.flatnonzero(entries.column("episode") <= last))
        numbers = numbers[: wanted.episodes]
    if not len(numbers):
        raise UseError(f"{folder} has no episodes", f"tiltyard data stats {folder}")
    write = _writer(wanted, about, folder, entries)
    require_new(wanted.out)
    result = Exported(wanted.out, wanted.format)

    def groups() -> Iterator[list[Recording]]:
        for group in exchange.recordings(folder, entries):
            yield group
            result.count(group)
            progress(result.episodes, len(numbers))

    try:
        wanted.out.parent.mkdir(parents=True, exist_ok=True)
        draft = atomic.empty_draft(wanted.out)
        try:
            result.notes += write(draft, groups(), len(numbers))
            files = [path for path in draft.rglob("*") if path.is_file()]
            result.files, result.bytes = len(files), sum(path.stat().st_size for path in files)
            draft.rename(wanted.out)
            atomic.sync_folder(wanted.out.parent)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except TiltyardError:
        raise
    except OSError as error:
        message = f"{wanted.out} could not be written: {error.strerror or error}"
        raise DiskError(message, "nothing is left of it; free some space or give another --out", error) from error
    return result


def require_new(out: Path) -> None:
    """UseError if there is something already; only an empty folder may be."""
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise UseError(f"{out} exists already", "give another --out, or delete it")


Write = Callable[[Path, Iterator[list[Recording]], int], list[str]]
"""Writes all episodes, given their number, into a folder; returns notes for the user."""


def _writer(wanted: Wanted, about: About, folder: Path, entries: Manifest) -> Write:
    """The function that writes the format. UseError if the dataset or an option does not fit."""
    name = wanted.name or layout_name(folder)
    if "/" in name or name.startswith(".") or not name.isprintable():
        raise UseError(f"--name {name!r} cannot be the name of a file", "write --name data")
    if wanted.format == "gif":
        return gif.writer(about, wanted.obs, wanted.fps)
    if wanted.format == "minari":
        return minari_format.writer(about, wanted.out.name)
    spec = exchange.spec_json(about)

    def facts_of(recording: Recording) -> dict[str, Any]:
        return exchange.facts_of(recording, about, spec)

    if wanted.format == "npz":
        return lambda draft, groups, count: _write_npz(draft, groups, facts_of)
    shards = wanted.shards or shards_for(about, entries, wanted.shard_mb)
    if wanted.format == "tfrecord":
        tfrecord.masked_crc(b"")  # the package is there
        return lambda draft, groups, count: _write_tfrecord(draft, groups, facts_of, parts(count, shards), name)
    return lambda draft, groups, count: _write_webdataset(draft, groups, facts_of, parts(count, shards), name)


def layout_name(folder: Path) -> str:
    return atomic.absolute(folder).name or "data"


def shards_for(about: About, entries: Manifest, megabytes: float) -> int:
    """How many shards of that size the arrays fill."""
    spec = about.spec
    row = sum(int(np.prod(item.shape, dtype=np.int64)) * np.dtype(item.dtype).itemsize for item in spec.obs.values())
    total = int(entries.column("rows").sum()) * (row + 4 * spec.action.columns + 4)
    numbers = len(entries.numbers())
    return int(min(max(1, round(total / (megabytes * 1e6))), numbers, 99_999))


# ---------------------------------------------------------------------------------------------- TFRecord


def example_features(facts: Mapping[str, Any], arrays: Mapping[str, Array]) -> dict[str, tfrecord.Feature]:
    """The features of an episode's Example."""
    features: dict[str, tfrecord.Feature] = {name: _array_feature(array) for name, array in arrays.items()}
    numbers = ("episode", "seed", "length", "terminated", "truncated")
    features |= {name: [int(facts[name])] for name in numbers}
    features["agent"] = str(facts["agent"]).encode()
    features[exchange.FACTS] = atomic.to_json(facts).encode()
    return features


def _array_feature(array: Array) -> tfrecord.Feature:
    if array.dtype == np.float32:
        return array.reshape(-1)
    return np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False)).tobytes()


def _write_tfrecord(
    draft: Path, groups: Iterator[list[Recording]], facts_of: Callable[[Recording], Any], split: list[range], name: str
) -> list[str]:
    for index, numbers in enumerate(split):
        with _synced(draft / tfrecord.shard_name(name, index, len(split))) as file:
            for group in _take(groups, numbers):
                for each in group:
                    features = example_features(facts_of(each), exchange.arrays_of(each.episode))
                    tfrecord.write_record(file, tfrecord.encode_example(features))
    return _require_all_read(groups)


def _take(groups: Iterator[list[Recording]], numbers: range) -> Iterator[list[Recording]]:
    """The next len(numbers) groups. Each is counted when the following one is asked for, so after it is written."""
    for _ in numbers:
        yield next(groups)


def _require_all_read(groups: Iterable[Any]) -> list[str]:
    for _ in groups:  # the last step of the iterator counts the last episode
        raise TiltyardError("internal error: an episode belongs to no shard", "please report it")
    return []


class _synced:
    """A new file whose contents are on the disk when it is closed without an error."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> BinaryIO:
        self._file = self._path.open("xb")
        return self._file

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


# ---------------------------------------------------------------------------------------------- npz, WebDataset


def _write_npz(
    draft: Path, groups: Iterator[list[Recording]], facts_of: Callable[[Recording], Mapping[str, Any]]
) -> list[str]:
    for group in groups:
        for place, each in enumerate(group):
            text = np.frombuffer(atomic.to_json(facts_of(each)).encode(), np.uint8)
            arrays = {**exchange.arrays_of(each.episode), exchange.FACTS: text}
            path = draft / f"{exchange.file_stem(each, place, several=len(group) > 1)}.npz"
            with _synced(path) as file:
                np.savez_compressed(file, allow_pickle=False, **arrays)
    return []


def _npy(array: Array) -> bytes:
    sink = io.BytesIO()
    np.lib.format.write_array(sink, array, allow_pickle=False)
    return sink.getvalue()


def _write_webdataset(
    draft: Path, groups: Iterator[list[Recording]], facts_of: Callable[[Recording], Any], split: list[range], name: str
) -> list[str]:
    for index, numbers in enumerate(split):
        with _synced(draft / f"{name}-{index:06d}.tar") as file, tarfile.open(fileobj=file, mode="w") as archive:
            for group in _take(groups, numbers):
                for place, each in enumerate(group):
                    key = f"{each.number:09d}" + (f"_{place}" if len(group) > 1 else "")  # a key ends at the first dot
                    for part, array in exchange.arrays_of(each.episode).items():
                        _add_member(archive, f"{key}.{quote(part, safe='')}.npy", _npy(array))
                    _add_member(archive, f"{key}.{exchange.FACTS}.json", atomic.to_json(facts_of(each)).encode())
    return _require_all_read(groups)


def _add_member(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    header = tarfile.TarInfo(name)
    header.size = len(data)
    archive.addfile(header, io.BytesIO(data))
