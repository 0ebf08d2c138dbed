"""The summary of a sweep: its state, the best point, tables as data and as CSV.

All of it is read from the folders, on any machine that sees them. Values over seeds are interquartile means; intervals
are bootstrapped; importance is the share of the variance between points that one setting explains by itself.
"""

from __future__ import annotations

import contextlib
import csv
import io
import math
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from tiltyard.config.fields import is_number
from tiltyard.config.search_space import Choices, fingerprint
from tiltyard.config.sweep_plan import Plan
from tiltyard.errors import UseError, did_you_mean
from tiltyard.run.history import History
from tiltyard.run.lock import describe, read_owner
from tiltyard.run.settings_schedule import read as read_schedule
from tiltyard.slurm.job_state import combined_state
from tiltyard.sweep.backends.jobs import job_ids, slurm_job_states
from tiltyard.sweep.damage import find_damage
from tiltyard.sweep.folder import Sweep, planned_pairs
from tiltyard.sweep.results import Group, Row, groups, interquartile_mean, ranked, rows, used_up
from tiltyard.sweep.space import dimensions, fixed_count

if TYPE_CHECKING:
    from tiltyard.sweep.pbt.lineage import Copy, Lineage

RESAMPLES = 2000
BINS = 4
SOME = 20  # trials, and records of each, that are searched for metric names
RETRY = "to retry"  # failed, and restarts automatically
ORDER = ("finished", "ended", "running", "queued", "created", "paused", "stopped", "lost", RETRY, "failed", "waiting")


@dataclass(frozen=True)
class SweepSummary:
    """A sweep and its trials at one moment."""

    sweep: Sweep
    plan: Plan
    rows: list[Row]
    total: int
    under_way: bool = False
    """whether jobs of the sweep wait or run"""

    @property
    def counts(self) -> dict[str, int]:
        """How many trials are in each state."""
        states = [row.state for row in self.rows]
        found = {state: states.count(state) for state in ORDER if state in states}
        unknown = self.total - len(self.rows)
        return {**found, "waiting": found.get("waiting", 0) + unknown} if unknown else found

    @property
    def state(self) -> str:
        """running (it has a controller, or jobs), finished, failed (over, and some trial failed) or stopped.

        Where trials are jobs, a tick after the last of them may still hold the lock: that does not count.
        """
        over = len(self.rows) == self.total and all(row.over for row in self.rows)
        last_tick = over and self.sweep.launcher != "local"
        if self.under_way or (self.sweep.controlled and not last_tick):
            return "running"
        if over:
            return "failed" if self.failed else "finished"
        return "stopped"

    @property
    def groups(self) -> list[Group]:
        """The points, best first."""
        return ranked(groups(self.rows), self.plan.better)

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row.state == "failed"]

    @property
    def keys(self) -> list[str]:
        """The names of the settings that vary."""
        return list(dict.fromkeys(key for row in self.rows for key in row.trial.settings))


def summarize(sweep: Sweep) -> SweepSummary:
    """Read the state of a sweep. Members of a population have their present settings."""
    plan, jobs = sweep.plan(), job_ids(sweep)
    while True:
        answers = slurm_job_states(jobs)  # asked first: a job writes before it ends
        decisions, found, asked = sweep.decisions(), rows(sweep, plan), jobs
        if (jobs := job_ids(sweep)) == asked:  # else some trials continued in new jobs, which were not asked about
            break
    failed = used_up(plan, decisions)
    for i, row in enumerate(found):
        if row.state == "failed" and not row.trial.refused and row.trial.number not in failed:
            found[i] = replace(row, state=RETRY)
    if plan.search == "population":
        from tiltyard.sweep.pbt.lineage import Lineage

        history = Lineage([row.trial for row in found], decisions)
        found = [_member(row, history) for row in found]
    total = max(len(found), len(planned_pairs(plan, fixed_count(plan), decisions)))  # an extension may be damaged
    under_way = False
    if sweep.launcher != "local":
        found = [
            row if row.over else replace(row, state=combined_state(row.state, answers.get(row.trial.number)))
            for row in found
        ]
        under_way = any(each.pending or each.running for each in answers.values())
        under_way |= any(row.state in ("queued", "running") for row in found)
    return SweepSummary(sweep, plan, found, total, under_way)


def _member(row: Row, history: Lineage) -> Row:
    trial = replace(row.trial, settings=history.settings(row.trial.number))
    schedule = None
    with contextlib.suppress(UseError):  # a damaged one is written again before the member continues
        schedule = read_schedule(row.folder) if row.state == "stopped" and row.folder is not None else None
    waits = schedule is not None and schedule.until is not None and row.env_steps >= schedule.until
    return replace(row, trial=trial, state="paused" if waits else row.state)


def controller_of(sweep: Sweep) -> str:
    """What runs the sweep, for people."""
    if sweep.launcher != "local":
        return f"jobs of profile {sweep.facts()['profile']}"
    owner = read_owner(sweep.folder) if sweep.controlled else None
    return describe(owner) if owner else ""


def recorded_instead(report: SweepSummary) -> str:
    """A hint with the metrics that trials did record, if none recorded the plan's."""
    names = {
        name
        for row in report.rows[:SOME]
        if row.folder is not None
        for record in History(row.folder).recent(SOME)
        for name in record["metrics"]
    }
    useful = sorted(name for name in names if not name.startswith(("time/", "speed/", "setting/")))
    return did_you_mean(report.plan.metric.name, useful) if useful else "no trial has recorded any metric"


