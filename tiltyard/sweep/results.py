"""The state, value and learning curve of each trial, read from the folders. Imports nothing heavy.

    waiting     not started yet          created running stopped finished failed lost    as for any run
    ended       early, by the plan's rule

The value of a trial that is over is kept in results.jsonl, so that a summary of a thousand trials reads one small file
of each. A line is valid as long as the trial's status has the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiltyard.config.sweep_plan import Objective, Plan
from tiltyard.errors import UseError
from tiltyard.failures import FailureClass, retry
from tiltyard.run import atomic
from tiltyard.run.curve import Curve
from tiltyard.run.folder import Run
from tiltyard.run.metrics import curve
from tiltyard.run.status import STATUS, observed_state
from tiltyard.sweep.folder import Sweep, Trial

RESULTS = "results.jsonl"
OVER = ("finished", "failed", "ended")
SILENT = ("waiting", "created", "queued", "lost")


@dataclass(frozen=True)
class Row:
    """One trial and its results so far."""

    trial: Trial
    state: str
    reason: str = ""
    value: float | None = None
    env_steps: int = 0
    seconds: float = 0.0
    attempt: int = 0
    updated: str = ""
    folder: Path | None = None
    kept: bool = False
    """whether the value is in results.jsonl"""
    failure: FailureClass | None = None
    """the class of the failure that it recorded"""

    @property
    def over(self) -> bool:
        return self.state in OVER


def rows(sweep: Sweep, plan: Plan, trials: Iterable[Trial] | None = None) -> list[Row]:
    """Every trial whose settings are known, by number."""
    lines = atomic.read_lines(sweep.folder / RESULTS)[0]
    valid = [line for line in lines if line.get("value") is None or atomic.number(line["value"]) is not None]
    known = {line["trial"]: line for line in valid if isinstance(line.get("trial"), int)}
    decisions = sweep.decisions()
    ended = {each["trial"]: str(each.get("why", "")) for each in decisions if each["kind"] == "ended early"}
    failed = used_up(plan, decisions)
    found = []
    for trial in sweep.trials() if trials is None else trials:
        row = read_row(sweep, plan, trial, known.get(trial.number), ended.get(trial.number))
        if row.state in SILENT and trial.number in failed:  # its retries are used up and it recorded no end
            row = replace(row, state="failed", reason=str(failed[trial.number].get("reason", "")))
        found.append(row)
    return found


def failures(decisions: Iterable[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """The recorded failures of each trial since a user last asked for a retry."""
    found: dict[int, list[dict[str, Any]]] = {}
    for each in decisions:
        if each["kind"] == "failed":
            found.setdefault(int(each["trial"]), []).append(each)
        elif each["kind"] == "retry":
            found.pop(int(each["trial"]), None)
    return found


def counted(known: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The failures that count as retries: not those of a disk that failed for too long."""
    return [each for each in known if each.get("class") != "retried in place"]


def used_up(plan: Plan, decisions: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Trials whose retries are used up, with their last failure."""
    return {number: known[-1] for number, known in failures(decisions).items() if len(counted(known)) > plan.retries}


def read_row(
    sweep: Sweep, plan: Plan, trial: Trial, known: Mapping[str, Any] | None = None, ended: str | None = None
) -> Row:
    """Read one trial. `known` is its line in results.jsonl, `ended` why it was stopped early."""
    if trial.refused:
        return Row(trial, "failed", trial.refused)
    folder = sweep.place(trial.number)
    if not (folder / STATUS).exists():
        return Row(trial, "waiting")
    try:
        status = Run(folder).status()
    except UseError as error:
        return Row(trial, "failed", error.message, folder=folder)
    state, reason, updated = observed_state(folder, status), status["reason"], status["updated"]
    kept = known is not None and known.get("updated") == updated
    failure = status.get("failure")
    if state == "stopped" and kept:  # only a trial that is over has a line there
        ended = ended or "stopped early"
    elif state == "stopped" and failure is not None:  # it did not stop on request: it starts again
        state = "failed"
    if ended is not None and state != "finished":
        state, reason = "ended", ended
    if known is not None and kept:
        value = atomic.number(known.get("value"))
    else:
        value = value_of(curve(folder, plan.metric.name), plan.metric, plan.better)
    return Row(
        trial,
        state,
        reason,
        value,
        int(status["progress"]["env_steps"]),
        float(status["progress"]["seconds"]),
        status["attempt"],
        updated,
        folder,
        kept,
        failure,
    )


def keep(sweep: Sweep, row: Row) -> None:
    """Record the value of a trial that is over."""
    line = {"trial": row.trial.number, "updated": row.updated, "value": row.value}
    retry(lambda: atomic.append_record(sweep.folder / RESULTS, line))


class CurveCache:
    """The curves of a sweep's trials. Of a file that has changed, only what its index lacks is read again."""

    def __init__(self, sweep: Sweep, metric: str) -> None:
        self.sweep, self.metric = sweep, metric
        self._known: dict[int, tuple[tuple[int, int], Curve]] = {}

    def read(self, number: int) -> Curve:
        folder = self.sweep.place(number)
        try:
            found = (folder / "metrics.jsonl").stat()
        except OSError:
            return Curve()
        mark = (found.st_size, found.st_mtime_ns)
        if number not in self._known or self._known[number][0] != mark:
            self._known[number] = (mark, curve(folder, self.metric))
        return self._known[number][1]


def value_of(found: Curve, metric: Objective, better: float) -> float | None:
    """The value by which a trial is compared with others."""
    if not found:
        return None
    return found.last if metric.of == "last" else found.best(better)


# ---------------------------------------------------------------------------------------------- over seeds


@dataclass(frozen=True)
class Group:
    """The trials of one point."""

    point: int
    rows: list[Row]

    @property
    def settings(self) -> dict[str, Any]:
        return self.rows[0].trial.settings

    @property
    def values(self) -> list[float]:
        return [row.value for row in self.rows if row.value is not None]

    @property
    def value(self) -> float | None:
        """The interquartile mean over seeds that have a value."""
        return interquartile_mean(self.values) if self.values else None


def groups(found: Iterable[Row]) -> list[Group]:
    """Trials by point, in the order of the points."""
    made: dict[int, list[Row]] = {}
    for row in found:
        made.setdefault(row.trial.point, []).append(row)
    return [Group(point, made[point]) for point in sorted(made)]


def ranked(found: Iterable[Group], better: float) -> list[Group]:
    """The best first; those without a value last."""
    return sorted(found, key=lambda group: (group.value is None, -better * (group.value or 0.0), group.point))


def interquartile_mean(values: list[float]) -> float:
    """The mean of the middle half; a value on its border counts by the part inside."""
    weights = quartile_weights(len(values))
    return sum(weight * value for weight, value in zip(weights, sorted(values), strict=True)) / sum(weights)


def quartile_weights(count: int) -> list[float]:
    """How much each of so many sorted values counts in the interquartile mean."""
    low, high = count / 4, 3 * count / 4
    return [max(0.0, min(i + 1, high) - max(i, low)) for i in range(count)]
