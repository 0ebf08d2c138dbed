"""Refusals of what an operating system cannot do, before anything is started or written. Table: docs/platforms.md.

Windows has no fork, flock or POSIX signals: nothing runs there. macOS has no packet sockets between processes, no
prctl, no /proc and no core affinity: what depends on them is refused, the rest works in one process.
"""

from __future__ import annotations

import sys

from tiltyard.errors import UseError

_SYSTEM: str = sys.platform
_NAMES = {"win32": "Windows", "cygwin": "Cygwin", "darwin": "macOS"}


def is_linux() -> bool:
    return _SYSTEM == "linux"


def system_name() -> str:
    return _NAMES.get(_SYSTEM, _SYSTEM)


def refuse_windows() -> None:
    """UseError on Windows itself; WSL is Linux."""
    if _SYSTEM in ("win32", "cygwin"):
        hint = "install it inside WSL 2, the Windows Subsystem for Linux; docs/platforms.md explains how"
        raise UseError(f"Tiltyard does not run on {system_name()}", hint)


def require_linux(what: str, hint: str) -> None:
    """UseError on another system; `what` begins the sentence."""
    if not is_linux():
        raise UseError(f"{what} needs Linux, and this is {system_name()}", hint)