# ---------------------------------------------------------------------------------------------- data


def as_data(report: SweepSummary) -> dict[str, Any]:
    """Everything as plain data, for JSON."""
    return {
        "sweep": report.sweep.id,
        "folder": str(report.sweep.folder),
        "state": report.state,
        "controller": controller_of(report.sweep) if report.state == "running" else "",
        "metric": report.plan.metric.name,
        "goal": report.plan.goal,
        "trials": report.total,
        "counts": report.counts,
        "damaged": find_damage(report.sweep, report.plan),
        "points": [
            {
                "point": group.point,
                "settings": group.settings,
                "value": group.value,
                "values": group.values,
                "trials": [row.trial.number for row in group.rows],
            }
            for group in report.groups
        ],
        "rows": [row_data(row) for row in report.rows],
    }


def row_data(row: Row) -> dict[str, Any]:
    return {
        "trial": row.trial.number,
        "point": row.trial.point,
        "seed": row.trial.seed,
        "state": row.state,
        "reason": row.reason,
        "value": row.value,
        "env_steps": row.env_steps,
        "seconds": row.seconds,
        "folder": str(row.folder) if row.folder else None,
        "settings": row.trial.settings,
    }


def as_csv(report: SweepSummary) -> str:
    """One line per trial, a column per setting."""
    keys = report.keys
    lines = io.StringIO(newline="")
    writer = csv.writer(lines)
    facts = ("trial", "point", "seed", "state", "value", "env_steps", "seconds", "folder")
    writer.writerow([*facts, *keys])
    for row in report.rows:
        data = row_data(row)
        settings = [shown(row.trial.settings[key]) if key in row.trial.settings else "" for key in keys]
        writer.writerow([*(data[fact] for fact in facts), *settings])  # None is written as an empty string
    return lines.getvalue()


def shown(value: Any) -> str:
    """A setting's value as in a file."""
    return value if isinstance(value, str) else fingerprint(value)


def brief(value: Any) -> str:
    """A setting's value in a table: four digits of a float."""
    return f"{value:.4g}" if isinstance(value, float) else shown(value)


def describe_copy(copy: Copy) -> str:
    """A sentence about one member of a population that became a copy of another."""
    new, now = copy.after, copy.counts_from
    scores = " against ".join("no score" if each is None else f"{each:.6g}" for each in (copy.source_score, copy.score))
    steps = f"{copy.env_steps:,}" if now == copy.env_steps else f"{copy.env_steps:,}, now {now:,}"
    moved = [f"{key} {brief(old)} -> {brief(new[key])}" for key, old in copy.before.items() if new[key] != old]
    changes = f": {', '.join(moved)}" if moved else ", with the same settings"
    return f"Member {copy.member} became a copy of member {copy.source} ({scores}) at env step {steps}{changes}."


# ---------------------------------------------------------------------------------------------- numbers


def bootstrap(values: Sequence[float], *, level: float = 0.95) -> tuple[float, float] | None:
    """The interval of the interquartile mean by resampling; None for fewer than two values."""
    if len(values) < 2:
        return None
    rng = random.Random(0)
    found = sorted(interquartile_mean(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    cut = (1 - level) / 2
    return found[math.floor(cut * (RESAMPLES - 1))], found[math.ceil((1 - cut) * (RESAMPLES - 1))]


def importance(report: SweepSummary) -> list[tuple[str, float]]:
    """(settings, share) of each dimension, the largest first: how much of the variance between points it explains by
    itself, less what as many groups would explain by chance. Needs at least four points with a value."""
    known = [group for group in report.groups if group.value is not None]
    if len(known) < 4 or report.plan.search == "population":  # its settings change during training
        return []
    values = [group.value or 0.0 for group in known]
    found = []
    for keys, is_choice in _axes(report):
        points: list[list[Any]] = [[group.settings.get(key) for key in keys] for group in known]
        labels = [fingerprint(each) for each in points]
        if not is_choice and len(set(labels)) > max(BINS, len(known) // 2):  # else values repeat, as in a grid
            labels = _bins([float(each[0]) for each in points])
        share = explained(labels, values)
        if share is not None:
            found.append((",".join(keys), share))
    return sorted(found, key=lambda pair: -pair[1])


def _axes(report: SweepSummary) -> list[tuple[tuple[str, ...], bool]]:
    if report.plan.points:
        numbers = {key for key in report.keys if all(is_number(group.settings.get(key)) for group in report.groups)}
        return [((key,), key not in numbers) for key in report.keys]
    return [(each.keys, isinstance(each, Choices)) for each in dimensions(report.plan)]


def _bins(values: list[float]) -> list[str]:
    """The quarter of the values that each is in; equal values are in the same one."""
    order = sorted(values)
    return [str(bisect_left(order, value) * BINS // len(values)) for value in values]


def explained(labels: Sequence[str], values: Sequence[float]) -> float | None:
    """The share of the variance between the groups (omega squared), from 0 to 1; None if no group has two values."""
    middle = fmean(values)
    total = sum((value - middle) ** 2 for value in values)
    parts: dict[str, list[float]] = {}
    for label, value in zip(labels, values, strict=True):
        parts.setdefault(label, []).append(value)
    free = len(values) - len(parts)
    if free <= 0:
        return None
    if total <= 0:
        return 0.0
    between = sum(len(part) * (fmean(part) - middle) ** 2 for part in parts.values())
    noise = (total - between) / free
    return max(0.0, min(1.0, (between - (len(parts) - 1) * noise) / (total + noise)))
