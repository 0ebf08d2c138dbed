"""`sweep stop`: ask a sweep's controller, jobs or trials to save and stop, and wait until they have."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from tiltyard.cli.sweep_start import echo, trial_count
from tiltyard.errors import EXIT_DONE, EXIT_FAILED
from tiltyard.run import atomic
from tiltyard.sweep.folder import find_sweep

WAIT_SECONDS = 60.0  # for trials to save and stop
POLL_SECONDS = 0.1  # between two reads of the folders; a queue is asked less often


def run_stop(args: argparse.Namespace) -> int:
    from tiltyard.slurm.job_state import Backoff
    from tiltyard.sweep.report import summarize

    sweep = find_sweep(args.target or "last")
    found = summarize(sweep)
    at_work = [row for row in found.rows if row.state in ("running", "queued")]
    if args.dry_run or (not at_work and found.state != "running"):
        count = trial_count(len(at_work))
        sys.stderr.write(f"would stop {count} of {sweep.id}\n" if at_work else f"no trial of {sweep.id} is running\n")
        return EXIT_DONE
    atomic.write_text(sweep.stop_file, f"{atomic.now()}\n")
    away: dict[int, str] = {}  # trial -> the only host on which it can be signalled
    if sweep.launcher != "local":
        from tiltyard.sweep.tick import run_tick

        run_tick(sweep, echo)
    elif not sweep.controlled:
        away = {row.trial.number: host for row in at_work if (host := _terminate(row.folder))}
    pace, deadline = Backoff(), time.monotonic() + (WAIT_SECONDS if args.wait is None else args.wait)
    while (now := summarize(sweep)).state == "running" or any(
        row.state == "running" and row.trial.number not in away for row in now.rows
    ):
        left = deadline - time.monotonic()
        if left <= 0:
            sys.stderr.write(f"trials of {sweep.id} are finishing an update; they will save and stop after it\n")
            return EXIT_FAILED
        time.sleep(min(left, POLL_SECONDS if sweep.launcher == "local" else pace.next_pause()))
    if away:
        which, hosts = ", ".join(map(str, away)), ", ".join(sorted(set(away.values())))
        sys.stderr.write(f"{sweep.id} has no controller, and trial {which} can only be stopped on host {hosts}\n")
        sys.stderr.write(f"next, on that host: tiltyard sweep stop {sweep.typed}\n")
        return EXIT_FAILED
    sys.stderr.write(f"sweep {sweep.id} is stopped\nnext: tiltyard sweep start {sweep.typed}\n")
    return EXIT_DONE


def _terminate(folder: Path | None) -> str:
    """Ask a trial without a controller to save and stop; if its process is on another host, return that host."""
    from tiltyard.run.lock import liveness, read_owner

    owner = read_owner(folder) if folder is not None else None
    if owner is None:
        return ""
    if (seen := liveness(owner)) == "alive":
        with contextlib.suppress(OSError):
            os.kill(int(owner["pid"]), signal.SIGTERM)
    return str(owner.get("host") or "?") if seen == "unknown" else ""
