"""Trials as jobs of a queue, for one tick: everything is read from the queue and the folders again in each.

    submitted   status.json says `queued`, and which folder the job has: slurm/array-0001, template/job-0007
    at work     the queue says that the job waits or runs, and the trial is not over yet
    continues   the trial saved near the job's time limit: due again in a new job; Slurm requeues its own
    gone        the queue no longer knows the job and the trial recorded no end: it has failed

A `Queue` knows one kind of queue: slurm_arrays.py, custom_queue.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tiltyard.config.site import Profile
from tiltyard.config.sweep_plan import Plan
from tiltyard.errors import TiltyardError, UseError
from tiltyard.run import atomic
from tiltyard.run.events import log_event
from tiltyard.run.folder import Run
from tiltyard.run.lock import Lock, read_owner
from tiltyard.run.logs import last_line
from tiltyard.run.status import observed_state, write_status
from tiltyard.slurm import COUNTS, FOLDER, JOB_NUMBER, STOP, VERDICT, job_state
from tiltyard.slurm.job_state import JobState
from tiltyard.slurm.submit import make_folder, task
from tiltyard.sweep.folder import Sweep
from tiltyard.sweep.results import SILENT

EARLY_STOP_SECONDS = 60.0  # between two checks of the learning curves by the agent of a job


@dataclass(frozen=True)
class Start:
    """A trial to submit, `wait` seconds from now at the earliest."""

    number: int
    folder: Path
    wait: float = 0.0

    @property
    def run(self) -> Run:
        return Run(self.folder)


class Queue(Protocol):
    """What a kind of queue can do with the jobs of one sweep."""

    profile: Profile

    arrays: bool
    """whether a job is an array with a task per trial, of which the queue itself limits how many run at once"""

    def recover(self) -> None:
        """Find out what became of submissions that a killed process began."""

    def states(self, jobs: Mapping[int, str]) -> dict[int, JobState]:
        """The state of the jobs of some trials."""

    def job_of(self, run: Run, status: dict[str, Any]) -> str | None:
        """The job that a trial was last submitted as."""

    def will_continue(self, run: Run, status: Mapping[str, Any]) -> bool:
        """Whether the last job of a trial ended so that another continues it, which is not a failure."""

    def withdraw(self, jobs: Mapping[int, str]) -> None:
        """Remove waiting jobs from the queue."""

    def batches(self, starts: Sequence[Start]) -> list[Sequence[Start]]:
        """Trials grouped by the job that they are submitted as."""

    def make_job(self, batch: Sequence[Start]) -> Path:
        """Write the folder of a job."""

    def submit(self, batch: Sequence[Start], folder: Path, others: Mapping[int, str]) -> tuple[str, str]:
        """Submit a job beside `others` (trial -> job); returns its id and a remark for the user, often empty."""

    def preview(self, tasks: int) -> str:
        """The script that would be submitted first for so many trials."""


class JobBackend:
    """The jobs of one sweep. `own` is the trial in whose job the tick runs, after the trial's end."""

    queues = True

    def __init__(self, sweep: Sweep, plan: Plan, queue: Queue, *, own: int | None = None) -> None:
        self.sweep, self.plan, self.queue, self.own = sweep, plan, queue, own
        self.work: dict[int, str] = {}
        """trial -> job, of those that wait or run"""
        self.chosen: list[Start] = []
        self.own_continues = False
        """whether the own trial is due again, in the same job"""
        self.jobs: dict[int, str] = {}
        self.gone: dict[int, str] = {}
        """trials whose jobs ended before they recorded an end, and what the queue says about the jobs"""

    def adopt(self, numbers: Iterable[int]) -> set[int]:
        """Those of the trials that wait or run. The queue is asked first: a job writes before it ends."""
        self.queue.recover()
        found = {number: status for number in numbers if (status := self._status(number)) is not None}
        for number, status in found.items():
            if (job := self.queue.job_of(Run(self.sweep.place(number)), status)) is not None:
                self.jobs[number] = job
        asked = {number: job for number, job in self.jobs.items() if number in found and not _is_over(found[number])}
        answers = self.queue.states(asked)
        for number in found:
            status = self._status(number) or found[number]
            if _is_over(status):
                continue
            run, answer = Run(self.sweep.place(number)), answers.get(number)
            state, continues = observed_state(run.folder, status), self.queue.will_continue(run, status)
            if number == self.own:
                if state in SILENT and not continues:
                    self.gone[number] = f"its agent recorded no end{_last_line(run.folder)}"
            elif (answer is not None and (answer.pending or answer.running)) or (
                state == "running" and not _in_job(run)
            ):
                self.work[number] = asked.get(number, "")
            elif answer is not None and state != "stopped" and not continues:
                self._record_end(run, number, answer, state)
            if continues and number not in self.work and self.sweep.stop_file.exists():
                set_status(run, state="stopped", reason="asked to stop")
        return set(self.work)

    def _record_end(self, run: Run, number: int, answer: JobState, state: str) -> None:
        """A job that ended before its trial recorded an end: it was cancelled, or it has failed."""
        job = self.jobs[number]
        if answer.state == "CANCELLED":
            set_status(run, state="stopped", reason=f"job {job} was cancelled")
        else:
            why = "" if state in ("lost", "running") else _last_line(run.folder)
            self.gone[number] = f"{answer.describe(job)}{why}"

    def has_capacity(self, number: int | None) -> bool:
        """Whether one more may be submitted: always, for a known trial and a queue that limits what runs itself."""
        limits_itself = self.queue.arrays and self.plan.search in ("grid", "random")
        if limits_itself and not (number in self.jobs and self.work):
            return True
        return len(self.work) + len(self.chosen) + self.own_continues < self.plan.max_parallel

    def submit(self, number: int, folder: Path, wait: float) -> bool:
        """Select a trial for `send`. The own one, if it stopped to continue later, continues in this job."""
        if number == self.own and (self._status(number) or {}).get("state") == "stopped":
            make_folder(Run(folder), self._task())
            self.own_continues = True
        else:
            self.chosen.append(Start(number, folder, wait))
        return True

    def send(self) -> list[str]:
        """Submit the selected trials; returns a sentence about each job."""
        chosen, self.chosen = self.chosen, []
        return [self._submit(batch) for batch in self.queue.batches(chosen)]

    def _submit(self, batch: Sequence[Start]) -> str:
        """Submit one job: its folder, then its trials' statuses, then the job itself, then its number."""
        folder = self.queue.make_job(batch)
        place = f"{folder.parent.name}/{folder.name}"
        before = [self._set_queued(start, place, index) for index, start in enumerate(batch)]
        try:
            number, remark = self.queue.submit(batch, folder, self.work)
        except TiltyardError:
            for start, fields in zip(batch, before, strict=True):
                set_status(start.run, **fields)
            raise
        atomic.write_text(folder / JOB_NUMBER, f"{number}\n")
        arrays = self.queue.arrays
        self.work |= {start.number: f"{number}_{index}" if arrays else number for index, start in enumerate(batch)}
        names = ", ".join(str(start.number) for start in batch[:10]) + (", ..." if len(batch) > 10 else "")
        if len(batch) == 1:
            return f"Trial {names} was submitted as job {number}{remark}."
        most = f", at most {self.plan.max_parallel:,} at once"
        return f"{len(batch):,} trials ({names}) were submitted as job {number}{most}{remark}."

    def poll(self) -> dict[int, str]:
        return {}

    def cancel(self, numbers: Iterable[int]) -> None:
        """Remove waiting jobs from the queue, and ask running ones to save and stop: their agents find a file."""
        chosen = {number: self.work[number] for number in numbers if number in self.work}
        for number in chosen:
            folder = self.sweep.place(number) / FOLDER
            folder.mkdir(exist_ok=True)
            (folder / STOP).touch()
        states = {number: (self._status(number) or {}).get("state") for number in chosen}
        waiting = {number: job for number, job in chosen.items() if states[number] in ("created", "queued") and job}
        if waiting:
            self.queue.withdraw(waiting)
        for number, job in waiting.items():
            run = Run(self.sweep.place(number))
            if run.status()["state"] in ("created", "queued"):
                set_status(run, state="stopped", reason=f"job {job} was removed from the queue")

    def _task(self) -> dict[str, object]:
        """What the agent in the trial's job reads."""
        return {
            **task(self.queue.profile),
            "program": self.plan.program is not None,
            "judge": EARLY_STOP_SECONDS if self.plan.stop is not None else 0.0,
        }

    def _set_queued(self, start: Start, place: str, index: int) -> dict[str, Any]:
        """Write the status of a trial before its job is submitted; returns the fields that it replaces."""
        run, profile = start.run, self.queue.profile
        with Lock.acquire(run):
            before = run.status()
            make_folder(run, self._task(), (COUNTS, VERDICT) if self.queue.will_continue(run, before) else ())
            job: dict[str, Any] = {"launcher": profile.launcher, "profile": profile.name, "array": place}
            job |= {"submitted": atomic.now(), **({"index": index} if self.queue.arrays else {})}
            write_status(run, state="queued", reason="", job=job)
        log_event(run, "submitted", f"submitted with profile {profile.name}, in {place}", submission=job)
        return {field: before.get(field) for field in ("state", "reason", "job")}

    def _status(self, number: int) -> dict[str, Any] | None:
        try:
            return Run(self.sweep.place(number)).status()
        except UseError:  # it has no folder yet
            return None


