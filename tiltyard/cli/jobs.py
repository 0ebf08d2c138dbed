"""Runs that are Slurm jobs: `train`, `resume` and `fork` submit and follow them; `ls`, `show` and `stop` ask Slurm."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tiltyard.cli import report
from tiltyard.cli.output import write_outcome
from tiltyard.config.ownership import TRUST_CODE
from tiltyard.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_RESUMABLE, TiltyardError, UseError
from tiltyard.run import trust
from tiltyard.run.events import log_event
from tiltyard.run.folder import Run
from tiltyard.run.lock import Lock
from tiltyard.run.status import root_of, write_status
from tiltyard.slurm import FOLDER, STOP, job_state
from tiltyard.slurm.commands import cancel

if TYPE_CHECKING:
    from tiltyard.config.experiment import Experiment
    from tiltyard.config.site import Profile
    from tiltyard.training.preflight import CheckedExperiment

EXIT = {"finished": EXIT_DONE, "stopped": EXIT_RESUMABLE}
POLL_SECONDS = 0.5  # while a job is being stopped


# ------------------------------------------------------------------------------------------------ submitting


def job_profile(name: str | None) -> Profile | None:
    """The profile called `name` if it submits jobs, else None."""
    from tiltyard.config.site import load_site, pick_profile

    if name is None:
        return None
    site, path = load_site()
    profile = pick_profile(site, name, path)
    if profile.launcher == "template":
        hint = "start a sweep of one trial with it, or add --here to continue a trial on this machine"
        raise UseError(f"profile {name} only submits trials of sweeps (launcher: template)", hint)
    return profile if profile.launcher == "slurm" else None


def profile_of(run: Run, trust_code: bool) -> Profile | None:
    """The profile that the run continues with if it is a job, else None."""
    status = run.status()
    try:
        profile = job_profile(status.get("profile"))
    except UseError as error:
        if status.get("job") is None:  # it was never a job; a missing profile is reported later
            return None
        hint = "restore the profile, or add --here to run on this machine"
        raise UseError(f"run {run.id} was a job: {error.message}", hint) from error
    if profile is not None and not trust_code:
        hint = f"add --here to run on this machine; or {TRUST_CODE}"
        trust.require_own(run, f"that a job of profile {profile.name} is submitted", hint)
    return profile


def train(
    prepared: CheckedExperiment, profile: Profile, seeds: Sequence[int | None], args: argparse.Namespace, data: TextIO
) -> int:
    """Submit one job per seed, then follow them one after another."""
    from tiltyard import api
    from tiltyard.slurm import submit
    from tiltyard.slurm.script import Job, script

    submit.check(profile, prepared.experiment)
    if getattr(args, "dry_run", False):
        folder = prepared.root / prepared.experiment.run_name / "NNNN-new-run"
        name, excluded = f"{folder.parent.name}/{folder.name}", tuple(_excluded(profile, prepared.root))
        data.write(script(Job(name, folder, profile, excluded=excluded)))
        return EXIT_DONE
    code, runs = EXIT_DONE, []
    for seed in seeds:
        run = api.create_run(prepared, seed=seed)
        try:
            _submit(run, profile, (), args)
            runs.append(run)
        except TiltyardError as error:
            if len(seeds) == 1:
                raise
            report(error)  # the other seeds are still submitted
            code = error.exit_code
    for run in runs:
        code = _follow(run, args, data) or code
    return code


def resume(run: Run, profile: Profile, settings: Experiment, args: argparse.Namespace, data: TextIO) -> int:
    """Submit a run that was checked here, with the settings that `resume` was given."""
    from tiltyard.slurm import submit

    submit.check(profile, settings)
    _submit(run, profile, args.overrides, args)
    return _follow(run, args, data)


def _submit(run: Run, profile: Profile, overrides: Sequence[str], args: argparse.Namespace) -> None:
    from tiltyard.slurm import submit

    for warning in profile.warnings():
        sys.stderr.write(f"warning: {warning}\n")
    excluded = _excluded(profile, root_of(run.folder))
    trust_code = getattr(args, "trust_code", False)
    number = submit.submit(run, profile, overrides, trust_code=trust_code, excluded=excluded)
    lines = [
        f"job         {number}",
        f"run folder  {os.path.relpath(run.folder)}",
        f"next        tiltyard logs -f {run.typed}",
        f"            tiltyard show {run.typed}",
        f"            tiltyard stop {run.typed}",
    ]
    sys.stderr.write("\n".join(lines) + "\n")


def _excluded(profile: Profile, root: Path) -> list[str]:
    """Nodes that the doctor found bad, if the profile excludes them; printed on stderr."""
    from tiltyard.doctor.bad_nodes import excluded_nodes

    bad = excluded_nodes(profile, root)
    for node, why in bad.items():
        sys.stderr.write(f"excluded    {node} (bad since {why})\n")
    if bad:
        names = ",".join(bad)
        sys.stderr.write(f"            check again with: tiltyard doctor --on {profile.name} --nodes {names}\n")
    return list(bad)


def _follow(run: Run, args: argparse.Namespace, data: TextIO) -> int:
    """Follow the job, unless --detach was given; returns the exit code."""
    try:
        state = run.state if args.detach else follow(run, sys.stderr)
    except KeyboardInterrupt:
        sys.stderr.write(f"\nthe job continues; follow it again with: tiltyard logs -f {run.typed}\n")
        return EXIT_INTERRUPTED
    status, job = run.status(), job_state.job_of(run)
    facts = {"job": job, "state": state, "reason": status["reason"], "progress": status["progress"]}
    write_outcome(data, run, args.json, **facts)
    if args.detach:
        return EXIT_DONE
    if args.expect is not None and state == "finished" and not args.expect.report(run, {}):
        return EXIT_FAILED
    return EXIT.get(state, EXIT_FAILED)


# ------------------------------------------------------------------------------------------------ watching


def follow(run: Run, output: TextIO) -> str:
    """Write the run's log, and on stderr the state of its job, until it has ended; returns the run's state."""
    from tiltyard.slurm import follow as follower

    def write(text: str) -> None:
        output.write(text)
        output.flush()

    state = follower.follow(run, write, lambda sentence: sys.stderr.write(f"{sentence}\n"))
    if state in ("lost", "failed"):
        reason = run.status()["reason"] or job_state.poll_job(run)[1]
        sys.stderr.write(f"run {run.id} is {state}: {reason}\n")
    if state == "lost" and (output_of_job := follower.last_output(run)):
        sys.stderr.write(f"the job's output ends with:\n{output_of_job}\n")
    return state


def overlay(rows: list[dict[str, Any]]) -> bool:
    """Update the states of listed runs by the states of their jobs; False if Slurm does not answer."""
    open_rows = [(row, job) for row in rows if (job := _open_job(row)) is not None]
    answers = job_state.query_jobs(job for _, job in open_rows)
    if answers is None:
        return False
    for row, job in open_rows:
        state = job_state.combined_state(row["state"], answers[job])
        # The run may have ended after it was listed and before Slurm was asked.
        row["state"] = (
            job_state.combined_state(Run(Path(row["folder"])).state, answers[job]) if state == "lost" else state
        )
    return True


def _open_job(row: dict[str, Any]) -> str | None:
    if row["state"] in ("finished", "failed", "damaged") or not isinstance(row["job"], dict):
        return None
    return job_state.job_of(Run(Path(row["folder"])), row)


# ------------------------------------------------------------------------------------------------ stopping


def stop(run: Run, wait: float) -> int:
    """Remove the run's job from the queue, or ask it to save and stop; wait until it has."""
    job = job_state.job_of(run)
    if job is None:  # not Slurm's: its agent polls this file
        (run.folder / FOLDER / STOP).touch()
        sys.stderr.write(f"asked the job of run {run.id} to save and stop\n")
        return EXIT_DONE
    answer = (job_state.query_jobs([job]) or {}).get(job)
    if answer is None:
        raise UseError(f"Slurm does not answer about job {job} of run {run.id} here", "type this where Slurm answers")
    if not (answer.pending or answer.running):
        hint = f"continue it with: tiltyard resume {run.typed}"
        raise UseError(f"run {run.id} is not running ({answer.describe(job)})", hint)
    (run.folder / FOLDER / STOP).touch()
    if answer.pending:
        cancel(job)
    else:
        cancel(job, signal="USR2")  # Ray ignores it; SIGTERM would end its processes before the last save
        sys.stderr.write(f"asked job {job} to save run {run.id} and stop\n")
    deadline = time.monotonic() + wait
    while (now := (job_state.query_jobs([job]) or {}).get(job)) is not None and (now.pending or now.running):
        if time.monotonic() >= deadline:
            sys.stderr.write(f"{now.describe(job)}; it will save and stop after its update\n")
            return EXIT_FAILED
        time.sleep(POLL_SECONDS)
    if run.status()["state"] in ("created", "queued"):
        with Lock.acquire(run):
            write_status(run, state="stopped", reason=f"job {job} was removed from the queue")
            log_event(run, "stopped", f"job {job} was removed from the queue before it ran")
    return report_stopped(run)


def report_stopped(run: Run) -> int:
    """Print what became of a run that was stopped, and what to type next."""
    reason = run.status()["reason"]
    sys.stderr.write(f"run {run.id} is {run.state}{f': {reason}' if reason else ''}\n")
    sys.stderr.write(f"next: tiltyard {'show' if run.state == 'finished' else 'resume'} {run.typed}\n")
    return EXIT_DONE
