"""status.json: the state and progress of a run, replaced atomically on every change; and the listing of all runs.

created -> queued -> running -> stopped | finished | failed     as written by its owner; queued: a job was submitted
lost                                                            seen by others: running, but no process holds the lock
damaged                                                         in listings: the file is damaged; rebuild.py repairs it
"""

from __future__ import annotations

import contextlib
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
LONGEST_LINE = 1 << 20  # bytes of the first event that are read
SWEEP_FOLDER = re.compile(r"sweep-\d{4,}")


# fmt: off
FIELDS: dict[str, Any] = {  # all fields, as they are before the run is started
    "schema": SCHEMA, "id": "", "name": "", "env": "", "tags": [], "notes": "", "state": "created", "reason": "",
    "progress": dataclasses.asdict(Progress()), "target_env_steps": None, "return": None, "eval_return": None,
    "best": None, "attempt": 0, "heartbeat": 0, "updated": "", "created": "", "host": "", "pid": 0,
    "lineage": None, "profile": None, "job": None, "save_seconds": 0.0, "failure": None,
}
# fmt: on
_OPTIONAL = ("lineage", "profile", "job", "failure", "target_env_steps", "return", "eval_return", "best")
_KINDS: dict[str, type | tuple[type, ...]] = {
    **{name: type(value) for name, value in FIELDS.items() if value is not None},
    "lineage": dict,
    "profile": str,
    "job": dict,
    "failure": str,
    "target_env_steps": int,
    **dict.fromkeys(("return", "eval_return", "best"), (int, float, str)),  # nan and inf are strings
}


class Damaged(ValueError):
    """A file does not have the content that was written into it; the text says how that shows."""


def read_status(folder: Path, *, newer: bool = False) -> dict[str, Any]:
    """The content of status.json, with all fields. OSError if it cannot be read, Damaged if its content is not what was
    written: not JSON, another checksum, values of another type; `newer` versions of the file may have other types."""
    try:
        status = atomic.read_sealed(folder / STATUS)
    except ValueError as error:
        raise Damaged(str(error)) from None
    schema = status.get("schema")
    wrong = [f"{name} = {str(value)[:40]}" for name, value in status.items() if not _is_valid(name, value)]
    if not isinstance(schema, int) or schema < 1:
        wrong.append("it has no schema number")
    if wrong and not (isinstance(schema, int) and schema > SCHEMA and newer):
        raise Damaged(wrong[0])
    progress = status.get("progress")
    return {**FIELDS, **status, "progress": FIELDS["progress"] | (progress if isinstance(progress, dict) else {})}


def _is_valid(name: str, value: Any) -> bool:
    """Whether a field may have this value. Fields that this version does not know may have any."""
    if name not in _KINDS or (value is None and name in _OPTIONAL):
        return True
    if not isinstance(value, _KINDS[name]) or isinstance(value, bool):
        return False
    if name == "state":
        return value in STATES
    if isinstance(value, list):
        return all(isinstance(tag, str) for tag in value)
    if name == "progress" and isinstance(value, dict):
        return all(_is_count(value.get(part, 0)) for part in FIELDS["progress"])
    return name not in ("return", "eval_return", "best") or atomic.number(value) is not None


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**63


def write_first_status(draft: Path, place: Path, **fields: Any) -> None:
    """Write the status of a run that has not been started, into the draft of its folder."""
    made = atomic.now()
    atomic.write_sealed(draft / STATUS, FIELDS | {"id": run_id(place), "updated": made, "created": made} | fields)


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
    status.pop("damaged", None)  # it is repaired now
    atomic.write_sealed(run.folder / STATUS, status)
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
    return sorted((_row(folder) for folder in run_folders(root)), key=lambda row: (row["created"], row["id"]))


def _first_event(folder: Path) -> str:
    """When the run was created, so that a damaged one keeps its place in a listing; empty if unknown."""
    with contextlib.suppress(OSError), (folder / "events.jsonl").open("rb") as file:
        return str((atomic.parse_line(file.readline(LONGEST_LINE).rstrip(b"\n")) or {}).get("time", ""))
    return ""


def _row(folder: Path) -> dict[str, Any]:
    try:
        status = read_status(folder)
        state = observed_state(folder, status)
    except (OSError, Damaged) as error:
        known = {"progress": {}, "reason": f"{STATUS} is damaged: {error}", "created": _first_event(folder)}
        status, state = FIELDS | known, "damaged"
    progress = status["progress"]
    return {
        "id": run_id(folder),
        "state": state,
        "reason": status["reason"],
        "env": status["env"],
        "env_steps": progress.get("env_steps"),
        "target": status["target_env_steps"],
        "return": atomic.number(status["return"]),
        "eval_return": atomic.number(status["eval_return"]),
        "tags": status["tags"],
        "notes": status["notes"],
        "seconds": progress.get("seconds"),
        "updated": status["updated"],
        "created": status["created"],
        "job": status["job"],
        "folder": str(folder),
    }