def set_status(run: Run, **changes: Any) -> None:
    """Change the status of a trial, unless a process holds its lock and writes the status itself."""
    with contextlib.suppress(UseError), Lock.acquire(run):
        write_status(run, **changes)


def _is_over(status: Mapping[str, Any]) -> bool:
    """Whether the trial is over, though its job may not have ended yet."""
    return status.get("state") in ("finished", "failed")


def _in_job(run: Run) -> bool:
    """Whether the process that holds the trial's lock is in a Slurm job: then Slurm knows whether it is alive."""
    return bool((read_owner(run.folder) or {}).get("job"))


def _last_line(trial: Path) -> str:
    """The last line of output of a job that ended before its trial began."""
    written = sorted((trial / "logs").glob("job-*.out"), key=lambda path: path.stat().st_mtime)
    line = last_line(written[-1]) if written else ""
    return f": {line}" if line else ""


def job_ids(sweep: Sweep) -> dict[int, str]:
    """The newest Slurm job of each trial that has one."""
    found = {}
    for trial in sweep.trials() if sweep.launcher == "slurm" else ():
        with contextlib.suppress(UseError):  # it has no folder yet
            if (job := job_state.job_of(Run(sweep.place(trial.number)))) is not None:
                found[trial.number] = job
    return found


def slurm_job_states(jobs: Mapping[int, str]) -> dict[int, JobState]:
    """The state of these trials' jobs; nothing where Slurm does not answer."""
    answers = job_state.query_jobs(jobs.values()) or {}
    return {number: answers[job] for number, job in jobs.items() if job in answers}
