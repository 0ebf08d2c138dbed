"""Trials as jobs of any other queue, by the commands in the site file: submit, poll, cancel.

    SWEEP/template/job-0001/    script.sh: the trial, then a tick; secrets.sh; number: the id that `submit` printed

One job per trial, at most max_parallel at once. What is submitted is `bash .../script.sh`, which needs the sweep's
folder under the same path and, to submit the next trials, the queue's commands; where a node lacks them, `tiltyard
sweep watch` runs the ticks instead.

A job without a number was being submitted when its process was killed, and may or may not be in the queue. The trial
gets another job; the first one, should it start, finds that the trial belongs to another job, and exits.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiltyard.config.site import ENTERED, PLACEHOLDER, Profile, Slurm
from tiltyard.config.sweep_plan import Plan
from tiltyard.errors import TiltyardError, UseError
from tiltyard.run import atomic
from tiltyard.run.folder import Run
from tiltyard.slurm import FOLDER, JOB_NUMBER, JOB_VARIABLE, SCRIPT, SECRETS, VERDICT
from tiltyard.slurm.commands import run_command
from tiltyard.slurm.job_state import JobState
from tiltyard.slurm.script import (
    CONTROL,
    RUN_AGAIN,
    one_line,
    pause_lines,
    quoted,
    script_text,
    setup_lines,
    tick_command,
)
from tiltyard.slurm.submit import write_secrets
from tiltyard.sweep.backends.jobs import Start
from tiltyard.sweep.folder import Sweep

PLACE = "template"


class CustomQueue:
    """A `Queue`: the jobs of one sweep, by a profile's command templates."""

    arrays = False

    def __init__(self, sweep: Sweep, plan: Plan, profile: Profile) -> None:
        assert profile.template is not None
        self.sweep, self.plan, self.profile, self.commands = sweep, plan, profile, profile.template

    def recover(self) -> None:
        """Nothing to find out: a trial whose job has no number gets another job."""

    def states(self, jobs: Mapping[int, str]) -> dict[int, JobState]:
        return {number: self._poll(job) for number, job in jobs.items()}

    def _poll(self, job: str) -> JobState:
        """The state of a job. A failed command may mean a network problem, so it raises unless `gone` matches."""
        command, alive, gone = words(self.commands.poll, {"id": job}), self.commands.alive, self.commands.gone
        done = run(command)
        if done.returncode == 0:
            return JobState("RUNNING" if alive is None or re.search(alive, done.stdout) else _first_line(done)[:100])
        if not (alive is None if gone is None else re.search(gone, done.stdout + done.stderr)):
            hint = "try again later; if this is its answer for a job that no longer exists, set template.gone"
            raise TiltyardError(f"{shlex.join(command)} failed: {_first_line(done)}", hint)
        return JobState("GONE")

    def job_of(self, run: Run, status: dict[str, Any]) -> str | None:
        job = status.get("job")
        if not isinstance(job, dict) or job.get("launcher") != PLACE:
            return None
        try:
            return (run.folder.parent / str(job["array"]) / JOB_NUMBER).read_text().strip()
        except OSError:
            return None

    def will_continue(self, run: Run, status: Mapping[str, Any]) -> bool:
        try:
            of, _, word = (run.folder / FOLDER / VERDICT).read_text().split()
        except (OSError, ValueError):
            return False
        job = status.get("job") or {}
        return word == "requeue" and job.get("array") == f"{PLACE}/job-{of}"

    def withdraw(self, jobs: Mapping[int, str]) -> None:
        for job in jobs.values():
            command = words(self.commands.cancel, {"id": job})
            done = run(command)
            if done.returncode != 0 and self._poll(job).running:  # else it has ended in the meantime
                raise TiltyardError(f"job {job} could not be cancelled: {_first_line(done)}", shlex.join(command))

    def batches(self, starts: Sequence[Start]) -> list[Sequence[Start]]:
        return [[start] for start in starts]

    def make_job(self, batch: Sequence[Start]) -> Path:
        place = self.sweep.folder / PLACE
        place.mkdir(exist_ok=True)
        number = max((int(folder.name.partition("-")[2]) for folder in place.glob("job-*")), default=0) + 1
        folder = place / f"job-{number:04d}"
        folder.mkdir(mode=0o700)
        atomic.write_private(folder / SCRIPT, self._script(batch[0], folder), 0o700)
        write_secrets(folder, self.profile)
        return folder

    def submit(self, batch: Sequence[Start], folder: Path, others: Mapping[int, str]) -> tuple[str, str]:
        command = self._submission(batch[0].folder, folder / SCRIPT)
        done = run(command)
        if done.returncode != 0:
            raise TiltyardError(f"trial {batch[0].number} was refused: {_first_line(done)}", shlex.join(command))
        found = re.search(self.commands.id, done.stdout)
        if found is None:
            hint = "set template.id to a pattern that finds it"
            raise TiltyardError(f"{command[0]} printed no job id: {_first_line(done)}", hint)
        return found[1] if found.groups() else found[0], ""

    def preview(self, tasks: int) -> str:
        folder, trial = self.sweep.folder / PLACE / "job-0001", self.sweep.place(1)
        command = shlex.join(self._submission(trial, folder / SCRIPT))
        return f"# submitted with: {command}\n{self._script(Start(1, trial), folder)}"

    def _submission(self, trial: Path, path: Path) -> list[str]:
        """The command that submits a trial's script. Queues write its words into scripts of their own."""
        if CONTROL.search(str(path)):
            raise UseError(f"a queue cannot use {str(path)!r}: it contains a control character", "rename the folder")
        asked = self.profile.resources.model_dump(mode="json")
        values = {name: "" if value is None else str(value) for name, value in asked.items()}
        values |= {"command": shlex.join(["bash", str(path)]), "name": ".".join(trial.parts[-3:])}
        return words(self.commands.submit, {**values, "folder": str(trial)})

    def _script(self, start: Start, folder: Path) -> str:
        """What the queue runs: the trial's agent, then a tick of the sweep, again while that says so."""
        sweep = folder.parents[1]
        slurm = Slurm(setup=self.commands.setup, python=self.commands.python, keep_ld_preload=True)
        profile = self.profile.model_copy(update={"slurm": slurm})
        python = quoted(slurm.python or sys.executable)
        lines = [
            "#!/bin/bash",
            f"# Trial {start.number} of {one_line(self.sweep.id)}, profile {profile.name!r}.",
            f"exec >>{quoted(str(start.folder))}/logs/{folder.name}.out 2>&1",
            *setup_lines(profile, quoted(str(folder / SECRETS))),
            f"export {ENTERED}={quoted(profile.name)} TILTYARD_RUNS={quoted(str(sweep.parents[1]))}",
            f"export {JOB_VARIABLE}={PLACE}/{folder.name}",
            f"run={quoted(str(start.folder))} sweep={quoted(str(sweep))}",
            *([f"sleep {start.wait:.0f}"] if start.wait else []),
            *pause_lines(self.plan.pause_between, PLACE),
            "while true; do",
            f'{python} -m tiltyard.slurm.node_agent "$run" &',
            "agent=$!",
            "trap 'kill -TERM \"$agent\" 2>/dev/null' TERM INT",
            "trap 'kill -USR2 \"$agent\" 2>/dev/null' USR2",
            'while wait "$agent"; code=$?; kill -0 "$agent" 2>/dev/null; do :; done',
            "# What comes next in the sweep; perhaps the same trial again.",
            tick_command(profile, sys.executable),
            f'[ $? = {RUN_AGAIN} ] || exit "$code"',
            "done",
        ]
        return script_text(lines)


def words(command: str, values: Mapping[str, str]) -> list[str]:
    """A command template as words, placeholders replaced by values. No shell reads them, so nothing needs quotes."""

    def value(found: re.Match[str]) -> str:
        return found[0][0] if found[1] is None else values.get(found[1], "")

    return [PLACEHOLDER.sub(value, word) for word in shlex.split(command)]


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run one of the queue's commands."""
    try:
        return run_command(command)
    except FileNotFoundError as error:
        raise UseError(f"{command[0]}: command not found", "type this on a machine that has it") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise TiltyardError(f"{command[0]} failed: {error}", "try again later") from error


def _first_line(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[0]
