"""`sweep lineage` and `sweep replay`: the copies in a population, and one member's schedule trained as a single run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tiltyard.cli import formatting
from tiltyard.errors import EXIT_DONE, UseError
from tiltyard.run import atomic
from tiltyard.sweep.folder import Sweep, find_sweep
from tiltyard.sweep.report import brief, describe_copy, summarize


def run_lineage(args: argparse.Namespace) -> int:
    """Print every exploit in order; for one member, its settings from each env step on."""
    from tiltyard.sweep.pbt.lineage import lineage_of, schedule_of

    sweep = find_sweep(args.target or "last")
    history = lineage_of(sweep)
    chosen = [args.member] if args.member is not None else sorted(history.first)
    schedules = {member: schedule_of(sweep, member) for member in chosen}
    if args.json:
        exploits = [copy.as_data() for copy in history.copies]
        parts = {
            str(member): [{"from": begins, "settings": settings} for begins, settings in schedule]
            for member, schedule in schedules.items()
        }
        sys.stdout.write(atomic.to_json({"exploits": exploits, "schedules": parts}, indent=2) + "\n")
    elif args.member is not None:
        sys.stdout.write(_schedule(schedules[args.member]))
    else:
        lines = [formatting.clean(describe_copy(copy)) for copy in history.copies]
        sys.stdout.write("".join(f"{line}\n" for line in lines) or "no member was replaced\n")
    return EXIT_DONE


def run_replay(args: argparse.Namespace) -> int:
    """Train one run that repeats a member's schedule."""
    from tiltyard.sweep.pbt.lineage import make, schedule_of

    sweep = find_sweep(args.target or "last")
    member = args.member if args.member is not None else _best(sweep)
    sys.stdout.write(_schedule(schedule_of(sweep, member)))
    if args.dry_run:
        return EXIT_DONE
    from tiltyard import api
    from tiltyard.training import resume

    run = make(sweep, member, [Path(sys.argv[0]).name, *sys.argv[1:]])
    sys.stderr.write(f"run {run.id} repeats the schedule of member {member} of {sweep.id}\n")
    return api.run_training(run, resume.prepare_resume(run)[1]).exit_code


def _schedule(schedule: list[tuple[int, dict[str, object]]]) -> str:
    keys = list(schedule[0][1])
    table = [[formatting.count(begins), *(brief(settings[key]) for key in keys)] for begins, settings in schedule]
    return formatting.table(("from env step", *keys), table, right=(0,))


def _best(sweep: Sweep) -> int:
    from tiltyard.sweep.pbt.lineage import lineage_of

    lineage_of(sweep)
    found = next((group for group in summarize(sweep).groups if group.value is not None), None)
    if found is None:
        raise UseError(f"no member of {sweep.id} has a score yet", "name one: --member 1")
    return found.rows[0].trial.number
