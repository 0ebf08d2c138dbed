"""The state of jobs in Slurm, and what it means for their runs. One query covers many jobs.

squeue knows jobs that are pending, running or ended recently; sacct, where a site has it, knows older ones. Without an
answer from Slurm, a run's state is the one in its folder.

    in the folder            in Slurm         combined
    finished, failed         any              the same
    any other                pending          queued
    created, queued, lost    running          running: it is starting or restarting
    stopped                  running          stopped: the job is about to end
    created, queued, lost    ended, unknown   lost: the job ended without a word in the folder

A job id is a number; an array task's id is two: 123_4.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiltyard.errors import UseError
from tiltyard.run.folder import Run
from tiltyard.slurm import FOLDER, JOB_NUMBER, RESUBMITTED
from tiltyard.slurm.commands import output_of, run_command

TIMEOUT = 20.0  # seconds per query; a user is waiting for a listing
FIRST_PAUSE, LONGEST_PAUSE, PAUSE_GROWTH = 1.0, 30.0, 1.4  # seconds between queries
PENDING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
RUNNING = ("RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
UNKNOWN = "UNKNOWN"
_ID = re.compile(r"\d+(_\d+)?")


@dataclass(frozen=True)
class JobState:
    """A job in Slurm: Slurm's name of its state, why it is pending, its nodes."""

    state: str
    reason: str = ""
    nodes: str = ""

    @property
    def pending(self) -> bool:
        return self.state in PENDING

    @property
    def running(self) -> bool:
        return self.state in RUNNING

    @property
    def active(self) -> bool:
        return self.pending or self.running

    def describe(self, job: str) -> str:
        """job 5 is pending: Resources; job 5 is running on node1; job 5 ended: TIMEOUT."""
        if self.pending:
            why = self.reason if self.reason not in ("", "None") else "not scheduled yet"
            return f"job {job} is pending: {why}"
        if self.running:
            return f"job {job} is running on {self.nodes}" if self.nodes else f"job {job} is running"
        return f"job {job} has left Slurm's records" if self.state == UNKNOWN else f"job {job} ended: {self.state}"


def job_of(run: Run, status: dict[str, Any] | None = None) -> str | None:
    """The id of the run's last job; None for a run that was never submitted to Slurm."""
    job = (run.status() if status is None else status).get("job")
    if not isinstance(job, dict) or job.get("launcher", "slurm") != "slurm":
        return None
    again = _word(run, FOLDER, RESUBMITTED)  # written by the job where requeueing is forbidden
    if _ID.fullmatch(again):
        return again
    if job.get("id"):
        return str(job["id"])
    array = _word(run, "..", str(job.get("array")), JOB_NUMBER)
    return f"{array}_{job['index']}" if array.isdecimal() else None


def _word(run: Run, *path: str) -> str:
    try:
        return run.folder.joinpath(*path).read_text().strip()
    except OSError:
        return ""


def current_job(environment: Mapping[str, str] = os.environ) -> str:
    """The id of the job that this process belongs to; empty outside a job."""
    array, index = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{index}" if array and index else environment.get("SLURM_JOB_ID", "")


def query_jobs(jobs: Iterable[str]) -> dict[str, JobState] | None:
    """The state of each job, in one query; None without an answer from Slurm."""
    wanted = sorted({job for job in jobs if _ID.fullmatch(job)})
    if not wanted:
        return {}
    ids = _array_ids(wanted)
    lines = _lines(["squeue", "--noheader", "--array", "--states=all", f"--jobs={ids}", "--format=%A|%i|%T|%N|%r"])
    if lines is None:
        return None
    found = {}
    for line in lines:
        number, name, state, nodes, reason = line.split("|", 4)
        found[name if "_" in name else number] = JobState(state, reason, nodes)
    older = [job for job in wanted if job not in found]
    return {**{job: JobState(UNKNOWN) for job in older}, **_query_sacct(older), **found}


def _array_ids(jobs: Sequence[str]) -> str:
    return ",".join(dict.fromkeys(job.partition("_")[0] for job in jobs))


