"""What Slurm says of jobs, and what that makes of their runs: one question for many jobs, asked seldom.

squeue knows jobs that wait, run or ended a while ago; sacct, where a site has it, knows older ones. Where there is no
Slurm, or it gives no answer, a run is what its folder says.

    folder says              Slurm says       seen as
    finished, failed         anything         the same
    any other                waits            queued
    created, queued, lost    runs             running: it is starting, or starting again
    stopped                  runs             stopped: the job is about to end
    created, queued, lost    ended, unknown   lost: the job is gone and said nothing

A job is named by its number, a task of an array by two: 123_4.
"""

from __future__ import annotations

import getpass
import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiltyard.errors import UseError
from tiltyard.run.folder import Run
from tiltyard.slurm import FOLDER, JOB_NUMBER, RESUBMITTED
from tiltyard.slurm.commands import run_command

TIMEOUT = 20.0  # seconds for an answer: somebody waits for a listing
WAITS = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
RUNS = ("RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
UNKNOWN = "UNKNOWN"
_ID = re.compile(r"\d+(_\d+)?")


@dataclass(frozen=True)
class JobState:
    """What Slurm says of a job: its state in Slurm's own word, why it waits, where it runs."""

    state: str
    reason: str = ""
    nodes: str = ""

    @property
    def pending(self) -> bool:
        return self.state in WAITS

    @property
    def running(self) -> bool:
        return self.state in RUNS

    def describe(self, job: str) -> str:
        """job 5 waits: Resources; job 5 runs on node1; job 5 ended: TIMEOUT."""
        if self.pending:
            why = self.reason if self.reason not in ("", "None") else "Slurm has not looked at it yet"
            return f"job {job} waits: {why}"
        if self.running:
            return f"job {job} runs on {self.nodes}" if self.nodes else f"job {job} runs"
        return (
            f"job {job} is not known to Slurm any more" if self.state == UNKNOWN else f"job {job} ended: {self.state}"
        )


def job_of(run: Run, status: dict[str, Any] | None = None) -> str | None:
    """The id of the job that the run was last submitted as; None for a run that never was, or not to Slurm."""
    job = (run.status() if status is None else status).get("job")
    if not isinstance(job, dict) or job.get("launcher", "slurm") != "slurm":
        return None
    again = _word(run, FOLDER, RESUBMITTED)  # by the job itself, where requeue is forbidden
    if _ID.fullmatch(again):
        return again
    if job.get("id"):
        return str(job["id"])
    array = _word(run, "..", str(job.get("array")), JOB_NUMBER)  # known as soon as it is submitted
    return f"{array}_{job['index']}" if array.isdecimal() else None


def _word(run: Run, *path: str) -> str:
    try:
        return run.folder.joinpath(*path).read_text().strip()
    except OSError:
        return ""


def current_job(environment: Mapping[str, str] = os.environ) -> str:
    """The id of the job that this process is part of; empty outside of jobs."""
    array, index = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{index}" if array and index else environment.get("SLURM_JOB_ID", "")


def query_jobs(jobs: Iterable[str]) -> dict[str, JobState] | None:
    """What Slurm says of each job, in one question; None where there is no Slurm, or no answer."""
    wanted = sorted({job for job in jobs if _ID.fullmatch(job)})
    if not wanted:
        return {}
    asked = ",".join(dict.fromkeys(job.partition("_")[0] for job in wanted))
    lines = _lines(["squeue", "--noheader", "--array", "--states=all", f"--jobs={asked}", "--format=%A|%i|%T|%N|%r"])
    if lines is None:
        return None
    found = {}
    for line in lines:
        number, name, state, nodes, reason = line.split("|", 4)
        found[name if "_" in name else number] = JobState(state, reason, nodes)
    older = [job for job in wanted if job not in found]
    return {**{job: JobState(UNKNOWN) for job in older}, **_accounted(older), **found}


def _accounted(jobs: Sequence[str]) -> dict[str, JobState]:
    """Of jobs that the controller has forgotten; nothing where the site keeps no accounts. The last line counts."""
    if not jobs:
        return {}
    fields = "--format=JobID,JobIDRaw,State,NodeList"
    asked = ["sacct", "--noheader", "--parsable2", "--duplicates", "--allocations", fields]
    found = {}
    for line in _lines([*asked, f"--jobs={','.join(dict.fromkeys(job.partition('_')[0] for job in jobs))}"]) or []:
        name, number, state, nodes = line.split("|", 3)
        job = name if "_" in name else number
        if job in jobs:
            found[job] = JobState(state.partition(" ")[0], "", nodes)  # CANCELLED by 1000
    return found


def job_id_by_name(name: str) -> str | None:
    """The id of this user's job or array of that name; empty when there is none, None when nobody answers."""
    asked = [f"--user={getpass.getuser()}", f"--name={name}", "--states=all", "--array", "--format=%F|"]
    lines = _lines(["squeue", "--noheader", *asked])
    return None if lines is None else next((line.rstrip("|") for line in lines), "")


def raw_job_id(job: str) -> str:
    """The plain number that a task of an array has as well, which some commands want; the id itself for others."""
    lines = _lines(["squeue", "--noheader", f"--jobs={job}", "--format=%A|"]) if "_" in job else None
    return lines[0].rstrip("|") if lines else job


def _lines(command: list[str]) -> list[str] | None:
    try:
        done = run_command(command, timeout=TIMEOUT)
    except (OSError, subprocess.SubprocessError):
        return None
    if done.returncode != 0 and "Invalid job id" not in done.stderr:
        return None
    return [line.strip() for line in done.stdout.splitlines() if "|" in line]


def combined_state(state: str, told: JobState | None) -> str:
    """The run's state by its folder and by Slurm together: see the table above. `told` is None where nobody knows."""
    if told is None or state in ("finished", "failed", "broken"):
        return state
    if told.pending:
        return "queued"
    if told.running:
        return "stopped" if state == "stopped" else "running"
    return "lost" if state in ("created", "queued", "lost") else state


def poll_job(run: Run) -> tuple[str, str]:
    """The run's state, and a sentence about its job; empty for a run that has none."""
    job = job_of(run)
    if job is None:
        return run.state, ""
    answers = query_jobs([job])  # before the state is read: a job writes it before it ends
    if answers is None:
        return run.state, f"job {job}, of which nothing is known here: Slurm does not answer on this machine"
    return combined_state(run.state, answers[job]), answers[job].describe(job)


def refuse_queued(run: Run) -> None:
    """UseError when the run's job waits or runs: whoever goes on with the run, or deletes it, stops that first."""
    try:
        job = job_of(run) if run.state not in ("finished", "failed") else None
    except UseError:  # half a folder, which is nobody's job
        return
    if job is None or job == current_job():  # that job is us
        return
    told = (query_jobs([job]) or {}).get(job)
    if told is not None and (told.pending or told.running):
        raise UseError(f"run {run.id} is in Slurm's hands: {told.describe(job)}", f"first: tiltyard stop {run.typed}")


class Backoff:
    """Seconds between questions: the longer nothing changes, the longer the pause."""

    FIRST, LONGEST, GROWTH = 1.0, 30.0, 1.4

    def __init__(self) -> None:
        self._pause = self.FIRST

    def reset(self) -> None:
        self._pause = self.FIRST

    def next_pause(self) -> float:
        """The next pause."""
        now, self._pause = self._pause, min(self.LONGEST, self._pause * self.GROWTH)
        return now
