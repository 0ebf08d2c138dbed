"""Numbers, times and tables for a terminal. Knows nothing about runs.

Text from files (notes, reasons, env ids) passes through `clean` first: control characters could move the cursor.
Everything that is printed passes through `printable`: names, logs and errors may contain another user's text.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")  # colours, cursor, titles
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")


def printable(text: str) -> str:
    """Text that no terminal obeys: sequences are removed, other control characters written as in JSON.

    A lone carriage return, with which progress bars overwrite their line, begins a new line.
    """
    return _CONTROL.sub(lambda found: "\n" if found[0] == "\r" else f"\\u{ord(found[0]):04x}", _SEQUENCE.sub("", text))


def clean(text: str) -> str:
    """One line without control characters."""
    return "".join(char if char.isprintable() else " " for char in text)


def count(value: Any) -> str:
    """1,234,567, or a dash for None."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else "-"


def plural(value: int, noun: str) -> str:
    """1 episode, 1,234 episodes."""
    return f"{value:,} {noun}" if value == 1 else f"{value:,} {noun}s"


def number(value: float | None) -> str:
    """Four significant digits: 475, 22.5, 0.001234."""
    if value is None:
        return "-"
    if math.isfinite(value) and value == round(value) and abs(value) < 1e6:
        return str(round(value))
    return f"{value:.4g}"


def percent(part: Any, whole: Any) -> str:
    """A share of the whole, or empty if unknown. 100 % only if all of it is reached."""
    if not isinstance(part, int | float) or not isinstance(whole, int | float) or not whole:
        return ""
    return "100 %" if part >= whole else f"{min(99, round(100 * part / whole))} %"


def duration(seconds: Any) -> str:
    """42 s, 3 min 20 s, 2 h 05 min, 4 d 3 h."""
    if not isinstance(seconds, int | float) or not math.isfinite(seconds):
        return "-"
    whole = max(0, round(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if not minutes:
        return f"{whole} s"
    if not hours:
        return f"{minutes} min {whole % 60:02d} s"
    return f"{hours} h {minutes % 60:02d} min" if not days else f"{days} d {hours % 24} h"


def ago(moment: Any) -> str:
    """How long ago a time from status.json was."""
    try:
        then = datetime.fromisoformat(str(moment))
    except ValueError:
        return "-"
    seconds = (datetime.now(UTC) - then.replace(tzinfo=then.tzinfo or UTC)).total_seconds()
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{max(0, int(seconds))} s ago"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Aligned columns; `right` are columns of numbers. Lines are cut to the width of a terminal."""
    lines = [list(head), *([clean(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    text = []
    for line in lines:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        joined = "  ".join(cells).rstrip()
        text.append(joined if not limit or len(joined) <= limit else joined[: limit - 1] + "…")
    return "\n".join(text) + "\n"


def leaves(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping flattened to dotted names. An empty mapping is a value."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            found |= leaves(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def value(inner: Any) -> str:
    """A setting's value on one line."""
    return inner if isinstance(inner, str) and inner else json.dumps(inner, ensure_ascii=False)
