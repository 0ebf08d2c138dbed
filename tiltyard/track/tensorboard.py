"""TensorBoard tracker; the only module that imports tensorboardX, for its message types and checksums.

Its own writer is not used: its thread dies on a full disk and the next caller blocks forever. Here a record is one
append of one frame, and an error is raised to trackers.py. One file per attempt, with names that sort by time:

    events.out.tfevents.T1...   env steps 0 ........ 900        (killed)
    events.out.tfevents.T2...          START purge 601, 700 ....      TensorBoard drops 601 to 900 of T1
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TensorBoardTracker:
    """Writes scalars by env step to `folder`; values of older files from `purge_step` on are superseded."""

    def __init__(self, folder: Path, purge_step: int | None) -> None:
        from tensorboardX.proto import event_pb2, summary_pb2
        from tensorboardX.record_writer import masked_crc32c

        self._event, self._value, self._summary = event_pb2.Event, summary_pb2.Summary.Value, summary_pb2.Summary
        self._checksum = masked_crc32c
        folder.mkdir(parents=True, exist_ok=True)
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds}.{nanoseconds:09d}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("xb", buffering=0)
        self._append(self._event(wall_time=time.time(), file_version="brain.Event:2"))
        if purge_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._append(self._event(wall_time=time.time(), step=purge_step, session_log=start))

    def record(self, record: Mapping[str, Any]) -> None:
        """All metrics of one record as one event."""
        values = [self._value(tag=name, simple_value=float(number)) for name, number in record["metrics"].items()]
        step = int(record["env_steps"])
        self._append(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        self._file.close()

    def _append(self, event: Any) -> None:
        # length, its checksum, the event, its checksum: the frame of a TFRecord
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        frame = length + struct.pack("<I", self._checksum(length)) + data + struct.pack("<I", self._checksum(data))
        written = self._file.write(frame)
        if written != len(frame):
            raise OSError(f"{self._file.name}: only {written} of {len(frame)} bytes were written")
