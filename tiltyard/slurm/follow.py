"""Following a run that is a job: what the queue says, then its log, until it has ended for good.

Requeues are followed through. Whoever stops following leaves the job as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tiltyard.run.folder import Run
from tiltyard.run.logs import new_text
from tiltyard.slurm.job_state import Backoff, JobState, combined_state, job_of, query_jobs

POLL_SECONDS = 0.25  # seconds between looks at the folder
TAIL = 20  # lines of a job's own output that are shown when it is lost


class Follower:
    """One run on its way through the queue."""

    def __init__(self, run: Run, write: Callable[[str], object], say: Callable[[str], object]) -> None:
        self._run, self._write, self._say = run, write, say
        self._read: dict[Path, int] = {}
        self._pace, self._said = Backoff(), ""
        self._due = 0.0
        self._told: JobState | None = None

    def follow(self) -> str:
        """Write what comes until nothing more can come; returns the run's last state."""
        while True:
            # Asked before reading: what was written before the end is then surely read.
            state, over = self._look()
            for text in new_text(self._run, self._read):
                self._write(text)
            if over:
                return state
            time.sleep(POLL_SECONDS)

    def _look(self) -> tuple[str, bool]:
        """The state as seen now, and whether the run is over. Slurm is asked first: a job writes before it ends, its
        last words after the run's own end."""
        job = job_of(self._run)
        if job is None:
            return self._run.state, self._run.state != "running"
        if self._run.state not in ("running", "queued"):
            self._due = min(self._due, time.monotonic() + Backoff.FIRST)  # it ends, or goes back into the queue
        if time.monotonic() >= self._due:
            self._ask(job)
        state = self._run.state
        if self._told is None:  # the folder alone has to do: a run that waits has not ended
            return state, state not in ("running", "queued")
        return combined_state(state, self._told), not (self._told.pending or self._told.running)

    def _ask(self, job: str) -> None:
        answers = query_jobs([job])
        self._told = answers[job] if answers is not None else None
        sentence = self._told.describe(job) if self._told is not None else f"Slurm does not answer about job {job}"
        if sentence != self._said:
            self._said = sentence
            self._pace.reset()
            self._say(sentence)
        self._due = time.monotonic() + self._pace.next_pause()


def last_output(run: Run) -> str:
    """The end of what the job itself wrote: why a run is lost that never got as far as a log of its own."""
    try:
        lines = (run.folder / "logs" / f"job-{job_of(run)}.out").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-TAIL:])
