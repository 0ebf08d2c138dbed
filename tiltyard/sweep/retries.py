"""Which failed trials start again, and when: after `back_off` seconds, doubled each time, at most `retries` times.

Failures and requests for a retry are in decisions.jsonl, so a controller that starts later decides the same.
"""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

from tiltyard.config.sweep_plan import Plan
from tiltyard.sweep import results
from tiltyard.sweep.folder import Sweep
from tiltyard.sweep.results import Row


class Retries:
    """The failures of one sweep's trials."""

    def __init__(self, sweep: Sweep, plan: Plan) -> None:
        self.sweep, self.plan = sweep, plan
        self._granted: dict[int, str] = {}  # trial -> time of the newest request that was granted

    def grant(self, number: int, requested: str) -> None:
        """Remember that a request, by its time, was granted: each counts once."""
        self._granted[number] = requested

    def grant_pending(self, row: Row) -> bool:
        """Grant a retry that a user asked for after the trial failed and before the failure was recorded."""
        number = row.trial.number
        newest = max((str(each["time"]) for each in self._decisions("retry", number)), default="")
        if not newest or newest < row.updated or self._granted.get(number) == newest:
            return False
        self.grant(number, newest)
        return True

    def is_recorded(self, row: Row, job: str) -> bool:
        """Whether the failure of this attempt, or of this job, is on record."""
        known = self._decisions("failed", row.trial.number)
        return any(each.get("attempt") == row.attempt and each.get("job", "") == job for each in known)

    def record(self, row: Row, reason: str, job: str) -> None:
        of_job = {"job": job} if job else {}
        self.sweep.decide("failed", trial=row.trial.number, attempt=row.attempt, reason=reason, **of_job)

    def next_start(self, number: int) -> float | None:
        """When the trial may start again (Unix time); None if its retries are used up."""
        known = results.failures(self.sweep.decisions()).get(number, [])
        if len(known) > self.plan.retries:
            return None
        return _timestamp(known[-1]["time"]) + self.plan.back_off * 2 ** (len(known) - 1) if known else 0.0

    def _decisions(self, kind: str, number: int) -> list[dict[str, Any]]:
        return [each for each in self.sweep.decisions() if each["kind"] == kind and int(each["trial"]) == number]


def _timestamp(text: Any) -> float:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return time.time()
