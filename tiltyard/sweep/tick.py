"""One tick of a sweep whose trials are jobs: `python -m tiltyard.sweep.tick SWEEP_FOLDER`.

    lock the sweep -> read the queue and the folders -> record what ended -> submit what is due -> unlock

Every job runs one at its end, as do the commands that users type; no process stays. A tick that is lost, because it
was killed or its node died, is made up for by the next. A job may be the last one, with no tick after it: where the
queue does not answer, it tries again for a while.

    --own RUN       the trial in whose job this runs, which has ended; exit code 10 if it is due again in the same job
    --judge SECS    only stop the worst trials early, unless that was done in the last SECS / 2 s; needs no queue
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tiltyard.config.site import Profile, load_site, pick_profile
from tiltyard.config.sweep_plan import Plan
from tiltyard.errors import EXIT_DONE, TiltyardError, UseError
from tiltyard.failures import exit_code
from tiltyard.run import atomic, metrics
from tiltyard.run.events import log_event
from tiltyard.run.folder import Run
from tiltyard.run.lock import Lock, describe, read_owner
from tiltyard.slurm import FOLDER, JOB_VARIABLE, STOP
from tiltyard.slurm.job_state import growing_pauses
from tiltyard.slurm.script import RUN_AGAIN
from tiltyard.sweep import optuna_search, results
from tiltyard.sweep.backends.custom_queue import CustomQueue
from tiltyard.sweep.backends.jobs import JobBackend, Queue
from tiltyard.sweep.backends.slurm_arrays import SlurmArrays
from tiltyard.sweep.controller import Controller, stop_early
from tiltyard.sweep.damage import repair
from tiltyard.sweep.early_stopping import behind
from tiltyard.sweep.folder import PROFILE, Sweep

LOCK_TIMEOUT = 600.0  # seconds to wait for another tick
POLL_SECONDS = 0.2
OUTAGE_SECONDS = 600.0  # for which a job tries again while its queue does not answer, as during a restart
JUDGED = "judged"


def run_tick(
    sweep: Sweep,
    echo: Callable[[str], None],
    *,
    own: str | None = None,
    by_user: bool = False,
    leave_stopped: bool = False,
) -> bool:
    """Run one tick. `own` is the folder of the trial in whose job it runs, after the trial's end. `by_user`: a user
    starts the sweep; trials that were stopped before continue, now or in a later tick, unless `leave_stopped`.

    Returns whether the own trial is due again, in the same job.
    """
    with wait_for_lock(sweep):
        repair(sweep)
        plan = sweep.plan()
        optuna_search.require_optuna(plan)
        profile = read_profile(sweep, refresh=by_user)
        if by_user:
            if not leave_stopped:
                sweep.decide("start")
            sweep.stop_file.unlink(missing_ok=True)
        jobs = JobBackend(sweep, plan, make_queue(sweep, plan, profile), own=_own(sweep, own))
        try:
            controller = Controller(sweep, plan, jobs, echo)
            controller.tick(stop=sweep.stop_file.exists())
            for sentence in jobs.send():
                controller.log("submitted", sentence)
        except TiltyardError as error:
            log_event(Run(sweep.folder), "warning", f"A tick failed: {error.message}")
            if not jobs.own_continues:  # else the own trial runs the next tick, which submits the rest
                raise
            echo(error.message)
        return jobs.own_continues


def read_profile(sweep: Sweep, *, refresh: bool) -> Profile:
    """The profile of the sweep's jobs; with `refresh`, first copied again from the site file, if that still has it.

    A tick runs on a node, long after the site file may have changed."""
    name, path = str(sweep.facts()["profile"]), sweep.folder / PROFILE
    if refresh:
        site, where = load_site()
        if name in site.profiles or not path.exists():
            profile = pick_profile(site, name, where)
            if profile.launcher != sweep.launcher:
                hint = f"set it back to {sweep.launcher}, which the sweep was started with, or start a new sweep"
                raise UseError(f"profile {name} of sweep {sweep.id} now has launcher: {profile.launcher}", hint)
            draft = path.with_name(f".{PROFILE}")
            values = profile.model_dump(mode="json")
            atomic.write_private(draft, json.dumps({**values, "sha256": atomic.digest(values)}), 0o600)
            draft.replace(path)
    try:
        return Profile.model_validate(atomic.read_sealed(path)).model_copy(update={"name": name})
    except (OSError, ValueError) as error:
        hint = f"write it again from the site file: tiltyard sweep start {sweep.typed}"
        raise TiltyardError(f"{path} is damaged: {error}", hint) from error


def make_queue(sweep: Sweep, plan: Plan, profile: Profile) -> Queue:
    """The queue of a profile, whose jobs get the plan's variables too."""
    whole = profile.model_copy(update={"environment": {**profile.environment, **plan.environment}})
    return SlurmArrays(sweep, plan, whole) if profile.launcher == "slurm" else CustomQueue(sweep, plan, whole)


