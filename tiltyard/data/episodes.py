"""Recorded episodes on disk: one Parquet file per episode, written when it ends, and a manifest with their checksums.

    DIR/episode-000000.parquet   T + 1 rows: step, obs.NAME..., action, reward, terminated, truncated[, info]
    DIR/manifest.jsonl           {"file", "rows", "bytes", "sha256", "seed", "return", "terminated", "truncated"}

Arrays are fixed-size binary; shapes and dtypes are in the file's metadata. The last row holds the final
observation and no action. Several processes may write to one folder; the next writer completes or removes what a
killed one left.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tiltyard.envs.spaces import spec_to_json
from tiltyard.errors import TiltyardError, UseError
from tiltyard.run import atomic, mutex
from tiltyard.run.lock import in_use, this_machine
from tiltyard.types import Array, EnvSpec, Episode

SCHEMA = 1
MANIFEST = "manifest.jsonl"
ROW_GROUP = 64  # env steps: a window of 16 is read in under a millisecond
_KEY = b"tiltyard"
_FILE = re.compile(r"episode-(\d{6,})\.parquet")
_TEMPORARY = re.compile(r"\.tmp-([0-9a-f]{12})-(\d+)-.*")  # machine and process of the writer
_OLD = 86400.0  # seconds after which an unfinished file of another machine is removed; writing one takes seconds


class EpisodeWriter:
    """Adds episodes to a folder. `meta` is stored with every episode: policy, run, env id, any JSON values."""

    def __init__(self, folder: Path, spec: EnvSpec, meta: Mapping[str, Any], *, save_info: bool = False) -> None:
        self.folder, self._spec, self._meta, self._save_info = folder, spec_to_json(spec), dict(meta), save_info
        self._next = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self._locked():
                self._recover()
        except OSError as error:
            reason = error.strerror or error
            raise UseError(f"cannot write episodes to {folder}: {reason}", "choose another folder") from error

    def _locked(self) -> AbstractContextManager[float]:
        """Let one process at a time number episodes and write the manifest."""
        return mutex.hold(self.folder / ".lock")

    def _recover(self) -> None:
        """Remove unfinished files of dead writers, cut a torn manifest line, list committed files that are missing."""
        for leftover in self.folder.glob(".tmp-*"):
            with suppress(FileNotFoundError):  # its writer has just finished it
                if _is_abandoned(leftover):
                    leftover.unlink()
        manifest = self.folder / MANIFEST
        if manifest.exists():
            text = manifest.read_bytes()
            if not text.endswith(b"\n"):
                os.truncate(manifest, text.rfind(b"\n") + 1)
        listed = {line["file"] for line in read_manifest(self.folder)} if manifest.exists() else set()
        found = sorted(path for path in self.folder.iterdir() if _FILE.fullmatch(path.name))
        for path in found:
            if path.name not in listed:
                self._add_to_manifest(path, _read(path))
        self._next = max((int(path.stem.split("-")[1]) for path in found), default=-1) + 1

    def write(self, episode: Episode) -> Path:
        """Write one episode completely or not at all, and return its file."""
        temporary = self.folder / f".tmp-{_machine()}-{os.getpid()}-{atomic.unique()}"
        table = _table(episode, self._spec, {**self._meta, **episode.meta}, self._save_info)
        try:
            with temporary.open("wb") as file:
                pq.write_table(
                    table,
                    file,
                    row_group_size=ROW_GROUP,
                    compression="zstd",
                    compression_level=1,
                    use_dictionary=False,
                    write_statistics=False,
                    write_page_checksum=True,
                )
                file.flush()
                os.fsync(file.fileno())
            with self._locked():
                while (path := self.folder / f"episode-{self._next:06d}.parquet").exists():
                    self._next += 1
                temporary.rename(path)
                self._add_to_manifest(path, episode)
        except OSError as error:
            reason = error.strerror or error
            what = f"cannot write an episode to {self.folder}: {reason}"
            raise TiltyardError(what, "earlier episodes are intact") from error
        finally:
            temporary.unlink(missing_ok=True)
        return path

    def _add_to_manifest(self, path: Path, episode: Episode) -> None:
        """Append a manifest line and flush it to disk."""
        content = path.read_bytes()
        line = {
            "file": path.name,
            "rows": len(episode.action) + 1,
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            "seed": episode.seed,
            "return": math.fsum(np.asarray(episode.reward, np.float64).tolist()),
            "terminated": episode.terminated,
            "truncated": episode.truncated,
        }
        with (self.folder / MANIFEST).open("ab") as file:
            file.write(atomic.to_line(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _machine() -> str:
    """This machine in the names of temporary files."""
    return hashlib.sha256("\n".join(this_machine().values()).encode()).hexdigest()[:12]


def _is_abandoned(temporary: Path) -> bool:
    """Whether its writer is dead: gone from this machine, or on another one and silent for a day."""
    name = _TEMPORARY.fullmatch(temporary.name)
    if name is not None and name[1] == _machine():
        return not in_use(int(name[2]))
    return time.time() - temporary.stat().st_mtime > _OLD


def _table(episode: Episode, spec: Mapping[str, Any], meta: Mapping[str, Any], save_info: bool) -> pa.Table:
    steps = len(episode.action)
    for name, array in episode.obs.items():
        if len(array) != steps + 1:
            raise TiltyardError(f"observation {name!r} has {len(array)} entries; {steps} actions need {steps + 1}")
    ends = np.zeros((2, steps + 1), bool)
    if steps:
        ends[:, steps - 1] = episode.terminated, episode.truncated
    columns: dict[str, pa.Array] = {"step": pa.array(np.arange(steps + 1, dtype=np.int32))}
    columns |= {f"obs.{name}": _binary(array, len(array)) for name, array in episode.obs.items()}
    columns["action"] = _binary(episode.action, steps + 1)
    columns["reward"] = pa.array([*np.asarray(episode.reward, np.float64).tolist(), None], pa.float64())
    columns["terminated"], columns["truncated"] = pa.array(ends[0]), pa.array(ends[1])
    if save_info:
        infos = [*episode.info, *([{}] * (steps + 1 - len(episode.info)))][: steps + 1]
        columns["info"] = pa.array([json.dumps(_plain(info)) for info in infos], pa.string())
    arrays = {"action": episode.action, **{f"obs.{name}": array for name, array in episode.obs.items()}}
    about = {
        "schema": SCHEMA,
        "arrays": {name: {"shape": list(array.shape[1:]), "dtype": array.dtype.name} for name, array in arrays.items()},
        "reward": np.asarray(episode.reward).dtype.name,
        "seed": episode.seed,
        "terminated": episode.terminated,
        "truncated": episode.truncated,
        "spec": spec,
        "meta": _plain(meta),
    }
    return pa.table(columns).replace_schema_metadata({_KEY: json.dumps(about).encode()})


def _binary(array: Array, rows: int) -> pa.Array:
    """Rows as fixed-size binary; rows beyond the array are null."""
    width = int(np.prod(array.shape[1:], dtype=np.int64)) * array.dtype.itemsize
    stored = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return pa.array([*(row.tobytes() for row in stored), *[None] * (rows - len(array))], pa.binary(width))


def _plain(value: Any) -> Any:
    """Any info as JSON values: arrays as lists, NaN and infinity and everything else as strings."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


