"""TFRecord files without TensorFlow: the framing with its checksums, and tf.train.Example on the wire.

    file      record record ...           NAME.tfrecord-00003-of-00074 is the fourth of 74 files
    record    length (8 bytes), masked CRC-32C of the length, data, masked CRC-32C of the data
    data      Example { name -> bytes list, float list or int64 list }

What the features of an exported episode are is in exports.py; `damages` checks the framing of anybody's files.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tiltyard.errors import TiltyardError, UseError
from tiltyard.types import Array

Feature = bytes | list[int] | Array
"""One value of bytes, integers, or float32 [N]."""

MOST_BYTES = 2**31 - 1  # of an Example: protobuf reads no larger message
_GZIP = b"\x1f\x8b"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def shard_name(name: str, index: int, count: int) -> str:
    return f"{name}.tfrecord-{index:05d}-of-{count:05d}"


def masked_crc(data: Any) -> int:
    """The checksum of TFRecord: CRC-32C, rotated and shifted, so that checksums of checksums are not weak."""
    crc: int = _crc32c()(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _crc32c() -> Any:
    try:
        from crc32c import crc32c
    except ImportError as error:
        raise UseError("TFRecord requires the package crc32c", "pip install 'tiltyard[data]'") from error
    return crc32c


def write_record(file: BinaryIO, data: bytes) -> None:
    length = struct.pack("<Q", len(data))
    file.write(length + struct.pack("<I", masked_crc(length)))
    file.write(data)
    file.write(struct.pack("<I", masked_crc(data)))


# ---------------------------------------------------------------------------------------------- reading


def records(path: Path) -> Iterator[bytes]:
    """All records of a file, each checked. TiltyardError at the first damage."""
    for number, data, wrong in _scan(path):
        if wrong:
            raise TiltyardError(f"{path} is damaged: record {number}: {wrong}", "restore it from a copy")
        yield data


def damages(path: Path) -> list[tuple[int, str]]:
    """(number of the record from 0, what is wrong), whatever the records contain; empty if the file is sound."""
    return [(number, wrong) for number, _, wrong in _scan(path) if wrong]


def _scan(path: Path) -> Iterator[tuple[int, bytes, str]]:
    """(number, data, what is wrong) of each record. After a damaged length no later record can be found."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                    yield from _scan_bytes(content, size)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TiltyardError(f"cannot read {path}: {reason}", "check the path") from error


def _scan_bytes(content: mmap.mmap, size: int) -> Iterator[tuple[int, bytes, str]]:
    offset = number = 0
    while offset < size:
        head = content[offset : offset + 12]
        if len(head) < 12:
            yield number, b"", f"the file ends {len(head)} bytes after the start of the record"
            return
        length, crc = struct.unpack("<QI", head)
        if masked_crc(head[:8]) != crc:
            zipped = number == 0 and head.startswith(_GZIP)
            wrong = f"the checksum of its length is wrong; the {size - offset:,} bytes from here on cannot be read"
            yield number, b"", "the file is compressed with gzip; decompress it first" if zipped else wrong
            return
        data = content[offset + 12 : offset + 12 + length]
        end = content[offset + 12 + length : offset + 16 + length]
        if len(end) < 4:
            missing = offset + 16 + length - size
            yield number, b"", f"the file ends within the record, {missing:,} bytes too early"
            return
        wrong = "" if struct.unpack("<I", end)[0] == masked_crc(data) else "the checksum of its data is wrong"
        yield number, data, wrong
        offset, number = offset + 16 + length, number + 1


# ---------------------------------------------------------------------------------------------- tf.train.Example


def encode_example(features: Mapping[str, Feature]) -> bytes:
    """An Example; features are ordered by name, so that equal features give equal bytes."""
    entries: list[bytes] = []
    for name in sorted(features):
        entry = [*_field(1, [name.encode()]), *_field(2, _feature(features[name]))]
        entries += _field(1, entry)
    if sum(map(len, entries)) > MOST_BYTES - 16:
        raise TiltyardError("an episode has more than 2 GiB, the most that a TFRecord reader parses", "use --to npz")
    return b"".join(_field(1, entries))


def _feature(value: Feature) -> list[bytes]:
    if isinstance(value, bytes):
        return _field(1, _field(1, [value]))
    if isinstance(value, list):
        return _field(3, _field(1, [b"".join(map(_varint, value))]))
    return _field(2, _field(1, [np.ascontiguousarray(value, "<f4").tobytes()]))


def _field(number: int, pieces: list[bytes]) -> list[bytes]:
    """A field of bytes or of a message, as pieces that are joined once at the end."""
    return [_varint(number << 3 | _BYTES), _varint(sum(map(len, pieces))), *pieces]


def _varint(value: int) -> bytes:
    value &= 0xFFFFFFFFFFFFFFFF  # negative numbers have ten bytes
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode_example(data: bytes) -> dict[str, Feature]:
    """The features of an Example, by name. ValueError if it is something else."""
    found: dict[str, Feature] = {}
    view = memoryview(data)
    for features in _messages(view, 1):
        for entry in _messages(features, 1):
            fields = {number: value for number, _, value in _fields(entry)}
            if not isinstance(fields.get(1), memoryview) or not isinstance(fields.get(2), memoryview):
                raise ValueError("not an Example")
            found[bytes(fields[1]).decode()] = _decode_feature(fields[2])
    if not found:
        raise ValueError("not an Example")
    return found


def _decode_feature(feature: memoryview) -> Feature:
    for kind, wire, content in _fields(feature):
        if wire != _BYTES or kind not in (1, 2, 3):
            raise ValueError("not a Feature")
        values = list(_fields(content))
        if kind != 3 and any(each == _VARINT for _, each, _ in values):
            raise ValueError("not a Feature")
        if kind == 1:
            return b"".join(bytes(value) for _, _, value in values)
        if kind == 2:
            return np.frombuffer(b"".join(bytes(value) for _, _, value in values), "<f4")
        return [_signed(number) for _, wire, value in values for number in _integers(wire, value)]
    return b""


def _integers(wire: int, value: Any) -> Iterable[int]:
    """The numbers of a list, packed or one by one."""
    if wire == _VARINT:
        return [value]
    numbers, offset = [], 0
    while offset < len(value):
        number, offset = _read_varint(value, offset)
        numbers.append(number)
    return numbers


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def _messages(view: memoryview, number: int) -> Iterator[memoryview]:
    for field, wire, value in _fields(view):
        if field == number:
            if wire != _BYTES:
                raise ValueError("not an Example")
            yield value


def _fields(view: memoryview) -> Iterator[tuple[int, int, Any]]:
    """(field number, wire type, value) of a message; values of other types than varints are bytes."""
    offset = 0
    while offset < len(view):
        tag, offset = _read_varint(view, offset)
        wire = tag & 7
        if wire == _VARINT:
            value, offset = _read_varint(view, offset)
            yield tag >> 3, wire, value
            continue
        if wire == _BYTES:
            size, offset = _read_varint(view, offset)
        elif wire in (_FIXED64, _FIXED32):
            size = 8 if wire == _FIXED64 else 4
        else:
            raise ValueError(f"unknown wire type {wire}")
        if offset + size > len(view):
            raise ValueError("a field is cut off")
        yield tag >> 3, wire, view[offset : offset + size]
        offset += size


def _read_varint(view: memoryview, offset: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        if offset >= len(view) or shift > 63:
            raise ValueError("a number is cut off")
        byte = view[offset]
        number |= (byte & 0x7F) << shift
        offset, shift = offset + 1, shift + 7
        if byte < 0x80:
            return number, offset
