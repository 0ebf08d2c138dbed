"""The run folder as a whole: made, found and removed here. What is in it has files of its own.

    runs/cartpole/0007-brisk-otter/
      experiment.yaml  resolved, complete     source.yaml        the user's own text       plugins/  their code
      status.json      status.py              events.jsonl       events.py                 lock.json lock.py
      metrics.jsonl    metrics.py             checkpoints/       checkpoint.py             provenance.json provenance.py
      stretches.json   stretches.py, where settings change on the way

A run is prepared as `.new-0007` and renamed, and renamed to `.trash-...` before deletion: no listing sees half of it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiltyard.config.site_file import runs_root
from tiltyard.errors import TiltyardError, UseError, did_you_mean
from tiltyard.run import atomic
from tiltyard.run.events import log_event, read_events
from tiltyard.run.lock import Lock, read_owner
from tiltyard.run.names import ADJECTIVES, ANIMALS
from tiltyard.run.status import (
    RUN_FOLDER,
    SCHEMA,
    STATUS,
    first_status,
    list_runs,
    observed_state,
    run_folders,
    run_id,
    write_status,
)

if TYPE_CHECKING:
    from tiltyard.config.experiment import Experiment
    from tiltyard.plugins.snapshot import Copies
    from tiltyard.run.settings_schedule import SettingsSchedule

__all__ = [
    "Lock",
    "Run",
    "create",
    "find",
    "list_runs",
    "log_event",
    "read_events",
    "read_owner",
    "remove",
    "run_of",
    "write_status",
]

EXPERIMENT = "experiment.yaml"
PROGRAM = "program.json"  # in its place where a trial of a sweep is another program


@dataclass(frozen=True)
class Run:
    """One execution history: a folder. Holds nothing but its place; every question reads the disk."""

    folder: Path

    @property
    def id(self) -> str:
        """cartpole/0007-brisk-otter"""
        return run_id(self.folder)

    @property
    def name(self) -> str:
        return self.id.partition("/")[0]

    @property
    def typed(self) -> str:
        """What a command typed in the current folder names the run by: its id where that finds it, else its path."""
        with contextlib.suppress(TiltyardError, OSError):
            if find(self.id, programs=True).folder.samefile(self.folder):
                return shlex.quote(self.id)
        folder = atomic.absolute(self.folder)
        with contextlib.suppress(ValueError, OSError):  # not below this folder, or there is no such folder any more
            return shlex.quote(f"./{folder.relative_to(Path.cwd())}")  # ./ because a name may begin with a dash
        return shlex.quote(str(folder))

    @property
    def base(self) -> tuple[Path, ...]:
        """Where the plug-in files named in experiment.yaml are relative to: their copies in this folder."""
        return (self.folder,)

    @property
    def experiment_file(self) -> Path:
        return self.folder / EXPERIMENT

    @property
    def is_program(self) -> bool:
        """Whether it is a trial of a sweep that is another program than Tiltyard."""
        return (self.folder / PROGRAM).is_file()

    def program(self) -> dict[str, Any]:
        """The command line of such a trial, and the folder that it runs in."""
        return atomic.read_json(self.folder / PROGRAM)

    @property
    def metrics_file(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def events_file(self) -> Path:
        return self.folder / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def experiment(self) -> Experiment:
        from tiltyard.config.load import from_resolved

        return from_resolved(self.experiment_file)

    def status(self) -> dict[str, Any]:
        """status.json as it stands; UseError when it is missing, broken or of a newer Tiltyard."""
        return _read_status(self.folder)

    def require_own_code(self, trust_code: bool) -> None:
        """UseError when going on would run code that another user chose; asked before each use of a run's plug-ins."""
        from tiltyard.plugins.resolve import named_plugins, refuse_foreign_code

        if not trust_code:
            refuse_foreign_code(named_plugins(self.experiment()), self.base, (self.folder, self.experiment_file))

    def enter_profile(self) -> str | None:
        """Set the environment variables of the profile that the run was started with, if any; returns its name."""
        from tiltyard.config.site import restore_profile

        return restore_profile(self.status().get("profile"), f"run {self.id}")

    @property
    def state(self) -> str:
        """created, queued, running, stopped, finished, failed, or lost: running, but nobody holds the lock."""
        return observed_state(self.folder, self.status())


# ---------------------------------------------------------------------------------------------- making


