"""The text of `tiltyard sweep status`, from a SweepSummary."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tiltyard.cli import formatting
from tiltyard.config.sweep_plan import Objective
from tiltyard.sweep.report import brief, controller_of, recorded_instead

if TYPE_CHECKING:
    from tiltyard.sweep.report import SweepSummary

SHOWN = 20  # points in the table


def summary(found: SweepSummary) -> str:
    """A sweep on one screen."""
    sweep, plan = found.sweep, found.plan
    controller = controller_of(sweep) if found.state == "running" else ""
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
    hint = recorded_instead(found)
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
        settings = [brief(group.settings.get(key)) for key in keys]
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
        source = "" if copy is None else f"{copy.exploit.source} at {formatting.count(copy.exploit.counts_from)}"
        settings = [brief(row.trial.settings.get(key)) for key in keys]
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
