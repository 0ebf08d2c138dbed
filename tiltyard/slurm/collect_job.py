"""An array of Slurm jobs that collect one dataset. Its tasks run the same command, and divide the episodes by claims.

    FOLDER/.jobs/0001/script.sh, secrets.sh    the script; the profile's secret variables, readable only by the user
    FOLDER/.jobs/0001/TASK.out                 what the tasks print

At the time limit a task stops (exit code 75) and is requeued; it then makes what is still missing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tiltyard.config.site import ENTERED, Profile
from tiltyard.config.site_file import runs_root
from tiltyard.errors import EXIT_RESUMABLE, UseError
from tiltyard.run import atomic
from tiltyard.slurm import SCRIPT, SECRETS
from tiltyard.slurm.commands import sbatch
from tiltyard.slurm.script import Array, header_lines, quoted, script_text, setup_lines, step_lines
from tiltyard.slurm.submit import write_secrets

FOLDER = ".jobs"


def check(profile: Profile) -> None:
    """UseError if tasks of this profile cannot collect."""
    if profile.slurm.samplers is not None or profile.resources.nodes > 1:
        hint = "set resources.nodes: 1 without slurm.samplers; --tasks sets the number of nodes"
        raise UseError(f"profile {profile.name} requests several nodes, but a task collects on one", hint)


def submit(dataset: Path, profile: Profile, words: Sequence[str], tasks: int) -> tuple[str, Path]:
    """Submit the array; returns its job id and the folder of script and logs. `words` follow `tiltyard`."""
    folder = _new_folder(dataset)
    name = f"collect-{dataset.name}-{folder.name}"
    text = script(folder, name, profile, words, tasks)
    atomic.write_private(folder / SCRIPT, text, 0o700)
    write_secrets(folder, profile)
    return sbatch(folder / SCRIPT, name), folder


def script(folder: Path, name: str, profile: Profile, words: Sequence[str], tasks: int) -> str:
    """The script of all tasks. Signals are for the command; this shell ignores them and waits."""
    place = quoted(str(folder))
    command = step_lines(profile, ["-m", "tiltyard", *words], "", python=sys.executable, background=True)
    return script_text(
        [
            *header_lines(profile, name, "/dev/null", array=Array(tasks, tasks)),
            f'exec >>{place}/"$SLURM_ARRAY_TASK_ID".out 2>&1',
            *setup_lines(profile, f"{place}/{SECRETS}"),
            f"export {ENTERED}={quoted(profile.name)} TILTYARD_RUNS={quoted(str(runs_root()))}",
            *command,
            "task=$!",
            "trap : USR2 TERM INT",
            'while wait "$task"; code=$?; kill -0 "$task" 2>/dev/null; do :; done',
            'id="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"',
            'echo "task $id: exit code $code"',
            "# Stopped at the time limit: make the rest later. A cancelled task does not run now.",
            f'[ "$code" = {EXIT_RESUMABLE} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {profile.slurm.requeues} ] \\',
            '  && [ "$(squeue -h -j "$id" -o %T)" = RUNNING ] && scontrol requeue "$id" && exit 0',
            'exit "$code"',
        ]
    )


def _new_folder(dataset: Path) -> Path:
    """The next folder of the dataset for the files of an array."""
    try:
        (dataset / FOLDER).mkdir(mode=0o700, exist_ok=True)
        for number in range(1, 10_000):
            folder = dataset / FOLDER / f"{number:04d}"
            try:
                folder.mkdir(mode=0o700)
                return folder
            except FileExistsError:
                continue
    except OSError as error:
        raise UseError(f"cannot write to {dataset}: {error.strerror}", "choose another folder") from error
    raise UseError(f"{dataset / FOLDER} has too many folders of jobs", "delete it")
