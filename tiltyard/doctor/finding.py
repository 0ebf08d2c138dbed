"""One line of the doctor's report: `ok` is fine, `note` is a limitation, `bad` must be fixed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "bad"]


@dataclass(frozen=True)
class Finding:
    """The name of a check, its state, what it found, and what to do about it."""

    what: str
    state: State
    found: str
    hint: str = ""
    node: str = ""
    """the node, if not this machine"""


def size(count: float) -> str:
    """Format a number of bytes."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} bytes"
