"""Reads rows of a dataset's episodes without reading the rest of their files.

    footer, once an episode is opened -> the row groups that are asked for -> arrays

Opened episodes are kept, up to CACHE bytes. Page checksums protect what is read; a whole episode is checked against the
manifest. If a file is gone because the dataset was packed, the manifest is read again, which names the new place.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tiltyard.data import folder as layout
from tiltyard.data.episode_file import ROW_GROUP, EpisodeFile
from tiltyard.data.manifest import Entry, Manifest
from tiltyard.errors import TiltyardError
from tiltyard.types import Array, Arrays, Episode

Columns = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]
CACHE = 64 << 20  # bytes of opened episodes
_TAIL = 1 << 15  # bytes at the end of a file that hold the footer of a usual episode
_SMALL = 1 << 17  # bytes: a smaller file is read at once
_OPENED = 1 << 14  # bytes that the footer of an opened episode takes in memory, about


class Reader:
    """Reads the episodes of a manifest, wherever they are by now."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.lengths: Array = np.asarray(manifest.column("length"), np.int64)
        self._places: Manifest | None = None  # the manifest as read again
        self._opened: OrderedDict[int, _Opened] = OrderedDict()
        self._bytes = 0
        self._columns: Columns = {}

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which opens files itself."""
        return {**self.__dict__, "_opened": OrderedDict(), "_bytes": 0}

    def rows(self, index: int, start: int, stop: int, names: Sequence[str]) -> Arrays:
        """Rows of an episode, by the names of its columns. The arrays are read-only."""
        try:
            return self._rows(index, start, stop, names)
        except FileNotFoundError:
            self._read_places()
        try:
            return self._rows(index, start, stop, names)
        except FileNotFoundError as error:
            raise self._gone(index, error) from error

    def _rows(self, index: int, start: int, stop: int, names: Sequence[str]) -> Arrays:
        opened = self._opened.pop(index, None)
        if opened is None:
            opened = _Opened(self.folder, self._entry(index))
            if self._columns and opened.file.columns != self._columns:
                what = f"{opened.file.name} has other observations or actions than the first episode"
                raise TiltyardError(what, f"tiltyard data verify {self.folder}")
        else:
            self._bytes -= opened.bytes
        opened.load(start // ROW_GROUP, -(-stop // ROW_GROUP))
        self._opened[index] = opened
        self._bytes += opened.bytes
        while self._bytes > CACHE and len(self._opened) > 1:
            self._bytes -= self._opened.popitem(last=False)[1].bytes
        return opened.file.read(start, stop, names)

    def columns(self) -> Columns:
        """Type and shape of a row of each column, as in the first episode. The others must have the same."""
        self.rows(0, 0, 1, ["reward"])
        file = self._opened[0].file
        self._columns = file.columns
        flags = {name: (np.dtype(bool), ()) for name in ("terminated", "truncated")}
        return {**file.columns, "reward": (np.dtype(file.about["reward"]), ()), **flags}

    def episode(self, index: int) -> Episode:
        """A whole episode, checked against the manifest."""
        try:
            return layout.open_episode(self.folder, self._entry(index)).episode()
        except TiltyardError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
        self._read_places()
        return layout.open_episode(self.folder, self._entry(index)).episode()

    # ------------------------------------------------------------------------------------------ places

    def _entry(self, index: int) -> Entry:
        """Where an episode is now."""
        entry = self.manifest.entry(index)
        if self._places is None:
            return entry
        numbers = self._places.column("episode")
        first, last = np.searchsorted(numbers, [entry.episode, entry.episode + 1])
        for row in range(int(first), int(last)):
            there = self._places.entry(row)
            if there.key == entry.key:
                if there.sha256 != entry.sha256:
                    what = f"{entry.name} of {self.folder} was replaced while the dataset was being read"
                    raise TiltyardError(what, "open the dataset again")
                return there
        raise TiltyardError(f"{entry.name} was removed from {self.folder} while it was being read", "open it again")

    def _read_places(self) -> None:
        self._opened.clear()
        self._bytes = 0
        self._places = layout.read_manifest(self.folder)

    def _gone(self, index: int, error: OSError) -> TiltyardError:
        path = self.folder / self._entry(index).file
        return TiltyardError(f"cannot read {path}, listed in the manifest: {error.strerror}", "restore it")


class _Opened:
    """An episode's file in memory, of which only some parts are read. The rest is zero and takes no memory."""

    def __init__(self, folder: Path, entry: Entry) -> None:
        self._path, self._entry, self._folder = folder / entry.file, entry, folder
        self._content: Array = np.zeros(entry.bytes, np.uint8)
        self.bytes = _OPENED
        size = entry.bytes
        whole = size <= _SMALL
        self._read(0 if whole else size - _TAIL, size)
        footer = int.from_bytes(self._content[-8:-4].tobytes(), "little") + 8
        if not whole and _TAIL < footer <= size:
            self._read(size - footer, size - _TAIL)
        self.file = EpisodeFile(pa.py_buffer(self._content), f"{self._path} ({entry.name})")
        if self.file.rows != entry.rows:
            raise self._damaged(f"it has {self.file.rows} rows instead of {entry.rows}")
        self._end = max(0, size - footer)
        self._loaded = np.full(self.file.row_groups, whole)

    def load(self, first: int, last: int) -> None:
        """Read row groups that are not there yet."""
        missing = np.flatnonzero(~self._loaded[first:last])
        if len(missing):
            begin, end = first + int(missing[0]), first + int(missing[-1]) + 1
            self._read(self._begin(begin), self._begin(end))
            self._loaded[begin:end] = True

    def _begin(self, group: int) -> int:
        """Where a row group begins. They follow each other up to the footer."""
        if group >= self.file.row_groups:
            return self._end
        return min(int(self.file._file.metadata.row_group(group).column(0).data_page_offset), self._end)

    def _read(self, start: int, stop: int) -> None:
        entry, view = self._entry, self._content.data
        try:
            with self._path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                alone = self._path.suffix == ".parquet"
                if size < entry.offset + entry.bytes or (alone and size != entry.bytes):
                    there = size if alone else max(0, size - entry.offset)
                    raise self._damaged(f"its size is {there} instead of {entry.bytes} bytes")
                while start < stop:
                    count = os.preadv(file.fileno(), [view[start:stop]], entry.offset + start)
                    if not count:
                        raise self._damaged(f"its size is {start} instead of {entry.bytes} bytes")
                    start, self.bytes = start + count, self.bytes + count
        except FileNotFoundError:
            raise
        except OSError as error:
            reason = error.strerror or error
            raise TiltyardError(f"cannot read {self._path}, listed in the manifest: {reason}", "restore it") from error

    def _damaged(self, wrong: str) -> TiltyardError:
        hint = f"restore it from a copy, or: tiltyard data repair {self._folder}"
        return TiltyardError(f"{self._path} ({self._entry.name}) is damaged: {wrong}", hint)
