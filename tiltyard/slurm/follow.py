"""Follow a run's job: its state in the queue, then its log, until it has ended for good.

Requeues are followed. Interrupting the follower does not affect the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tiltyard.run.folder import Run
from tiltyard.run.logs import last_lines, new_text
from tiltyard.slurm.job_state import JobWatch, combined_state, job_of

POLL_SECONDS = 0.25  # between reads of the run folder
TAIL = 20  # lines of the job's output that are shown when the run is lost


def follow(run: Run, write: Callable[[str], object], notify: Callable[[str], object]) -> str:
    """`write` the log and `notify` about the job until the run is over; returns its last state."""
    watch, read = JobWatch(notify), dict[Path, int]()
    while True:
        # Poll before reading, so that everything written before the end is read.
        state, over = _poll(run, watch)
        for text in new_text(run, read):
            write(text)
        if over:
            return state
        time.sleep(POLL_SECONDS)


def _poll(run: Run, watch: JobWatch) -> tuple[str, bool]:
    """The current state, and whether the run is over. Slurm is queried before the state is read: a job writes its
    run's state before it ends."""
    job = job_of(run)
    if job is None:
        return run.state, run.state != "running"
    watch.poll(job, soon=run.state not in ("running", "queued"))  # it ends or is requeued
    state = run.state
    if watch.state is None:  # Slurm does not answer, only the folder is known; a queued run has not ended
        return state, state not in ("running", "queued")
    return combined_state(state, watch.state), not watch.state.active


def last_output(run: Run) -> str:
    """The last lines of the job's output: the reason why a run was lost before it had a log."""
    return "\n".join(last_lines(run.folder / "logs" / f"job-{job_of(run)}.out", TAIL))
