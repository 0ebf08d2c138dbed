"""Trials as jobs, which outlive whoever submitted them: what Slurm's arrays and any other queue have in common.

    submitted   status.json says `queued`, and which folder the job has: slurm/array-0001, template/job-0007
    at work     the queue says that it waits or runs, and the trial is not over yet
    comes back  its agent saved near the job's time limit: due again, in a new job; Slurm's go back by themselves
    gone        the queue knows it no more, and the trial says nothing of its end: it has failed

All of it is asked anew in every turn. The profile is kept with the sweep, as it was when a person last started it:
turns are taken on nodes, long after the site file may have changed.
"""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiltyard.config.site import Profile, load_site, pick_profile
from tiltyard.config.sweep_plan import Plan
from tiltyard.errors import TiltyardError, UseError
from tiltyard.run import atomic
from tiltyard.run.events import log_event
from tiltyard.run.folder import Run
from tiltyard.run.lock import Lock, read_owner
from tiltyard.run.logs import last_line
from tiltyard.run.status import STATUS, observed_state, write_status
from tiltyard.slurm import COUNTS, FOLDER, STOP, VERDICT, job_state
from tiltyard.slurm.job_state import JobState
from tiltyard.slurm.submit import make_folder, task, write_private
from tiltyard.sweep.folder import Sweep
from tiltyard.sweep.results import SILENT

PROFILE = "profile.json"
JUDGE = 60.0  # seconds between two looks of an agent at who falls behind


@dataclass(frozen=True)
class Start:
    """A trial that is to be submitted."""

    number: int
    folder: Path
    wait: float = 0.0

    @property
    def run(self) -> Run:
        return Run(self.folder)


class Jobs(ABC):
    """The jobs of one sweep, for one turn. `own` is the trial in whose job the turn is taken, after its end."""

    queues = True

    def __init__(self, sweep: Sweep, plan: Plan, profile: Profile, *, own: int | None = None) -> None:
        self.sweep, self.plan, self.own = sweep, plan, own
        self.profile = profile.model_copy(update={"environment": {**profile.environment, **plan.environment}})
        self.work: dict[int, str] = {}
        """trial -> its job, of those at work"""
        self.chosen: list[Start] = []
        self.goes_on = False
        """whether the own trial is due again, in the same job"""
        self._jobs: dict[int, str] = {}
        self._gone: dict[int, str] = {}

    # -- what a kind of queue knows

    @abstractmethod
    def ask(self, jobs: Mapping[int, str]) -> dict[int, JobState]:
        """What the queue says of the jobs of some trials."""

    @abstractmethod
    def job_of(self, run: Run, status: dict[str, Any]) -> str | None:
        """The job that a trial was last submitted as."""

    def will_continue(self, run: Run, status: Mapping[str, Any]) -> bool:
        """Whether the last job of a trial ended so that another is to go on with it, which is no failure."""
        return False

    @abstractmethod
    def withdraw(self, jobs: Mapping[int, str]) -> None:
        """Take jobs that wait out of the queue."""

    @abstractmethod
    def send(self) -> list[str]:
        """Submit what was chosen; returns what was done, in sentences."""

    @abstractmethod
    def shown(self, tasks: int) -> str:
        """What would be submitted first for so many trials, for people."""

    # -- as a backend

    def adopt(self, numbers: Iterable[int]) -> set[int]:
        """Those of the trials that wait or run. The queue is asked first: a job writes before it ends."""
        found = {number: status for number in numbers if (status := self._status(number)) is not None}
        for number, status in found.items():
            if (job := self.job_of(Run(self.sweep.place(number)), status)) is not None:
                self._jobs[number] = job
        asked = {number: job for number, job in self._jobs.items() if number in found and not _is_over(found[number])}
        answers = self.ask(asked)
        for number in found:
            status = self._status(number) or found[number]
            if _is_over(status):
                continue
            state, told = observed_state(self.sweep.place(number), status), answers.get(number)
            run = Run(self.sweep.place(number))
            back = self.will_continue(run, status)
            if number == self.own:
                if state in SILENT and not back:
                    self._gone[number] = f"its agent said nothing{_last_line(self.sweep.place(number))}"
            elif (told is not None and (told.pending or told.running)) or (
                state == "running" and not self._in_job(number)
            ):
                self.work[number] = asked.get(number, "")
            elif told is not None and state != "stopped" and not back:
                self._note_end(number, told, state)
            if back and number not in self.work and self.sweep.stop_file.exists():
                set_status(run, state="stopped", reason="asked to stop")
        return set(self.work)

    def _in_job(self, number: int) -> bool:
        """Whether whoever writes the trial does so in a job of Slurm's, which knows better whether they live."""
        return bool((read_owner(self.sweep.place(number)) or {}).get("job"))

    def _note_end(self, number: int, told: JobState, state: str) -> None:
        """A job that ended without a word of its trial: cancelled by somebody, or it has failed."""
        job = self._jobs[number]
        if told.state == "CANCELLED":
            set_status(Run(self.sweep.place(number)), state="stopped", reason=f"job {job} was cancelled")
        else:
            why = "" if state in ("lost", "running") else _last_line(self.sweep.place(number))
            self._gone[number] = f"{told.describe(job)}{why}"

    def gone(self) -> dict[int, str]:
        """Trials whose jobs ended without a word, and what the queue says of them."""
        return self._gone

    def job(self, number: int) -> str:
        return self._jobs.get(number, "")

    def has_capacity(self, number: int | None) -> bool:
        """Whether one more may be submitted, so that no more than max_parallel are at work."""
        return len(self.work) + len(self.chosen) + self.goes_on < self.plan.max_parallel

    def submit(self, number: int, folder: Path, wait: float) -> bool:
        """Choose a trial to be submitted by `send`. The own one, if it was stopped to go on, does so where it is."""
        start = Start(number, folder, wait)
        if number == self.own and (self._status(number) or {}).get("state") == "stopped":
            make_folder(Run(folder), self.task())
            self.goes_on = True
        else:
            self.chosen.append(start)
        return True

    def poll(self) -> dict[int, str]:
        return {}

    def cancel(self, numbers: Iterable[int]) -> None:
        """Take out of the queue what waits, and ask what runs to save and end: its agent finds a file."""
        chosen = {number: self.work[number] for number in numbers if number in self.work}
        for number in chosen:
            folder = self.sweep.place(number) / FOLDER
            folder.mkdir(exist_ok=True)
            (folder / STOP).touch()
        states = {number: (self._status(number) or {}).get("state") for number in chosen}
        waiting = {number: job for number, job in chosen.items() if states[number] in ("created", "queued") and job}
        if waiting:
            self.withdraw(waiting)
        for number, job in waiting.items():
            run = Run(self.sweep.place(number))
            if run.status()["state"] in ("created", "queued"):
                set_status(run, state="stopped", reason=f"job {job} was taken out of the queue")

    # -- for the kinds

    def task(self) -> dict[str, object]:
        """What the trial's agent has to know."""
        return {
            **task(self.profile),
            "program": self.plan.program is not None,
            "judge": JUDGE if self.plan.stop is not None else 0.0,
        }

    def queue_up(self, start: Start, place: str, **more: Any) -> dict[str, Any]:
        """The trial as it is before its job is submitted; returns what its status was, for `take_back`."""
        run = start.run
        with Lock.acquire(run):
            before = run.status()
            make_folder(run, self.task(), (COUNTS, VERDICT) if self.will_continue(run, before) else ())
            launcher, name = self.profile.launcher, self.profile.name
            job = {"launcher": launcher, "profile": name, "array": place, "submitted": atomic.now(), **more}
            write_status(run, state="queued", reason="", job=job)
        log_event(run, "submitted", f"submitted with profile {name}, in {place}")
        return {field: before.get(field) for field in ("state", "reason", "job")}

    def take_back(self, starts: Iterable[Start], before: Iterable[dict[str, Any]]) -> None:
        """What could not be submitted is as it was."""
        for start, fields in zip(starts, before, strict=True):
            set_status(start.run, **fields)

    def _status(self, number: int) -> dict[str, Any] | None:
        try:
            return atomic.read_json(self.sweep.place(number) / STATUS)
        except (OSError, ValueError):
            return None


