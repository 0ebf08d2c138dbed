"""`sweep`: many runs from one plan. This file has the arguments; the actions are imported when typed.

    start                 sweep_start     check every trial, make the sweep's folder, run it; again: continue it
    status best plot      sweep_results   summaries, from the folders alone
    watch stop            sweep_watch, sweep_stop
    retry extend          sweep_change    record a decision; the sweep's controller acts on it, or this command does
    lineage replay        population      the copies of a population; one member's schedule, trained alone

With --on PROFILE whose trials are jobs, start, retry and extend submit what is due and return: the jobs do the rest.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from tiltyard.errors import UseError, did_you_mean

# action -> (module with a function `run_ACTION(args)`, its options)
ACTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "start": ("sweep_start", ("on", "yes", "dry_run", "new", "detach", "leave_stopped")),
    "status": ("sweep_results", ("json", "csv")),
    "watch": ("sweep_watch", ("every",)),
    "retry": ("sweep_change", ("failed", "detach", "dry_run")),
    "extend": ("sweep_change", ("trials", "seeds", "yes", "detach", "dry_run")),
    "stop": ("sweep_stop", ("wait", "dry_run")),
    "best": ("sweep_results", ("json",)),
    "plot": ("sweep_results", ("out",)),
    "lineage": ("population", ("member", "json")),
    "replay": ("population", ("member", "dry_run")),
}


def configure_sweep(parser: argparse.ArgumentParser) -> None:
    """Arguments of `tiltyard sweep`."""
    parser.add_argument("action", metavar="ACTION", help=" | ".join(ACTIONS))
    parser.add_argument(
        "targets",
        metavar="SWEEP|PLAN",
        nargs="*",
        help="a sweep: its id, folder or name (default: the newest); start: one or more plans (YAML or Python)",
    )
    parser.add_argument("--on", metavar="PROFILE", help="start: a profile of the site file to run with")
    parser.add_argument("--yes", action="store_true", help="start, extend: allow more than 10,000 trials")
    parser.add_argument("--new", action="store_true", help="start: a new sweep, even if this plan already has one")
    parser.add_argument("--leave-stopped", action="store_true", help="start: do not continue trials that were stopped")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, and do nothing")
    parser.add_argument("--detach", action="store_true", help="start, retry, extend: run in the background")
    parser.add_argument("--failed", action="store_true", help="retry: all trials that failed")
    parser.add_argument("--trials", type=int, metavar="N", help="extend: N more combinations")
    parser.add_argument("--seeds", type=int, metavar="N", help="extend: N more seeds of every combination")
    parser.add_argument(
        "--every", type=float, metavar="SECONDS", help="watch: time between updates (default: 2; for jobs: 10)"
    )
    parser.add_argument("--wait", type=float, metavar="SECONDS", help="stop: how long to wait for trials (default: 60)")
    parser.add_argument("--member", type=int, metavar="N", help="lineage, replay: this member of a population")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="plot: folder for the plots")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="status, best, lineage: print JSON")
    form.add_argument("--csv", action="store_true", help="status: print CSV, one line per trial")


def run_sweep(args: argparse.Namespace) -> int:
    """Run one action."""
    if args.action not in ACTIONS:
        raise UseError(f"unknown action {args.action!r} of `tiltyard sweep`", did_you_mean(args.action, ACTIONS))
    module, options = ACTIONS[args.action]
    every = {name for _, names in ACTIONS.values() for name in names}
    strange = [name for name in sorted(every - set(options)) if getattr(args, name) not in (None, False)]
    if strange:
        owners = [action for action, (_, names) in ACTIONS.items() if strange[0] in names]
        raise UseError(
            f"`tiltyard sweep {args.action}` has no --{strange[0].replace('_', '-')}",
            f"it is an option of: {', '.join(owners)}",
        )
    if len(args.targets) > 1 and args.action != "start":
        raise UseError(f"`tiltyard sweep {args.action}` takes one sweep", "name one; only start takes several")
    args.target = args.targets[0] if args.targets else None
    action = getattr(importlib.import_module(f"tiltyard.cli.{module}"), f"run_{args.action}")
    return int(action(args))
