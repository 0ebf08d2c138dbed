"""The user's processes, read with psutil: commands, resources, and which process started which."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

PROC = Path("/proc")


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
    for pid in psutil.pids():
        if (process := read(pid)) is not None:
            yield process


def read(pid: int) -> Process | None:
    """The process with that pid; None if it is gone, another user's, or a zombie."""
    with suppress(psutil.Error, OSError):
        found = psutil.Process(pid)
        with found.oneshot():
            if found.uids().effective != os.geteuid() or found.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                return None
            times = found.cpu_times()
            return Process(
                pid=pid,
                parent=found.ppid(),
                command=" ".join(found.cmdline()) or found.name(),
                threads=found.num_threads(),
                cpu=times.user + times.system,
                rss=found.memory_info().rss,
                started=found.create_time(),
            )
    return None


def pss(pid: int) -> int | None:
    """Proportional set size in bytes: shared pages are divided among their users. None if unknown."""
    with suppress(psutil.Error, OSError):
        return int(psutil.Process(pid).memory_full_info().pss)
    return None


def environment(pid: int) -> dict[str, str]:
    """The environment variables that the process was started with; empty if unreadable."""
    with suppress(psutil.Error, OSError):
        return psutil.Process(pid).environ()
    return {}


def tree(pid: int) -> list[Process]:
    """The process and all its descendants."""
    with suppress(psutil.Error):
        pids = [pid, *(each.pid for each in psutil.Process(pid).children(recursive=True))]
        return [found for each in pids if (found := read(each)) is not None]
    return []
