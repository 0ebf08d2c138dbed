"""A damaged status.json, rebuilt from what the run's other files say. Only its owner writes it again.

state, reason, attempt         events.jsonl: the newest event that changed them
progress, best                 the manifests of the checkpoints, else the newest record of metrics.jsonl
return, eval_return            metrics.jsonl
env, tags, notes, target       the run's settings
created, lineage, profile, job events.jsonl
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tiltyard.errors import TiltyardError
from tiltyard.run import atomic, checkpoint
from tiltyard.run.events import read_events
from tiltyard.run.history import History
from tiltyard.run.status import FIELDS, STATUS

if TYPE_CHECKING:
    from tiltyard.run.folder import Run

STATE_AFTER = {  # kind of event -> state; other kinds do not change it
    "created": "created",
    "submitted": "queued",
    "started": "running",
    "stopped": "stopped",
    "finished": "finished",
    "failed": "failed",
}


def rebuild_status(run: Run, why: str) -> dict[str, Any]:
    """All fields of status.json, and `damaged`: a sentence that says why they were rebuilt."""
    events = [event for event in read_events(run) if isinstance(event.get("time"), str)]
    complaint = f"{STATUS} is damaged ({why}); its content was rebuilt from events, checkpoints and metrics"
    status = {**FIELDS, "id": run.id, "name": run.name, "damaged": complaint, **_settings(run), **_progress(run)}
    if events:
        status |= {"created": events[0]["time"], "updated": events[-1]["time"]}
    for event in events:
        status |= _after(event)
    return status


def _after(event: dict[str, Any]) -> dict[str, Any]:
    """The fields that an event changed."""
    kind = str(event.get("kind"))
    if kind not in STATE_AFTER:
        return {}
    sentence = event.get("sentence", "") if kind in ("stopped", "finished", "failed") else ""
    changed: dict[str, Any] = {"state": STATE_AFTER[kind], "reason": str(event.get("reason", sentence))}
    if kind == "created":
        changed |= {"lineage": event.get("parent"), "profile": event.get("profile")}
    if kind == "submitted":
        changed["job"] = event.get("submission")
    if isinstance(event.get("attempt"), int):
        changed["attempt"] = event["attempt"]
    return changed


def _settings(run: Run) -> dict[str, Any]:
    with contextlib.suppress(TiltyardError, OSError):
        if run.is_program:
            return {"env": str(run.program()["command"][0])}
        now = run.experiment()
        fields = {"env": now.env.id, "tags": now.tags, "notes": now.notes, "target_env_steps": now.stop.env_steps}
        scores = [each.score for each in checkpoint.list_checkpoints(run) if each.score is not None]
        return {**fields, "best": (max if now.save.mode == "max" else min)(scores, default=None)}
    return {}


def _progress(run: Run) -> dict[str, Any]:
    history, kept = History(run), checkpoint.list_checkpoints(run)
    newest = history.newest()
    found: dict[str, Any] = {"return": newest.get("train/return"), "eval_return": newest.get("eval/return")}
    if kept:
        return {**found, "progress": asdict(kept[-1].progress)}
    last = next(iter(history.recent(1)), {})
    counts = {name: atomic.number(last.get(name)) or 0 for name in FIELDS["progress"]}
    whole = {name: value if name == "seconds" else int(value) for name, value in counts.items()}
    return {**found, "progress": whole}
