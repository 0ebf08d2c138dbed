"""Checkpoints: written atomically, verified before use, pruned by the settings of `save`.

    checkpoints/.tmp-...        being written or deleted; no listing pattern matches it
    checkpoints/000001000000    complete: every byte was synced before the rename
    manifest.json               env steps, progress, score, order, and a checksum of each file and of itself

Newest means committed last (`order`), not most env steps: a run may have resumed from an older checkpoint.
Engines decide what is in a checkpoint; state_file.py stores trees of arrays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tiltyard
from tiltyard.config.ownership import find_foreign
from tiltyard.errors import DiskError, TiltyardError, UseError
from tiltyard.run import atomic
from tiltyard.run.checkpoint_files import FOLDER, MANIFEST, delete_folder, publish, sync_and_hash
from tiltyard.run.regular_files import copy_files, each_file
from tiltyard.run.state_file import Files
from tiltyard.types import Checkpoint, Progress

if TYPE_CHECKING:
    from tiltyard.config.sections import Save
    from tiltyard.run.folder import Run

SCHEMA = 1
_ASIDE = "checkpoints.before-attempt-"


# ---------------------------------------------------------------------------------------------- writing


class Draft:
    """A checkpoint that is being written, in a folder that no listing shows.

    On failure it is deleted and nothing else changes. A killed process leaves it behind, and `prune` deletes it.
    """

    def __init__(self, run: Run, env_steps: int) -> None:
        self.run, self.env_steps = run, env_steps
        self._folder = run.checkpoints / f".tmp-{env_steps:012d}-{atomic.unique()}"
        with self.filling():
            self._folder.mkdir(parents=True)

    @contextlib.contextmanager
    def filling(self) -> Iterator[Path]:
        """Write files into the folder within this."""
        try:
            yield self._folder
        except BaseException as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            parent = self.run.checkpoints
            raise DiskError(
                f"the checkpoint at env step {self.env_steps} could not be saved: {error.strerror or error} ({parent});"
                f" {_what_is_left(parent)}",
                f"free some space, then continue with: tiltyard resume {self.run.typed}",
                error,
            ) from error

    def commit(
        self,
        progress: Progress,
        score: float | None,
        known: Files,
        *,
        milestone: bool = False,
        check: Callable[[], None] = lambda: None,
        records: Mapping[str, int] | None = None,
    ) -> Checkpoint:
        """Make it the run's newest checkpoint. Files with `known` checksums are not read again; `check` is called
        before it appears; `records` are the sizes of the files of records, which are synced up to there."""
        with self.filling() as draft:
            env_steps, earlier = self.env_steps, [manifest for _, manifest in _manifests(draft.parent)[0]]
            manifest = {
                "schema": SCHEMA,
                "env_steps": env_steps,
                "progress": dataclasses.asdict(progress),
                "score": score,
                # A milestone stays one when the same env step is saved again.
                "milestone": milestone or any(old["milestone"] for old in earlier if old["env_steps"] == env_steps),
                "order": 1 + earlier[-1]["order"] if earlier else 1,
                "created": atomic.now(),
                "tiltyard": tiltyard.__version__,
                "files": sync_and_hash(draft, known),
                "records": records or {},
            }
            atomic.write_sealed(draft / MANIFEST, manifest)
            atomic.sync_folder(draft)
            check()
            final = publish(draft, draft.with_name(f"{env_steps:012d}"))
        return Checkpoint(final, self.env_steps, score, progress)


def commit(
    run: Run,
    env_steps: int,
    progress: Progress,
    score: float | None,
    writer: Callable[[Path], object],
    *,
    milestone: bool = False,
) -> Checkpoint:
    """Let `writer` fill a folder and make it the run's newest checkpoint; on failure nothing changes."""
    draft = Draft(run, env_steps)
    with draft.filling() as folder:
        writer(folder)
    return draft.commit(progress, score, {}, milestone=milestone)


