"""`sweep lineage` and `sweep replay`: who of a population came from whom, and what made one of them, trained alone."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tiltyard.cli import formatting
from tiltyard.errors import EXIT_DONE, UseError
from tiltyard.run import atomic

if TYPE_CHECKING:
    from tiltyard.sweep.folder import Sweep


def lineage(sweep: Sweep, args: argparse.Namespace) -> int:
    """Every exploit in its order; of one member, from which env step on it had which settings."""
    from tiltyard.sweep.pbt.lineage import schedule_of, story_of
    from tiltyard.sweep.report import describe_copy

    story = story_of(sweep)
    chosen = [args.member] if args.member is not None else sorted(story.first)
    schedules = {member: schedule_of(sweep, member) for member in chosen}
    if args.json:
        exploits = [copy.as_data() for copy in story.copies]
        stretches = {
            str(member): [{"from": begins, "settings": settings} for begins, settings in schedule]
            for member, schedule in schedules.items()
        }
        sys.stdout.write(atomic.to_json({"exploits": exploits, "schedules": stretches}, indent=2) + "\n")
    elif args.member is not None:
        sys.stdout.write(_schedule(schedules[args.member]))
    else:
        said = [formatting.clean(describe_copy(copy)) for copy in story.copies]
        sys.stdout.write("".join(f"{sentence}\n" for sentence in said) or "nobody was replaced\n")
    return EXIT_DONE


def replay(sweep: Sweep, args: argparse.Namespace) -> int:
    """Train one run with all that the member's weights saw."""
    from tiltyard.sweep.pbt.lineage import make, schedule_of

    member = args.member if args.member is not None else _best(sweep)
    sys.stdout.write(_schedule(schedule_of(sweep, member)))
    if args.dry_run:
        return EXIT_DONE
    from tiltyard import api
    from tiltyard.training import resume

    run = make(sweep, member, [Path(sys.argv[0]).name, *sys.argv[1:]])
    sys.stderr.write(f"run {run.id} repeats what made member {member} of {sweep.id}\n")
    return api.run_training(run, resume.prepare_resume(run)[1]).exit_code


def _schedule(schedule: list[tuple[int, dict[str, object]]]) -> str:
    from tiltyard.sweep.report import brief

    keys = list(schedule[0][1])
    table = [[formatting.count(begins), *(brief(settings[key]) for key in keys)] for begins, settings in schedule]
    return formatting.table(("from env step", *keys), table, right=(0,))


def _best(sweep: Sweep) -> int:
    from tiltyard.sweep.pbt.lineage import story_of
    from tiltyard.sweep.report import summarize

    story_of(sweep)
    found = next((group for group in summarize(sweep).groups if group.value is not None), None)
    if found is None:
        raise UseError(f"no member of {sweep.id} has a score yet", "name one: --member 1")
    return found.rows[0].trial.number
