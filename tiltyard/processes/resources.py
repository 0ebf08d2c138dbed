"""Cores, memory and address of this machine, or of the part given to us."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from functools import cache
from pathlib import Path

import psutil

from tiltyard.errors import UseError

CACHE_LINE = 64  # bytes
SPARE_FILES = 64  # for logs, checkpoints, trackers and the processes of an evaluation
SAMPLE_SECONDS = 0.2  # how long core usage is measured


def usable_cores() -> int:
    """Cores that this process may use: its affinity, its job's share, and its control group's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if given.isdecimal() and "SLURM_STEP_ID" in os.environ:  # Slurm may not enforce it
        allowed = max(1, min(allowed, int(given)))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return allowed if quota == "max" else max(1, min(allowed, round(int(quota) / int(period))))
    except (OSError, ValueError):
        return allowed


@cache
def free_cores() -> float:
    """Idle cores among the usable ones, at least 1. Measured once, before our own processes use them;
    `free_cores.cache_clear()` makes the next call measure again."""
    usable = usable_cores()
    if not hasattr(os, "sched_getaffinity"):
        return float(usable)
    before, start = _idle_seconds(), time.monotonic()
    time.sleep(SAMPLE_SECONDS)  # so that the core of this process counts as free
    return max(1.0, min(usable, (_idle_seconds() - before) / (time.monotonic() - start)))


def _idle_seconds() -> float:
    """Idle seconds of all cores that this process may run on, since boot."""
    cores = psutil.cpu_times(percpu=True)
    return sum(cores[number].idle + cores[number].iowait for number in os.sched_getaffinity(0))


def own_address() -> str:
    """The address by which other machines reach this one: its host name's, or else the outgoing interface's."""
    with contextlib.suppress(OSError):
        found = socket.gethostbyname(socket.gethostname())
        if not found.startswith("127."):
            return found
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; a documentation address
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def rss_bytes() -> int:
    """Resident bytes of this process."""
    return psutil.Process().memory_info().rss


def free_memory() -> int:
    """Bytes still available: the system's, or what the control group's limit leaves if that is less."""
    available = psutil.virtual_memory().available
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    return available if limit is None or used is None else min(max(0, limit - used), available)


def require_files(count: int, what: str, fewer: str) -> None:
    """Let this process open so many more files: raise its soft limit if that is too low. UseError, which begins with
    `what` and advises `fewer`, if the hard limit is too low as well."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = sum(1 for _ in Path("/dev/fd").iterdir()) + count + SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        hint = f"{fewer}, or ask the administrators for a higher hard limit of open files (ulimit -Hn)"
        raise UseError(f"{what} needs {wanted:,} open files, but this process may open {hard:,} (ulimit -n)", hint)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None
