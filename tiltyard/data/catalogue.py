"""Which datasets there are below a folder. Reads their dataset.json and manifests, no episodes.

What a folder holds is decided by the functions in RECOGNISERS, one for each kind of thing that can be listed: given a
folder and the names in it, a function returns an Item, or None if the folder is something else. A folder that is
recognised is not searched further. A damaged dataset is an Item whose `problem` says what is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiltyard.data import dataset_file, manifest
from tiltyard.data import folder as layout
from tiltyard.data.dataset_file import About
from tiltyard.data.statistics import UNKNOWN, policy_codes
from tiltyard.errors import TiltyardError, UseError


@dataclass(frozen=True)
class Item:
    """One thing that was found."""

    kind: str
    folder: Path
    env: str = UNKNOWN
    episodes: int = 0
    """one for each agent"""
    steps: int = 0
    bytes: int = 0
    """of the episodes' files"""
    policies: list[str] = field(default_factory=list)
    created: str = ""
    made: list[dict[str, Any]] = field(default_factory=list)
    """the commands that wrote to it"""
    problem: str = ""


def find(folders: Sequence[Path], depth: int | None = None) -> list[Item]:
    """Everything below these folders, each once, in the order of paths; `depth` limits how far down is searched."""
    found: dict[Path, Item] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UseError(f"there is no folder {folder}", "give the folder that datasets are in")
        for item in _search(folder, depth):
            found.setdefault(item.folder.resolve(), item)
    return sorted(found.values(), key=lambda item: item.folder)


def _search(folder: Path, depth: int | None) -> Iterator[Item]:
    """What is in a folder and below it. Links and hidden folders are not followed."""
    try:
        with os.scandir(folder) as entries:
            inside = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
    except OSError:  # of another user, or deleted just now
        return
    for recognise in RECOGNISERS:
        if (item := recognise(folder, inside)) is not None:
            yield item
            return
    if depth != 0:
        for name in sorted(name for name, is_folder in inside.items() if is_folder and not name.startswith(".")):
            yield from _search(folder / name, None if depth is None else depth - 1)


def recognise_dataset(folder: Path, inside: dict[str, bool]) -> Item | None:
    """A dataset, also one from before dataset.json (schema 1) or one that has lost it."""
    if not (dataset_file.NAME in inside or _has_manifests(inside) or _has_old_episodes(inside)):
        return None
    problems: list[str] = []
    about: About | None = None
    try:
        about = dataset_file.read(folder)
        if about is None:
            if not manifest.files(folder):
                return None
            about = layout.about_from_episodes(folder)  # reads one episode
            if manifest.OLD not in inside:
                problems.append(f"it has no {dataset_file.NAME}")
    except TiltyardError as error:
        problems.append(error.message)
    found = manifest.read(folder)
    problems += [str(damage) for damage in found.damages]
    return Item(
        kind="dataset",
        folder=folder,
        env=UNKNOWN if about is None else about.env_id,
        episodes=len(found),
        steps=int(found.column("length").sum()),
        bytes=int(found.column("bytes").sum()),
        policies=[name for name in policy_codes(found)[1] if name != UNKNOWN],
        created="" if about is None else about.created,
        made=[] if about is None else about.made,
        problem="; ".join(problems),
    )


def _has_manifests(inside: dict[str, bool]) -> bool:
    return manifest.FOLDER in inside and (layout.EPISODES in inside or layout.SHARDS in inside)


def _has_old_episodes(inside: dict[str, bool]) -> bool:
    return manifest.OLD in inside and any(name.startswith("episode-") for name in inside)


RECOGNISERS: tuple[Callable[[Path, dict[str, bool]], Item | None], ...] = (recognise_dataset,)