def set_status(run: Run, **changes: Any) -> None:
    """Change a trial's status, unless somebody writes the trial: then it is theirs to say."""
    try:
        with Lock.acquire(run):
            write_status(run, **changes)
    except UseError:
        return


def _is_over(status: Mapping[str, Any]) -> bool:
    """Whether the trial is, though its job may still be about to end."""
    return status.get("state") in ("finished", "failed")


def _last_line(trial: Path) -> str:
    """The last that a job said which never got as far as its trial."""
    written = sorted((trial / "logs").glob("job-*.out"), key=lambda path: path.stat().st_mtime)
    said = last_line(written[-1]) if written else ""
    return f": {said}" if said else ""


def job_ids(sweep: Sweep) -> dict[int, str]:
    """The newest job of each trial that is one of Slurm's."""
    found = {}
    for trial in sweep.trials() if sweep.launcher == "slurm" else ():
        with contextlib.suppress(UseError):  # it has no folder yet
            if (job := job_state.job_of(Run(sweep.place(trial.number)))) is not None:
                found[trial.number] = job
    return found


def slurm_job_states(jobs: Mapping[int, str]) -> dict[int, JobState]:
    """What Slurm says of these trials' jobs; nothing where it does not answer."""
    answers = job_state.query_jobs(jobs.values()) or {}
    return {number: answers[job] for number, job in jobs.items() if job in answers}


# ---------------------------------------------------------------------------------------------- the profile


def kept_profile(sweep: Sweep, *, afresh: bool) -> Profile:
    """The profile of the sweep's jobs; with `afresh` as the site file has it now, where it can be found."""
    name, path = str(sweep.facts()["profile"]), sweep.folder / PROFILE
    if afresh:
        site, where = load_site()
        if name in site.profiles or not path.exists():
            profile = pick_profile(site, name, where)
            if profile.launcher != sweep.launcher:
                hint = f"its launcher was {sweep.launcher}, and stays so for this sweep"
                raise UseError(f"profile {name} of sweep {sweep.id} has launcher {profile.launcher} now", hint)
            draft = path.with_name(f".{PROFILE}")
            write_private(draft, json.dumps(profile.model_dump(mode="json")), 0o600)
            draft.replace(path)
    try:
        return Profile.model_validate(atomic.read_json(path)).model_copy(update={"name": name})
    except (OSError, ValueError) as error:
        raise TiltyardError(f"{path} cannot be read: {error}", f"tiltyard sweep start {sweep.typed}") from error