def create(
    root: Path,
    experiment: Experiment,
    *,
    source_text: str | None = None,
    source_name: str | None = None,
    base: Sequence[Path] = (),
    command: Sequence[str] = (),
    parent: dict[str, Any] | None = None,
    copies: Copies | None = None,
    profile: str | None = None,
    place: Path | None = None,
    schedule: SettingsSchedule | None = None,
) -> Run:
    """A new run folder below root/<name>/, complete before anybody can list it.

    `base` are the folders that plug-in files are relative to, `parent` is the lineage of a fork. `copies` are those of
    its plug-ins that were checked; without them they are copied now. `profile` is the one it is started with. `place`
    is the folder to be, where that is decided: a sweep's trial, made by whoever holds the sweep's lock. `stretches` are
    those that its settings change in.
    """
    import secrets

    group = place.parent if place else atomic.absolute(root) / experiment.run_name
    draft, number = (_clear(place), 0) if place else _claim(group)
    try:
        final = place or group / f"{number:04d}-{secrets.choice(ADJECTIVES)}-{secrets.choice(ANIMALS)}"
        _fill(draft, run_id(final), experiment, source_text, source_name, base, command, parent, copies, profile)
        if schedule is not None:
            schedule.write(draft)
        atomic.sync_folder(draft)
        draft.rename(final)
        atomic.sync_folder(group)
    except OSError as error:
        raise TiltyardError(
            f"the run folder could not be written in {group}: {error.strerror or error}",
            "free some space and start again",
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Run(final)


def _claim(group: Path) -> tuple[Path, int]:
    """An empty folder .new-NNNN that is ours alone, NNNN being above every number in use: mkdir decides races."""
    try:
        while True:
            group.mkdir(parents=True, exist_ok=True)
            number = max(_numbers(group), default=0) + 1
            draft = group / f".new-{number:04d}"
            try:
                draft.mkdir()
            except FileExistsError:
                continue
            except FileNotFoundError:  # `remove` took the group's last run, and the group with it
                continue
            # Between our look and our mkdir another run of this number may have been finished and renamed.
            if not any(path.name.startswith(f"{number:04d}-") for path in group.iterdir()):
                return draft, number
            draft.rmdir()
    except OSError as error:
        raise UseError(
            f"the runs folder {group.parent} cannot be written: {error.strerror or error}",
            "set TILTYARD_RUNS (or `runs:` in tiltyard.yaml) to a folder of yours",
        ) from error


def _clear(place: Path) -> Path:
    """An empty folder beside the place, without what a killed predecessor left there."""
    draft = place.with_name(f".new-{place.name}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    return draft


def _numbers(group: Path) -> list[int]:
    found = (re.match(r"(?:\.new-)?(\d{4,})(?:-|$)", path.name) for path in group.iterdir())
    return [int(match[1]) for match in found if match]


def _fill(
    draft: Path,
    name: str,
    experiment: Experiment,
    source_text: str | None,
    source_name: str | None,
    base: Sequence[Path],
    command: Sequence[str],
    parent: dict[str, Any] | None,
    copies: Copies | None,
    profile: str | None,
) -> None:
    from tiltyard.config.load import resolved_yaml
    from tiltyard.plugins.snapshot import copy_plugins
    from tiltyard.run import provenance

    if copies is None:
        copies = copy_plugins(experiment, base, draft)
    else:
        copies.put_into(draft)
    frozen = copies.named_in(experiment)
    atomic.write_text(draft / EXPERIMENT, resolved_yaml(frozen))
    if source_text is not None:
        atomic.write_text(draft / "source.yaml", source_text)
    facts, diff = provenance.collect_with_diff(command, base)
    facts["source"] = source_name
    facts["seed"] = experiment.seed
    facts["plugins"] = {
        str(path.relative_to(draft)): provenance.sha256(path)
        for place in ("plugins", "frozen")
        for path in sorted((draft / place).rglob("*"))
        if path.is_file()
    }
    atomic.write_json(draft / "provenance.json", facts)
    if diff:
        atomic.write_text(draft / "provenance.diff", diff)
    (draft / "checkpoints").mkdir()
    atomic.write_json(draft / STATUS, first_status(name, frozen, parent, profile))
    log_event(Run(draft), "created", f"Run {name} was created.", **({"parent": parent} if parent else {}))
    for note in copies.notes:
        log_event(Run(draft), "warning", note)


# ---------------------------------------------------------------------------------------------- finding


def find(text: str | Path, root: Path | None = None, *, whole: bool = True, programs: bool = False) -> Run:
    """The run that `text` means: a path to or into its folder, name/0007-brisk-otter, a unique end of that
    (brisk-otter), name (its newest run) or last (the newest of all).

    `root` is the site's runs folder when left out. With whole=False a folder that was deleted in part is found too,
    so that it can be removed; with `programs` a trial of a sweep that is another program, which has no experiment.
    """
    root = runs_root() if root is None else root
    given = str(text)
    if "\0" in given or not given.strip():
        raise UseError("the run's name is empty or holds a null byte", "list the runs with: tiltyard ls")
    folder = _by_keyword(given, root) or _by_path(Path(given)) or _by_path(root / given) or _by_name(given, root)
    if whole:
        _check(folder, programs)
    return Run(folder)


def run_of(path: Path) -> Run:
    """The run that a path (a checkpoint, a video) lies in."""
    folder = _by_path(path)
    if folder is None:
        raise UseError(f"{path} lies in no run folder", "name a run, or a folder inside one")
    _check(folder)
    return Run(folder)


def _by_keyword(text: str, root: Path) -> Path | None:
    if text != "last":
        return None
    rows = list_runs(root)
    if not rows:
        raise UseError(f"there is no run in {root}", "start one with: tiltyard train CartPole-v1")
    return atomic.absolute(Path(rows[-1]["folder"]))


def _by_path(path: Path) -> Path | None:
    """The run folder that the path is, or lies in."""
    try:
        path = atomic.absolute(path)
        if not path.exists():
            return None
        for folder in (path, *path.parents):
            if (folder / EXPERIMENT).is_file() or (folder / STATUS).is_file():
                return folder
    except OSError:  # a name too long, a loop of links: no path, perhaps a name
        pass
    return None


def _by_name(text: str, root: Path) -> Path:
    folders = [atomic.absolute(folder) for folder in run_folders(root)]
    ids = {folder: run_id(folder) for folder in folders}
    of_name = [folder for folder in folders if ids[folder].startswith(f"{text.rstrip('/')}/")]
    if of_name:
        return of_name[-1]
    ends = [folder for folder in folders if _is_end(text, folder)]
    if len(ends) > 1:
        some = ", ".join(ids[folder] for folder in ends[:5])
        raise UseError(f"{text!r} means {len(ends)} runs", f"write one of them in full: {some}")
    if ends:
        return ends[0]
    known = list(ids.values())
    known += [folder.name for folder in folders] + [folder.name.partition("-")[2] for folder in folders]
    near = did_you_mean(text, known + [folder.parent.name for folder in folders])
    hint = near if near.startswith("did") else "list the runs with: tiltyard ls"
    raise UseError(f"there is no run {text!r} in {root}", hint)


def _is_end(text: str, folder: Path) -> bool:
    """cartpole/0007-brisk-otter, cartpole/7, 0007-brisk-otter, 0007, 7 and brisk-otter all mean the same folder."""
    group, _, last = text.rpartition("/")
    number, _, words = folder.name.partition("-")
    groups = ("", folder.parent.name, run_id(folder).rpartition("/")[0])
    return group in groups and last in (folder.name, number, str(int(number)), words)


def _check(folder: Path, programs: bool = False) -> None:
    if (folder / PROGRAM).is_file():
        if not programs:
            raise UseError(
                f"{run_id(folder)} is a trial of another program, and no training of Tiltyard's",
                f"look at it with: tiltyard show {run_id(folder)}, or tiltyard logs {run_id(folder)}",
            )
        _read_status(folder)
        return
    missing = [name for name in (EXPERIMENT, STATUS) if not (folder / name).is_file()]
    if missing:
        raise UseError(
            f"{folder} is no whole run: {' and '.join(missing)} is missing",
            "it was copied or deleted in part; copy it again, or remove it with: tiltyard rm",
        )
    _read_status(folder)


def _read_status(folder: Path) -> dict[str, Any]:
    path = folder / STATUS
    try:
        status = atomic.read_json(path)
    except FileNotFoundError as error:
        raise UseError(f"{folder} is no whole run: {STATUS} is missing", "copy the run again, or remove it") from error
    except (OSError, ValueError) as error:
        raise UseError(f"{path} cannot be read: {error}", "restore the file, or remove the run") from error
    schema = status.get("schema")
    if not isinstance(schema, int) or schema < 1:
        raise UseError(f"{path} has no schema number", "restore the file, or remove the run")
    if schema > SCHEMA:
        raise UseError(
            f"{folder} was made by a newer Tiltyard (schema {schema}, this one knows up to {SCHEMA})",
            "update with: pip install -U tiltyard",
        )
    return status


# ---------------------------------------------------------------------------------------------- removing


def remove(run: Run, root: Path) -> None:
    """Delete for good: only a real run folder of this root, never through links, never a live one."""
    folder = atomic.absolute(run.folder)
    if not RUN_FOLDER.fullmatch(folder.name) or not any(_is_plain_file(folder / name) for name in (EXPERIMENT, STATUS)):
        raise UseError(f"{folder} is no run folder", "nothing was removed; list the runs with: tiltyard ls")
    remove_folder(run, Path(os.path.realpath(root)) / run_id(folder))


def remove_folder(run: Run, place: Path) -> None:
    """Delete what lies at its real `place`, unless somebody is writing it: a run, or a sweep without its trials."""
    folder = atomic.absolute(run.folder)
    group = folder.parent
    if folder.is_symlink() or group.is_symlink() or Path(os.path.realpath(folder)) != place:
        raise UseError(
            f"{folder} is not a run folder inside the runs folder",
            "only its own runs are removed, and never through a link; name another runs folder with --root",
        )
    trash = group / f".trash-{folder.name}-{atomic.unique()}"
    with Lock.acquire(run):  # refuses a run that somebody is writing
        try:
            folder.rename(trash)
        except OSError as error:
            raise UseError(
                f"{folder} cannot be removed: {error.strerror}", "check the folder's owner and permissions"
            ) from error
    try:
        shutil.rmtree(trash)  # removes links, never what they point to
    except OSError as error:
        raise TiltyardError(
            f"{trash} could not be deleted: {error}", "the run is gone from listings; delete the rest by hand"
        ) from error
    with contextlib.suppress(OSError):
        group.rmdir()  # only when that was its last run


def _is_plain_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()