def pin(source: Path, place: Path) -> None:
    """Link or copy a checkpoint to another place, atomically: it stays when the run deletes its own."""
    draft = place.with_name(f".tmp-{place.name}-{atomic.unique()}")
    try:
        copy_files(source, draft, link=True)
        atomic.sync_folder(draft)
        if place.exists():
            delete_folder(place)
        draft.rename(place)
        atomic.sync_folder(place.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _what_is_left(parent: Path) -> str:
    kept, _ = _manifests(parent)
    return f"the previous checkpoint {kept[-1][0].name} is intact" if kept else "there is no earlier checkpoint"


# ---------------------------------------------------------------------------------------------- reading


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(path for path in parent.iterdir() if FOLDER.fullmatch(path.name))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _read_manifest(folder: Path) -> dict[str, Any] | str:
    """The manifest, or the reason why it is invalid."""
    try:
        manifest = atomic.read_json(folder / MANIFEST)
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    schema = manifest.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        return f"it was written by a newer Tiltyard (schema {schema}, this one reads up to {SCHEMA})"
    if manifest.get("sha256") != atomic.digest(manifest):
        return f"{MANIFEST} does not match its own checksum"
    match = FOLDER.fullmatch(folder.name)
    if match and int(match[1]) != manifest["env_steps"]:
        return f"{MANIFEST} belongs to env step {manifest['env_steps']}"
    return manifest


def _manifests(parent: Path) -> tuple[list[tuple[Path, dict[str, Any]]], list[tuple[Path, str]]]:
    """Checkpoints with their manifests, newest last; and those with an invalid manifest, with the reason."""
    found = [(folder, _read_manifest(folder)) for folder in _folders(parent)]
    pairs = [pair for pair in found if pair[0].exists()]  # the run may have deleted some since they were listed
    valid = [(folder, manifest) for folder, manifest in pairs if not isinstance(manifest, str)]
    invalid = [(folder, reason) for folder, reason in pairs if isinstance(reason, str)]
    return sorted(valid, key=lambda pair: pair[1]["order"]), invalid


def _checkpoint(folder: Path, manifest: dict[str, Any]) -> Checkpoint:
    return Checkpoint(folder, manifest["env_steps"], atomic.number(manifest["score"]), Progress(**manifest["progress"]))


def list_checkpoints(run: Run) -> list[Checkpoint]:
    """Checkpoints with a valid manifest, newest last. Cheap: the files themselves are not read."""
    return [_checkpoint(*pair) for pair in _manifests(run.checkpoints)[0]]


def unreadable(run: Run) -> list[str]:
    """A sentence for each checkpoint with an invalid manifest. As cheap as the listing."""
    return [f"checkpoint {folder.name}: {reason}" for folder, reason in _manifests(run.checkpoints)[1]]


def verify(folder: Path) -> str | None:
    """Why the checkpoint cannot be used, or None. Reads every byte; only the manifest's files may be there."""
    manifest = _read_manifest(folder)
    if isinstance(manifest, str):
        return manifest
    for place in (folder.parent, folder):  # it may lead to a private checkpoint of this user, to be copied by a fork
        if place.is_symlink() and (found := find_foreign(place)) and found.path.name == place.name:
            return f"{place} is a link of another user, {found.owner}"
    missing = dict(manifest["files"])
    try:
        for name, file in each_file(folder):
            if name == MANIFEST:
                continue
            if name not in missing:
                return f"{name} is not in {MANIFEST}; move it to another folder"
            expected, size = missing.pop(name), os.fstat(file.fileno()).st_size
            if size != expected["bytes"]:
                return f"{name} has {size} bytes instead of {expected['bytes']}"
            if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                return f"{name} does not match its checksum"
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})" if error.filename else str(error)
    return f"{next(iter(missing))} is missing" if missing else None


def newest_valid(run: Run) -> tuple[Checkpoint | None, list[str]]:
    """The newest valid checkpoint, and a warning for each newer one that is invalid.

    (None, []) if there are no checkpoints; an error if there are some but none is valid: never start over silently.
    """
    valid, invalid = _manifests(run.checkpoints)
    warnings = [f"Checkpoint {folder} cannot be used: {reason}." for folder, reason in invalid]
    for folder, manifest in reversed(valid):
        reason = verify(folder)
        if reason is None:
            return _checkpoint(folder, manifest), warnings
        if not folder.exists():  # deleted by the running run: a newer one follows
            continue
        warnings.append(f"Checkpoint {folder} cannot be used: {reason}.")
    if warnings or valid:
        raise TiltyardError(
            f"no checkpoint of run {run.id} can be used, and the run does not start over automatically",
            f"restore the files, or start a new run with: tiltyard train {shlex.quote(str(run.experiment_file))}",
            details="\n".join(warnings),
        )
    return None, []


def select(
    where: Run | Path,
    at: int | str | None = None,
    mode: Literal["max", "min"] | None = None,
    *,
    warn: Callable[[str], None] | None = None,
) -> Checkpoint:
    """One checkpoint of a run: the newest, the best by score, or the one at an env step; or the one at a path.

    A damaged newest one is skipped only if `warn` is given. `mode` defaults to the run's own save.mode.
    """
    from tiltyard.run.folder import Run

    if isinstance(where, Path) and ((where / MANIFEST).exists() or FOLDER.fullmatch(where.name)):
        return _verified(atomic.absolute(where))
    run = Run(atomic.absolute(where)) if isinstance(where, Path) else where
    if at is None:
        checkpoint, warnings = newest_valid(run)
        if checkpoint is None:
            raise UseError(f"run {run.id} has no checkpoint yet", f"train it first: tiltyard resume {run.typed}")
        for sentence in warnings:
            if warn is None:
                hint = f"use another one; the newest valid one is at env step {checkpoint.env_steps}"
                raise TiltyardError(sentence, hint)
            warn(sentence)
        return checkpoint
    if isinstance(at, bool) or not (isinstance(at, str) or hasattr(at, "__index__")):
        raise UseError(f"run {run.id} has no checkpoint {at!r}", "give an env step or best")
    if at == "best":
        return _verified(_best(run, mode))
    if isinstance(at, str) and not at.replace("_", "").isdecimal():
        raise UseError(f"run {run.id} has no checkpoint {at!r}", "give an env step or best")
    return _verified(_at(run, int(at)))


