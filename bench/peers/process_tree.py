"""Resource use of a process and its descendants, from /proc. Standard library only: every peer's Python imports it."""

import os
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def _stats() -> dict[int, list[str]]:
    """Fields of /proc/PID/stat after the command's name, for all processes that still exist."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                found[int(folder.name)] = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
    return found


def _below(root: int, stats: dict[int, list[str]]) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, fields in stats.items():
        children.setdefault(int(fields[1]), []).append(pid)
    found = [root] if root in stats else []
    for pid in found:
        found.extend(children.get(pid, []))
    return found


def pids(root: int) -> list[int]:
    """The process and its descendants."""
    return _below(root, _stats())


def cpu_seconds(root: int) -> float:
    """CPU-seconds of the process, its descendants, and the children they have waited for."""
    stats = _stats()
    return sum(sum(map(int, stats[pid][11:15])) for pid in _below(root, stats)) / TICKS


def machine_seconds() -> float:
    """Core-seconds since boot in which the machine was not idle, including stolen time."""
    fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / TICKS  # all except idle and iowait


def pss(root: int) -> int:
    """Bytes of memory; a page that n processes share counts 1/n in each."""
    return sum(_kilobytes(pid, "smaps_rollup", "Pss:") for pid in pids(root)) * 1024


def usage(root: int) -> dict[str, int]:
    """Resident and shared memory in bytes, threads, and open file descriptors of the whole tree."""
    total = {"resident": 0, "shared memory": 0, "threads": 0, "file descriptors": 0}
    for pid in pids(root):
        total["resident"] += _kilobytes(pid, "status", "VmRSS:") * 1024
        total["shared memory"] += _kilobytes(pid, "status", "RssShmem:") * 1024
        total["threads"] += _kilobytes(pid, "status", "Threads:")
        try:
            total["file descriptors"] += len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 (names are enough)
        except OSError:
            continue
    return total


def _kilobytes(pid: int, file: str, key: str) -> int:
    """The number after a key in a /proc file; 0 if the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(key)), 0)
