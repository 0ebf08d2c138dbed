"""What a run's processes use on one machine: `python -m tiltyard.slurm.usage JOB SECONDS` prints a line of JSON.

With SECONDS above 0 it prints one every so many seconds, until nobody reads them. Standard library only.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tiltyard.processes import proc
from tiltyard.processes.proc import Process

FIRST = 0.5  # seconds between the two looks that the first shares of CPU are taken from
QUERY = "index,name,utilization.gpu,memory.used,memory.total"


def of_job(job: str) -> list[Process]:
    """The processes of this user that a job has started on this node, but for ourselves."""
    node = os.environ.get("SLURMD_NODENAME")
    mine = {os.getpid(), os.getppid()}
    return [
        each
        for each in proc.own_processes()
        if each.pid not in mine
        and (told := proc.environment(each.pid)).get("SLURM_JOB_ID") == job
        and told.get("SLURMD_NODENAME") == node
    ]


def snapshots(look: Callable[[], Iterable[Process]], every: float) -> Iterator[dict[str, Any]]:
    """What the processes use, again and again; once with every = 0."""
    before, then = {each.pid: each.cpu for each in look()}, time.monotonic()
    pause = FIRST
    while True:
        time.sleep(pause)
        found, now = sorted(look(), key=lambda each: each.pid), time.monotonic()
        yield {
            "node": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            "processes": [_row(each, (each.cpu - before.get(each.pid, each.cpu)) / (now - then)) for each in found],
            "gpus": gpus(),
        }
        if not every:
            return
        before, then, pause = {each.pid: each.cpu for each in found}, now, every


def _row(process: Process, share: float) -> dict[str, Any]:
    return {
        "pid": process.pid,
        "cpu": round(100 * max(0.0, share)),
        "threads": process.threads,
        "resident": process.rss,
        "proportional": proc.pss(process.pid),
        "command": process.command,
    }


def gpus() -> list[dict[str, str]]:
    """As nvidia-smi tells them; none where it is not there."""
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10)
    except (OSError, subprocess.SubprocessError):
        return []
    names = ("index", "name", "busy", "used", "total")
    rows = [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines()]
    return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)] if not done.returncode else []


def main() -> int:
    """Print until nobody reads."""
    job, every = sys.argv[1], float(sys.argv[2])
    try:
        for told in snapshots(lambda: of_job(job), every):
            sys.stdout.write(json.dumps(told) + "\n")
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
