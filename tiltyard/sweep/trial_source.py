"""Where the trials of a sweep come from: the plan, extensions of it, or a search that chooses one point after another.

A trial is written to the manifest before a controller acts on it. Which (point, seed) a trial number stands for follows
from the plan and the decisions; see folder.planned_pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from tiltyard.config.search_space import Point
from tiltyard.config.sweep_plan import Plan
from tiltyard.errors import UseError
from tiltyard.sweep import optuna_search, results
from tiltyard.sweep.folder import Sweep, Trial, listed_trials, planned_pairs
from tiltyard.sweep.preflight import load_trial
from tiltyard.sweep.results import Row
from tiltyard.sweep.space import fixed_count, fixed_points

WITHOUT_METRIC = 3  # finished trials without the metric after which an adaptive search warns


class TrialSource:
    """The trials of one sweep so far, and how to get the next one."""

    def __init__(self, sweep: Sweep, plan: Plan) -> None:
        self.sweep, self.plan = sweep, plan
        self.trials = {trial.number: trial for trial in sweep.trials()}
        for number in self.trials.keys() - listed_trials(sweep.folder).keys():  # its line was damaged
            sweep.add_to_manifest(self.trials[number])
        self.pairs: list[tuple[int, int]] = []  # (point, seed) of every planned trial, by number - 1
        self._points: list[Point] = []

    @property
    def exhausted(self) -> bool:
        """Whether every planned trial is in the manifest."""
        return len(self.trials) >= len(self.pairs)

    def extend(self, decisions: Iterable[Mapping[str, Any]]) -> list[Trial]:
        """Apply extensions of the plan; returns the new trials, none for an adaptive search, which asks for them."""
        self.pairs = planned_pairs(self.plan, fixed_count(self.plan), decisions)
        added: list[Trial] = []
        while not self.plan.adaptive and not self.exhausted:
            number = self._next()
            point, seed = self.pairs[number - 1]
            if len(self._points) < point:
                self._points = fixed_points(self.plan, max(each for each, _ in self.pairs))
            added.append(self._add(Trial(number, point, seed, self._points[point - 1])))
        return added

    def search(self, rows: Iterable[Row]) -> Trial:
        """Ask an adaptive search for the next trial; one whose settings are invalid is `refused`."""
        number = self._next()
        point, seed = self.pairs[number - 1]
        known = next((each.settings for each in self.trials.values() if each.point == point), None)
        settings = known or optuna_search.ask(self.plan, results.groups(rows), point)
        trial = Trial(number, point, seed, settings)
        try:
            if self.plan.program is None:
                load_trial(self.sweep, self.plan, trial)
        except UseError as error:
            trial = replace(trial, refused=f"{error.message} {error.details}".strip())
        return self._add(trial)

    def _next(self) -> int:
        """The first number without a trial: the next one, unless a line of the manifest was damaged."""
        return next(number for number in range(1, len(self.trials) + 2) if number not in self.trials)

    def _add(self, trial: Trial) -> Trial:
        self.sweep.add_to_manifest(trial)
        self.trials[trial.number] = trial
        return trial


def missing_metric(plan: Plan, rows: Iterable[Row]) -> str:
    """A warning for an adaptive search whose trials never record the metric; empty if they do, or too few finished."""
    finished = [row for row in rows if row.state == "finished"]
    if len(finished) < WITHOUT_METRIC or any(row.value is not None for row in finished):
        return ""
    name = plan.metric.name
    return f"None of the {len(finished)} finished trials recorded {name}: the search has nothing to learn from."
