"""Trials that run any other program: parameters as flags, a folder with a status, a log per attempt.

    python -m tiltyard.sweep.external_program FOLDER [--trust-code]    runs a trial's program, records how it ended

The program may write to the trial's folder, whose path is in TILTYARD_TRIAL. Trials are compared by the lines
{"env_steps": ..., "metrics": {...}} that it appends to metrics.jsonl there. A retry starts the program from scratch.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, BinaryIO

from tiltyard.config.ownership import refuse_foreign
from tiltyard.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, UseError
from tiltyard.processes import proc
from tiltyard.processes.lifetime import die_with
from tiltyard.run import atomic
from tiltyard.run.events import log_event
from tiltyard.run.folder import PROGRAM, Run
from tiltyard.run.history import History
from tiltyard.run.lock import Lock
from tiltyard.run.logs import last_line
from tiltyard.run.status import write_first_status, write_status
from tiltyard.sweep.folder import Trial, trial_line

if TYPE_CHECKING:
    from tiltyard.config.sweep_plan import Plan
    from tiltyard.sweep.folder import Sweep

TRIAL = "TILTYARD_TRIAL"  # the trial's folder; identifies all processes of a program
GRACE_SECONDS = 60.0  # from SIGTERM to SIGKILL
POLL_SECONDS = 0.05
NOT_STARTED = 127  # as in a shell


def check(plan: Plan) -> None:
    """UseError if the program is not found."""
    assert plan.program
    first = plan.program[0]
    if first != "python" and shutil.which(first) is None:
        raise UseError(f"program = {first}: command not found", "give its path, or add its folder to PATH")


def name(plan: Plan) -> str:
    """A name for the sweep's folder: that of the script, the module or the program."""
    assert plan.program
    words = [word for word in plan.program if not word.startswith("-")]
    chosen = words[1] if words[0].startswith("python") and len(words) > 1 else words[0]
    cleaned = "".join(letter if letter.isalnum() or letter in "_.+" else "-" for letter in Path(chosen).stem)
    return cleaned.strip("-.")[:80] or "program"


def command(sweep: Sweep, plan: Plan, trial: Trial) -> list[str]:
    """The command line: the plan's words, then the parameters as flags."""
    assert plan.program
    made = [*plan.program]
    for key, value in trial.settings.items():
        made += _flag(f"{plan.flag}{key}", value)
    made += [f"{plan.flag}seed={trial.seed}"] if plan.seeds != [0] or trial.seed else []
    made += [f"{plan.name_flag}={sweep.place(trial.number).name}"] if plan.name_flag else []
    return made + ([f"{plan.folder_flag}={sweep.folder}"] if plan.folder_flag else [])


def _flag(flag: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, list):
        return [flag, *(str(each) for each in value)]
    return [f"{flag}={json.dumps(value) if isinstance(value, dict) else value}"]


def make(sweep: Sweep, plan: Plan, trial: Trial) -> None:
    """Make a trial's folder; it appears complete."""
    place = sweep.place(trial.number)
    draft, words = atomic.empty_draft(place), command(sweep, plan, trial)
    about = {"command": words, "folder": sweep.facts()["cwd"], "trial": trial_line(trial)}
    atomic.write_sealed(draft / PROGRAM, about)
    write_first_status(draft, place, name=sweep.folder.parent.name, env=words[0])
    atomic.sync_folder(draft)
    draft.rename(place)


def run(folder: Path) -> int:
    """Run the program of a trial and record its end in status.json; returns the exit code."""
    trial = Run(folder)
    with Lock(trial):
        program = trial.program()
        attempt = int(trial.status()["attempt"]) + 1
        write_status(trial, state="running", reason="", attempt=attempt, pid=os.getpid(), host=os.uname().nodename)
        log_event(trial, "started", f"Attempt {attempt} started.", attempt=attempt)
        (folder / "logs").mkdir(exist_ok=True)
        signals: list[int] = []
        began = time.monotonic()
        _end(folder, 0.0)  # processes of an attempt whose parent was killed
        with (folder / "logs" / f"attempt-{attempt}.log").open("ab") as log:
            code = _run_program(folder, program, log, signals)
        if code == 0:
            state, reason, result = "finished", "exit code 0", EXIT_DONE
        elif signals or code == EXIT_RESUMABLE:
            state, reason, result = "stopped", "stopped by a signal" if signals else "exit code 75", EXIT_RESUMABLE
        else:
            how = f"exit code {code}" if code > 0 else f"signal {-code}"
            line = last_line(folder / "logs" / f"attempt-{attempt}.log")
            state, reason, result = "failed", f"{how}: {line}" if line else how, EXIT_FAILED
        spent = float(trial.status()["progress"]["seconds"]) + time.monotonic() - began
        steps = History(folder).env_steps or 0
        progress = {**trial.status()["progress"], "env_steps": steps, "seconds": spent}
        write_status(trial, state=state, reason=reason, progress=progress)
        log_event(trial, state, f"Attempt {attempt} {state}: {reason}", reason=reason)
    return result


def _run_program(folder: Path, program: Mapping[str, Any], log: BinaryIO, signals: list[int]) -> int:
    """Run the program to its end; returns its exit code. Signals that ask it to stop are appended to `signals`."""
    first, *rest = program["command"]
    words = [sys.executable if first == "python" else first, *rest]  # the Python of the node that it runs on
    try:
        # If this process dies, the trial may be started again: the program must die with it.
        child = subprocess.Popen(
            words,
            stdout=log,
            stderr=log,
            cwd=program["folder"],
            env={**os.environ, TRIAL: str(folder)},
            preexec_fn=partial(die_with, os.getpid()),
            start_new_session=True,
        )
    except OSError as error:  # the program, or the folder that it is started in
        log.write(f"{words[0]} could not be started: {error.filename}: {error.strerror}\n".encode())
        return NOT_STARTED

    def forward(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)  # to the group: a shell does not forward signals to its children

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, forward)
    code = child.wait()
    if signals:
        _end(folder, GRACE_SECONDS)
    return code


def _end(folder: Path, grace: float) -> None:
    """Wait until no process of the trial is left; kill those that remain after the grace period."""
    until = time.monotonic() + grace
    while left := [
        each.pid
        for each in proc.own_processes()
        if each.pid != os.getpid() and proc.environment(each.pid).get(TRIAL) == str(folder)
    ]:
        if time.monotonic() >= until:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)


def main(folder: Path, *options: str) -> int:
    """Run the command; returns the exit code."""
    try:
        if "--trust-code" not in options:
            refuse_foreign([folder / PROGRAM], "which program the trial runs", top=folder)
        return run(folder)
    except UseError as error:
        sys.stderr.write(f"error: {error.message}\nhint: {error.hint}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
