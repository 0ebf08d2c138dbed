"""`sweep` where trials are jobs: what would be submitted, and submitting it. Nobody stays to watch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from tiltyard.cli.sweep_show import summary
from tiltyard.errors import EXIT_DONE, EXIT_FAILED

if TYPE_CHECKING:
    from tiltyard.sweep.folder import Sweep
    from tiltyard.sweep.preflight import CheckedPlan


def dry(prepared: CheckedPlan) -> None:
    """What would be submitted: the script, and how many trials it would be for."""
    from tiltyard.config.site_file import runs_root
    from tiltyard.sweep.folder import Sweep
    from tiltyard.sweep.tick import would_submit

    assert prepared.profile is not None
    sweep = Sweep(runs_root().absolute() / prepared.name / "sweep-NNNN")
    sys.stdout.write(would_submit(sweep, prepared.plan, prepared.profile, prepared.count))
    said = f"{prepared.count:,} trials of {prepared.name} would be submitted, {prepared.plan.max_parallel:,} at once"
    sys.stderr.write(f"{said}; nothing was made\n")


def submit(sweep: Sweep, say: Callable[[str], None], *, leave_stopped: bool) -> int:
    """A turn of the sweep, by a person: what is due is submitted."""
    from tiltyard.sweep import tick
    from tiltyard.sweep.report import summarize

    tick.run_tick(sweep, say, afresh=True, leave_stopped=leave_stopped)
    found = summarize(sweep)
    sys.stdout.write(summary(found))
    return EXIT_FAILED if found.state == "failed" else EXIT_DONE
