"""`sweep retry` and `sweep extend`: record a decision, for the sweep's controller or, without one, to act on here."""

from __future__ import annotations

import argparse
import sys
import time

from tiltyard.cli.sweep_start import echo, run
from tiltyard.errors import EXIT_DONE, UseError
from tiltyard.sweep.folder import Sweep, find_sweep

READ_SECONDS = 2.0  # within which a controller that is not about to exit reads a decision


def run_retry(args: argparse.Namespace) -> int:
    """Start failed trials again."""
    from tiltyard.sweep.report import RETRY, summarize

    if not args.failed:
        raise UseError("`tiltyard sweep retry` does not know which trials to retry", "add --failed")
    sweep = find_sweep(args.target or "last")
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
    return _act(sweep, args.detach)


def run_extend(args: argparse.Namespace) -> int:
    """Add combinations or seeds."""
    sweep = find_sweep(args.target or "last")
    plan = sweep.plan()
    points, seeds = args.trials or 0, args.seeds or 0
    if points < 0 or seeds < 0 or not points + seeds:
        raise UseError("`tiltyard sweep extend` does not know by how much", "add --trials 10, or --seeds 2")
    if plan.search == "population":
        hint = "start a new sweep; to train one member longer: tiltyard fork RUN stop.env_steps=..."
        raise UseError(f"{sweep.id} is a population, which cannot be extended", hint)
    if points and plan.search == "grid":
        raise UseError(
            f"{sweep.id} is a grid and already has all combinations", "--seeds 2 runs each of them two more times"
        )
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
    return _act(sweep, args.detach)


def _act(sweep: Sweep, detach: bool) -> int:
    """Leave a decision to the controller that runs; without one run the sweep, but not trials that were stopped."""
    until = time.monotonic() + READ_SECONDS
    while sweep.launcher == "local" and sweep.controlled:
        if time.monotonic() >= until:
            sys.stderr.write(f"sweep {sweep.id} is running, and its controller takes this up\n")
            return EXIT_DONE
        time.sleep(0.1)
    return run(sweep, detach, leave_stopped=True)
