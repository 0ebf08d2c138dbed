"""`sweep watch`: print a sweep's summary whenever it changes, until nothing of it runs. Ctrl-C only stops watching."""

from __future__ import annotations

import argparse
import sys
import time

from tiltyard.cli.sweep_show import summary
from tiltyard.cli.sweep_start import echo
from tiltyard.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, TiltyardError, UseError
from tiltyard.sweep.folder import Sweep, find_sweep

POLL_SECONDS, QUEUE_SECONDS = 2.0, 10.0  # between two updates: from folders, from a queue


def run_watch(args: argparse.Namespace) -> int:
    from tiltyard.sweep.report import summarize

    sweep = find_sweep(args.target or "last")
    before, counts, launcher = "", dict[str, int](), sweep.launcher
    usual = POLL_SECONDS if launcher == "local" else QUEUE_SECONDS
    pause = usual if args.every is None else max(0.1, args.every)
    ticks = launcher == "template"  # run here, too: the jobs may not be able to submit others
    while True:
        ticked = ticks and _tick(sweep)
        found = summarize(sweep)
        # A trial that ended since the tick has made way for another, which the next tick submits.
        settled, counts = not ticks or (ticked and found.counts == counts), found.counts
        text = summary(found)
        if text != before:
            sys.stdout.write(("\033[H\033[2J" if sys.stdout.isatty() else "") + text)
            sys.stdout.flush()
            before = text
        if found.state in ("finished", "failed"):
            return EXIT_DONE if found.state == "finished" else EXIT_FAILED
        if found.state != "running" and not found.counts.get("running") and settled:
            return EXIT_RESUMABLE
        time.sleep(pause)


def _tick(sweep: Sweep) -> bool:
    """Run a tick; False if the queue did not answer, which may be temporary."""
    from tiltyard.sweep.tick import run_tick

    try:
        run_tick(sweep, echo)
    except UseError:
        raise
    except TiltyardError as error:
        echo(error.message)
        return False
    return True
