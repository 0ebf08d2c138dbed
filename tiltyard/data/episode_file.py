"""One recorded episode as the bytes of a Parquet file, and back: whole, or some of its rows.

    T + 1 rows: step, obs.NAME..., action, reward, terminated, truncated[, info]

Arrays are fixed-size binary; shapes, dtypes and the env's spec are in the file's metadata, so that a file explains
itself. The last row holds the final observation and no action. Every page has a checksum, which reading verifies.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tiltyard.errors import TiltyardError, UseError
from tiltyard.types import Array, Arrays, Episode

SCHEMA = 1
ROW_GROUP = 64  # env steps: a window of 16 is read in under a millisecond
_KEY = b"tiltyard"
_READ_ERRORS = (OSError, pa.ArrowException, KeyError, ValueError, TypeError, RecursionError, OverflowError)


def encode(episode: Episode, spec: Mapping[str, Any], meta: Mapping[str, Any], *, save_info: bool = False) -> pa.Buffer:
    """The bytes of an episode's file. `spec` is that of spec_to_json; `meta` may have any JSON values."""
    sink = pa.BufferOutputStream()
    pq.write_table(
        _table(episode, spec, meta, save_info),
        sink,
        row_group_size=ROW_GROUP,
        compression="zstd",
        compression_level=1,
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
    )
    return sink.getvalue()


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
    reward = np.append(np.asarray(episode.reward, np.float64), 0.0)
    columns["reward"] = pa.array(reward, mask=np.arange(steps + 1) == steps)
    columns["terminated"], columns["truncated"] = pa.array(ends[0]), pa.array(ends[1])
    if save_info:
        infos = [*episode.info, *([{}] * (steps + 1 - len(episode.info)))][: steps + 1]
        columns["info"] = pa.array([json.dumps(json_values(info)) for info in infos], pa.string())
    arrays = {"action": episode.action, **{f"obs.{name}": array for name, array in episode.obs.items()}}
    about = {
        "schema": SCHEMA,
        "arrays": {name: {"shape": list(array.shape[1:]), "dtype": array.dtype.name} for name, array in arrays.items()},
        "reward": np.asarray(episode.reward).dtype.name,
        "seed": episode.seed,
        "terminated": episode.terminated,
        "truncated": episode.truncated,
        "spec": spec,
        "meta": json_values(meta),
    }
    return pa.table(columns).replace_schema_metadata({_KEY: json.dumps(about).encode()})


def _binary(array: Array, rows: int) -> pa.Array:
    """Rows as fixed-size binary; rows beyond the array are null."""
    width = int(np.prod(array.shape[1:], dtype=np.int64)) * array.dtype.itemsize
    stored = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
    missing = rows - len(array)
    data = stored.tobytes() + bytes(width * missing) if missing else stored
    present = np.packbits(np.arange(rows) < len(array), bitorder="little").tobytes()
    buffers = [pa.py_buffer(present) if missing else None, pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(width), rows, buffers, missing)


def json_values(value: Any) -> Any:
    """Any info as JSON values: arrays as lists, NaN and infinity and everything else as strings."""
    if isinstance(value, Mapping):
        return {str(key): json_values(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [json_values(inner) for inner in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


# ---------------------------------------------------------------------------------------------- reading


class EpisodeFile:
    """A file's bytes, opened for reading. `name` is for error messages."""

    def __init__(self, content: Any, name: str) -> None:
        self.name = name
        try:
            self._file = pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True)
            self.about: dict[str, Any] = json.loads(self._file.schema_arrow.metadata[_KEY])
            schema = self.about["schema"]
            self.rows = int(self._file.metadata.num_rows)
            self.row_groups = int(self._file.metadata.num_row_groups)
            self.columns = {name: _column(saved) for name, saved in self.about["arrays"].items()}
        except _READ_ERRORS as error:
            raise self._unreadable(error) from error
        if schema > SCHEMA:
            raise UseError(f"{name} was written by a newer Tiltyard (schema {schema})", "update Tiltyard")

    def _unreadable(self, error: Exception) -> TiltyardError:
        return TiltyardError(f"{self.name} is not a readable episode: {error}", "delete or restore it")

    @property
    def steps(self) -> int:
        return self.rows - 1

    def read(self, start: int, stop: int, names: Sequence[str]) -> Arrays:
        """Rows start .. stop of some columns, by the names of the file: obs.NAME, action, reward, terminated, ...

        The last row of the episode has zeros for action and reward.
        """
        first, last = start // ROW_GROUP, -(-stop // ROW_GROUP)
        try:
            table = self._file.read_row_groups(list(range(first, last)), list(names), use_threads=False)
            offset = first * ROW_GROUP
            return {name: self._array(table.column(name), name, start - offset, stop - offset) for name in names}
        except _READ_ERRORS as error:
            raise self._unreadable(error) from error

    def _array(self, column: pa.ChunkedArray, name: str, start: int, stop: int) -> Array:
        if name not in self.columns:
            plain = column.slice(start, stop - start)
            return (
                np.asarray(plain.fill_null(0.0)).astype(self.about["reward"]) if name == "reward" else np.asarray(plain)
            )
        dtype, shape = self.columns[name]
        parts = [np.frombuffer(chunk.buffers()[1], dtype).reshape(len(chunk), *shape) for chunk in column.chunks]
        stored = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return stored[start:stop]

    def episode(self) -> Episode:
        """The whole episode."""
        steps, about = self.steps, self.about
        arrays = self.read(0, self.rows, list(self.columns))
        try:
            table = self._file.read(["info"] if "info" in self._file.schema_arrow.names else [], use_threads=False)
            texts = table.column("info").to_pylist()[:steps] if table.num_columns else []
            return Episode(
                obs={name[4:]: _native(array) for name, array in arrays.items() if name.startswith("obs.")},
                action=_native(arrays["action"][:steps]),
                reward=self.read(0, self.rows, ["reward"])["reward"][:steps],
                terminated=about["terminated"],
                truncated=about["truncated"],
                seed=about["seed"],
                info=[json.loads(text) for text in texts],
                meta=about["meta"],
            )
        except _READ_ERRORS as error:
            raise self._unreadable(error) from error

    def damaged_row_groups(self) -> list[int]:
        """The row groups that cannot be read."""
        found = []
        for group in range(self.row_groups):
            try:
                self._file.read_row_group(group, use_threads=False)
            except _READ_ERRORS:
                found.append(group)
        return found


def _column(saved: Mapping[str, Any]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    return np.dtype(saved["dtype"]).newbyteorder("<"), tuple(saved["shape"])


def _native(array: Array) -> Array:
    """A writable array in the machine's byte order."""
    return array.astype(array.dtype.newbyteorder("="), copy=True)
