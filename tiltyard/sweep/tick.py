"""One turn of a sweep whose trials are jobs: `python -m tiltyard.sweep.tick SWEEP_FOLDER`.

    take the lock -> see what the queue and the folders say -> write down what ended -> start what is due -> let go

Whoever comes by takes it: every task at its end, and the commands that people type. Nobody stays. A turn that is lost,
because it was killed or its node died, is taken by the next one, which finds everything on the disk. A task may be the
last one, after which nobody comes by: where the queue gives no answer, it tries again for a while.

    --own RUN       the trial in whose job this is, which has ended; exit code 10 when it is due again in the same job
    --judge SECS    only look who falls behind, unless somebody did in so many seconds: needs no queue
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tiltyard.config.site import Profile
from tiltyard.config.sweep_plan import Plan
from tiltyard.errors import EXIT_DONE, TiltyardError, UseError
from tiltyard.run import atomic
from tiltyard.run.events import log_event
from tiltyard.run.folder import Run
from tiltyard.run.lock import Lock, read_owner
from tiltyard.run.status import STATUS
from tiltyard.slurm import FOLDER, JOB_VARIABLE, STOP
from tiltyard.slurm.job_state import Backoff
from tiltyard.slurm.script import RUN_AGAIN
from tiltyard.sweep import optuna_search, results
from tiltyard.sweep.backends.custom_queue import Template
from tiltyard.sweep.backends.jobs import Jobs, kept_profile
from tiltyard.sweep.backends.slurm_arrays import Arrays
from tiltyard.sweep.controller import Controller, judge
from tiltyard.sweep.folder import Sweep

TIMEOUT = 600.0  # seconds to wait for somebody else's turn
AGAIN = 0.2  # seconds between two tries
OUTAGE = 600.0  # seconds for which a task tries again where its queue gives no answer, as while that is restarted
JUDGED = "judged"
KINDS: dict[str, type[Jobs]] = {"slurm": Arrays, "template": Template}


def run_tick(
    sweep: Sweep,
    say: Callable[[str], None],
    *,
    own: str | None = None,
    afresh: bool = False,
    leave_stopped: bool = False,
) -> bool:
    """One turn. `own` is the folder of the trial in whose job it is taken, after its end. `afresh`: a person starts the
    sweep, and what was stopped before goes on, now or in a later turn, unless `leave_stopped`.

    True when the own trial is due again, in the same job.
    """
    with wait_for_lock(sweep):
        plan = sweep.plan()
        optuna_search.require_optuna(plan)
        profile = kept_profile(sweep, afresh=afresh)
        if afresh:
            if not leave_stopped:
                sweep.decide("start")
            sweep.stop_file.unlink(missing_ok=True)
        jobs = KINDS[profile.launcher](sweep, plan, profile, own=_own(sweep, own))
        try:
            Controller(sweep, plan, jobs, say).tick(stop=sweep.stop_file.exists())
        except TiltyardError as error:
            log_event(Run(sweep.folder), "warning", f"A turn could not be taken: {error.message}")
            if not jobs.goes_on:  # what could not be submitted is left to the next turn, which the own trial takes
                raise
            say(error.message)
        return jobs.goes_on


def would_submit(sweep: Sweep, plan: Plan, profile: Profile, trials: int) -> str:
    """What would be submitted first, as text, for a sweep that does not exist."""
    first = trials if plan.search in ("grid", "random") else min(trials, plan.max_parallel)
    return KINDS[profile.launcher](sweep, plan, profile).shown(first)


def wait_for_lock(sweep: Sweep) -> Lock:
    """The sweep's lock, as soon as whoever has it lets go."""
    deadline = time.monotonic() + TIMEOUT
    while True:
        try:
            return Lock.acquire(Run(sweep.folder))
        except UseError as error:
            owner = read_owner(sweep.folder)
            if time.monotonic() >= deadline:
                who = f"pid {owner.get('pid')} on host {owner.get('host')}" if owner else "somebody"
                raise TiltyardError(
                    f"{who} has had the lock of sweep {sweep.id} for {TIMEOUT:.0f} s: {error.message}", error.hint
                ) from error
            time.sleep(AGAIN)


def end_early(sweep: Sweep, every: float) -> None:
    """Write down who falls behind, and leave a file for their agents to find; nothing if somebody did so lately."""
    mark = sweep.folder / JUDGED
    if mark.exists() and time.time() - mark.stat().st_mtime < every / 2:
        return
    with wait_for_lock(sweep):
        mark.touch()
        plan = sweep.plan()
        rows = {row.trial.number: row for row in results.rows(sweep, plan)}
        running = {number for number, row in rows.items() if row.state == "running"}
        curves = {
            number: results.curve(sweep.place(number), plan.metric.name)
            for number, row in rows.items()
            if row.state != "waiting"
        }
        for number, why in judge(sweep, plan, curves, running).items():
            log_event(Run(sweep.folder), "stopped", f"Trial {number} is ended early: {why}")
            (sweep.place(number) / FOLDER / STOP).touch()


def _own(sweep: Sweep, folder: str | None) -> int | None:
    """The number of the trial in whose job this is; none if it has been given to another job since, as by a turn that
    had the lock before: so it is asked under the lock."""
    if folder is None:
        return None
    number = int(Path(folder).name.partition("-")[0])
    job = atomic.read_json(sweep.place(number) / STATUS).get("job") or {}
    return number if job.get("array") == os.environ.get(JOB_VARIABLE, job.get("array")) else None


def _take_at_end(sweep: Sweep, own: str) -> bool:
    """The turn of a task at its end: again and again while the queue is silent."""
    pace, deadline = Backoff(), time.monotonic() + OUTAGE
    while True:
        try:
            return run_tick(sweep, _say, own=own)
        except UseError:
            raise
        except TiltyardError as error:
            if time.monotonic() >= deadline:
                raise
            _say(f"{error.message}; the turn is tried again")
            time.sleep(pace.next_pause())


def _say(sentence: str) -> None:
    sys.stdout.write(f"{sentence}\n")
    sys.stdout.flush()


def main() -> int:
    """The exit code of a turn."""
    parser = argparse.ArgumentParser(prog="tiltyard.sweep.tick")
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--own")
    parser.add_argument("--judge", type=float)
    args = parser.parse_args()
    sweep = Sweep(atomic.absolute(args.sweep))
    try:
        if args.judge is not None:
            end_early(sweep, args.judge)
            return EXIT_DONE
        goes_on = run_tick(sweep, _say) if args.own is None else _take_at_end(sweep, args.own)
    except TiltyardError as error:
        sys.stderr.write(f"error: {error.message}\n{error.hint}\n")
        return error.exit_code
    return RUN_AGAIN if goes_on else EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
