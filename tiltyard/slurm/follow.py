"""Follow a run's job: its state in the queue, then its log, until it has ended for good.

Requeues are followed. Interrupting the follower does not affect the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tiltyard.run.folder import Run
from tiltyard.run.logs import new_text
from tiltyard.slurm.job_state import Backoff, JobState, combined_state, job_of, no_answer, query_jobs

POLL_SECONDS = 0.25  # between reads of the run folder
TAIL = 20  # lines of the job's output that are shown when the run is lost


class Follower:
    """Shows one run's progress through the queue: `write` gets log text, `notify` sentences about the job."""

    def __init__(self, run: Run, write: Callable[[str], object], notify: Callable[[str], object]) -> None:
        self._run, self._write, self._notify = run, write, notify
        self._read: dict[Path, int] = {}
        self._backoff, self._shown = Backoff(), ""
        self._next_query = 0.0
        self._job_state: JobState | None = None

    def follow(self) -> str:
        """Write the log until the run is over; returns its last state."""
        while True:
            # Poll before reading, so that everything written before the end is read.
            state, over = self._poll()
            for text in new_text(self._run, self._read):
                self._write(text)
            if over:
                return state
            time.sleep(POLL_SECONDS)

    def _poll(self) -> tuple[str, bool]:
        """The current state, and whether the run is over. Slurm is queried before the state is read: a job writes its
        run's state before it ends."""
        job = job_of(self._run)
        if job is None:
            return self._run.state, self._run.state != "running"
        if self._run.state not in ("running", "queued"):
            self._next_query = min(self._next_query, time.monotonic() + Backoff.FIRST)  # it ends or is requeued
        if time.monotonic() >= self._next_query:
            self._query(job)
        state = self._run.state
        if self._job_state is None:  # Slurm does not answer, only the folder is known; a queued run has not ended
            return state, state not in ("running", "queued")
        return combined_state(state, self._job_state), not self._job_state.active

    def _query(self, job: str) -> None:
        answers = query_jobs([job])
        self._job_state = answers[job] if answers is not None else None
        sentence = self._job_state.describe(job) if self._job_state is not None else no_answer(job)
        if sentence != self._shown:
            self._shown = sentence
            self._backoff.reset()
            self._notify(sentence)
        self._next_query = time.monotonic() + self._backoff.next_pause()


def last_output(run: Run) -> str:
    """The last lines of the job's output: the reason why a run was lost before it had a log."""
    try:
        lines = (run.folder / "logs" / f"job-{job_of(run)}.out").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-TAIL:])
