"""`sweep status`, `watch`, `best` and `plot`: a sweep's results, read from its folder. Imports nothing heavy."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tiltyard.cli import formatting
from tiltyard.cli.arguments import add, add_json_or_csv
from tiltyard.cli.output import clear_screen, write_result
from tiltyard.config.sweep_plan import Objective
from tiltyard.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, TiltyardError, UseError
from tiltyard.run.folder import Run
from tiltyard.sweep import report
from tiltyard.sweep.damage import find_damage
from tiltyard.sweep.folder import Sweep, find_sweep, is_own

if TYPE_CHECKING:
    from tiltyard.sweep.report import SweepSummary

SHOWN = 20  # points in the table
POLL_SECONDS, QUEUE_SECONDS = 2.0, 10.0  # between two updates: from folders, from a queue


def echo(sentence: str) -> None:
    """Print a line on stderr."""
    sys.stderr.write(formatting.clean(sentence) + "\n")


def configure_status(parser: argparse.ArgumentParser) -> None:
    add(parser, "sweep")
    add_json_or_csv(parser, "trial")


def run_status(args: argparse.Namespace) -> int:
    """Print the summary of a sweep."""
    found = report.summarize(find_sweep(args.sweep))
    text = report.as_csv(found) if args.csv else summary(found)
    write_result(report.as_data(found), text, as_json=args.json)
    return EXIT_FAILED if found.state == "failed" else EXIT_DONE


def configure_best(parser: argparse.ArgumentParser) -> None:
    add(parser, "sweep", "--json")


def run_best(args: argparse.Namespace) -> None:
    """Print the best settings and the best run with them."""
    found = report.summarize(find_sweep(args.sweep))
    group = next((group for group in found.groups if group.value is not None), None)
    if group is None:
        waits = found.state == "running" or found.counts.get("running")
        hint = f"wait for one: tiltyard sweep watch {found.sweep.typed}" if waits else report.recorded_instead(found)
        raise UseError(
            f"no trial of {found.sweep.id} has recorded {found.plan.metric.name}{' yet' if waits else ''}", hint
        )
    interval = report.bootstrap(group.values)
    best = max(group.values) if found.plan.better > 0 else min(group.values)
    row = next(row for row in group.rows if row.value == best)
    data = {
        "settings": group.settings,
        "value": group.value,
        "interval": interval,
        "values": group.values,
        "trials": [report.row_data(each) for each in group.rows],
        "best": report.row_data(row),
    }
    assert row.folder is not None
    run = Run(row.folder)
    words = " ".join(f"{key}={report.shown(value)}" for key, value in group.settings.items())
    over = f" over {len(group.values)} seeds" if len(group.values) > 1 else ""
    low_high = f" ({formatting.number(interval[0])} to {formatting.number(interval[1])})" if interval else ""
    lines = [
        ("settings", words or "as in the experiment"),
        ("value", f"{found.plan.metric.name} {formatting.number(group.value)}{low_high}{over}"),
        ("best run", f"{run.id}, {formatting.number(row.value)}"),
        ("next", _next_command(run, is_program=found.plan.program is not None)),
    ]
    text = "".join(f"{name:<9} {formatting.clean(value)}\n" for name, value in lines)
    write_result(data, text, as_json=args.json)


def _next_command(run: Run, *, is_program: bool) -> str:
    """What to do with the best run: evaluate its best checkpoint, or its newest if none has a score."""
    if is_program:
        return f"tiltyard show {run.typed}"
    from tiltyard.run.checkpoint import list_checkpoints

    scored = any(each.score is not None for each in list_checkpoints(run))
    return f"tiltyard eval {run.typed}{' --best' if scored else ''}"


def configure_plot(parser: argparse.ArgumentParser) -> None:
    add(parser, "sweep")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder for the plots (default: the sweep's)")


def run_plot(args: argparse.Namespace) -> None:
    """Draw plots, and print their paths."""
    from tiltyard.sweep import plots

    found = report.summarize(find_sweep(args.sweep))
    for picture in plots.draw(found, args.out or found.sweep.folder / "pictures"):
        sys.stdout.write(f"{os.path.relpath(picture)}\n")


# ---------------------------------------------------------------------------------------------- watch


def configure_watch(parser: argparse.ArgumentParser) -> None:
    add(parser, "sweep")
    about = f"time between updates (default: {POLL_SECONDS:g}; for jobs: {QUEUE_SECONDS:g})"
    parser.add_argument("--every", type=float, metavar="SECONDS", help=about)


def run_watch(args: argparse.Namespace) -> int:
    sweep = find_sweep(args.sweep)
    before, counts, launcher = "", dict[str, int](), sweep.launcher
    usual = POLL_SECONDS if launcher == "local" else QUEUE_SECONDS
    pause = usual if args.every is None else max(0.1, args.every)
    # Ticks run here, too: the jobs may not be able to submit others. Another user's sweep is only watched.
    ticks = launcher == "template" and is_own(sweep)
    if ticks:
        sweep.require_own()
    while True:
        ticked = ticks and _tick(sweep)
        found = report.summarize(sweep)
        # A trial that ended since the tick has made way for another, which the next tick submits.
        settled, counts = not ticks or (ticked and found.counts == counts), found.counts
        text = summary(found)
        if text != before:
            if sys.stdout.isatty():
                clear_screen()
            sys.stdout.write(text)
            sys.stdout.flush()
            before = text
        if found.state in ("finished", "failed"):
            return EXIT_DONE if found.state == "finished" else EXIT_FAILED
        if found.state != "running" and not found.counts.get("running") and settled:
            return EXIT_RESUMABLE
        time.sleep(pause)


def _tick(sweep: Sweep) -> bool:
    """Run a tick; False if the queue did not answer, which may be temporary."""
    from tiltyard.sweep.tick import run_tick

    try:
        run_tick(sweep, echo)
    except UseError:
        raise
    except TiltyardError as error:
        echo(error.message)
        return False
    return True


# ---------------------------------------------------------------------------------------------- text


def summary(found: SweepSummary) -> str:
    """A sweep on one screen."""
    sweep, plan = found.sweep, found.plan
    controller = report.controller_of(sweep) if found.state == "running" else ""
    counts = ", ".join(f"{count:,} {state}" for state, count in found.counts.items())
    lines = [
        f"sweep    {sweep.id}",
        f"state    {found.state}{f' ({controller})' if controller else ''}{_orphans(found)}",
        f"trials   {found.total:,}: {counts}",
    ]
    silent = all(row.value is None for row in found.rows)
    if not (plan.program is not None and plan.metric == Objective() and silent):  # a program need not record any
        lines.append(f"metric   {plan.metric.name}, {plan.metric.of} of each trial, to {plan.goal}")
        lines += _none_recorded(found)
    lines += [f"damaged  {formatting.clean(complaint)}" for complaint in find_damage(sweep, plan)]
    lines += ["", _table(found).rstrip("\n")]
    for row in found.failed[:10]:
        lines.append(f"trial {row.trial.number} failed: {formatting.clean(row.reason)}")
    lines += ["", f"folder   {os.path.relpath(sweep.folder)}", f"next     {_next(found)}"]
    return "\n".join(lines) + "\n"


def _orphans(found: SweepSummary) -> str:
    """Trials keep running when their controller is gone."""
    running = found.counts.get("running", 0)
    if found.state == "running" or not running:
        return ""
    return f", but {running} trial{'s are' if running > 1 else ' is'} still running without a controller"


def _none_recorded(found: SweepSummary) -> list[str]:
    """A warning if trials are over and none has the metric."""
    over = [row for row in found.rows if row.state in ("finished", "ended")]
    if not over or any(row.value is not None for row in over):
        return []
    hint = report.recorded_instead(found)
    return [f"warning  none of the {len(over)} trials that are over recorded {found.plan.metric.name}; {hint}"]


def _table(found: SweepSummary) -> str:
    if found.plan.search == "population":
        return _members(found)
    keys = found.keys
    lines = []
    for group in found.groups[:SHOWN]:
        values = group.values
        spread = f"{formatting.number(min(values))} to {formatting.number(max(values))}" if len(values) > 1 else ""
        over = sum(row.over for row in group.rows)
        states = ", ".join(dict.fromkeys(row.state for row in group.rows))
        steps = sum(row.env_steps for row in group.rows)
        settings = [report.brief(group.settings.get(key)) for key in keys]
        seeds = f"{over} of {len(group.rows)}"
        lines.append([*settings, formatting.number(group.value), spread, seeds, formatting.count(steps), states])
    head = (*keys, "value", "range", "done", "env steps", "state")
    right = (len(keys), len(keys) + 2, len(keys) + 3)
    more = len(found.groups) - SHOWN
    rest = f"... and {more:,} more combinations; --csv and --json list all\n" if more > 0 else ""
    return formatting.table(head, lines, right=right) + rest if lines else ""


def _members(found: SweepSummary) -> str:
    """The members of a population, best first: settings, progress, and which member each was copied from."""
    from tiltyard.sweep.pbt.lineage import read

    keys, history = found.keys, read(found.sweep)
    lines = []
    for row in [group.rows[0] for group in found.groups]:
        copy = history.copy(row.trial.number)
        source = "" if copy is None else f"{copy.source} at {formatting.count(copy.counts_from)}"
        settings = [report.brief(row.trial.settings.get(key)) for key in keys]
        about = [
            formatting.number(row.value),
            formatting.count(row.env_steps),
            str(history.count(row.trial.number)),
            source,
        ]
        lines.append([str(row.trial.number), *settings, *about, row.state])
    head = ("member", *keys, "value", "env steps", "periods", "copy of", "state")
    return formatting.table(head, lines, right=(0, len(keys) + 1, len(keys) + 2, len(keys) + 3)) if lines else ""


def _next(found: SweepSummary) -> str:
    typed = found.sweep.typed
    if found.state == "failed" and not all(row.trial.refused for row in found.failed):
        return f"tiltyard sweep retry --failed {typed}"
    if found.state in ("failed", "finished"):
        return f"tiltyard sweep best {typed}"
    return f"tiltyard sweep {'watch' if found.state == 'running' else 'start'} {typed}"
