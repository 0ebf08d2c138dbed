"""`sweep status`, `sweep best` and `sweep plot`: a sweep's results, read from its folder. Imports nothing heavy."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from tiltyard.cli import formatting
from tiltyard.cli.sweep_show import summary
from tiltyard.errors import EXIT_DONE, EXIT_FAILED, UseError
from tiltyard.run import atomic
from tiltyard.sweep import report
from tiltyard.sweep.folder import find_sweep

if TYPE_CHECKING:
    from tiltyard.run.folder import Run


def run_status(args: argparse.Namespace) -> int:
    """Print the summary of a sweep."""
    found = report.summarize(find_sweep(args.target or "last"))
    if args.json:
        sys.stdout.write(atomic.to_json(report.as_data(found), indent=2) + "\n")
    elif args.csv:
        sys.stdout.write(report.as_csv(found))
    else:
        sys.stdout.write(summary(found))
    return EXIT_FAILED if found.state == "failed" else EXIT_DONE


def run_best(args: argparse.Namespace) -> int:
    """Print the best settings and the best run with them."""
    found = report.summarize(find_sweep(args.target or "last"))
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
    if args.json:
        data: dict[str, Any] = {"settings": group.settings, "value": group.value, "interval": interval}
        data |= {
            "values": group.values,
            "trials": [report.row_data(each) for each in group.rows],
            "best": report.row_data(row),
        }
        sys.stdout.write(atomic.to_json(data, indent=2) + "\n")
        return EXIT_DONE
    from tiltyard.run.folder import Run

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
    sys.stdout.write("".join(f"{name:<9} {formatting.clean(value)}\n" for name, value in lines))
    return EXIT_DONE


def _next_command(run: Run, *, is_program: bool) -> str:
    """What to do with the best run: evaluate its best checkpoint, or its newest if none has a score."""
    if is_program:
        return f"tiltyard show {run.typed}"
    from tiltyard.run.checkpoint import list_checkpoints

    scored = any(each.score is not None for each in list_checkpoints(run))
    return f"tiltyard eval {run.typed}{' --best' if scored else ''}"


def run_plot(args: argparse.Namespace) -> int:
    """Draw plots, and print their paths."""
    from tiltyard.sweep import plots

    found = report.summarize(find_sweep(args.target or "last"))
    for picture in plots.draw(found, args.out or found.sweep.folder / "pictures"):
        sys.stdout.write(f"{os.path.relpath(picture)}\n")
    return EXIT_DONE
