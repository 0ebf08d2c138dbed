"""Trials as tasks of Slurm's job arrays.

    SWEEP/slurm/array-0001/    script.sh, trials (which task is which), name, secrets.sh; number: the job's

A plan whose trials are known is submitted at once: one array, throttled to max_parallel; where Slurm allows only
smaller ones several, each after those before it. Trials that come later (a search that learns, retries) are arrays of
their own, submitted when there is room.

Nothing is submitted twice: the array's folder, with a name that nobody else draws, is there before `sbatch`. An array
without a number was on its way when somebody died: Slurm is asked for the name, and if it does not know it, the array
is forgotten, for good: a task that starts in spite of that ends at once.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiltyard.doctor.bad_nodes import excluded_nodes
from tiltyard.errors import TiltyardError, UseError
from tiltyard.run import atomic
from tiltyard.run.folder import Run
from tiltyard.slurm import JOB_NUMBER, NEVER_SUBMITTED, SCRIPT, TRIALS, job_state
from tiltyard.slurm.commands import cancel, run_command, sbatch
from tiltyard.slurm.job_state import JobState
from tiltyard.slurm.script import Array, Job, script
from tiltyard.slurm.submit import write_script
from tiltyard.sweep.backends.jobs import Jobs, Start

PLACE, NAME = "slurm", "name"
AT_ONCE = 500  # jobs in one scancel


class Arrays(Jobs):
    """The arrays of one sweep."""

    def adopt(self, numbers: Any) -> set[int]:
        self._find_numbers()
        return super().adopt(numbers)

    def ask(self, jobs: Mapping[int, str]) -> dict[int, JobState]:
        answers = job_state.query_jobs(jobs.values())
        if answers is None:
            raise _silent()
        return {number: answers[job] for number, job in jobs.items()}

    def job_of(self, run: Run, status: dict[str, Any]) -> str | None:
        return job_state.job_of(run, status)

    def withdraw(self, jobs: Mapping[int, str]) -> None:
        for some in _parts(list(jobs.values()), AT_ONCE):
            cancel(*some)

    def has_capacity(self, number: int | None) -> bool:
        """What is known goes at once; what comes later when there is room, which each task that ends leaves."""
        eager = self.plan.search in ("grid", "random")
        again = number is not None and self.job(number) != ""
        return super().has_capacity(number) if not eager or (again and self.work) else True

    def send(self) -> list[str]:
        """Everything chosen as arrays: what may begin now, then what has to wait."""
        said: list[str] = []
        now = [start for start in self.chosen if start.wait <= 0]
        later = [start for start in self.chosen if start.wait > 0]
        largest = most_tasks() if self.chosen else 1
        for starts in _parts(now, largest):
            said.append(self._submit(starts))
        for starts in _parts(later, largest):
            said.append(self._submit(starts, [f"--begin=now+{max(start.wait for start in starts):.0f}"]))
        self.chosen = []
        return said

    def _submit(self, starts: Sequence[Start], options: Sequence[str] = ()) -> str:
        """One array: its folder, then its trials' statuses, then the array itself, then its number."""
        folder, name = self._make(starts)
        place = f"{PLACE}/{folder.name}"
        before = [self.queue_up(start, place, index=index) for index, start in enumerate(starts)]
        after = self._after(len(starts))
        try:
            number = sbatch(folder / SCRIPT, name, [*options, *after])
        except TiltyardError:
            (folder / NEVER_SUBMITTED).touch()
            self.take_back(starts, before)
            raise
        atomic.write_text(folder / JOB_NUMBER, f"{number}\n")
        self.work |= {start.number: f"{number}_{index}" for index, start in enumerate(starts)}
        which = ", ".join(map(str, [start.number for start in starts][:10])) + (", ..." if len(starts) > 10 else "")
        told = f"Trial {which} was submitted as job {number}"
        if len(starts) > 1:
            told = f"{len(starts):,} trials ({which}) were submitted as job {number}"
            told += f", at most {self.plan.max_parallel:,} at once"
        return f"{told}{', after those before' if after else ''}."

    def _after(self, tasks: int) -> list[str]:
        """Options that keep an array waiting as long as it would be too many at once."""
        others = {job.partition("_")[0] for job in self.work.values() if job}
        if not others or len(self.work) + tasks <= self.plan.max_parallel:
            return []
        return [f"--dependency=afterany:{':'.join(sorted(others, key=int))}"]

    def _make(self, starts: Sequence[Start]) -> tuple[Path, str]:
        """A new array's folder, complete before anybody can find it; and its name in the queue."""
        place = self.sweep.folder / PLACE
        place.mkdir(exist_ok=True)
        number = max((int(folder.name.partition("-")[2]) for folder in place.glob("array-*")), default=0) + 1
        folder = place / f"array-{number:04d}"
        name = f"{self.sweep.id}/{folder.name}-{atomic.unique()}"
        draft = place / f".new-{atomic.unique()}"
        draft.mkdir(mode=0o700)
        atomic.write_text(draft / TRIALS, "".join(f"{start.folder.name}\n" for start in starts))
        atomic.write_text(draft / NAME, f"{name}\n")
        write_script(draft, self._described(name, folder, len(starts)))
        atomic.sync_folder(draft)
        draft.rename(folder)
        return folder, name

    def _described(self, name: str, folder: Path, tasks: int) -> Job:
        """An array as its script is made of."""
        array = Array(tasks, min(tasks, self.plan.max_parallel), self.plan.pause_between)
        bad = tuple(excluded_nodes(self.profile, self.sweep.folder.parents[1]))
        return Job(name, folder, self.profile, excluded=bad, array=array)

    def shown(self, tasks: int) -> str:
        folder = self.sweep.folder / PLACE / "array-0001"
        return script(self._described(f"{self.sweep.id}/{folder.name}", folder, min(tasks, most_tasks())))

    def _find_numbers(self) -> None:
        """Arrays that somebody was about to submit who died: submitted or not?"""
        for folder in sorted((self.sweep.folder / PLACE).glob("array-*")):
            if (folder / JOB_NUMBER).exists() or (folder / NEVER_SUBMITTED).exists():
                continue
            number = job_state.job_id_by_name((folder / NAME).read_text().strip())
            if number is None:
                raise _silent()
            if number:
                atomic.write_text(folder / JOB_NUMBER, f"{number}\n")
            else:
                (folder / NEVER_SUBMITTED).touch()


def _parts(many: Sequence[Any], largest: int) -> list[Sequence[Any]]:
    return [many[i : i + largest] for i in range(0, len(many), largest)]


def _silent() -> TiltyardError:
    """What is missing stays so; what gives no answer may give one later."""
    kind = TiltyardError if shutil.which("squeue") else UseError
    return kind("Slurm gives no answer about the sweep's jobs here", "type this where Slurm answers")


def most_tasks() -> int:
    """How many tasks an array may have at this site."""
    try:
        done = run_command(["scontrol", "show", "config"], timeout=job_state.TIMEOUT)
    except (OSError, subprocess.SubprocessError) as error:
        raise _silent() from error
    for line in done.stdout.splitlines():
        name, _, value = line.partition("=")
        if name.strip() == "MaxArraySize" and value.strip().isdecimal():
            if int(value) < 2:
                raise UseError("this Slurm allows no job arrays: MaxArraySize is 0", "ask its administrators")
            return int(value)
    raise _silent()
