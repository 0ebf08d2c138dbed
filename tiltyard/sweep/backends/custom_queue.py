"""Trials as jobs of any other queue, whose commands the site file has: submit, poll, cancel.

    SWEEP/template/job-0001/    script.sh: the trial, then a turn; secrets.sh; number: the id that `submit` printed

One job per trial, as many as max_parallel at once. What is submitted is `bash .../script.sh`, which needs the sweep's
folder under the same path and, to submit what comes next, the queue's commands; where they are missing, whoever types
`tiltyard sweep watch` takes the turns instead.

A job without a number was on its way when somebody died, and nobody can tell whether it was submitted. It is made again
under another number; the first one, should it start, finds that its trial is no longer its own.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiltyard.config import site
from tiltyard.config.site import ENTERED, PLACEHOLDER, Profile, Slurm
from tiltyard.errors import TiltyardError, UseError
from tiltyard.run import atomic
from tiltyard.run.folder import Run
from tiltyard.slurm import FOLDER, JOB_NUMBER, JOB_VARIABLE, SCRIPT, SECRETS, VERDICT
from tiltyard.slurm.commands import run_command
from tiltyard.slurm.job_state import JobState
from tiltyard.slurm.script import RUN_AGAIN, setup_lines, tick_command
from tiltyard.slurm.submit import write_private, write_secrets
from tiltyard.sweep.backends.jobs import Jobs, Start

PLACE = "template"


class Template(Jobs):
    """The jobs of one sweep in a queue that only its commands know."""

    @property
    def commands(self) -> site.Template:
        assert self.profile.template is not None
        return self.profile.template

    def ask(self, jobs: Mapping[int, str]) -> dict[int, JobState]:
        return {number: self._poll(job) for number, job in jobs.items()}

    def _poll(self, job: str) -> JobState:
        """A command that fails may only have found no network: it tells nothing, unless the site file says so."""
        command, alive, gone = words(self.commands.poll, {"id": job}), self.commands.alive, self.commands.gone
        done = run(command)
        if done.returncode == 0:
            return JobState("RUNNING" if alive is None or re.search(alive, done.stdout) else _said(done)[:100])
        if not (alive is None if gone is None else re.search(gone, done.stdout + done.stderr)):
            hint = "try again later; if that is what it says of a job that it has forgotten, set template.gone"
            raise TiltyardError(f"{shlex.join(command)} gives no answer: {_said(done)}", hint)
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
            if done.returncode != 0 and self._poll(job).running:  # else it has ended by itself meanwhile
                raise TiltyardError(f"job {job} could not be cancelled: {_said(done)}", shlex.join(command))

    def send(self) -> list[str]:
        said = []
        while self.chosen:
            said.append(self._submit(self.chosen.pop(0)))
        return said

    def _submit(self, start: Start) -> str:
        """One job: its folder, then its trial's status, then the job itself, then its number."""
        folder = self._make(start)
        before = self.queue_up(start, f"{PLACE}/{folder.name}")
        command = submission(self.profile, start.folder, folder / SCRIPT)
        try:
            done = run(command)
            if done.returncode != 0:
                raise TiltyardError(f"trial {start.number} was refused: {_said(done)}", shlex.join(command))
            found = re.search(self.commands.id, done.stdout)
            if found is None:
                raise TiltyardError(
                    f"{command[0]} printed no id of a job: {_said(done)}", "template.id says how to find it"
                )
        except TiltyardError:
            self.take_back([start], [before])
            raise
        number = found[1] if found.groups() else found[0]
        atomic.write_text(folder / JOB_NUMBER, f"{number}\n")
        self.work[start.number] = number
        return f"Trial {start.number} was submitted as job {number}."

    def shown(self, tasks: int) -> str:
        folder, trial = self.sweep.folder / PLACE / "job-0001", self.sweep.place(1)
        command = shlex.join(submission(self.profile, trial, folder / SCRIPT))
        return f"# submitted with: {command}\n{script(self, Start(1, trial), folder)}"

    def _make(self, start: Start) -> Path:
        place = self.sweep.folder / PLACE
        place.mkdir(exist_ok=True)
        number = max((int(folder.name.partition("-")[2]) for folder in place.glob("job-*")), default=0) + 1
        folder = place / f"job-{number:04d}"
        folder.mkdir(mode=0o700)
        write_private(folder / SCRIPT, script(self, start, folder), 0o700)
        write_secrets(folder, self.profile)
        return folder


def script(jobs: Jobs, start: Start, folder: Path) -> str:
    """What the queue is to run: the trial's agent, then a turn of the sweep, and again as long as there is more."""
    profile, sweep = jobs.profile, folder.parents[1]
    assert profile.template is not None
    told = Slurm(setup=profile.template.setup, python=profile.template.python, keep_ld_preload=True)
    profile = profile.model_copy(update={"slurm": told})
    python = shlex.quote(told.python or sys.executable)
    pause = jobs.plan.pause_between
    lines = [
        "#!/bin/bash",
        f"# Trial {start.number} of {jobs.sweep.id}, profile {profile.name!r}.",
        f"exec >>{shlex.quote(str(start.folder))}/logs/{folder.name}.out 2>&1",
        *setup_lines(profile, shlex.quote(str(folder / SECRETS))),
        f"export {ENTERED}={shlex.quote(profile.name)} TILTYARD_RUNS={shlex.quote(str(sweep.parents[1]))}",
        f"export {JOB_VARIABLE}={PLACE}/{folder.name}",
        f"run={shlex.quote(str(start.folder))} sweep={shlex.quote(str(sweep))}",
        *([f"sleep {start.wait:.0f}"] if start.wait else []),
        *([f'{{ flock 9; sleep {pause:g}; }} 9>"$sweep/{PLACE}/pause"'] if pause else []),
        "while true; do",
        f'{python} -m tiltyard.slurm.node_agent "$run" &',
        "agent=$!",
        "trap 'kill -TERM \"$agent\" 2>/dev/null' TERM INT",
        "trap 'kill -USR2 \"$agent\" 2>/dev/null' USR2",
        'while wait "$agent"; code=$?; kill -0 "$agent" 2>/dev/null; do :; done',
        "# What comes next in the sweep; perhaps more of the same.",
        tick_command(profile, sys.executable),
        f'[ $? = {RUN_AGAIN} ] || exit "$code"',
        "done",
    ]
    return "\n".join(lines) + "\n"


def submission(profile: Profile, trial: Path, path: Path) -> list[str]:
    """The command that submits a trial's script."""
    assert profile.template is not None
    asked = profile.resources.model_dump(mode="json")
    values = {name: str(asked[name] or "") for name in ("memory", "time")}
    values |= {name: str(asked[name]) for name in ("nodes", "cpus", "gpus")}
    values |= {"command": shlex.join(["bash", str(path)]), "name": ".".join(trial.parts[-3:])}
    return words(profile.template.submit, {**values, "folder": str(trial)})


def words(command: str, values: Mapping[str, str]) -> list[str]:
    """A template's words with values in the place of names. No shell reads them, so nothing needs quotes."""

    def value(found: re.Match[str]) -> str:
        if found[1] is None:
            return found[0][0]
        return values.get(found[1], "")

    return [PLACEHOLDER.sub(value, word) for word in shlex.split(command)]


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """One of the queue's commands."""
    try:
        return run_command(command)
    except FileNotFoundError as error:
        raise UseError(f"there is no {command[0]} here", "type this where it is") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise TiltyardError(f"{command[0]} gives no answer: {error}", "try again later") from error


def _said(done: subprocess.CompletedProcess[str]) -> str:
    text = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
    return text[0]
