"""Reader for W&B run files: a log of protobuf records in 32 KiB blocks, in the LevelDB log format.

file     7 bytes of header, then blocks of 32768 bytes
record   crc (4), length (2), type (1: full, 2: first, 3: middle, 4: last), data; fewer than 7 bytes at the end of a
         block are padding
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

BLOCK = 32768


def frames(file: Path) -> Iterator[bytes]:
    data = file.read_bytes()
    assert data[:4] == b":W&B"
    at, parts = 7, b""
    while at < len(data):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if kind == 0:  # preallocated but not written
            return
        piece = data[at + 7 : at + 7 + length]
        at += 7 + length
        parts = piece if kind in (1, 2) else parts + piece
        if kind in (1, 4):
            yield parts


def records(file: Path) -> list[Record]:
    found = []
    for frame in frames(file):
        record = Record()
        record.ParseFromString(frame)
        found.append(record)
    return found


def history(file: Path) -> list[dict[str, Any]]:
    """Return the logged rows including `_step`, oldest first."""
    rows = []
    for record in records(file):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            items["_step"] = record.history.step.num
            rows.append(items)
    return rows
