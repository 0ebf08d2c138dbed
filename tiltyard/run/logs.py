"""Read logs/attempt-N.log, the console output of each attempt, also while it is being written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tiltyard.run.folder import Run


def new_text(run: Run, read: dict[Path, int]) -> Iterator[str]:
    """New text since the last call, oldest attempt first; `read` has the bytes read so far of each file."""
    for path in sorted((run.folder / "logs").glob("*.log")):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(read.get(path, 0))
            data = file.read()
            if data:
                # The last line may be incomplete: leave it for the next call.
                whole = data if data.endswith(b"\n") else data[: data.rfind(b"\n") + 1] or data
                read[path] = read.get(path, 0) + len(whole)
                yield whole.decode("utf-8", "replace")


def last_line(path: Path) -> str:
    """The last line of a text file, at most 200 characters; empty if the file is blank."""
    text = _end_of(path, 2_000).strip()
    return text.splitlines()[-1][:200] if text else ""


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a command's output; none if it is blank or cannot be read."""
    try:
        return _end_of(path, 100_000).strip().splitlines()[-count:]
    except OSError:
        return []


def last_error(path: Path, since: int = 0) -> str:
    """The last `error: ...` line of a command's output, from byte `since` on; empty if there is none."""
    try:
        text = _end_of(path, 20_000, since)
    except OSError:
        return ""
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    return errors[-1].removeprefix("error: ") if errors else ""


def _end_of(path: Path, most: int, since: int = 0) -> str:
    """The last `most` bytes, not before byte `since`, as text: a log may be larger than memory."""
    with path.open("rb") as file:
        file.seek(max(since, file.seek(0, os.SEEK_END) - most))
        return file.read().decode("utf-8", "replace")
