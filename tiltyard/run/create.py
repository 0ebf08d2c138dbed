"""Create run folders: prepared as `.new-0007`, then renamed, so that no listing sees half of one; and find the
checkpoints that a new run starts from."""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiltyard.errors import TiltyardError, UseError
from tiltyard.plugins.snapshot import Copies, copy_plugins
from tiltyard.run import atomic, checkpoint, provenance
from tiltyard.run.events import log_event
from tiltyard.run.folder import Run, find
from tiltyard.run.names import ADJECTIVES, ANIMALS
from tiltyard.run.redact import mode_for
from tiltyard.run.settings_file import write_settings
from tiltyard.run.status import run_id, write_first_status

if TYPE_CHECKING:
    from tiltyard.config.experiment import Experiment
    from tiltyard.run.settings_schedule import SettingsSchedule


@dataclass(frozen=True)
class Source:
    """Where a new run comes from, for its files provenance.json, source.yaml, status.json and plugins/."""

    base: Sequence[Path] = ()
    """folders that plug-in paths are relative to"""
    command: Sequence[str] = ()
    """the command line"""
    text: str | None = None
    """content of the user's experiment file"""
    name: str | None = None
    """name of that file"""
    parent: dict[str, Any] | None = None
    """lineage of a fork"""
    copies: Copies | None = None
    """plug-ins that were already copied and checked; else they are copied now"""
    profile: str | None = None
    trial: dict[str, Any] | None = None
    """the line of a sweep's manifest that it is made for"""


def create(
    root: Path,
    experiment: Experiment,
    source: Source = Source(),  # noqa: B008 -- frozen
    *,
    place: Path | None = None,
    schedule: SettingsSchedule | None = None,
) -> Run:
    """Create a run folder in root/<name>/, or at `place`: a sweep's trial, created under the sweep's lock.

    `schedule` is for a run whose settings change on the way.
    """
    group = place.parent if place else atomic.absolute(root) / experiment.run_name
    draft, number = (atomic.empty_draft(place), 0) if place else _claim_number(group)
    try:
        final = place or group / f"{number:04d}-{secrets.choice(ADJECTIVES)}-{secrets.choice(ANIMALS)}"
        _fill(draft, final, experiment, source)
        if schedule is not None:
            schedule.write(draft)
        atomic.sync_folder(draft)
        draft.rename(final)
        atomic.sync_folder(group)
    except OSError as error:
        message = f"the run folder could not be written in {group}: {error.strerror or error}"
        hint = "free some space and start again"
        raise TiltyardError(message, hint) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Run(final)


def _claim_number(group: Path) -> tuple[Path, int]:
    """Create an empty folder .new-NNNN with the next free number; mkdir decides races between processes."""
    try:
        while True:
            group.mkdir(parents=True, exist_ok=True)
            number = max(_numbers(group), default=0) + 1
            draft = group / f".new-{number:04d}"
            try:
                draft.mkdir()
            except (FileExistsError, FileNotFoundError):  # not found: `remove` deleted the group with its last run
                continue
            # Another process may have finished and renamed a run of this number before our mkdir.
            if not any(path.name.startswith(f"{number:04d}-") for path in group.iterdir()):
                return draft, number
            draft.rmdir()
    except OSError as error:
        hint = "set TILTYARD_RUNS (or `runs:` in tiltyard.yaml) to a folder of yours"
        raise UseError(f"the runs folder {group.parent} cannot be written: {error.strerror or error}", hint) from error


def _numbers(group: Path) -> list[int]:
    found = (re.match(r"(?:\.new-)?(\d{4,})(?:-|$)", path.name) for path in group.iterdir())
    return [int(match[1]) for match in found if match]


def _fill(draft: Path, place: Path, experiment: Experiment, source: Source) -> None:
    copies = source.copies
    if copies is None:
        copies = copy_plugins(experiment, source.base, draft)
    else:
        copies.put_into(draft)
    frozen = copies.named_in(experiment)
    write_settings(draft, frozen)
    if source.text is not None:
        atomic.write_text(draft / "source.yaml", source.text, mode_for(frozen.model_dump(mode="json"), source.text))
    facts, diff = provenance.collect_with_diff(source.command, source.base)
    facts["source"] = source.name
    facts["seed"] = experiment.seed
    facts |= {"trial": source.trial} if source.trial else {}
    facts["plugins"] = {
        str(path.relative_to(draft)): provenance.sha256(path)
        for folder in ("plugins", "frozen")
        for path in sorted((draft / folder).rglob("*"))
        if path.is_file()
    }
    atomic.write_sealed(draft / provenance.FILE, facts)
    if diff:
        atomic.write_text(draft / "provenance.diff", diff)
    (draft / "checkpoints").mkdir()
    write_first_status(
        draft,
        place,
        name=frozen.run_name,
        env=frozen.env.id,
        tags=frozen.tags,
        notes=frozen.notes,
        target_env_steps=frozen.stop.env_steps,
        lineage=source.parent,
        profile=source.profile,
    )
    origin = {"parent": source.parent, "profile": source.profile}
    origin = {name: value for name, value in origin.items() if value}
    log_event(Run(draft), "created", f"Run {run_id(place)} was created.", **origin)
    for note in copies.notes:
        log_event(Run(draft), "warning", note)


def with_found_sources(experiment: Experiment, root: Path) -> Experiment:
    """Replace `resume: PATH` and `model.init: RUN` by absolute checkpoint folders, which stay valid elsewhere."""
    if experiment.resume not in ("auto", "never"):
        experiment = experiment.model_copy(update={"resume": source_folder(experiment.resume, root)})
    if experiment.model.init:
        model = experiment.model.model_copy(update={"init": source_folder(experiment.model.init, root)})
        experiment = experiment.model_copy(update={"model": model})
    return with_absolute_dataset(experiment)


def with_absolute_dataset(experiment: Experiment) -> Experiment:
    """Replace the folder of a dataset that is learned from, if any, by its absolute path."""
    dataset = getattr(experiment.algo, "dataset", None)
    if dataset is None:
        return experiment
    algo = experiment.algo.model_copy(update={"dataset": str(atomic.absolute(Path(dataset).expanduser()))})
    return experiment.model_copy(update={"algo": algo})


def source_folder(text: str, root: Path) -> str:
    """The absolute checkpoint folder for a run's name or a path."""
    folder = Path(text).expanduser().absolute()
    if (folder / "manifest.json").is_file():
        return str(checkpoint.select(folder).folder)
    return str(checkpoint.select(find(text, root), None).folder)
