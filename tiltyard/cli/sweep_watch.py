"""`sweep watch`: look again until nobody carries a sweep out and no trial runs. Ending it ends nothing else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tiltyard.cli.sweep_show import summary
from tiltyard.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, TiltyardError, UseError

if TYPE_CHECKING:
    from tiltyard.sweep.folder import Sweep

EVERY, POLITE = 2.0, 10.0  # seconds between two looks, at folders and at a queue


def watch(sweep: Sweep, every: float | None, say: Callable[[str], None]) -> int:
    from tiltyard.sweep.report import summarize

    before, counts, launcher = "", dict[str, int](), sweep.launcher
    usual = EVERY if launcher == "local" else POLITE
    pause = usual if every is None else max(0.1, every)
    turns = launcher == "template"  # taken here, too: its jobs may not be able to submit others
    while True:
        taken = turns and _take_turn(sweep, say)
        found = summarize(sweep)
        # A trial that ended since the turn has left room for the next turn to use.
        settled, counts = not turns or (taken and found.counts == counts), found.counts
        said = summary(found)
        if said != before:
            sys.stdout.write(("\033[H\033[2J" if sys.stdout.isatty() else "") + said)
            sys.stdout.flush()
            before = said
        if found.state in ("finished", "failed"):
            return EXIT_DONE if found.state == "finished" else EXIT_FAILED
        if found.state != "running" and not found.counts.get("running") and settled:
            return EXIT_RESUMABLE
        time.sleep(pause)


def _take_turn(sweep: Sweep, say: Callable[[str], None]) -> bool:
    """False when the queue gave no answer, which it may do later."""
    from tiltyard.sweep import tick

    try:
        tick.run_tick(sweep, say)
    except UseError:
        raise
    except TiltyardError as error:
        say(error.message)
        return False
    return True
