"""Repairs a dataset as far as its files allow. Damaged files go to FOLDER/quarantine, and nothing is deleted.

    sound episodes of damaged tars    into a new shard
    episodes in no manifest           into a manifest
    damaged manifests                 replaced by their sound lines, with a seal
    damaged episodes                  out of the manifests
    dataset.json                      from an episode

New files are written first, then old ones are moved, so that a repair can be killed at any moment and repeated.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tiltyard.data import claims, dataset_file, manifest, shards, verify
from tiltyard.data import folder as layout
from tiltyard.data.manifest import Entry, Manifest
from tiltyard.data.verify import Findings
from tiltyard.data.writer import remove_leftovers
from tiltyard.errors import TiltyardError, UseError
from tiltyard.run import atomic

Key = tuple[int, str]


@dataclass(frozen=True)
class Step:
    """Something to do, as a sentence and as a function."""

    text: str
    do: Callable[[], object]


def repair(
    folder: Path, *, dry_run: bool = False, report: Callable[[str], object] = lambda line: None
) -> tuple[Findings, list[str]]:
    """Repair a dataset; return what was wrong, and what was done or would be done."""
    layout.require_dataset(folder)
    _refuse_live_writers(folder)
    with nullcontext() if dry_run else _alone(folder):
        found = verify.examine(folder, wait=0.0, alone=True)
        steps = _steps(folder, found)
        if steps and not dry_run:
            size = sum((folder / file).stat().st_size for file in found.tars if (folder / file).exists())
            shards.require_space(folder, size, "copy the dataset to a larger disk")
        for step in steps:
            report(step.text)
            if not dry_run:
                step.do()
    return found, [step.text for step in steps]


def _refuse_live_writers(folder: Path) -> None:
    pid = claims.holder(folder)
    live = [path for path in (folder / manifest.FOLDER).glob(f"*{manifest.OPEN}") if manifest.is_live(path)]
    if pid is None and not live:
        return
    who = f"process {pid} collects episodes" if pid else f"a process writes {live[0].name}" if live else "it is in use"
    raise UseError(f"cannot repair {folder} while {who}", "wait until it is done, or stop it, and try again")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep packs, repairs and collectors away."""
    with shards.exclusive(folder), claims.Claims(folder) as held:
        if not held.take_all():
            raise UseError(f"cannot repair {folder} while a collector is at work", "wait until it is done")
        remove_leftovers(folder)
        yield


# ---------------------------------------------------------------------------------------------- what to do


def _steps(folder: Path, found: Findings) -> list[Step]:
    sound, hopeless = _recovered(folder, found)
    lost = {entry.key: entry for entry in found.episodes}
    broken = {file for file in found.tars if (folder / file).exists()}
    steps = _rescue(folder, found, sound, broken)
    steps += _list_again(folder, [entry for entry in sound if entry.file not in broken])
    # Files go before their lines: a file without a line would be listed again after a kill, and no checksum would tell.
    gone = {entry.file for entry in found.episodes if not entry.file.endswith(".tar")} | broken | hopeless
    for file in sorted(gone):
        if (folder / file).exists():
            steps.append(Step(move_text(file), partial(set_aside, folder, file)))
    steps += _rewrite_manifests(folder, found, lost, broken)
    if found.about:
        steps.append(Step(f"write {dataset_file.NAME} from an episode", partial(_write_about, folder)))
    return steps


def move_text(file: str) -> str:
    """The step that puts a file into the quarantine."""
    return f"move {file} to {layout.QUARANTINE}"


def _recovered(folder: Path, found: Findings) -> tuple[list[Entry], set[str]]:
    """Sound episodes that no line names, and single files in which there is none."""
    keys = {entry.key for entry in found.manifest} if found.unlisted else set()
    sound: list[Entry] = []
    hopeless: set[str] = set()
    for file in found.unlisted:
        entries, damages = layout.entries_in(folder, file)
        new = [entry for entry in entries if entry.key not in keys]
        keys |= {entry.key for entry in new}
        sound += new
        if (damages or not entries) and not file.endswith(".tar"):
            hopeless.add(file)
        elif damages or not entries:
            found.tars.add(file)
    return sound, hopeless


def _rescue(folder: Path, found: Findings, recovered: list[Entry], broken: set[str]) -> list[Step]:
    """Copy the sound episodes of damaged tars into new shards."""
    lost = {entry.key for entry in found.episodes}
    tars: dict[str, list[Entry]] = defaultdict(list)
    for entry in [*(found.manifest if broken else ()), *recovered]:
        if entry.file in broken and entry.key not in lost:
            tars[entry.file].append(entry)
    steps = []
    for file, entries in sorted(tars.items()):
        units: dict[int, list[Entry]] = defaultdict(list)
        for entry in sorted(entries, key=lambda entry: entry.offset):
            units[entry.episode].append(entry)
        text = f"copy {_count(len(entries), 'sound episode')} of {file} into a new shard"
        steps.append(Step(text, partial(_copy, folder, list(units.values()), broken)))
    return steps


