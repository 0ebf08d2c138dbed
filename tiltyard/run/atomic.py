"""Write files so that readers never see half of one: whole files by rename, lines by one append, and valid JSON.

A reader sees the old file or the new one. An appended line may be torn by a crash; the next append then starts a new
line. What commands decide on has a checksum of its own, so that a damaged value is not believed; files and lines of
earlier versions, and lines of other programs, have none.

    write_text     temp file, fsync, rename       append_record   one write() at the end of the file
    to_json        nan and inf as strings         read_lines      complete records, and the numbers of broken lines
    write_sealed   JSON with its own sha256       to_line         JSON with its own CRC-32
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import operator
import os
import re
import shutil
import zlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from tiltyard.errors import DiskError
from tiltyard.run.regular_files import open_regular

DISK_HINT = "free some space or check the folder's permissions, then continue with: tiltyard resume"

_CHECKED_LINE = re.compile(rb'(.*), "crc": "([0-9a-f]{8})"\}', re.DOTALL)

NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def disk_error(path: Path, cause: OSError) -> DiskError:
    return DiskError(f"{path} could not be written: {cause.strerror or cause}", DISK_HINT, cause)


def now() -> str:
    """The current time as written in status and events: UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def unique() -> str:
    """Eight random characters for temporary names."""
    return os.urandom(4).hex()


def plain(value: Any) -> Any:
    """Convert a value for JSON: nan and inf become strings, array scalars become numbers."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "__index__"):
        return operator.index(value)
    number = float(value)
    if math.isfinite(number):
        return number
    return "nan" if math.isnan(number) else "inf" if number > 0 else "-inf"


def to_json(value: Any, *, indent: int | None = None) -> str:
    return json.dumps(plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def number(value: Any) -> float | None:
    """The number that `plain` wrote, or None for anything else."""
    if isinstance(value, str):
        return NOT_FINITE.get(value)
    try:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
    except OverflowError:  # an integer above the largest float, as no writer of ours writes it
        return None


def write_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Replace the file atomically by one with this mode, less the umask. Costs one fsync."""
    temporary = path.with_name(f".{path.name}.{unique()}.tmp")
    try:
        # Lone surrogates (file names in odd encodings) must not be an error.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, mode), "wb") as file:
            file.write(text.encode("utf-8", "backslashreplace"))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise disk_error(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_private(path: Path, text: str, mode: int) -> None:
    """Write a file that other users can never read."""
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)


def write_json(path: Path, value: Any, mode: int = 0o666) -> None:
    write_text(path, to_json(value, indent=2) + "\n", mode)


def read_json(path: Path) -> dict[str, Any]:
    """The file's JSON object. OSError if it cannot be read, ValueError if it is not an object."""
    try:
        with open_regular(path, follow=True) as file:
            value = json.loads(file.read())
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return cast(dict[str, Any], value)


def digest(value: dict[str, Any]) -> str:
    """The checksum of a JSON object, whatever the order of its keys and its own `sha256`."""
    body = {key: inner for key, inner in value.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(plain(body), sort_keys=True).encode()).hexdigest()


def write_sealed(path: Path, value: dict[str, Any], mode: int = 0o666) -> None:
    """Write a JSON object with its checksum."""
    write_json(path, {**value, "sha256": digest(value)}, mode)


def read_sealed(path: Path) -> dict[str, Any]:
    """The JSON object that `write_sealed` wrote, or one of an earlier version, without a checksum. OSError if it cannot
    be read, ValueError if it is damaged."""
    value = read_json(path)
    if value.pop("sha256", None) not in (None, digest(value)):
        raise ValueError("it does not match its own checksum")
    return value


def append_line(path: Path, text: str) -> None:
    """Append one line; if a crash has torn the last line, start a new one. On failure nothing of it stays."""
    try:
        with path.open("a+b", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
            line = rest = (b"\n" if torn else b"") + text.encode("utf-8", "backslashreplace") + b"\n"
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                if os.fstat(file.fileno()).st_size == size + len(line) - len(rest):  # no other process wrote since
                    file.truncate(size)
                raise
    except OSError as error:
        raise disk_error(path, error) from error


def to_line(record: dict[str, Any]) -> str:
    """A record as a line of JSON that ends with its checksum."""
    text = to_json(record)
    return f'{text[:-1]}, "crc": "{zlib.crc32(text.encode("utf-8", "backslashreplace")):08x}"}}'


def append_record(path: Path, record: dict[str, Any]) -> None:
    append_line(path, to_line(record))


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None if the line is broken. Checks a line that ends with its checksum."""
    checked = _CHECKED_LINE.fullmatch(line)
    if checked is not None:
        line = checked[1] + b"}"
        if f"{zlib.crc32(line):08x}".encode() != checked[2]:
            return None
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_lines(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The file's records, and the numbers (from 1) of broken lines. A missing file has no records."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], []
    records: list[dict[str, Any]] = []
    broken: list[int] = []
    for index, line in enumerate(data.split(b"\n"), 1):
        if not line:
            continue
        if (record := parse_line(line)) is not None:
            records.append(record)
        else:
            broken.append(index)
    return records, broken


def absolute(path: Path) -> Path:
    """An absolute path without `..`; links are not resolved, because deletion must see them."""
    return Path(os.path.normpath(path.absolute()))


def empty_draft(place: Path) -> Path:
    """Create an empty folder beside the place, without leftovers of a killed process."""
    draft = place.with_name(f".new-{place.name}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    return draft


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries (new names, renames) to disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
