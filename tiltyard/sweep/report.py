"""What a sweep says of itself: how it stands, which point is best, tables for people and for programs.

All of it is read off the folders, anywhere that sees them. Numbers over seeds are interquartile means; intervals are
bootstrapped, and importance is the share of the variance between points that one setting explains by itself.
"""

from __future__ import annotations

import csv
import io
import math
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from tiltyard.config.search_space import Choices, fingerprint, is_number
from tiltyard.config.sweep_plan import Plan
from tiltyard.errors import did_you_mean
from tiltyard.run import metrics
from tiltyard.run.lock import read_owner
from tiltyard.run.settings_schedule import read as read_schedule
from tiltyard.slurm.job_state import combined_state
from tiltyard.sweep.backends.jobs import job_ids, slurm_job_states
from tiltyard.sweep.folder import Sweep, wanted
from tiltyard.sweep.results import Group, Row, failures, groups, interquartile_mean, ranked, rows
from tiltyard.sweep.space import dimensions, fixed_count

if TYPE_CHECKING:
    from tiltyard.sweep.pbt.lineage import Copy, Lineage

RESAMPLES = 2000
BINS = 4
SOME = 20  # trials, and records of each, that are looked through for names
RETRY = "to retry"  # failed, and is started again by itself
ORDER = ("finished", "ended", "running", "queued", "created", "paused", "stopped", "lost", RETRY, "failed", "waiting")


@dataclass(frozen=True)
class SweepSummary:
    """A sweep as it stands."""

    sweep: Sweep
    plan: Plan
    rows: list[Row]
    total: int
    under_way: bool = False
    """whether jobs of it wait or run"""

    @property
    def counts(self) -> dict[str, int]:
        """How many trials are in each state."""
        states = [row.state for row in self.rows]
        found = {state: states.count(state) for state in ORDER if state in states}
        unknown = self.total - len(self.rows)
        return {**found, "waiting": found.get("waiting", 0) + unknown} if unknown else found

    @property
    def state(self) -> str:
        """running (somebody carries it out), finished, failed (over, and some trial failed) or stopped.

        Where trials are jobs, whoever takes a turn when all of them are over only finds out that they are.
        """
        over = len(self.rows) == self.total and all(row.over for row in self.rows)
        last_turn = over and self.sweep.launcher != "local"
        if self.under_way or (self.sweep.controlled and not last_turn):
            return "running"
        if over:
            return "failed" if self.failed else "finished"
        return "stopped"

    @property
    def groups(self) -> list[Group]:
        """The points, the best first."""
        return ranked(groups(self.rows), self.plan.better)

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row.state == "failed"]

    @property
    def keys(self) -> list[str]:
        """The settings that are varied."""
        return list(dict.fromkeys(key for row in self.rows for key in row.trial.settings))


def summarize(sweep: Sweep) -> SweepSummary:
    """Read everything there is to say. Members of a population are told with their settings of now."""
    plan, jobs = sweep.plan(), job_ids(sweep)
    while True:
        told = slurm_job_states(jobs)  # asked first: a job writes before it ends
        decisions, found, asked = sweep.decisions(), rows(sweep, plan), jobs
        if (jobs := job_ids(sweep)) == asked:  # else some went on in others, of which nothing was asked
            break
    failed = failures(decisions)
    found = [_to_retry(row, len(failed.get(row.trial.number, ())), plan.retries) for row in found]
    if plan.search == "population":
        from tiltyard.sweep.pbt.lineage import Lineage

        story = Lineage([row.trial for row in found], decisions)
        found = [_member(row, story) for row in found]
    total, under_way = len(wanted(plan, fixed_count(plan), decisions)), False
    if sweep.launcher != "local":
        found = [
            row if row.over else replace(row, state=combined_state(row.state, told.get(row.trial.number)))
            for row in found
        ]
        under_way = any(each.pending or each.running for each in told.values())
        under_way |= any(row.state in ("queued", "running") for row in found)
    return SweepSummary(sweep, plan, found, total, under_way)


def _to_retry(row: Row, failures: int, retries: int) -> Row:
    waits = row.state == "failed" and not row.trial.refused and failures <= retries
    return replace(row, state=RETRY) if waits else row


