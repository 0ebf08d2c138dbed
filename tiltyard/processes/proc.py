"""The user's processes as read from /proc: commands, resources, and which process started which."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """One process at one moment."""

    pid: int
    parent: int
    command: str
    threads: int
    cpu: float
    """CPU seconds used so far"""
    rss: int
    """resident bytes"""
    started: float
    """Unix time"""


def own_processes() -> Iterator[Process]:
    """All processes of this user."""
    for folder in PROC.glob("[0-9]*"):
        process = read(int(folder.name))
        if process is not None:
            yield process


def read(pid: int) -> Process | None:
    """The process with that pid; None if it is gone, another user's, or a zombie."""
    folder = PROC / str(pid)
    try:
        if folder.stat().st_uid != os.getuid():
            return None
        # The command's name (field 2) may hold spaces and brackets: count from the last one.
        name, _, rest = (folder / "stat").read_text(errors="replace").rpartition(")")
        fields = rest.split()
        cmdline = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
    except OSError:
        return None
    if len(fields) < 22 or fields[0] in "ZX":
        return None
    return Process(
        pid=pid,
        parent=int(fields[1]),
        command=cmdline or name.partition("(")[2],
        threads=int(fields[17]),
        cpu=(int(fields[11]) + int(fields[12])) / _TICKS,
        rss=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
        started=_boot() + int(fields[19]) / _TICKS,
    )


def _boot() -> float:
    return time.time() - float((PROC / "uptime").read_text().split()[0])


def pss(pid: int) -> int | None:
    """Proportional set size in bytes: shared pages are divided among their users. None if unknown."""
    try:
        for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return None
    return None


def environment(pid: int) -> dict[str, str]:
    """The environment variables that the process was started with; empty if unreadable."""
    try:
        whole = (PROC / str(pid) / "environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(pair.partition("=")[::2] for pair in whole.split("\0") if "=" in pair)


def tree(pid: int) -> list[Process]:
    """The process and all its descendants."""
    everything = list(own_processes())
    wanted, found = {pid}, []
    while more := [each for each in everything if each.pid in wanted and each not in found]:
        found += more
        wanted |= {each.pid for each in everything if each.parent in wanted}
    return found
