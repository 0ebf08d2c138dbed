"""Records, events and status of a run that is being trained. Trouble with the disk that may pass stops none of it.

    metrics.jsonl, events.jsonl   lines wait in memory, in order, and are tried again: each is written once
    status.json                   a write that fails is skipped; its changes are part of the next one
    sync                          before a checkpoint is committed, which is never newer than its records

The first failure is reported, and the recovery. Other processes append to events.jsonl too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiltyard.errors import UseError
from tiltyard.failures import BackOff, class_of
from tiltyard.run import atomic, metrics
from tiltyard.run.checkpoint_files import MANIFEST
from tiltyard.run.events import event_line
from tiltyard.run.status import STATUS, write_status
from tiltyard.types import Checkpoint

if TYPE_CHECKING:
    from tiltyard.run.folder import Run

MOST_WAITING = 64 * 2**20  # bytes of lines in memory; beyond that the run stops
MOST_UNSYNCED = 2**20
CLOSE_SECONDS = 10.0  # for the last lines and the last status


class LineFile:
    """The lines of one file that this process still has in memory: unwritten, or written and not synced yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: deque[bytes] = deque()
        self.size = 0  # bytes that wait
        self._cut = 0  # bytes of the first waiting line that are in the file already: the disk was full then
        self._end = 0  # of the file, after the last write
        self._unsynced: list[tuple[int, bytes]] = []  # places in the file
        self._unsure = False  # whether the system may have dropped what it took: an error came after a write

    def add(self, line: str) -> None:
        self.waiting.append(line.encode("utf-8", "backslashreplace") + b"\n")
        self.size += len(self.waiting[-1])

    def write(self) -> None:
        """Append the waiting lines. A line that was cut off is completed, or repeated if another process wrote too."""
        if not self.waiting and not self._unsure:
            return
        try:
            if self._unsure or sum(len(data) for _, data in self._unsynced) > MOST_UNSYNCED:
                self._sync()
            self._unsure = True
            with self.path.open("a+b", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                self._cut = self._cut if size == self._end else 0
                if not self._cut and size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                    file.write(b"\n")
                while self.waiting:
                    rest = self.waiting[0][self._cut :]
                    count = file.write(rest)
                    self._end = file.tell()
                    self._unsynced.append((self._end - count, rest[:count]))
                    self._cut += count
                    if count == len(rest):
                        self.size -= len(self.waiting.popleft())
                        self._cut = 0
            self._unsure = False
        except OSError as error:
            raise atomic.disk_error(self.path, error) from error

    def sync(self, lock: contextlib.AbstractContextManager[Any]) -> int:
        """Write what waits, and make all of it survive a power cut; returns the file's size. The lock is not held while
        the disk is waited for."""
        with lock:
            self.write()
            synced, self._unsynced, size = self._unsynced, [], self._end
        try:
            if synced:
                with self.path.open("rb") as file:
                    os.fsync(file.fileno())
        except OSError as error:
            with lock:
                self._unsynced, self._unsure = synced + self._unsynced, True
            raise atomic.disk_error(self.path, error) from error
        return size

    def remove_cut(self) -> None:
        """Remove the beginning of a line that could not be completed; only for a file without other writers."""
        if self._cut:
            with contextlib.suppress(OSError):
                os.truncate(self.path, self._end - self._cut)

    def _sync(self) -> None:
        if not self._unsynced:
            self._unsure = False
            return
        with self.path.open("r+b", buffering=0) as file:
            for place, data in self._unsynced if self._unsure else ():  # Linux forgets data that it failed to write
                if os.pwrite(file.fileno(), data, place) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._unsure = True
            os.fsync(file.fileno())
        self._unsure, self._unsynced = False, []


class RunWriter:
    """The writer of one attempt. `say` prints a sentence to the user; `patience` is `save.patience`."""

    def __init__(self, run: Run, say: Callable[[str], None], patience: float) -> None:
        self.run, self._say, self._patience = run, say, patience
        self._metrics, self._events = map(LineFile, run.record_files)
        self._status: dict[str, Any] = {}  # changes that are not in status.json yet
        self._back_off = BackOff()
        self._listed = False  # whether the names of both files are synced
        self._lock = threading.RLock()  # a checkpoint may be saved in another thread

    def log(self, kind: str, message: str, **facts: Any) -> None:
        """Write an event, and show it to the user."""
        self.event(kind, message, **facts)
        self._say(message)

    def event(self, kind: str, sentence: str, **facts: Any) -> None:
        with self._lock:
            self._events.add(event_line(kind, sentence, **facts))
            self._try()

    def record(self, record: Mapping[str, Any]) -> None:
        with self._lock:
            self._metrics.add(metrics.line(record))
            self._try()

    def rewind(self, env_steps: int, attempt: int) -> None:
        with self._lock:
            self._metrics.add(metrics.rewind_line(env_steps, attempt))
            self._try()

    def status(self, **changes: Any) -> None:
        with self._lock:
            self._status |= changes
            self._try()

    def sync(self) -> dict[str, int]:
        """Write and sync all lines, and return the sizes of the files; DiskError if that fails."""
        sizes = {file.path.name: file.sync(self._lock) for file in (self._metrics, self._events)}
        if not self._listed:
            try:
                atomic.sync_folder(self.run.folder)
            except OSError as error:
                raise atomic.disk_error(self.run.folder, error) from error
        self._listed = True
        return sizes

    def close(self) -> str:
        """Write and sync all that is left, within CLOSE_SECONDS; returns what could not be written, or nothing."""
        deadline = time.monotonic() + min(CLOSE_SECONDS, self._patience)
        while True:
            try:
                with self._lock:
                    self._write()
                self.sync()
                return ""
            except (OSError, UseError) as error:
                if class_of(error) == "final" or time.monotonic() >= deadline:
                    files = (self._metrics, self._events)
                    left = [f"{len(each.waiting)} lines of {each.path.name}" for each in files if each.waiting]
                    left += [STATUS] if self._status else []
                    self._metrics.remove_cut()
                    return f"{error}; not written: {', '.join(left) or 'nothing, but it may not survive a power cut'}"
                self._back_off.failed()
                self._back_off.wait()

    def _try(self) -> None:
        """Write all that waits, unless the last failure was just now."""
        if self._metrics.size + self._events.size > MOST_WAITING:
            self._write()
        if self._back_off.is_due:
            try:
                self._write()
            except (OSError, UseError) as error:
                if class_of(error) == "final":
                    raise
                if self._back_off.since is None:
                    sentence = f"{error}; training continues, and records wait in memory"
                    self._events.add(event_line("warning", sentence))
                    self._say(sentence)
                self._back_off.failed()

    def _write(self) -> None:
        self._metrics.write()
        self._events.write()
        if self._status:
            write_status(self.run, **self._status)
            self._status = {}
        if self._back_off.since is not None:
            seconds, self._back_off = time.monotonic() - self._back_off.since, BackOff()
            self.log("recovered", f"the run folder can be written again, after {seconds:.1f} s; no record is lost")


def missing_records(run: Run, newest: Checkpoint) -> list[str]:
    """A sentence for each file of records that is shorter than it was when the checkpoint was committed."""
    sizes = atomic.read_json(newest.folder / MANIFEST).get("records") or {}
    found = []
    for name, expected in sizes.items():
        path = run.folder / name
        size = path.stat().st_size if path.exists() else 0
        if size < expected:
            lost = f"{expected - size:,} of {expected:,} bytes are missing"
            found.append(f"{name} ends before the checkpoint at env step {newest.env_steps:,}: {lost}")
    return found