def _member(row: Row, story: Lineage) -> Row:
    trial = replace(row.trial, settings=story.settings(row.trial.number))
    known = read_schedule(row.folder) if row.state == "stopped" and row.folder is not None else None
    waits = known is not None and known.until is not None and row.env_steps >= known.until
    return replace(row, trial=trial, state="paused" if waits else row.state)


def controller_of(sweep: Sweep) -> str:
    """Who carries it out, in words."""
    if sweep.launcher != "local":
        return f"jobs of profile {sweep.facts()['profile']}"
    owner = read_owner(sweep.folder) if sweep.controlled else None
    if owner is None:
        return ""
    return f"pid {owner.get('pid')} on host {owner.get('host')}"


def recorded_instead(report: SweepSummary) -> str:
    """Which metrics trials have recorded, for whoever asked for one that none has."""
    names = {
        name
        for row in report.rows[:SOME]
        if row.folder is not None
        for record in metrics.read(row.folder)[-SOME:]
        for name in record["metrics"]
    }
    told = sorted(name for name in names if not name.startswith(("time/", "speed/", "setting/")))
    return did_you_mean(report.plan.metric.name, told) if told else "no trial has recorded any metric"


# ---------------------------------------------------------------------------------------------- for programs


def as_data(report: SweepSummary) -> dict[str, Any]:
    """Everything as plain data."""
    return {
        "sweep": report.sweep.id,
        "folder": str(report.sweep.folder),
        "state": report.state,
        "controller": controller_of(report.sweep) if report.state == "running" else "",
        "metric": report.plan.metric.name,
        "goal": report.plan.goal,
        "trials": report.total,
        "counts": report.counts,
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
        writer.writerow([*("" if data[fact] is None else data[fact] for fact in facts), *settings])
    return lines.getvalue()


def shown(value: Any) -> str:
    """A setting's value as one would write it."""
    return value if isinstance(value, str) else fingerprint(value)


def brief(value: Any) -> str:
    """The same for people: four digits of a long number."""
    return f"{value:.4g}" if isinstance(value, float) else shown(value)


def describe_copy(copy: Copy) -> str:
    """How one member of a population became a copy of another, in a sentence."""
    one, new = copy.exploit, copy.exploit.after
    scores = " against ".join("no score" if each is None else f"{each:.6g}" for each in (copy.source_score, copy.score))
    steps = f"{one.env_steps:,}" if one.counts_from == one.env_steps else f"{one.env_steps:,}, now {one.counts_from:,}"
    moved = [f"{key} {brief(old)} -> {brief(new[key])}" for key, old in one.before.items() if new[key] != old]
    changes = f": {', '.join(moved)}" if moved else ", with the same settings"
    return f"Member {one.member} became a copy of member {one.source} ({scores}) at env step {steps}{changes}."


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
    if len(known) < 4 or report.plan.search == "population":  # whose settings were others before
        return []
    values = [group.value or 0.0 for group in known]
    found = []
    for keys, is_choice in _axes(report):
        points: list[list[Any]] = [[group.settings.get(key) for key in keys] for group in known]
        labels = [fingerprint(each) for each in points]
        if not is_choice and len(set(labels)) > max(BINS, len(known) // 2):  # else values come again, as in a grid
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
    """Which quarter of the values each lies in."""
    order = sorted(values)
    return [str(bisect_left(order, value) * BINS // len(values)) for value in values]  # equal ones lie in the same


def explained(labels: Sequence[str], values: Sequence[float]) -> float | None:
    """The share of the variance between the groups (omega squared), from 0 to 1; None where no group has two values,
    and all of it could be chance."""
    middle = fmean(values)
    total = sum((value - middle) ** 2 for value in values)
    parts = {
        label: [value for mark, value in zip(labels, values, strict=True) if mark == label] for label in set(labels)
    }
    free = len(values) - len(parts)
    if free <= 0:
        return None
    if total <= 0:
        return 0.0
    between = sum(len(part) * (fmean(part) - middle) ** 2 for part in parts.values())
    noise = (total - between) / free
    return max(0.0, min(1.0, (between - (len(parts) - 1) * noise) / (total + noise)))
