"""A sweep on one screen: what `tiltyard sweep status` says, as lines. Reads what the report has, and nothing else."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tiltyard.cli import formatting
from tiltyard.config.sweep_plan import Objective
from tiltyard.sweep.report import brief, controller_of, recorded_instead

if TYPE_CHECKING:
    from tiltyard.sweep.report import SweepSummary

SHOWN = 20  # points in the table; files have all of them


def summary(found: SweepSummary) -> str:
    """A sweep on one screen."""
    sweep, plan = found.sweep, found.plan
    who = controller_of(sweep) if found.state == "running" else ""
    counts = ", ".join(f"{count:,} {state}" for state, count in found.counts.items())
    lines = [
        f"sweep    {sweep.id}",
        f"state    {found.state}{f', carried out by {who}' if who else ''}{_alone(found)}",
        f"trials   {found.total:,}: {counts}",
    ]
    silent = all(row.value is None for row in found.rows)
    if not (plan.program is not None and plan.metric == Objective() and silent):  # a program need not record any
        lines.append(f"metric   {plan.metric.name}, {plan.metric.of} of each trial, {plan.goal}d")
        lines += _none_recorded(found)
    lines += ["", _table(found).rstrip("\n")]
    for row in found.failed[:10]:
        lines.append(f"trial {row.trial.number} failed: {formatting.clean(row.reason)}")
    lines += ["", f"folder   {os.path.relpath(sweep.folder)}", f"next     {_next(found)}"]
    return "\n".join(lines) + "\n"


def _alone(found: SweepSummary) -> str:
    """Trials go on when whoever started them is gone."""
    running = found.counts.get("running", 0)
    if found.state == "running" or not running:
        return ""
    return f", while {running} trials go on by themselves" if running > 1 else ", while 1 trial goes on by itself"


def _none_recorded(found: SweepSummary) -> list[str]:
    """A warning where trials are over and none has the metric: a search would learn nothing from them."""
    over = [row for row in found.rows if row.state in ("finished", "ended")]
    if not over or any(row.value is not None for row in over):
        return []
    hint = recorded_instead(found)
    return [f"warning  none of {len(over)} that are over has recorded {found.plan.metric.name}; {hint}"]


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
    head = (*keys, "value", "over seeds", "over", "env steps", "state")
    right = (len(keys), len(keys) + 2, len(keys) + 3)
    more = len(found.groups) - SHOWN
    said = f"... and {more:,} more combinations; --csv and --json have all\n" if more > 0 else ""
    return formatting.table(head, lines, right=right) + said if lines else ""


def _members(found: SweepSummary) -> str:
    """The members of a population, the best first: with what they learn, how far they are, whose copies they are."""
    from tiltyard.sweep.pbt.lineage import read

    keys, story = found.keys, read(found.sweep)
    lines = []
    for row in [group.rows[0] for group in found.groups]:
        copy = story.copy(row.trial.number)
        source = "" if copy is None else f"{copy.exploit.source} at {formatting.count(copy.exploit.counts_from)}"
        settings = [brief(row.trial.settings.get(key)) for key in keys]
        about = [
            formatting.number(row.value),
            formatting.count(row.env_steps),
            str(story.count(row.trial.number)),
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