def _verified(folder: Path) -> Checkpoint:
    manifest = _read_manifest(folder) if folder.is_dir() else "there is no such folder"
    reason = manifest if isinstance(manifest, str) else verify(folder)
    if reason is not None or isinstance(manifest, str):
        hint = "use another one; `tiltyard show RUN` lists them"
        raise UseError(f"checkpoint {folder} cannot be used: {reason}", hint)
    return _checkpoint(folder, manifest)


def _at(run: Run, env_steps: int) -> Path:
    folders = [folder for folder in _folders(run.checkpoints) if int(folder.name.partition(".")[0]) == env_steps]
    if not folders:
        known = [str(checkpoint.env_steps) for checkpoint in list_checkpoints(run)]
        hint = f"it has: {', '.join(known) or 'none'}"
        raise UseError(f"run {run.id} has no checkpoint at env step {env_steps}", hint)
    return folders[-1]


def _best(run: Run, mode: Literal["max", "min"] | None) -> Path:
    kept = list_checkpoints(run)
    if not kept:
        raise UseError(f"run {run.id} has no checkpoint yet", f"train it first: tiltyard resume {run.typed}")
    ranked = _ranked(kept, mode or run.experiment().save.mode)
    if not ranked:
        raise UseError(f"no checkpoint of run {run.id} has a score", "leave --best out to take the newest")
    return ranked[0].folder


def _ranked(checkpoints: Sequence[Checkpoint], mode: Literal["max", "min"]) -> list[Checkpoint]:
    """Checkpoints with a score that is not nan, best first; of equal ones the newer first."""
    scored = [(checkpoint.score, checkpoint) for checkpoint in reversed(checkpoints) if checkpoint.score is not None]
    sign = -1.0 if mode == "max" else 1.0
    numbered = [(sign * score, checkpoint) for score, checkpoint in scored if score == score]
    return [checkpoint for _, checkpoint in sorted(numbered, key=lambda pair: pair[0])]


# ---------------------------------------------------------------------------------------------- moving


def copy_into(run: Run, source: Checkpoint, *, score: float | None, milestone: bool = True) -> Checkpoint:
    """Copy another run's checkpoint into this run; as a milestone, because the start of a fork must be kept.

    `score` is the source's own, or None if this run has another env or metric.
    """

    def write(folder: Path) -> None:
        copy_files(source.folder, folder)
        reason = verify(folder)  # the copy, which nobody else can change
        if reason is not None:
            hint = "fork from another checkpoint with --at"
            raise TiltyardError(f"checkpoint {source.folder} cannot be used: {reason}", hint)
        (folder / MANIFEST).unlink()

    return commit(run, source.env_steps, source.progress, score, write, milestone=milestone)


def set_aside(run: Run, attempt: int) -> list[str]:
    """Move all checkpoints aside for a start from scratch (resume=never); return a message if there were any."""
    kept = _folders(run.checkpoints)
    if not kept:
        return []
    aside = run.folder / f"{_ASIDE}{attempt}"
    while aside.exists():
        aside = aside.with_name(aside.name + "+")
    run.checkpoints.rename(aside)
    atomic.sync_folder(run.folder)
    return [f"resume=never: {len(kept)} checkpoints of earlier attempts were moved to {aside}"]


def was_set_aside(run: Run) -> bool:
    """Whether the run was once restarted from scratch, so that its origin no longer matters."""
    return any(run.folder.glob(f"{_ASIDE}*"))


# ---------------------------------------------------------------------------------------------- pruning


def prune(run: Run, save: Save) -> list[Checkpoint]:
    """Delete checkpoints that save.last, save.best and milestones do not keep, and leftovers of killed saves; return
    those that stay.

    Only for the process that holds the run's lock, between saves. Checkpoints with an invalid manifest are kept.
    """
    pairs, _ = _manifests(run.checkpoints)
    every = [_checkpoint(*pair) for pair in pairs]
    keep = {checkpoint.folder for checkpoint in every[-save.last :]}
    keep |= {checkpoint.folder for checkpoint in _ranked(every, save.mode)[: save.best]}
    keep |= {folder for folder, manifest in pairs if manifest["milestone"]}
    with contextlib.suppress(OSError):  # what cannot be deleted now goes with the next save
        for checkpoint in every:
            if checkpoint.folder not in keep:
                delete_folder(checkpoint.folder)
        for path in run.checkpoints.iterdir():
            if path.name.startswith(".tmp-"):
                shutil.rmtree(path, ignore_errors=True)
    return [checkpoint for checkpoint in every if checkpoint.folder in keep]
