"""A queue's commands: how any is called, and Slurm's that change something. What is asked of Slurm is in queue.py."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tiltyard.errors import TiltyardError

TIMEOUT = 120.0  # seconds that sbatch may take: a busy controller makes it wait and try again


def run_command(
    command: Sequence[str], *, timeout: float | None = None, new_session: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a command of the queue's and return what it said. Raises OSError and subprocess.SubprocessError.

    `apart` keeps the terminal's Ctrl-C from it.
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


def sbatch(path: Path, name: str, options: Sequence[str] = ()) -> str:
    """Submit a script and return the job's id. Whatever goes wrong, nothing called `name` is left in the queue."""
    try:
        with _cancelled_unless_done(name):
            # A Ctrl-C is for us, who then take back what was submitted.
            done = run_command(["sbatch", "--parsable", *options, str(path)], new_session=True)
            if done.returncode == 0:
                return _job_id(done.stdout, path)
    except FileNotFoundError as error:
        raise TiltyardError(
            "there is no sbatch here, which submits jobs to Slurm", f"log in where it is; the script is {path}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise TiltyardError(
            f"sbatch gave no answer for {TIMEOUT:.0f} s: Slurm's controller is down or busy",
            f"try again later; the script is {path}",
        ) from error
    said = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").removeprefix(
        "sbatch: error: "
    )
    lines = said.splitlines()
    raise TiltyardError(f"Slurm refused the job: {lines[0]}", f"the script is {path}", "\n".join(lines[1:]))


def _job_id(said: str, path: Path) -> str:
    """What `sbatch --parsable` prints last, after what a site may have to say."""
    found = re.match(r"\d+(?=;|$)", (said.strip().splitlines() or [""])[-1].strip())
    if found is None:
        raise TiltyardError(f"sbatch printed no job id: {said.strip() or 'nothing'}", f"the script is {path}")
    return found[0]


@contextlib.contextmanager
def _cancelled_unless_done(name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except BaseException:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            run_command(["scancel", "--user", getpass.getuser(), "--name", name])
        raise


def environment() -> dict[str, str]:
    """This process's variables without those of a job that it may be part of, which sbatch and srun would obey."""
    return {
        name: value
        for name, value in os.environ.items()
        if name == "SLURM_CONF" or not name.startswith(("SLURM_", "SBATCH_"))
    }


def cancel(*jobs: str, signal: str | None = None) -> None:
    """End jobs; with a signal, send that to what runs on their nodes and leave the rest to them."""
    done = run_command(["scancel", *([f"--signal={signal}"] if signal else []), *jobs])
    if done.returncode != 0 and not signal:
        said = f"job {', '.join(jobs)} could not be cancelled: {done.stderr.strip()}"
        raise TiltyardError(said, f"try by hand: scancel {' '.join(jobs)}")
