"""What happens to a job after its trainer has exited: a pure function of the exit, the counts and the profile.

trainer exit                   outcome
0                              done
75 after SIGUSR2 (limit near)  requeue; unless twice without progress, out of requeues, or `tiltyard stop`
75 after SIGTERM               stopped: cancelled, or preempted; then Slurm itself requeues the job
75 after both                  late: requeue if Slurm reports that the time limit ended the save
75, the disk failed too long   again: restart the trainer inside the job, `slurm.retry` times; then requeue
any, Ray's head lost           requeue, `slurm.retry` times; then failed
killed by a signal             again, `slurm.retry` times; then failed
anything else                  failed

Whether an exit code is resumable or final, and whether a stop was a failure, is in failures.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from tiltyard.errors import EXIT_RESUMABLE
from tiltyard.failures import FailureClass, class_of_exit
from tiltyard.processes.exit_reason import killed_by

SAVE_MARGIN = 2.0  # times the longest recent save, as disks are slower at times
STILL = 2  # jobs in a row without a new checkpoint after which the run fails
Outcome = Literal["done", "requeue", "late", "stopped", "failed", "again"]


@dataclass(frozen=True)
class Counts:
    """Counts that are kept from job to job."""

    requeues: int = 0
    still: int = 0
    """jobs in a row without progress"""
    heads: int = 0
    """times that Ray's head was lost"""


@dataclass(frozen=True)
class TrainerExit:
    """How a trainer exited, and which signals came before."""

    code: int
    asked: str | None
    """SIGUSR2 or SIGTERM, the last signal that the trainer was sent"""
    stop: bool
    """whether `tiltyard stop` was typed"""
    began: int | None
    ended: int | None
    """env steps of the newest checkpoint at the start and at the end of the job; None if unknown"""
    tries_left: int
    lost: str = ""
    """how Ray's head was lost"""
    near: bool = False
    """whether the time limit was near before any other signal came"""
    failure: FailureClass | None = None
    """the class of the failure that made the trainer stop, if one did"""


def lead_needed(lead: float, save_seconds: float, length: float) -> float:
    """Seconds before the time limit at which to save: half of the lead is for signal and update, the rest for saving.
    More than the lead if recent saves took long, up to half of the job's length."""
    return max(lead, min(lead / 2 + SAVE_MARGIN * save_seconds, length / 2))


def decide_outcome(end: TrainerExit, counts: Counts, requeues: int, retry: int = 0) -> tuple[Outcome, str, Counts]:
    """The job's outcome, the reason as a sentence, and the new counts."""
    if end.lost and (end.stop or end.asked == "SIGTERM"):  # Slurm ends Ray's processes along with the others
        end = replace(end, code=EXIT_RESUMABLE)
    elif end.lost:
        if counts.heads >= retry:
            return "failed", f"{end.lost}; no retries are left (slurm.retry = {retry})", counts
        return "requeue", f"{end.lost}; the job is requeued", replace(counts, heads=counts.heads + 1)
    near_limit, ended = end.near or end.asked == "SIGUSR2", end.asked == "SIGTERM"
    kind = class_of_exit(end.code)
    passing = end.code == EXIT_RESUMABLE and end.failure is not None and not near_limit
    if kind is None:
        return "done", "", counts
    if kind == "final":
        return "failed", f"the trainer exited with code {end.code}", counts
    if end.stop or (ended and not near_limit) or (end.code == EXIT_RESUMABLE and not near_limit and not passing):
        return "stopped", "", counts
    if not near_limit:
        how = "the run folder could not be written" if passing else f"the trainer {killed_by(-end.code)}"
        if end.tries_left > 0:
            return "again", f"{how}; restarting it inside the job", counts
        if not passing:
            return "failed", f"{how}; no restarts are left (slurm.retry)", counts
        if counts.requeues >= requeues:
            return "stopped", f"{how}, and no requeues are left (slurm.requeues = {requeues})", counts
        return "requeue", f"{how}; the job is requeued", replace(counts, requeues=counts.requeues + 1)
    still = end.ended is not None and end.ended <= (end.began or 0)
    counts = replace(counts, still=counts.still + 1 if still else 0)
    if counts.still >= STILL:
        return "failed", f"no progress: {counts.still} jobs in a row ended at env step {end.ended:,}", counts
    if counts.requeues >= requeues:
        return "stopped", f"the time limit was reached, and no requeues are left (slurm.requeues = {requeues})", counts
    counts = replace(counts, requeues=counts.requeues + 1)
    times = f"(requeue {counts.requeues} of at most {requeues})"
    if ended:
        return "late", f"ended while saving near the time limit; requeued if the limit was the cause {times}", counts
    at = "" if end.ended is None else f" at env step {end.ended:,}"
    return "requeue", f"the time limit is near: saved{at}, back in the queue {times}", counts
