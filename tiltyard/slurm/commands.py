"""Running a queue's commands, and the Slurm commands that change something. Queries are in job_state.py."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tiltyard.errors import TiltyardError

TIMEOUT = 120.0  # seconds for sbatch, which retries while the controller is busy


def run_command(
    command: Sequence[str], *, timeout: float | None = None, new_session: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a queue command and return its output. Raises OSError and subprocess.SubprocessError.

    With `new_session`, Ctrl-C in the terminal does not reach the command.
    """
    return subprocess.run(
        command,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIMEOUT if timeout is None else timeout,
        start_new_session=new_session,
    )


def output_of(command: Sequence[str], timeout: float) -> str | None:
    """What a command prints; None if it is missing, fails or takes longer."""
    try:
        done = run_command(command, timeout=timeout)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def sbatch(path: Path, name: str, options: Sequence[str] = ()) -> str:
    """Submit a script and return the job id. After an error no job called `name` is left in the queue."""
    try:
        # Ctrl-C must reach only this process, which then cancels the job.
        done = run_command(["sbatch", "--parsable", *options, str(path)], new_session=True)
        if done.returncode == 0:
            return _job_id(done.stdout, path)
    except FileNotFoundError as error:
        hint = f"run this on a login node; the script is {path}"
        raise TiltyardError("sbatch not found; it is needed to submit jobs to Slurm", hint) from error
    except BaseException as error:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            run_command(["scancel", "--user", getpass.getuser(), "--name", name])
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        message = f"sbatch did not answer within {TIMEOUT:.0f} s; the Slurm controller may be down or busy"
        hint = f"try again later; the script is {path}"
        raise TiltyardError(message, hint) from error
    output = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
    lines = output.removeprefix("sbatch: error: ").splitlines()
    raise TiltyardError(f"Slurm refused the job: {lines[0]}", f"the script is {path}", "\n".join(lines[1:]))


def _job_id(output: str, path: Path) -> str:
    """The last line of `sbatch --parsable`; a site may print messages before it."""
    found = re.match(r"\d+(?=;|$)", (output.strip().splitlines() or [""])[-1].strip())
    if found is None:
        raise TiltyardError(f"sbatch printed no job id: {output.strip() or 'nothing'}", f"the script is {path}")
    return found[0]


def environment() -> dict[str, str]:
    """This process's environment without the variables of a surrounding job, which sbatch and srun would obey."""
    return {
        name: value
        for name, value in os.environ.items()
        if name == "SLURM_CONF" or not name.startswith(("SLURM_", "SBATCH_"))
    }


def cancel(*jobs: str, signal: str | None = None) -> None:
    """Cancel jobs; with a signal, only send it to their processes."""
    done = run_command(["scancel", *([f"--signal={signal}"] if signal else []), *jobs])
    if done.returncode != 0 and not signal:
        reason = f"cannot cancel job {', '.join(jobs)}: {done.stderr.strip()}"
        raise TiltyardError(reason, f"run: scancel {' '.join(jobs)}")
