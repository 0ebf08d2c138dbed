"""The run folder as a whole: find and remove it. create.py creates it; each of its files has its own module.

    runs/cartpole/0007-brisk-otter/
      experiment.yaml  settings_file.py       source.yaml        the user's own file       plugins/  copies of user code
      status.json      status.py              events.jsonl       events.py                 lock.json lock.py
      metrics.jsonl    metrics.py             checkpoints/       checkpoint.py             provenance.json provenance.py
      metrics.index    metrics_index.py       stretches.json     settings_schedule.py, if settings change during the run

A run is renamed to `.trash-...` before deletion, so that no listing sees half of it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiltyard.config.ownership import owner_name
from tiltyard.config.site_file import runs_root
from tiltyard.errors import TiltyardError, UseError, did_you_mean
from tiltyard.run import atomic
from tiltyard.run.lock import Lock
from tiltyard.run.status import (
    RUN_FOLDER,
    SCHEMA,
    STATUS,
    Damaged,
    list_runs,
    observed_state,
    read_status,
    run_folders,
    run_id,
)

if TYPE_CHECKING:
    from tiltyard.config.experiment import Experiment

EXPERIMENT = "experiment.yaml"
PROGRAM = "program.json"  # instead of it, in a trial of a sweep that runs another program


@dataclass(frozen=True)
class Run:
    """One run: a folder. Stores only its path; every method reads the disk."""

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
        """The run's name for a command typed in the current folder: its id if that finds it, else its path."""
        with contextlib.suppress(TiltyardError, OSError):
            if find(self.id, programs=True).folder.samefile(self.folder):
                return shlex.quote(self.id)
        folder = atomic.absolute(self.folder)
        with contextlib.suppress(ValueError, OSError):  # not below the current folder, or that folder is gone
            return shlex.quote(f"./{folder.relative_to(Path.cwd())}")  # ./ because a name may begin with a dash
        return shlex.quote(str(folder))

    @property
    def base(self) -> tuple[Path, ...]:
        """Folders that plug-in paths in experiment.yaml are relative to: the copies in this folder."""
        return (self.folder,)

    @property
    def experiment_file(self) -> Path:
        return self.folder / EXPERIMENT

    @property
    def is_program(self) -> bool:
        """Whether it is a trial of a sweep that runs another program."""
        return (self.folder / PROGRAM).is_file()

    def program(self) -> dict[str, Any]:
        """The command line of such a trial, and its working directory."""
        path = self.folder / PROGRAM
        try:
            found = atomic.read_sealed(path)
            if not isinstance(found["folder"], str) or not all(isinstance(word, str) for word in found["command"]):
                raise ValueError("command and folder must be strings")
            return found
        except (OSError, ValueError, KeyError, TypeError) as error:
            hint = "delete the trial with `tiltyard rm`, and the sweep starts it again"
            raise UseError(f"{path} is damaged: {error}", hint) from error

    @property
    def metrics_file(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def events_file(self) -> Path:
        return self.folder / "events.jsonl"

    @property
    def record_files(self) -> tuple[Path, Path]:
        """Files of lines, which grow only: synced before a checkpoint is committed, shorter if records were lost."""
        return self.metrics_file, self.events_file

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def experiment(self) -> Experiment:
        """The settings; UseError if experiment.yaml was edited."""
        from tiltyard.run.settings_file import read_settings

        stored = read_settings(self.folder)
        if stored.edits:
            raise stored.refusal(self)
        return stored.experiment

    def status(self) -> dict[str, Any]:
        """The content of status.json, rebuilt if it is damaged; UseError if it is missing or of a newer Tiltyard."""
        return _read_status(self.folder)

    def damage(self) -> list[str]:
        """A sentence about each file that is not what was written into it, though the run can be used."""
        from tiltyard.run.provenance import changed_copies
        from tiltyard.run.settings_file import read_settings

        complaints = [self.status().get("damaged", ""), "" if self.is_program else read_settings(self.folder).complaint]
        return [*filter(None, complaints), *changed_copies(self.folder)]

    @property
    def state(self) -> str:
        """created, queued, running, stopped, finished, failed, or lost: running, but no process holds the lock."""
        return observed_state(self.folder, self.status())


# ---------------------------------------------------------------------------------------------- finding


def find(text: str | Path, root: Path | None = None, *, whole: bool = True, programs: bool = False) -> Run:
    """The run that `text` names: a path to or into its folder, name/0007-brisk-otter, a unique end of that
    (brisk-otter), name (its newest run) or last (the newest of all).

    `root` defaults to the site's runs folder. whole=False also finds a partly deleted folder, so that it can be
    removed; `programs` also finds a trial of another program, which has no experiment.
    """
    given = str(text)
    if "\0" in given or not given.strip():
        raise UseError("the run's name is empty or contains a null byte", "list the runs with: tiltyard ls")
    folder = None if given == "last" else _by_path(Path(given))
    if folder is None:  # only now: a path needs no site file, which may be refused
        root = runs_root() if root is None else root
        folder = _newest(root) if given == "last" else _by_path(root / given) or _by_name(given, root)
    if whole:
        _check(folder, programs)
    return Run(folder)


def run_of(path: Path) -> Run:
    """The run that contains a path (a checkpoint, a video)."""
    folder = _by_path(path)
    if folder is None:
        raise UseError(f"{path} is not in a run folder", "name a run, or a folder inside one")
    _check(folder)
    return Run(folder)


def _newest(root: Path) -> Path:
    rows = list_runs(root)
    if not rows:
        raise UseError(f"there is no run in {root}", "start one with: tiltyard train CartPole-v1")
    return atomic.absolute(Path(rows[-1]["folder"]))


def _by_path(path: Path) -> Path | None:
    """The run folder that the path is or is in."""
    try:
        path = atomic.absolute(path)
        if not path.exists():
            return None
        for folder in (path, *path.parents):
            if (folder / EXPERIMENT).is_file() or (folder / STATUS).is_file():
                return folder
    except OSError:  # name too long, loop of links: not a path
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
        raise UseError(f"{text!r} matches {len(ends)} runs", f"write the full name of one: {some}")
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
            hint = f"inspect it with: tiltyard show {run_id(folder)}, or tiltyard logs {run_id(folder)}"
            raise UseError(f"{run_id(folder)} is a trial of another program, not a run of Tiltyard", hint)
        _read_status(folder)
        return
    missing = [name for name in (EXPERIMENT, STATUS) if not (folder / name).is_file()]
    if EXPERIMENT in missing and (folder / "experiment.json").is_file():  # a copy of it
        missing.remove(EXPERIMENT)
    if missing:
        hint = "it was partly copied or deleted; copy it again, or remove it with: tiltyard rm"
        raise UseError(f"{folder} is not a complete run: {' and '.join(missing)} is missing", hint)
    _read_status(folder)


def _read_status(folder: Path) -> dict[str, Any]:
    """The status; rebuilt in memory if the file is damaged, and then with a sentence about that in `damaged`."""
    path = folder / STATUS
    try:
        status = read_status(folder, newer=True)
    except FileNotFoundError as error:
        hint = "copy the run again, or remove it"
        raise UseError(f"{folder} is not a complete run: {STATUS} is missing", hint) from error
    except OSError as error:
        raise UseError(f"{path} cannot be read: {error.strerror}", "check its owner and permissions") from error
    except Damaged as error:
        from tiltyard.run.rebuild import rebuild_status

        return rebuild_status(Run(folder), str(error))
    if status["schema"] > SCHEMA:
        message = f"{folder} was written by a newer Tiltyard (schema {status['schema']}, this one reads up to {SCHEMA})"
        hint = "update with: pip install -U tiltyard"
        raise UseError(message, hint)
    return status


# ---------------------------------------------------------------------------------------------- removing


def remove(run: Run, root: Path) -> None:
    """Delete a run permanently: only a run folder of this root, never through links, never a running one."""
    folder = atomic.absolute(run.folder)
    if not RUN_FOLDER.fullmatch(folder.name) or not any(_is_plain_file(folder / name) for name in (EXPERIMENT, STATUS)):
        raise UseError(f"{folder} is not a run folder", "nothing was removed; list the runs with: tiltyard ls")
    remove_folder(run, Path(os.path.realpath(root)) / run_id(folder))


def remove_folder(run: Run, place: Path) -> None:
    """Delete a run, or a sweep without its trials, at its real path `place`, unless a process is writing it."""
    folder = atomic.absolute(run.folder)
    group = folder.parent
    if folder.is_symlink() or group.is_symlink() or Path(os.path.realpath(folder)) != place:
        hint = "runs are not removed through links; give another runs folder with --root"
        raise UseError(f"{folder} is not a run folder inside the runs folder", hint)
    if (uid := folder.stat().st_uid) != os.geteuid():  # whoever may write to the group's folder could rename it
        raise UseError(f"{folder} belongs to another user, {owner_name(uid)}", "ask that user to remove it")
    trash = group / f".trash-{folder.name}-{atomic.unique()}"
    with Lock.acquire(run):  # refuses a run that a process is writing
        try:
            folder.rename(trash)
        except OSError as error:
            hint = "check the folder's owner and permissions"
            raise UseError(f"{folder} cannot be removed: {error.strerror}", hint) from error
    try:
        shutil.rmtree(trash)  # removes links, not their targets
    except OSError as error:
        hint = "the run is no longer listed; delete the rest by hand"
        raise TiltyardError(f"{trash} could not be deleted: {error}", hint) from error
    with contextlib.suppress(OSError):
        group.rmdir()  # fails unless that was its last run


def _is_plain_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()