# ---------------------------------------------------------------------------------------------- reading


def read_manifest(folder: Path) -> list[dict[str, Any]]:
    """The manifest's lines. A torn last line is ignored: its episode was never completed."""
    try:
        text = (folder / MANIFEST).read_bytes()
    except OSError as error:
        reason = error.strerror or error
        hint = "give a folder of recorded episodes"
        raise UseError(f"no recorded episodes in {folder}: {MANIFEST}: {reason}", hint) from error
    found: list[dict[str, Any]] = []
    for number, line in enumerate(text.split(b"\n")[:-1], 1):
        entry = atomic.parse_line(line) or {}
        kinds = {"file": str, "sha256": str, "bytes": int, "rows": int}
        whole = all(type(entry.get(name)) is kind for name, kind in kinds.items())
        if not whole or not _FILE.fullmatch(entry["file"]):  # a name could lead to another folder
            hint = f"restore it, or delete it: the next recording into {folder} lists all episodes again"
            raise TiltyardError(f"{folder / MANIFEST}, line {number}, is damaged", hint)
        found.append(entry)
    return found


def read_episodes(folder: str | Path) -> Iterator[Episode]:
    """All episodes in the order of recording, each checked against the manifest first."""
    folder = Path(folder)
    for line in read_manifest(folder):
        path = folder / line["file"]
        try:
            content = path.read_bytes()
        except OSError as error:
            reason = error.strerror or error
            raise TiltyardError(f"cannot read {path}, listed in the manifest: {reason}", "restore it") from error
        if hashlib.sha256(content).hexdigest() != line["sha256"]:
            wrong = f"its size is {len(content)} instead of {line['bytes']} bytes"
            if len(content) == line["bytes"]:
                wrong = "its checksum differs from the manifest"
            raise TiltyardError(f"{path} is damaged: {wrong}", "restore it from a copy")
        yield _read(path)


def _read(path: Path) -> Episode:
    try:
        table = pq.ParquetFile(path, page_checksum_verification=True).read()
        about = json.loads((table.schema.metadata or {})[_KEY])
        if about["schema"] > SCHEMA:
            raise UseError(f"{path} was written by a newer Tiltyard (schema {about['schema']})", "update Tiltyard")
        return _episode(table, about)
    except (OSError, pa.ArrowException, KeyError, ValueError, TypeError, RecursionError) as error:
        raise TiltyardError(f"{path} is not a readable episode: {error}", "delete or restore it") from error


def _episode(table: pa.Table, about: Mapping[str, Any]) -> Episode:
    steps = table.num_rows - 1

    def array(name: str, rows: int) -> Array:
        saved = about["arrays"][name]
        data = b"".join(table.column(name).slice(0, rows).to_pylist())
        stored = np.frombuffer(data, np.dtype(saved["dtype"]).newbyteorder("<"))
        return stored.reshape(rows, *saved["shape"]).astype(saved["dtype"])

    texts = table.column("info").to_pylist()[:steps] if "info" in table.column_names else []
    return Episode(
        obs={name[4:]: array(name, steps + 1) for name in about["arrays"] if name.startswith("obs.")},
        action=array("action", steps),
        reward=np.asarray(table.column("reward").to_pylist()[:steps], np.dtype(about["reward"])),
        terminated=about["terminated"],
        truncated=about["truncated"],
        seed=about["seed"],
        info=[json.loads(text) for text in texts],
        meta=about["meta"],
    )
