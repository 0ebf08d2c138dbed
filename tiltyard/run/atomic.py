"""How bytes reach the disk: whole files by rename, lines by one append, and JSON that is always JSON.

Owns no format and no layout. A reader sees the old file or the new one, never half of either; an appended line may
be torn by a crash, and the next append then starts on a line of its own.

    write_text   temp file, fsync, rename       append_line   one write() at the end of the file
    to_json      nan and inf as strings         read_lines    whole records, and the numbers of broken lines
"""

from __future__ import annotations

import contextlib
import json
import math
import operator
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from tiltyard.errors import TiltyardError

# For people: what to do when the disk refuses.
NO_ROOM = "free some space or check the folder's permissions, then go on with: tiltyard resume"

NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class DiskError(TiltyardError, OSError):
    """A file could not be written. One sentence for people, and still an OSError for code that guards against disks."""

    def __init__(self, path: Path, cause: OSError) -> None:
        super().__init__(f"{path} could not be written: {cause.strerror or cause}", NO_ROOM)
        self.errno, self.strerror = cause.errno, cause.strerror

    def __str__(self) -> str:
        return self.message


def now() -> str:
    """The time as status and events write it: UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def unique() -> str:
    """Eight letters that no other process draws, for temporary names."""
    return os.urandom(4).hex()


def plain(value: Any) -> Any:
    """The value as JSON can hold it: nan and inf become strings, an array's scalar becomes a plain number."""
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
    """A number as `plain` wrote it, or None for anything else."""
    if isinstance(value, str):
        return NOT_FINITE.get(value)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def write_text(path: Path, text: str) -> None:
    """Replace the file as a whole. Costs one fsync."""
    temporary = path.with_name(f".{path.name}.{unique()}.tmp")
    try:
        # Lone surrogates (file names in odd encodings) must not stop a status from being written.
        with temporary.open("wb") as file:
            file.write(text.encode("utf-8", "backslashreplace"))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise DiskError(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    write_text(path, to_json(value, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The file's JSON object. OSError when it cannot be read, ValueError when it is no object."""
    value = json.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise ValueError("is no JSON object")
    return cast(dict[str, Any], value)


def append_line(path: Path, text: str) -> None:
    """One line at the end; after a line that a crash tore, a fresh one."""
    try:
        _append(path, text)
    except OSError as error:
        raise DiskError(path, error) from error


def _append(path: Path, text: str) -> None:
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(handle).st_size
        torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        line = (b"\n" if torn else b"") + text.encode("utf-8", "backslashreplace") + b"\n"
        while line:
            line = line[os.write(handle, line) :]
    finally:
        os.close(handle)


def read_lines(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The file's records, and the numbers (from 1) of lines that are none. A missing file has no records."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], []
    records: list[dict[str, Any]] = []
    broken: list[int] = []
    for index, line in enumerate(data.split(b"\n"), 1):
        if not line:
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            broken.append(index)
            continue
        if isinstance(value, dict):
            records.append(value)
        else:
            broken.append(index)
    return records, broken


def absolute(path: Path) -> Path:
    """From the root and without `..`, but with links left as they are: whoever deletes must be able to see them."""
    return Path(os.path.normpath(path.absolute()))


def sync_folder(folder: Path) -> None:
    """Make the folder's own entries (new names, renames) survive a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