def preview(sweep: Sweep, plan: Plan, profile: Profile, trials: int) -> str:
    """The script that would be submitted first, for a sweep that does not exist yet."""
    first = trials if plan.search in ("grid", "random") else min(trials, plan.max_parallel)
    return make_queue(sweep, plan, profile).preview(first)


def wait_for_lock(sweep: Sweep) -> Lock:
    """Acquire the sweep's lock as soon as it is free."""
    deadline = time.monotonic() + LOCK_TIMEOUT
    while True:
        try:
            return Lock.acquire(Run(sweep.folder))
        except UseError as error:
            owner = read_owner(sweep.folder)
            if time.monotonic() >= deadline:
                holder = describe(owner) if owner else "another process"
                message = f"{holder} has held the lock of sweep {sweep.id} for {LOCK_TIMEOUT:.0f} s: {error.message}"
                raise TiltyardError(message, error.hint) from error
            time.sleep(POLL_SECONDS)


def stop_worst(sweep: Sweep, every: float) -> None:
    """Record which trials the plan's rule stops, and leave a file for their agents; at most once in every / 2 s.

    Trials are read and compared before the sweep is locked: that may take a while, and jobs wait for the lock."""
    mark = sweep.folder / JUDGED
    if mark.exists() and time.time() - mark.stat().st_mtime < every / 2:
        return
    mark.touch()
    plan = sweep.plan()
    states = {row.trial.number: row.state for row in results.rows(sweep, plan) if row.state != "waiting"}
    curves = {number: metrics.curve(sweep.place(number), plan.metric.name) for number in states}
    running = {number for number, state in states.items() if state == "running"}
    found = behind(plan, curves, running)
    with wait_for_lock(sweep):
        for number in stop_early(sweep, found):
            (sweep.place(number) / FOLDER / STOP).touch()


def _own(sweep: Sweep, folder: str | None) -> int | None:
    """The number of the trial in whose job this runs; None if an earlier tick gave the trial to another job, which is
    why the lock is held here."""
    if folder is None:
        return None
    number = int(Path(folder).name.partition("-")[0])
    job = Run(sweep.place(number)).status()["job"] or {}
    return number if job.get("array") == os.environ.get(JOB_VARIABLE, job.get("array")) else None


def _run_at_end(sweep: Sweep, own: str) -> bool:
    """The tick of a job at its end, repeated while the queue does not answer."""
    pace, deadline = growing_pauses(), time.monotonic() + OUTAGE_SECONDS
    while True:
        try:
            return run_tick(sweep, _echo, own=own)
        except UseError:
            raise
        except TiltyardError as error:
            if time.monotonic() >= deadline:
                raise
            _echo(f"{error.message}; trying again")
            time.sleep(next(pace))


def _echo(sentence: str) -> None:
    sys.stdout.write(f"{sentence}\n")
    sys.stdout.flush()


def main() -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="tiltyard.sweep.tick")
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--own")
    parser.add_argument("--judge", type=float)
    args = parser.parse_args()
    sweep = Sweep(atomic.absolute(args.sweep))
    try:
        sweep.require_own()
        if args.judge is not None:
            stop_worst(sweep, args.judge)
            return EXIT_DONE
        again = run_tick(sweep, _echo) if args.own is None else _run_at_end(sweep, args.own)
    except TiltyardError as error:
        sys.stderr.write(f"error: {error.message}\nhint: {error.hint}\n")
        return exit_code(error)
    return RUN_AGAIN if again else EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
