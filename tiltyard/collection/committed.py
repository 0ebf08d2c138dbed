"""Which episodes of a dataset are committed, by all writers: the manifests, read again only where they have grown.

A poll costs one listing of the folder, and a stat for each manifest that is not sealed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tiltyard.data import manifest
from tiltyard.data.manifest import OPEN
from tiltyard.run import atomic


class Committed:
    """The episodes 0 .. total - 1 of a dataset that any manifest lists."""

    def __init__(self, folder: Path, total: int) -> None:
        self._folder = folder / manifest.FOLDER
        self._there = bytearray(total)  # 1 where the episode is committed
        self._open: dict[str, int] = {}  # manifests that are being written: bytes read, up to the end of a line
        self._sealed: set[str] = set()

    def __contains__(self, number: int) -> bool:
        return bool(self._there[number])

    @property
    def count(self) -> int:
        return self._there.count(1)

    def missing(self) -> Iterator[int]:
        """The episodes that are not, in ascending order, as of now."""
        at = self._there.find(0)
        while at >= 0:
            yield at
            at = self._there.find(0, at + 1)

    def add(self, number: int) -> None:
        if 0 <= number < len(self._there):
            self._there[number] = 1

    def refresh(self) -> None:
        """Read what writers have added since the last call."""
        try:
            listed = list(os.scandir(self._folder))
        except FileNotFoundError:  # no writer yet
            return
        entries = [entry for entry in listed if entry.name.endswith(".jsonl") and not entry.name.startswith(".")]
        self._open = {entry.name: self._open.get(entry.name, 0) for entry in entries if entry.name.endswith(OPEN)}
        for entry in entries:
            try:
                if entry.name in self._open and entry.stat().st_size > self._open[entry.name]:
                    self._read_on(Path(entry.path))
                elif entry.name not in self._open and entry.name not in self._sealed:
                    self._read_sealed(Path(entry.path))
            except FileNotFoundError:  # sealed or packed meanwhile; it has another name in the next listing
                continue

    def _read_sealed(self, path: Path) -> None:
        table, _ = manifest.read_file(path, f"{manifest.FOLDER}/{path.name}")
        if path.exists():
            self._sealed.add(path.name)
        for number in table.column("episode").to_pylist():
            self.add(number)

    def _read_on(self, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(self._open[path.name])
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._open[path.name] += end
        for line in data[:end].splitlines():
            record = atomic.parse_line(line)
            if record is not None and type(record.get("episode")) is int:
                self.add(record["episode"])
