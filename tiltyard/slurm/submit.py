"""Submit a run to Slurm: write its job folder and script, call sbatch, set the run's state to `queued`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from tiltyard.config.experiment import Experiment
from tiltyard.config.site import Profile
from tiltyard.errors import TiltyardError, UseError
from tiltyard.run import atomic
from tiltyard.run.events import log_event
from tiltyard.run.folder import Run
from tiltyard.run.lock import Lock
from tiltyard.run.status import write_status
from tiltyard.slurm import COUNTS, FOLDER, RESUBMITTED, SCRIPT, SECRETS, STOP, TASK, VERDICT
from tiltyard.slurm.commands import sbatch
from tiltyard.slurm.script import Job, script, secret_environment


def check(profile: Profile, experiment: Experiment) -> None:
    """UseError if the experiment cannot use the nodes that the profile requests."""
    several = profile.resources.nodes > 1 or profile.slurm.samplers is not None
    if several and experiment.engine.kind != "rllib":
        message = f"profile {profile.name} requests several nodes, but engine.kind = {experiment.engine.kind} uses one"
        hint = "set engine.kind=rllib, or resources.nodes: 1 without slurm.samplers"
        raise UseError(message, hint)


def submit(
    run: Run, profile: Profile, overrides: Sequence[str] = (), *, trust_code: bool = False, excluded: Sequence[str] = ()
) -> str:
    """Write the run's script and submit it; returns the job id. `overrides` apply to the job's first attempt.

    If Slurm refuses the job, the run is marked failed and TiltyardError is raised.
    """
    folder = run.folder / FOLDER
    with Lock.acquire(run):
        make_folder(run, task(profile, overrides, trust_code))
        write_script(folder, Job(run.id, run.folder, profile, excluded=tuple(excluded)))
        try:
            number = sbatch(folder / SCRIPT, run.id)
        except TiltyardError as error:
            write_status(run, state="failed", reason=error.message)
            log_event(run, "failed", error.message)
            raise
        submitted = {"launcher": "slurm", "profile": profile.name, "id": number, "submitted": atomic.now()}
        job = {**submitted, "script": str(folder / SCRIPT), "avoided": list(excluded)}
        write_status(run, state="queued", reason="", job=job)
        without = f", excluding {', '.join(excluded)} (found bad by tiltyard doctor)" if excluded else ""
        sentence = f"submitted as job {number} with profile {profile.name}{without}"
        log_event(run, "submitted", sentence, job=number, submission=job)
    return number


def make_folder(run: Run, task: Mapping[str, object], kept: Sequence[str] = ()) -> None:
    """Make the run's job folder and remove an earlier job's files, except those `kept`."""
    folder = run.folder / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    (run.folder / "logs").mkdir(exist_ok=True)
    for stale in {STOP, RESUBMITTED, COUNTS, VERDICT}.difference(kept):
        (folder / stale).unlink(missing_ok=True)
    atomic.write_json(folder / TASK, task)


def write_script(folder: Path, job: Job) -> None:
    """Write the script and the secrets that it reads."""
    atomic.write_private(folder / SCRIPT, script(job), 0o700)
    write_secrets(folder, job.profile)


def write_secrets(folder: Path, profile: Profile) -> None:
    """Write the profile's secret variables to a file that only the user can read."""
    hidden = secret_environment(profile.environment)
    secrets = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in hidden.items())
    atomic.write_private(folder / SECRETS, secrets, 0o600)


def task(profile: Profile, overrides: Sequence[str] = (), trust_code: bool = False) -> dict[str, object]:
    """The contents of task.json, for the node agent. A sweep adds `program` and `judge` for its trials."""
    slurm, resources, samplers = profile.slurm, profile.resources, profile.slurm.samplers
    return {
        "profile": profile.name,
        "lead": profile.lead,
        "lead_set": slurm.lead is not None,
        "requeues": slurm.requeues,
        "retry": slurm.retry,
        "wait": slurm.wait,
        "nodes": resources.nodes + (samplers.nodes if samplers else 0),
        "cpus_elsewhere": (resources.nodes - 1) * resources.cpus + (samplers.nodes * samplers.cpus if samplers else 0),
        "samplers": samplers is not None,
        "overrides": list(overrides),
        "trust_code": trust_code,
    }
