"""Which failed trials start again, and when: after `back_off` seconds, doubled each time up to an hour, at most
`retries` times. A trial whose disk failed for longer than its `save.patience` starts again however often.

Failures and requests for a retry are in decisions.jsonl, so a controller that starts later decides the same.
"""

from __future__ import annotations

from datetime import datetime

from tiltyard.config.sweep_plan import Plan
from tiltyard.sweep import results
from tiltyard.sweep.folder import Sweep
from tiltyard.sweep.results import Row

LONGEST_WAIT = 3600.0  # seconds


class Retries:
    """The failures of one sweep's trials."""

    def __init__(self, sweep: Sweep, plan: Plan) -> None:
        self.sweep, self.plan = sweep, plan
        self.granted: dict[int, str] = {}  # trial -> time of the newest request that was granted: each counts once

    def grant_pending(self, row: Row) -> bool:
        """Grant a retry that a user asked for after the trial failed and before the failure was recorded."""
        number = row.trial.number
        requests = [str(each["time"]) for each in self.sweep.decisions("retry") if int(each["trial"]) == number]
        newest = max(requests, default="")
        if not newest or newest < row.updated or self.granted.get(number) == newest:
            return False
        self.granted[number] = newest
        return True

    def is_recorded(self, row: Row, job: str) -> bool:
        """Whether the failure of this attempt, or of this job, is on record."""
        mark = (row.trial.number, row.attempt, job)
        known = self.sweep.decisions("failed")
        return any((int(each["trial"]), each.get("attempt"), each.get("job", "")) == mark for each in known)

    def record(self, row: Row, reason: str, job: str) -> None:
        facts = ({"job": job} if job else {}) | ({"class": row.failure} if row.failure else {})
        self.sweep.decide("failed", trial=row.trial.number, attempt=row.attempt, reason=reason, **facts)

    def next_start(self, number: int) -> float | None:
        """When the trial may start again (Unix time); None if its retries are used up."""
        known = results.failures(self.sweep.decisions()).get(number, [])
        if len(results.counted(known)) > self.plan.retries:
            return None
        if not known:
            return 0.0
        wait = min(self.plan.back_off * 2.0 ** (len(known) - 1), max(self.plan.back_off, LONGEST_WAIT))
        return datetime.fromisoformat(known[-1]["time"]).timestamp() + wait
