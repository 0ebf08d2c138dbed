"""status.json: the state and progress of a run, replaced atomically on every change; and the listing of all runs.

created -> queued -> running -> stopped | finished | failed     as written by its owner; queued: a job was submitted
lost                                                            seen by others: running, but no process holds the lock
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiltyard.run import atomic
from tiltyard.run.lock import seems_alive
from tiltyard.types import Progress

if TYPE_CHECKING:
    from tiltyard.run.folder import Run

SCHEMA = 1
STATUS = "status.json"
STATES = ("created", "queued", "running", "stopped", "finished", "failed")
RUN_FOLDER = re.compile(r"\d{4,}-[a-z]+-[a-z]+")
SWEEP_FOLDER = re.compile(r"sweep-\d{4,}")


# fmt: off
FIELDS: dict[str, Any] = {  # all fields, as they are before the run is started
    "schema": SCHEMA, "id": "", "name": "", "env": "", "tags": [], "notes": "", "state": "created", "reason": "",
    "progress": dataclasses.asdict(Progress()), "target_env_steps": None, "return": None, "eval_return": None,
    "best": None, "attempt": 0, "heartbeat": 0, "updated": "", "created": "", "host": "", "pid": 0,
    "lineage": None, "profile": None, "job": None, "save_seconds": 0.0,
}
# fmt: on


def write_first_status(draft: Path, place: Path, **fields: Any) -> None:
    """Write the status of a run that has not been started, into the draft of its folder."""
    made = atomic.now()
    atomic.write_json(draft / STATUS, FIELDS | {"id": run_id(place), "updated": made, "created": made} | fields)


def write_status(run: Run, **changes: Any) -> dict[str, Any]:
    """Change some fields (heartbeat and updated change automatically); `progress` may be a Progress. Return all."""
    unknown = sorted(changes.keys() - FIELDS.keys())
    if unknown:
        raise ValueError(f"status.json has no field {', '.join(unknown)}")
    if changes.get("state", "created") not in STATES:
        raise ValueError(f"unknown state {changes['state']!r}; known: {', '.join(STATES)}")
    status = run.status() | changes
    if isinstance(changes.get("progress"), Progress):
        status["progress"] = dataclasses.asdict(changes["progress"])
    status["heartbeat"] = int(status.get("heartbeat") or 0) + 1
    status["updated"] = atomic.now()
    atomic.write_json(run.folder / STATUS, status)
    return status


def observed_state(folder: Path, status: dict[str, Any]) -> str:
    """The state as seen by others: a running run whose lock no process holds is lost."""
    state = str(status.get("state"))
    return "lost" if state == "running" and not seems_alive(folder) else state


# ---------------------------------------------------------------------------------------------- listing


def run_folders(root: Path) -> list[Path]:
    """All run folders below the root, sorted by name and number, including trials of sweeps; no hidden folders."""
    found: list[Path] = []
    for group in _folders(root):
        entries = _folders(group.path)
        for place in (*(_folders(sweep.path) for sweep in entries if SWEEP_FOLDER.fullmatch(sweep.name)), entries):
            found += [Path(entry.path) for entry in place if RUN_FOLDER.fullmatch(entry.name)]
    return found


def run_id(folder: Path) -> str:
    """cartpole/0007-brisk-otter, or for a trial of a sweep cartpole/sweep-0001/0003-calm-crow."""
    return "/".join(folder.parts[-3 if SWEEP_FOLDER.fullmatch(folder.parent.name) else -2 :])


def root_of(folder: Path) -> Path:
    """The runs folder that contains a run's folder."""
    place = folder.absolute()
    return place.parents[2 if SWEEP_FOLDER.fullmatch(place.parent.name) else 1]


def _folders(path: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return sorted(
                (entry for entry in entries if not entry.name.startswith(".") and entry.is_dir()),
                key=lambda entry: (len(entry.name.partition("-")[0]) if entry.name[:1].isdigit() else 0, entry.name),
            )
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def list_runs(root: Path) -> list[dict[str, Any]]:
    """One dictionary per run, oldest first. Reads one small file per run, and the locks of running ones."""
    return sorted((_row(folder) for folder in run_folders(root)), key=lambda row: (row["created"] or "", row["id"]))


def _row(folder: Path) -> dict[str, Any]:
    try:
        status = atomic.read_json(folder / STATUS)
        state = observed_state(folder, status)
    except (OSError, ValueError):
        status, state = {}, "broken"
    progress = status.get("progress")
    progress = progress if isinstance(progress, dict) else {}
    tags = status.get("tags")
    return {
        "id": run_id(folder),
        "state": state,
        "reason": str(status.get("reason") or ""),
        "env": str(status.get("env") or ""),
        "env_steps": progress.get("env_steps"),
        "target": status.get("target_env_steps"),
        "return": atomic.number(status.get("return")),
        "eval_return": atomic.number(status.get("eval_return")),
        "tags": [str(tag) for tag in tags] if isinstance(tags, list) else [],
        "notes": str(status.get("notes") or ""),
        "seconds": progress.get("seconds"),
        "updated": status.get("updated"),
        "created": status.get("created"),
        "job": status.get("job"),
        "folder": str(folder),
    }
