"""Trials as tasks of Slurm job arrays.

    SWEEP/slurm/array-0001/    script.sh, trials (which task is which), name, secrets.sh; number: the job's

A plan whose trials are known is submitted at once: one array, throttled to max_parallel; several, one after another,
where Slurm allows only smaller ones. Later trials (of an adaptive search, retries) are further arrays.

Nothing is submitted twice: the array's folder, with a unique name, exists before `sbatch`. An array without a number
was being submitted when its process was killed: Slurm is asked for the name, and if it does not know it, the array is
marked as forgotten, and a task of it that starts all the same exits at once.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiltyard.config.site import Profile
from tiltyard.config.sweep_plan import Plan
from tiltyard.doctor.bad_nodes import excluded_nodes
from tiltyard.errors import TiltyardError, UseError
from tiltyard.run import atomic
from tiltyard.run.folder import Run
from tiltyard.slurm import JOB_NUMBER, NEVER_SUBMITTED, SCRIPT, TRIALS, job_state
from tiltyard.slurm.commands import cancel, sbatch
from tiltyard.slurm.job_state import JobState
from tiltyard.slurm.script import Array, Job, script, script_text
from tiltyard.slurm.submit import write_script
from tiltyard.sweep.backends.jobs import Start
from tiltyard.sweep.folder import Sweep

PLACE, NAME = "slurm", "name"
MOST_CANCELLED = 500  # jobs in one scancel


class SlurmArrays:
    """A `Queue`: the job arrays of one sweep."""

    arrays = True

    def __init__(self, sweep: Sweep, plan: Plan, profile: Profile) -> None:
        self.sweep, self.plan, self.profile = sweep, plan, profile

    def recover(self) -> None:
        """Find out whether arrays without a number were submitted before their process was killed."""
        for folder in sorted((self.sweep.folder / PLACE).glob("array-*")):
            if (folder / JOB_NUMBER).exists() or (folder / NEVER_SUBMITTED).exists():
                continue
            number = job_state.job_id_by_name((folder / NAME).read_text().strip())
            if number is None:
                raise _no_answer()
            if number:
                atomic.write_text(folder / JOB_NUMBER, f"{number}\n")
            else:
                (folder / NEVER_SUBMITTED).touch()

    def states(self, jobs: Mapping[int, str]) -> dict[int, JobState]:
        answers = job_state.query_jobs(jobs.values())
        if answers is None:
            raise _no_answer()
        return {number: answers[job] for number, job in jobs.items()}

    def job_of(self, run: Run, status: dict[str, Any]) -> str | None:
        return job_state.job_of(run, status)

    def will_continue(self, run: Run, status: Mapping[str, Any]) -> bool:
        return False  # Slurm requeues the job itself

    def withdraw(self, jobs: Mapping[int, str]) -> None:
        for some in _parts(list(jobs.values()), MOST_CANCELLED):
            cancel(*some)

    def batches(self, starts: Sequence[Start]) -> list[Sequence[Start]]:
        """Arrays of trials that may begin now, then arrays of trials that wait."""
        largest = most_tasks() if starts else 1
        now = [start for start in starts if start.wait <= 0]
        later = [start for start in starts if start.wait > 0]
        return [*_parts(now, largest), *_parts(later, largest)]

    def make_job(self, batch: Sequence[Start]) -> Path:
        """Write an array's folder; it appears complete."""
        place = self.sweep.folder / PLACE
        place.mkdir(exist_ok=True)
        number = max((int(folder.name.partition("-")[2]) for folder in place.glob("array-*")), default=0) + 1
        folder = place / f"array-{number:04d}"
        name = f"{self.sweep.id}/{folder.name}-{atomic.unique()}"
        draft = place / f".new-{atomic.unique()}"
        draft.mkdir(mode=0o700)
        atomic.write_text(draft / TRIALS, script_text(start.folder.name for start in batch))
        atomic.write_text(draft / NAME, f"{name}\n")
        write_script(draft, self._job(name, folder, len(batch)))
        atomic.sync_folder(draft)
        draft.rename(folder)
        return folder

    def submit(self, batch: Sequence[Start], folder: Path, others: Mapping[int, str]) -> tuple[str, str]:
        wait = max(start.wait for start in batch)
        options = [f"--begin=now+{wait:.0f}"] if wait > 0 else []
        jobs = {job.partition("_")[0] for job in others.values() if job}
        waits = bool(jobs) and len(others) + len(batch) > self.plan.max_parallel  # else too many would run at once
        if waits:
            options.append(f"--dependency=afterany:{':'.join(sorted(jobs, key=int))}")
        try:
            number = sbatch(folder / SCRIPT, (folder / NAME).read_text().strip(), options)
        except TiltyardError:
            (folder / NEVER_SUBMITTED).touch()
            raise
        return number, ", to run after the earlier ones" if waits else ""

    def preview(self, tasks: int) -> str:
        folder = self.sweep.folder / PLACE / "array-0001"
        return script(self._job(f"{self.sweep.id}/{folder.name}", folder, min(tasks, most_tasks())))

    def _job(self, name: str, folder: Path, tasks: int) -> Job:
        array = Array(tasks, min(tasks, self.plan.max_parallel), self.plan.pause_between)
        bad = tuple(excluded_nodes(self.profile, self.sweep.folder.parents[1]))
        return Job(name, folder, self.profile, excluded=bad, array=array)


def _parts(many: Sequence[Any], largest: int) -> list[Sequence[Any]]:
    return [many[i : i + largest] for i in range(0, len(many), largest)]


def _no_answer() -> TiltyardError:
    """A missing command stays missing (UseError); a Slurm that does not answer may do so later."""
    kind = TiltyardError if shutil.which("squeue") else UseError
    return kind("Slurm does not answer on this machine", "type this where Slurm answers")


def most_tasks() -> int:
    """How many tasks an array may have at this site."""
    most = (job_state.site_config() or {}).get("MaxArraySize", "")
    if not most.isdecimal():
        raise _no_answer()
    if int(most) < 2:
        raise UseError("this Slurm allows no job arrays: MaxArraySize is 0", "ask its administrators")
    return int(most)