def _query_sacct(jobs: Sequence[str]) -> dict[str, JobState]:
    """Jobs that the controller no longer knows; empty without accounting. A job's last line counts."""
    if not jobs:
        return {}
    fields = "--format=JobID,JobIDRaw,State,NodeList"
    command = ["sacct", "--noheader", "--parsable2", "--duplicates", "--allocations", fields]
    found = {}
    for line in _lines([*command, f"--jobs={_array_ids(jobs)}"]) or []:
        name, number, state, nodes = line.split("|", 3)
        job = name if "_" in name else number
        if job in jobs:
            found[job] = JobState(state.partition(" ")[0], "", nodes)  # CANCELLED by 1000
    return found


def job_id_by_name(name: str) -> str | None:
    """The id of this user's job or array of that name; empty if there is none, None if Slurm does not answer."""
    options = [f"--user={getpass.getuser()}", f"--name={name}", "--states=all", "--array", "--format=%F|"]
    lines = _lines(["squeue", "--noheader", *options])
    return None if lines is None else next((line.rstrip("|") for line in lines), "")


def raw_job_id(job: str) -> str:
    """An array task's plain number, which some commands need; other ids as they are."""
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


def combined_state(state: str, job: JobState | None) -> str:
    """The run's state from its folder and from Slurm, as in the table above; `job` is None if Slurm did not answer."""
    if job is None or state in ("finished", "failed", "damaged"):
        return state
    if job.pending:
        return "queued"
    if job.running:
        return "stopped" if state == "stopped" else "running"
    return "lost" if state in ("created", "queued", "lost") else state


def poll_job(run: Run) -> tuple[str, str]:
    """The run's combined state, and a sentence about its job; empty without a job."""
    job = job_of(run)
    if job is None:
        return run.state, ""
    answers = query_jobs([job])  # before the state is read: a job writes it before it ends
    if answers is None:
        return run.state, f"job {job}, state unknown: Slurm does not answer on this machine"
    return combined_state(run.state, answers[job]), answers[job].describe(job)


def refuse_queued(run: Run) -> None:
    """UseError if the run's job is pending or running: it must be stopped before the run is resumed or deleted."""
    try:
        job = job_of(run) if run.state not in ("finished", "failed") else None
    except UseError:  # an incomplete run folder has no job
        return
    if job is None or job == current_job():  # this process belongs to that job
        return
    state = (query_jobs([job]) or {}).get(job)
    if state is not None and state.active:
        hint = f"stop it first: tiltyard stop {run.typed}"
        raise UseError(f"run {run.id} has an active Slurm job: {state.describe(job)}", hint)


def growing_pauses() -> Iterator[float]:
    """Seconds between queries."""
    pause = FIRST_PAUSE
    while True:
        yield pause
        pause = min(LONGEST_PAUSE, PAUSE_GROWTH * pause)


class JobWatch:
    """Queries a job, less often while nothing changes. `notify` gets every new sentence about it."""

    def __init__(self, notify: Callable[[str], object]) -> None:
        self.state: JobState | None = None
        """None if Slurm does not answer"""
        self._notify, self._shown = notify, ""
        self._pauses, self._next_query = growing_pauses(), 0.0

    def poll(self, job: str, *, soon: bool = False) -> None:
        """Query the job if it is time; `soon`: within the first pause."""
        now = time.monotonic()
        if soon:
            self._next_query = min(self._next_query, now + FIRST_PAUSE)
        if now < self._next_query:
            return
        self.state = (query_jobs([job]) or {}).get(job)
        sentence = self.state.describe(job) if self.state else f"Slurm does not answer about job {job}"
        if sentence != self._shown:
            self._shown, self._pauses = sentence, growing_pauses()
            self._notify(sentence)
        self._next_query = time.monotonic() + next(self._pauses)


def site_config() -> dict[str, str] | None:
    """The output of `scontrol show config`; empty if Slurm does not answer, None without Slurm."""
    if shutil.which("scontrol") is None:
        return None
    output = output_of(["scontrol", "show", "config"], TIMEOUT) or ""
    return dict(re.findall(r"^(\w+)[^\S\n]*=[^\S\n]*(.*?)[^\S\n]*$", output, re.MULTILINE))
