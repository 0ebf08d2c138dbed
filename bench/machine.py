"""Describe the machine that a result was measured on."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

from peers.process_tree import machine_seconds


def describe() -> dict[str, object]:
    cpu = next((x.split(":")[1].strip() for x in _lines("/proc/cpuinfo") if x.startswith("model name")), "unknown")
    memory = next(int(x.split()[1]) for x in _lines("/proc/meminfo") if x.startswith("MemTotal"))
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 2**20, 1),
        "gpu": Path("/proc/driver/nvidia/version").exists(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def busy_cores(seconds: float = 1.0) -> float:
    """Number of cores that other programs keep busy while this process sleeps."""
    before, began = machine_seconds(), time.monotonic()
    time.sleep(seconds)
    return (machine_seconds() - before) / (time.monotonic() - began)
