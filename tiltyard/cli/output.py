"""stdout is for data: nothing else gets there, and what cannot be written there is an error.

No terminal obeys what is written to stdout and stderr, also if a pipe leads there: text of another user's file could
contain control sequences. Only commands that draw (`data_stdout`) write to the real stderr.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from tiltyard.cli.formatting import printable
from tiltyard.errors import TiltyardError
from tiltyard.run import atomic

if TYPE_CHECKING:
    from tiltyard.run.folder import Run


class Data(io.TextIOWrapper):
    """stdout or stderr: characters that it cannot encode and those that control a terminal are escaped, and a failed
    write is an error with a sentence."""

    def write(self, text: str) -> int:
        try:
            return super().write(printable(text))
        except OSError as error:
            raise self._lost(error) from error

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise self._lost(error) from error

    def _lost(self, error: OSError) -> Exception:
        # Python flushes again at exit, which must not fail a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
        if isinstance(error, BrokenPipeError):
            return BrokenPipeError(*error.args)
        name = "stderr" if self.fileno() == 2 else "stdout"
        return TiltyardError(f"{name} cannot be written: {error.strerror}", "redirect it to a disk with free space")


def clear_screen() -> None:
    """Clear the terminal at stdout. Text may not, as it may be another user's; these bytes are ours."""
    sys.stdout.flush()
    sys.stdout.buffer.write(b"\033[H\033[J")


def write_result(value: Any, text: str, *, as_json: bool) -> None:
    """Print a result as JSON, in which nan and inf are strings, or as text."""
    sys.stdout.write(atomic.to_json(value, indent=2) + "\n" if as_json else text)


def write_outcome(data: TextIO, run: Run, as_json: bool, **facts: Any) -> None:
    """Print what became of a run: its folder, or JSON with these facts."""
    whole = {"run": run.id, "folder": str(run.folder), **facts}
    data.write(f"{json.dumps(whole) if as_json else os.path.relpath(run.folder)}\n")
    data.flush()


@contextmanager
def data_to(buffer: BinaryIO, encoding: str, line_buffering: bool = False) -> Iterator[Data]:
    """A text stream over a buffer, flushed at the end; the buffer stays open."""
    data = Data(buffer, encoding, "backslashreplace", line_buffering=line_buffering)
    try:
        yield data
    finally:
        data.detach()


@contextmanager
def data_stdout() -> Iterator[TextIO]:
    """The real stdout, for data; meanwhile everything else that is printed, also by C libraries, goes to the real
    stderr, where training draws its panel."""
    sys.stdout.flush()
    kept = os.dup(1)
    raw = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        drawn = sys.__stderr__ or sys.stderr
        with data_to(raw, sys.stdout.encoding) as data, redirect_stderr(drawn), redirect_stdout(drawn):
            yield data
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
        raw.close()
