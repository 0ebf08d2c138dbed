"""One line of the doctor's report: `ok` needs nothing, `note` limits something, `bad` must be mended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "bad"]


@dataclass(frozen=True)
class Finding:
    """What was looked at, how it stands, what was found, and what to do about it."""

    what: str
    state: State
    found: str
    hint: str = ""
    node: str = ""
    """where, if not on this machine"""


def size(count: float) -> str:
    """Bytes as people read them."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} bytes"
