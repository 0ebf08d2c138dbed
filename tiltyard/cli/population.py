"""`sweep lineage` and `sweep replay`: the copies in a population, and one member's schedule trained as a single run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tiltyard.cli import formatting
from tiltyard.cli.arguments import add
from tiltyard.cli.output import write_result
from tiltyard.errors import EXIT_DONE, UseError
from tiltyard.sweep.folder import Sweep, find_sweep, own_sweep
from tiltyard.sweep.report import brief, describe_copy, summarize


def configure_lineage(parser: argparse.ArgumentParser) -> None:
    add(parser, "sweep")
    parser.add_argument("--member", type=int, metavar="N", help="only this member: its settings over time")
    add(parser, "--json")


def run_lineage(args: argparse.Namespace) -> None:
    """Print every exploit in order; for one member, its settings from each env step on."""
    from tiltyard.sweep.pbt.lineage import lineage_of, schedule_of

    sweep = find_sweep(args.sweep)
    history = lineage_of(sweep)
    chosen = [args.member] if args.member is not None else sorted(history.first)
    schedules = {member: schedule_of(sweep, member) for member in chosen}
    parts = {
        str(member): [{"from": begins, "settings": settings} for begins, settings in schedule]
        for member, schedule in schedules.items()
    }
    lines = "".join(f"{formatting.clean(describe_copy(copy))}\n" for copy in history.copies)
    text = _schedule(schedules[args.member]) if args.member is not None else lines or "no member was replaced\n"
    data = {"exploits": [vars(copy) for copy in history.copies], "schedules": parts}
    write_result(data, text, as_json=args.json)


def configure_replay(parser: argparse.ArgumentParser) -> None:
    add(parser, "sweep")
    parser.add_argument("--member", type=int, metavar="N", help="this member (default: the best)")
    add(parser, "--dry-run", "--trust-code")


def run_replay(args: argparse.Namespace) -> int:
    """Train one run that repeats a member's schedule."""
    from tiltyard.sweep.pbt.lineage import make, schedule_of

    sweep = own_sweep(args.sweep, args.trust_code)
    member = args.member if args.member is not None else _best(sweep)
    sys.stdout.write(_schedule(schedule_of(sweep, member)))
    if args.dry_run:
        return EXIT_DONE
    from tiltyard import api
    from tiltyard.engines.local import PRELOAD
    from tiltyard.processes.fork_server import ForkServer
    from tiltyard.training import resume

    run = make(sweep, member, [Path(sys.argv[0]).name, *sys.argv[1:]])
    sys.stderr.write(f"run {run.id} repeats the schedule of member {member} of {sweep.id}\n")
    with ForkServer(PRELOAD) as server:
        return api.run_training(run, resume.prepare_resume(run, server=server)[1], server).exit_code


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
