"""`sweep start`, `retry`, `extend` and `stop`: run many trials from one plan, and record decisions about them.

`start` checks every trial, makes the sweep's folder and runs it; again, it continues it. A decision is read by the
sweep's controller or, without one, carried out here. With a profile whose trials are jobs, start, retry and extend
submit what is due and return: the jobs do the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiltyard.cli import formatting
from tiltyard.cli.arguments import add
from tiltyard.cli.sweep_results import echo, summary
from tiltyard.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, UseError
from tiltyard.run import atomic
from tiltyard.sweep.folder import Sweep, find_sweep, own_sweep
from tiltyard.sweep.report import RETRY, shown, summarize

if TYPE_CHECKING:
    from tiltyard.sweep.preflight import CheckedPlan

READ_SECONDS = 2.0  # within which a controller that is not about to exit reads a decision
WAIT_SECONDS = 60.0  # for trials to save and stop
POLL_SECONDS = 0.1  # between two reads of the folders; a queue is asked less often


def configure_start(parser: argparse.ArgumentParser) -> None:
    about = "plans (YAML or Python) of new sweeps, or sweeps to continue: id, folder or name"
    parser.add_argument("targets", metavar="PLAN|SWEEP", nargs="+", help=about)
    add(parser, "--on", "--yes")
    parser.add_argument("--new", action="store_true", help="a new sweep, even if this plan already has one")
    parser.add_argument("--leave-stopped", action="store_true", help="do not continue trials that were stopped")
    add(parser, "--dry-run", "--detach", "--trust-code")


def run_start(args: argparse.Namespace) -> int:
    found = [each for target in args.targets for each in _resolve(target, args)]
    if args.dry_run:
        for each in found:
            _print_dry_run(each, leave_stopped=args.leave_stopped)
        return EXIT_DONE
    sweeps = [_make(each) for each in found]
    if args.detach and len(sweeps) > 1 and all(sweep.launcher == "local" for sweep in sweeps):
        return _run_in_background(sweeps, args, leave_stopped=args.leave_stopped)  # one after another there, too
    code = EXIT_DONE
    for sweep in sweeps:
        result = _run(sweep, args, leave_stopped=args.leave_stopped)
        code = code or result
        if result == EXIT_RESUMABLE:
            break
    return code


def _run(sweep: Sweep, args: argparse.Namespace, *, leave_stopped: bool) -> int:
    """Run a sweep in this process, or in the background; jobs are submitted and need neither."""
    if sweep.launcher != "local":
        from tiltyard.sweep.tick import run_tick

        run_tick(sweep, echo, by_user=True, leave_stopped=leave_stopped)
        found = summarize(sweep)
        sys.stdout.write(summary(found))
        return EXIT_FAILED if found.state == "failed" else EXIT_DONE
    if args.detach:
        return _run_in_background([sweep], args, leave_stopped=leave_stopped)
    from tiltyard.sweep.backends.local import Local
    from tiltyard.sweep.controller import run_controller

    code = run_controller(sweep, partial(Local, trust_code=args.trust_code), echo, leave_stopped=leave_stopped)
    sys.stdout.write(summary(summarize(sweep)))
    return code


# ---------------------------------------------------------------------------------------------- plans


def _resolve(target: str, args: argparse.Namespace) -> list[Sweep | CheckedPlan]:
    """What an argument names: a sweep to continue, or plans, which are checked."""
    sources = _plans(target)
    if not sources:
        sweep = own_sweep(target, args.trust_code)
        if args.new or args.on or args.yes:
            hint = f"tiltyard sweep start {sweep.typed}; or name a plan to start a new sweep"
            raise UseError(f"{sweep.id} is an existing sweep: --new, --on and --yes are for plans", hint)
        return [sweep]
    from tiltyard.sweep import preflight

    found: list[Sweep | CheckedPlan] = []
    for prepared in [preflight.prepare(source, profile=args.on, many=args.yes) for source in sources]:
        known = None if args.new else preflight.same_sweep(prepared)
        if known is not None:
            sys.stderr.write(f"continuing sweep {known.id}, which has this plan; --new starts another\n")
        found.append(known or prepared)
    return found


def _plans(target: str) -> list[Any]:
    """The plans that an argument names: a YAML file, or RUN_DESCRIPTION in Python; none if it names a sweep."""
    if target.endswith((".yaml", ".yml")):
        return [Path(target)]
    from tiltyard.sweep.python_plan import is_module, load_description

    if target.endswith(".py"):
        return list(load_description(target).plans())
    try:
        find_sweep(target)
    except UseError:
        if is_module(target):
            return list(load_description(target).plans())
        raise
    return []


def _make(each: Sweep | CheckedPlan) -> Sweep:
    from tiltyard.sweep import preflight

    if not isinstance(each, preflight.CheckedPlan):
        return each
    sweep = preflight.begin(each, [Path(sys.argv[0]).name, *sys.argv[1:]])
    sys.stderr.write(f"sweep {sweep.id}: {trial_count(each.count)}, at most {each.plan.max_parallel} at once\n")
    return sweep


def trial_count(count: int) -> str:
    """1 trial, 2 trials."""
    return "1 trial" if count == 1 else f"{count:,} trials"


# ---------------------------------------------------------------------------------------------- dry run


def _print_dry_run(each: Sweep | CheckedPlan, *, leave_stopped: bool) -> None:
    from tiltyard.sweep.preflight import CheckedPlan

    if not isinstance(each, CheckedPlan):
        _print_unfinished(each, leave_stopped=leave_stopped)
    elif each.launcher == "local":
        _print_trials(each)
    else:
        _print_script(each)


def _print_unfinished(sweep: Sweep, *, leave_stopped: bool) -> None:
    left = [row for row in summarize(sweep).rows if not row.over and not (leave_stopped and row.state == "stopped")]
    sys.stdout.write("".join(f"trial {row.trial.number} ({row.state})\n" for row in left))
    sys.stderr.write(f"would continue {trial_count(len(left))} of {sweep.id}; nothing was started\n")


def _print_trials(prepared: CheckedPlan) -> None:
    keys = list(dict.fromkeys(key for trial in prepared.trials for key in trial.settings))
    table = [
        [str(trial.number), str(trial.seed), *(shown(own[key]) if key in own else "" for key in keys)]
        for trial in prepared.trials
        for own in [trial.settings]
    ]
    if table:
        sys.stdout.write(formatting.table(("trial", "seed", *keys), table, right=(0, 1)))
    else:
        plan, seeds = prepared.plan, len(prepared.plan.seeds)
        each = "one seed" if seeds == 1 else f"{seeds} seeds"
        sys.stdout.write(f"search: {plan.search} chooses {plan.trials} combinations during the sweep, {each} each\n")
    sys.stderr.write(f"would start {trial_count(prepared.count)} of {prepared.name}; nothing was made\n")


def _print_script(prepared: CheckedPlan) -> None:
    """The script of the first job."""
    from tiltyard.config.site_file import runs_root
    from tiltyard.sweep.tick import preview

    assert prepared.profile is not None
    sweep = Sweep(runs_root().absolute() / prepared.name / "sweep-NNNN")
    sys.stdout.write(preview(sweep, prepared.plan, prepared.profile, prepared.count))
    most = f"at most {prepared.plan.max_parallel:,} at once"
    sys.stderr.write(f"would submit {trial_count(prepared.count)} of {prepared.name}, {most}; nothing was made\n")


# ---------------------------------------------------------------------------------------------- background


def _run_in_background(sweeps: Sequence[Sweep], args: argparse.Namespace, *, leave_stopped: bool) -> int:
    """Run sweeps one after another in a process that outlives the terminal."""
    for busy in [sweep for sweep in sweeps if sweep.controlled]:
        sys.stderr.write(f"sweep {busy.id} is already running\n")
    left = [sweep for sweep in sweeps if not sweep.controlled]
    if not left:
        return EXIT_DONE
    with (left[0].folder / "controller.log").open("ab") as file:
        command = [sys.executable, "-m", "tiltyard", "sweep", "start", *(str(sweep.folder) for sweep in left)]
        command += ["--leave-stopped"] if leave_stopped else []
        command += ["--trust-code"] if args.trust_code else []
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)
    order = ", one after another" if len(left) > 1 else ""
    for sweep in left:
        sys.stderr.write(f"sweep {sweep.id} is running in the background (pid {child.pid}{order}); safe to log out\n")
        sys.stdout.write(f"{sweep.id}\n")
    sys.stderr.write(f"next: tiltyard sweep watch {left[0].typed}\n")
    return EXIT_DONE


# ---------------------------------------------------------------------------------------------- decisions


def configure_retry(parser: argparse.ArgumentParser) -> None:
    add(parser, "sweep")
    parser.add_argument("--failed", action="store_true", required=True, help="all trials that failed")
    add(parser, "--dry-run", "--detach", "--trust-code")


def run_retry(args: argparse.Namespace) -> int:
    """Start failed trials again."""
    sweep = own_sweep(args.sweep, args.trust_code)
    if sweep.launcher != "local" and not args.dry_run:
        from tiltyard.sweep.tick import run_tick

        run_tick(sweep, echo)  # a failure must be on record before the retry
    rows = [row for row in summarize(sweep).rows if row.state in ("failed", RETRY)]
    failed = [row.trial.number for row in rows if not row.trial.refused]
    if len(failed) < len(rows):
        sys.stderr.write(f"{len(rows) - len(failed)} failed trials have invalid settings and are not retried\n")
    if not failed:
        sys.stderr.write(f"no trial of {sweep.id} has failed that can be retried\n")
        return EXIT_DONE
    sys.stderr.write(f"to be retried: trial {', '.join(map(str, failed))}\n")
    if args.dry_run:
        return EXIT_DONE
    for number in failed:
        sweep.decide("retry", trial=number)
    return _act(sweep, args)


def configure_extend(parser: argparse.ArgumentParser) -> None:
    add(parser, "sweep")
    parser.add_argument("--trials", type=int, default=0, metavar="N", help="N more combinations")
    parser.add_argument("--seeds", type=int, default=0, metavar="N", help="N more seeds of every combination")
    add(parser, "--yes", "--dry-run", "--detach", "--trust-code")


def run_extend(args: argparse.Namespace) -> int:
    """Add combinations or seeds."""
    sweep = own_sweep(args.sweep, args.trust_code)
    plan = sweep.plan()
    points, seeds = args.trials, args.seeds
    if points < 0 or seeds < 0 or not points + seeds:
        raise UseError("`tiltyard sweep extend` does not know by how much", "add --trials 10, or --seeds 2")
    if plan.search == "population":
        hint = "start a new sweep; to train one member longer: tiltyard fork RUN stop.env_steps=..."
        raise UseError(f"{sweep.id} is a population, which cannot be extended", hint)
    if points and plan.search == "grid":
        hint = "--seeds 2 runs each of them two more times"
        raise UseError(f"{sweep.id} is a grid and already has all combinations", hint)
    if seeds and plan.program and any("seed" in trial.settings for trial in sweep.trials()):
        hint = "write the new seeds into the plan, and start that"
        raise UseError(f"seed is a parameter of {sweep.id}, so --seeds would set it twice", hint)
    from tiltyard.sweep.preflight import check_more

    check_more(sweep, plan, points, seeds, many=args.yes)
    more = [f"{count} {what}{'s' * (count > 1)}" for count, what in ((points, "combination"), (seeds, "seed")) if count]
    sys.stderr.write(f"{sweep.id} {'would be' if args.dry_run else 'is'} extended by {' and '.join(more)}\n")
    if args.dry_run:
        return EXIT_DONE
    sweep.decide("extend", points=points, seeds=seeds)
    return _act(sweep, args)


def _act(sweep: Sweep, args: argparse.Namespace) -> int:
    """Leave a decision to the controller that runs; without one run the sweep, but not trials that were stopped."""
    until = time.monotonic() + READ_SECONDS
    while sweep.launcher == "local" and sweep.controlled:
        if time.monotonic() >= until:
            sys.stderr.write(f"sweep {sweep.id} is running, and its controller takes this up\n")
            return EXIT_DONE
        time.sleep(0.1)
    return _run(sweep, args, leave_stopped=True)


# ---------------------------------------------------------------------------------------------- stop


def configure_stop(parser: argparse.ArgumentParser) -> None:
    add(parser, "sweep")
    about = f"how long to wait for trials (default: {WAIT_SECONDS:g})"
    parser.add_argument("--wait", type=float, default=WAIT_SECONDS, metavar="SECONDS", help=about)
    add(parser, "--dry-run")


def run_stop(args: argparse.Namespace) -> int:
    from tiltyard.slurm.job_state import growing_pauses

    sweep = own_sweep(args.sweep)
    found = summarize(sweep)
    at_work = [row for row in found.rows if row.state in ("running", "queued")]
    if args.dry_run or (not at_work and found.state != "running"):
        count = trial_count(len(at_work))
        sys.stderr.write(f"would stop {count} of {sweep.id}\n" if at_work else f"no trial of {sweep.id} is running\n")
        return EXIT_DONE
    atomic.write_text(sweep.stop_file, f"{atomic.now()}\n")
    away: dict[int, str] = {}  # trial -> the only host on which it can be signalled
    if sweep.launcher != "local":
        from tiltyard.sweep.tick import run_tick

        run_tick(sweep, echo)
    elif not sweep.controlled:
        away = {row.trial.number: host for row in at_work if (host := _terminate(row.folder))}
    pace, deadline = growing_pauses(), time.monotonic() + args.wait
    while (now := summarize(sweep)).state == "running" or any(
        row.state == "running" and row.trial.number not in away for row in now.rows
    ):
        left = deadline - time.monotonic()
        if left <= 0:
            sys.stderr.write(f"trials of {sweep.id} are finishing an update; they will save and stop after it\n")
            return EXIT_FAILED
        time.sleep(min(left, POLL_SECONDS if sweep.launcher == "local" else next(pace)))
    if away:
        which, hosts = ", ".join(map(str, away)), ", ".join(sorted(set(away.values())))
        sys.stderr.write(f"{sweep.id} has no controller, and trial {which} can only be stopped on host {hosts}\n")
        sys.stderr.write(f"next, on that host: tiltyard sweep stop {sweep.typed}\n")
        return EXIT_FAILED
    sys.stderr.write(f"sweep {sweep.id} is stopped\nnext: tiltyard sweep start {sweep.typed}\n")
    return EXIT_DONE


def _terminate(folder: Path | None) -> str:
    """Ask a trial without a controller to save and stop; if its process is on another host, return that host."""
    from tiltyard.run.lock import liveness, read_owner

    owner = read_owner(folder) if folder is not None else None
    if owner is None:
        return ""
    if (seen := liveness(owner)) == "alive":
        with contextlib.suppress(OSError):
            os.kill(int(owner["pid"]), signal.SIGTERM)
    return str(owner.get("host") or "?") if seen == "unknown" else ""
