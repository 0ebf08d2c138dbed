"""CPU, memory and GPU use of a run's processes on one machine: `python -m tiltyard.slurm.usage JOB SECONDS`.

Prints one line of JSON, or one every SECONDS seconds until the pipe closes.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tiltyard.processes import proc
from tiltyard.processes.proc import Process
from tiltyard.slurm.commands import output_of

FIRST_INTERVAL = 0.5  # seconds over which the first CPU shares are measured
QUERY = "index,name,utilization.gpu,memory.used,memory.total"


def of_job(job: str) -> list[Process]:
    """The job's processes on this node, except this one and its parent."""
    node = os.environ.get("SLURMD_NODENAME")
    mine = {os.getpid(), os.getppid()}
    return [
        each
        for each in proc.own_processes()
        if each.pid not in mine
        and (variables := proc.environment(each.pid)).get("SLURM_JOB_ID") == job
        and variables.get("SLURMD_NODENAME") == node
    ]


def snapshots(list_processes: Callable[[], Iterable[Process]], every: float) -> Iterator[dict[str, Any]]:
    """Measure the processes every so many seconds; once if `every` is 0."""
    before, then = {each.pid: each.cpu for each in list_processes()}, time.monotonic()
    pause = FIRST_INTERVAL
    while True:
        time.sleep(pause)
        found, now = sorted(list_processes(), key=lambda each: each.pid), time.monotonic()
        yield {
            "node": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            "processes": [
                {
                    "pid": each.pid,
                    "cpu": round(100 * max(0.0, each.cpu - before.get(each.pid, each.cpu)) / (now - then)),
                    "threads": each.threads,
                    "resident": each.rss,
                    "proportional": proc.pss(each.pid),
                    "command": each.command,
                }
                for each in found
            ],
            "gpus": gpus(),
        }
        if not every:
            return
        before, then, pause = {each.pid: each.cpu for each in found}, now, every


def gpus() -> list[dict[str, str]]:
    """GPUs as nvidia-smi lists them; empty without nvidia-smi."""
    output = output_of(["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"], 10) or ""
    names = ("index", "name", "busy", "used", "total")
    rows = [[word.strip() for word in line.split(",")] for line in output.splitlines()]
    return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]


def gpu_count() -> int:
    """The number of GPUs that nvidia-smi lists; 0 without nvidia-smi."""
    return sum(line.startswith("GPU ") for line in (output_of(["nvidia-smi", "-L"], 60) or "").splitlines())


def main() -> int:
    """Print snapshots until the reader is gone."""
    job, every = sys.argv[1], float(sys.argv[2])
    try:
        for snapshot in snapshots(lambda: of_job(job), every):
            sys.stdout.write(json.dumps(snapshot) + "\n")
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