def _copy(folder: Path, units: list[list[Entry]], broken: set[str]) -> None:
    skipped: list[str] = []
    shards.write_shard(folder, units, skipped, avoid=broken)
    if skipped:
        raise TiltyardError(skipped[0], f"tiltyard data verify {folder}")


def _list_again(folder: Path, entries: list[Entry]) -> list[Step]:
    """Write manifests of the episodes that no line names: of a shard to its own."""
    files: dict[Path, list[Entry]] = defaultdict(list)
    single = [entry for entry in entries if not entry.file.startswith(layout.SHARDS)]
    for entry in entries:
        if entry.file.startswith(layout.SHARDS):
            files[shards.manifest_of(folder, entry.file)].append(entry)
    if single:
        digest = hashlib.sha256("".join(entry.sha256 for entry in single).encode()).hexdigest()[:12]
        files[folder / manifest.FOLDER / f"repair-{digest}.jsonl"] = single
    return [
        Step(
            f"list {_count(len(new), 'episode')} in {path.relative_to(folder)}", partial(_add_lines, folder, path, new)
        )
        for path, new in sorted(files.items())
    ]


def _add_lines(folder: Path, path: Path, new: list[Entry]) -> None:
    name, before = path.relative_to(folder).as_posix(), list[Entry]()
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        table, damages = manifest.read_file(path, name)
        before = list(Manifest(table))
        if damages:
            keep_copy(folder, name)
    every = {entry.key: entry for entry in [*new, *before]}
    manifest.write_sealed(path, sorted(every.values(), key=lambda entry: (entry.file, entry.offset)))


def _rewrite_manifests(folder: Path, found: Findings, lost: dict[Key, Entry], broken: set[str]) -> list[Step]:
    """Drop the lines of lost episodes, replace damaged manifests, and seal those of killed writers."""
    steps = []
    for path in manifest.files(folder):
        name = path.relative_to(folder).as_posix()
        is_open, damaged = name.endswith(manifest.OPEN), name in found.manifests
        if not (lost or broken or damaged or is_open):
            continue
        lines = list(Manifest(manifest.read_file(path, name)[0]))
        gone = sum(_is_gone(folder, entry, lost, broken) for entry in lines)
        if damaged or is_open or gone:
            what = f"{'repair' if damaged or gone else 'seal'} {name}" + (
                f" without {_count(gone, 'line')}" if gone else ""
            )
            is_gone = partial(_is_gone, folder, lost=lost, broken=broken)
            steps.append(Step(what, partial(_rewrite, folder, name, is_gone, damaged)))
    return steps


def _rewrite(folder: Path, name: str, is_gone: Callable[[Entry], bool], damaged: bool) -> None:
    """Replace a manifest by its sound lines. They are read again: an earlier step may have added some."""
    path = place = folder / name
    table, damages = manifest.read_file(path, name)
    lines = list(Manifest(table))
    kept = [entry for entry in lines if not is_gone(entry)]
    if name == manifest.OLD:
        place = folder / manifest.FOLDER / "old-0000.jsonl"
        place.parent.mkdir(exist_ok=True)
    elif name.endswith(manifest.OPEN):
        place = path.with_name(path.name.removesuffix(manifest.OPEN) + ".jsonl")
    elif kept == lines and not damages:
        return
    if kept:
        if place == path:
            keep_copy(folder, name)
        manifest.write_sealed(place, kept)
    if damaged or kept != lines:
        if place != path or not kept:
            set_aside(folder, name)
    elif place != path:
        path.unlink()  # all of its lines are in the sealed one


def _is_gone(folder: Path, entry: Entry, lost: dict[Key, Entry], broken: set[str]) -> bool:
    """Whether a line names bytes that are damaged, missing, or in a file that goes into quarantine."""
    if entry.file in broken:
        return True
    if entry.key not in lost:
        return False
    there = lost[entry.key]
    if (entry.file, entry.offset, entry.sha256) == (there.file, there.offset, there.sha256):
        return True
    try:  # a second copy, such as one that a pack has not removed yet
        layout.read_bytes(folder, entry)
    except TiltyardError:
        return True
    return False


def _write_about(folder: Path) -> None:
    about = layout.about_from_episodes(folder)
    made = [dataset_file.provenance(["tiltyard", "data", "repair", str(folder)])]
    about = replace(about, made=made, created=atomic.now(), schema=dataset_file.SCHEMA)
    keep_copy(folder, dataset_file.NAME)
    atomic.write_sealed(folder / dataset_file.NAME, about.to_json())


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


# ---------------------------------------------------------------------------------------------- quarantine


def set_aside(folder: Path, name: str) -> None:
    """Move a file to the quarantine."""
    (folder / name).rename(_place(folder, name))


def keep_copy(folder: Path, name: str) -> None:
    """Put a copy of a file into the quarantine, before it is replaced."""
    if not (folder / name).exists():
        return
    place = _place(folder, name)
    try:
        os.link(folder / name, place)
    except OSError:  # a file system without links
        shutil.copyfile(folder / name, place)


def _place(folder: Path, name: str) -> Path:
    """A free name in the quarantine."""
    place = folder / layout.QUARANTINE / name
    place.parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while place.exists():
        place = place.with_name(f"{Path(name).name}.{number}")
        number += 1
    return place
