"""`sweep stop`: whoever carries a sweep out, its jobs or its trials are asked to save and end, and waited for."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tiltyard.errors import EXIT_DONE, EXIT_FAILED
from tiltyard.run import atomic

if TYPE_CHECKING:
    from tiltyard.sweep.folder import Sweep

STOPS = 60.0  # seconds that trials have to save and end
POLL_SECONDS = 0.1  # seconds between two looks at folders; those at a queue are further apart


def stop(sweep: Sweep, args: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Ask, then wait until nobody is at work any more who was asked."""
    from tiltyard.slurm.job_state import Backoff
    from tiltyard.sweep.report import summarize

    found = summarize(sweep)
    at_work = [row for row in found.rows if row.state in ("running", "queued")]
    if args.dry_run or (not at_work and found.state != "running"):
        sys.stderr.write(f"{len(at_work)} trials of {sweep.id} are at work\n")
        return EXIT_DONE
    atomic.write_text(sweep.stop_file, f"{atomic.now()}\n")
    away: dict[int, str] = {}  # trial -> the host on which alone it can be asked
    if sweep.launcher != "local":
        from tiltyard.sweep import tick

        tick.run_tick(sweep, say)
    elif not sweep.controlled:
        away = {row.trial.number: host for row in at_work if (host := _ask(row.folder))}
    pace, deadline = Backoff(), time.monotonic() + (STOPS if args.wait is None else args.wait)
    while (now := summarize(sweep)).state == "running" or any(
        row.state == "running" and row.trial.number not in away for row in now.rows
    ):
        left = deadline - time.monotonic()
        if left <= 0:
            sys.stderr.write(f"trials of {sweep.id} are still finishing their updates; they will save and end\n")
            return EXIT_FAILED
        time.sleep(min(left, POLL_SECONDS if sweep.launcher == "local" else pace.next_pause()))
    if away:
        which, hosts = ", ".join(map(str, away)), ", ".join(sorted(set(away.values())))
        sys.stderr.write(f"nobody carries {sweep.id} out, and trial {which} can only be asked to end on host {hosts}\n")
        sys.stderr.write(f"next, there: tiltyard sweep stop {sweep.typed}\n")
        return EXIT_FAILED
    sys.stderr.write(f"sweep {sweep.id} is stopped\nnext: tiltyard sweep start {sweep.typed}\n")
    return EXIT_DONE


def _ask(folder: Path | None) -> str:
    """Ask a trial that nobody watches to save and end; or the name of the host where it has to be asked."""
    from tiltyard.run.lock import liveness, read_owner

    owner = read_owner(folder) if folder is not None else None
    if owner is None:
        return ""
    if (seen := liveness(owner)) == "alive":
        with contextlib.suppress(OSError):
            os.kill(int(owner["pid"]), signal.SIGTERM)
    return str(owner.get("host") or "?") if seen == "unknown" else ""
