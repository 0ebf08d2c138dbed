"""Processes of this user as /proc tells them: what they are called, what they use, who started whom."""

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
    """seconds of CPU used so far"""
    rss: int
    """bytes in memory"""
    started: float
    """as time.time() says it"""


def own_processes() -> Iterator[Process]:
    """All processes of this user."""
    for folder in PROC.glob("[0-9]*"):
        process = read(int(folder.name))
        if process is not None:
            yield process


def read(pid: int) -> Process | None:
    """The process of that number; None when it is gone, somebody else's, or only waits to be forgotten."""
    folder = PROC / str(pid)
    try:
        if folder.stat().st_uid != os.getuid():
            return None
        # The command's name (field 2) may hold spaces and brackets: count from the last one.
        name, _, rest = (folder / "stat").read_text(errors="replace").rpartition(")")
        fields = rest.split()
        words = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
    except OSError:
        return None
    if len(fields) < 22 or fields[0] in "ZX":
        return None
    return Process(
        pid=pid,
        parent=int(fields[1]),
        command=words or name.partition("(")[2],
        threads=int(fields[17]),
        cpu=(int(fields[11]) + int(fields[12])) / _TICKS,
        rss=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
        started=_boot() + int(fields[19]) / _TICKS,
    )


def _boot() -> float:
    return time.time() - float((PROC / "uptime").read_text().split()[0])


def pss(pid: int) -> int | None:
    """Bytes in memory with what is shared divided among those who share it; None where the system does not tell."""
    try:
        for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return None
    return None


def environment(pid: int) -> dict[str, str]:
    """The variables that the process was started with; empty when they cannot be read."""
    try:
        whole = (PROC / str(pid) / "environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(pair.partition("=")[::2] for pair in whole.split("\0") if "=" in pair)


def tree(pid: int) -> list[Process]:
    """The process and all that it and its children started."""
    everyone = list(own_processes())
    wanted, found = {pid}, []
    while more := [each for each in everyone if each.pid in wanted and each not in found]:
        found += more
        wanted |= {each.pid for each in everyone if each.parent in wanted}
    return found
