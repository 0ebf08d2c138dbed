"""New datasets from old ones: split, merge, filter. The files of episodes are copied byte for byte.

    split, filter   an episode keeps its number
    merge           episodes are numbered in the order of the sources; a recording that several have is kept once

Everything is checked before anything is written. Episodes that the result has already are not written again, so the
same command completes what a killed one has begun, and adds what the sources have gained. A result that has other
episodes is not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tiltyard.data import dataset_file, manifest
from tiltyard.data import folder as layout
from tiltyard.data.claims import Claims
from tiltyard.data.conditions import Condition, met_by_all
from tiltyard.data.dataset_file import About
from tiltyard.data.manifest import Entry, Manifest
from tiltyard.data.split import is_validation
from tiltyard.data.statistics import with_meta
from tiltyard.data.writer import DatasetWriter
from tiltyard.errors import TiltyardError, UseError
from tiltyard.run import atomic, mutex
from tiltyard.types import Array

Progress = Callable[[Path, int, int], None]
_COPYING = 1 << 62  # the claim of a process that copies into a folder; no episode has this number
_HINT = "give a new folder; one that is completed needs the sources and options with which it was made"


@dataclass(frozen=True)
class Command:
    """What was typed, for `made` in dataset.json, and whom to report progress to: folder, copied, of how many."""

    words: list[str]
    progress: Progress = lambda out, done, total: None


@dataclass(frozen=True)
class Result:
    """A dataset that was made or completed. Counts of episodes are one for each agent."""

    folder: Path
    episodes: int
    steps: int
    added: int
    """by this command"""
    repeated: int = 0
    """that more than one source had"""


@dataclass(frozen=True)
class Source:
    """A dataset, or some of its episodes."""

    folder: Path
    about: About
    manifest: Manifest

    def take(self, rows: Array) -> Source:
        """The episodes in which `rows` (bool [N]) is true."""
        return replace(self, manifest=self.manifest.take(np.flatnonzero(rows)))


class Groups:
    """The episodes of a manifest with all their agents: those are one file, and are copied together."""

    def __init__(self, found: Manifest) -> None:
        rows = found.column("episode")
        self.manifest = found
        self.starts = np.flatnonzero(np.append(True, np.diff(rows) != 0)) if len(rows) else np.zeros(0, np.int64)
        self.ends = np.append(self.starts[1:], len(rows)) if len(rows) else self.starts
        self.numbers = rows[self.starts]
        checksums = found.table.column("sha256").combine_chunks()
        offsets = pa.array(np.append(self.starts, len(rows)), pa.int32())
        self.checksums = pc.binary_join(pa.ListArray.from_arrays(offsets, checksums), "+")

    def __len__(self) -> int:
        return len(self.starts)

    def rows(self, chosen: Array) -> tuple[Array, Array]:
        """The rows of these groups, one group after another, and where each group ends among them."""
        starts, sizes = self.starts[chosen], (self.ends - self.starts)[chosen]
        ends = np.cumsum(sizes)
        return np.arange(int(sizes.sum())) + np.repeat(starts - (ends - sizes), sizes), ends


def identities(found: Manifest) -> pa.Array:
    """The checksums; the second copy of a recording in the same dataset has another identity than the first."""
    checksums = found.table.column("sha256").combine_chunks()
    encoded = pc.dictionary_encode(checksums)
    if len(encoded.dictionary) == len(found):
        return checksums
    codes = np.asarray(encoded.indices)
    order = np.argsort(codes, kind="stable")
    first = np.append(True, np.diff(codes[order]) != 0)
    rank = np.zeros(len(codes), np.int64)
    rank[order] = np.arange(len(codes)) - np.maximum.accumulate(np.where(first, np.arange(len(codes)), 0))
    numbered = pc.binary_join_element_wise(checksums, pa.array(rank).cast(pa.string()), "#")
    return pc.if_else(pa.array(rank > 0), numbered, checksums)


@dataclass(frozen=True)
class Plan:
    """What is to be copied into a folder: for each copy its source and number, and its rows of the source's manifest.

    The rows of copy i are rows[ends[i - 1] : ends[i]].
    """

    out: Path
    about: About
    sources: Sequence[Source]
    source: Array
    number: Array
    rows: Array
    ends: Array
    repeated: int = 0

    @property
    def made(self) -> list[dict[str, Any]]:
        """How the sources were made."""
        return [entry for each in self.sources for entry in each.about.made]

    def copies(self) -> Iterator[tuple[Path, list[Entry], int]]:
        """For each copy the folder of its source, its recordings there, and its number."""
        begin = 0
        for source, number, end in zip(self.source.tolist(), self.number.tolist(), self.ends.tolist(), strict=True):
            found = self.sources[source]
            yield found.folder, [found.manifest.entry(row) for row in self.rows[begin:end].tolist()], number
            begin = end


# ---------------------------------------------------------------------------------------------- the commands


def split_dataset(folder: Path, share: float, outs: tuple[Path, Path], command: Command) -> list[Result]:
    """Divide a dataset into one for training and one for validation, by a hash of the episodes' seeds."""
    source = open_source(folder)
    groups = Groups(source.manifest)
    chosen = is_validation(source.manifest.column("seed")[groups.starts], share)
    rows = np.repeat(chosen, groups.ends - groups.starts)  # all agents of an episode are on the same side
    if atomic.absolute(outs[0]) == atomic.absolute(outs[1]):
        raise UseError(f"--out names {outs[0]} twice", "give one folder for training and one for validation")
    plans = [plan_with_same_numbers(source.take(part), out) for part, out in zip((~rows, rows), outs, strict=True)]
    return [carry_out(plan, command, validation=share) for plan in plans]


def filter_dataset(folder: Path, out: Path, conditions: Sequence[Condition], command: Command) -> Result:
    """Copy the episodes that meet all conditions."""
    source = open_source(folder)
    chosen = source.take(met_by_all(conditions, source.manifest))
    if not len(chosen.manifest):
        wanted = " and ".join(condition.text for condition in conditions)
        hint = f"see what it has with: tiltyard data stats {folder}"
        raise UseError(f"none of the {len(source.manifest):,} episodes of {folder} meets {wanted}", hint)
    plan = plan_with_same_numbers(chosen, out)
    return carry_out(plan, command, where=[condition.text for condition in conditions])


def merge_datasets(folders: Sequence[Path], out: Path, command: Command) -> Result:
    """Join datasets of the same env, or copy one."""
    places = [folder.resolve() for folder in folders]
    for place, folder in zip(places, folders, strict=True):
        if places.count(place) > 1:
            raise UseError(f"{folder} is given twice", "name each dataset once")
    sources = [open_source(folder) for folder in folders]
    for source in sources[1:]:
        require_same_env(source.folder, source.about, sources[0].folder, sources[0].about)
    return carry_out(plan_merge(sources, out), command)


def open_source(folder: Path) -> Source:
    found = with_meta(folder, layout.read_manifest(folder))
    return Source(folder, layout.read_about(folder), found)


def require_same_env(folder: Path, about: About, other: Path, wanted: About) -> None:
    """UseError that names both datasets if they are of different envs."""
    if not (about.digest and wanted.digest):  # of schema 1, which has id and options only
        same = about.env_id == wanted.env_id and about.env.get("options", {}) == wanted.env.get("options", {})
        about = replace(about, digest=wanted.digest) if same else replace(about, digest=f"not {wanted.digest}")
    try:
        dataset_file.require_same_env(folder, about, wanted)
    except UseError as error:
        raise UseError(
            f"{folder} and {other} are not of the same env: {error.message}", "give other folders"
        ) from error


# ---------------------------------------------------------------------------------------------- plans


def plan_with_same_numbers(source: Source, out: Path) -> Plan:
    """Copy all episodes of a source that the result does not have."""
    about, there = inspect_out(out, [source])
    groups, found = Groups(source.manifest), Groups(there)
    places = np.searchsorted(groups.numbers, found.numbers)
    places = np.minimum(places, max(0, len(groups) - 1))
    if len(found):
        known = groups.numbers[places] == found.numbers if len(groups) else np.zeros(len(found), bool)
        if known.all():
            known = np.asarray(pc.equal(groups.checksums.take(pa.array(places)), found.checksums))
        _refuse_others(out, found.numbers, known)
    missing = np.flatnonzero(~np.isin(groups.numbers, found.numbers))
    rows, ends = groups.rows(missing)
    return Plan(out, about, [source], np.zeros(len(missing), np.int64), groups.numbers[missing], rows, ends)


def plan_merge(sources: Sequence[Source], out: Path) -> Plan:
    """Copy each recording once, under the next free numbers, in the order of the sources.

    Recordings of one episode get one number, except for those of agents that an earlier source has.
    """
    about, there = inspect_out(out, sources)
    every = pa.concat_arrays([pa.array([], pa.string()), *(identities(each.manifest) for each in sources)])
    codes = np.asarray(pc.dictionary_encode(every).indices)
    kept = np.sort(np.unique(codes, return_index=True)[1])  # the first source that has a recording gives it
    existing = identities(there)
    if len(there):
        _refuse_others(out, there.column("episode"), np.asarray(pc.is_in(existing, value_set=every), bool))
    absent = ~np.asarray(pc.is_in(every.take(pa.array(kept)), value_set=existing), bool)
    chosen = kept[absent]
    starts = np.append(0, np.cumsum([len(each.manifest) for each in sources]))
    source = np.searchsorted(starts, chosen, side="right") - 1
    episode = np.concatenate([each.manifest.column("episode") for each in sources])[chosen]
    begins = np.flatnonzero(np.append(True, (np.diff(source) != 0) | (np.diff(episode) != 0))[: len(chosen)])
    next_number = int(there.column("episode").max()) + 1 if len(there) else 0
    numbers = next_number + np.arange(len(begins))
    ends = np.append(begins, len(chosen))[1:]
    return Plan(out, about, sources, source[begins], numbers, chosen - starts[source], ends, len(every) - len(kept))


def inspect_out(out: Path, sources: Sequence[Source]) -> tuple[About, Manifest]:
    """What the result is to hold, and the episodes that it has already. UseError if it is not one of these sources."""
    about = next((each.about for each in sources if each.about.digest), sources[0].about)
    # No seed: a collector would play episodes that were left out on purpose.
    about = replace(about, seed=None, made=[], created=atomic.now(), schema=dataset_file.SCHEMA)
    for source in sources:
        if out.resolve() == source.folder.resolve():
            raise UseError(f"{out} is a source, so it cannot be the result", "give a new folder")
    if not out.exists():
        return about, manifest.from_entries([])
    others = sorted(each.name for each in out.iterdir() if not each.name.startswith(".")) if out.is_dir() else [""]
    there = dataset_file.read(out) if out.is_dir() else None
    if there is None and others:
        raise UseError(f"{out} exists and is not a dataset that episodes can be added to", "give a new folder")
    if there is None:
        return about, manifest.from_entries([])
    require_same_env(out, there, sources[0].folder, about)
    listed = manifest.read(out)
    found = layout.read_manifest(out) if listed.damages else manifest.from_entries([*listed, *_unlisted(out, listed)])
    return replace(about, digest=there.digest, env=there.env), found


def _unlisted(out: Path, listed: Manifest) -> list[Entry]:
    """Whole episodes whose writer was killed before it listed them."""
    return layout.unlisted(out, listed) if manifest.abandoned(out) else []


def _refuse_others(out: Path, numbers: Array, known: Array) -> None:
    if not known.all():
        number = int(numbers[np.flatnonzero(~known)[0]])
        raise UseError(f"{out} has episodes that this command does not write, such as episode {number}", _HINT)


# ---------------------------------------------------------------------------------------------- copying


def carry_out(plan: Plan, command: Command, **facts: Any) -> Result:
    """Copy what is missing, each episode whole or not at all."""
    out, total = plan.out, len(plan.number)
    is_new = not (out / dataset_file.NAME).exists()
    left = [] if is_new else sorted({entry.episode for entry in _unlisted(out, manifest.read(out))})
    if total or left or is_new:
        _make_folder(out)
        with Claims(out) as claims:
            if not claims.take(_COPYING):
                raise mutex.MutexHeld(f"another process is at work on {out}", "wait for it, then try again")
            writer = DatasetWriter(out, _write_about(plan, command, facts), {})
            try:
                for number in left:
                    writer.list_existing(number)
                for done, (folder, entries, number) in enumerate(plan.copies()):
                    command.progress(out, done, total)
                    _copy(writer, folder, entries, number)
            finally:
                writer.close()
    found = layout.read_manifest(out)
    return Result(out, len(found), int(found.column("length").sum()), len(plan.rows), plan.repeated)


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UseError(f"cannot write a dataset to {out}: {error.strerror}", "choose another folder") from error


def _write_about(plan: Plan, command: Command, facts: dict[str, Any]) -> About:
    """Write dataset.json: how the sources were made, then this command."""
    there = dataset_file.read(plan.out)
    known = [] if there is None else there.made
    made = plan.made
    new = [entry for place, entry in enumerate(made) if entry not in known and entry not in made[:place]]
    sources = [str(atomic.absolute(each.folder)) for each in plan.sources]
    about = plan.about
    for entry in [*new, dataset_file.provenance(command.words, sources=sources, **facts)]:
        about = dataset_file.create_or_check(plan.out, about, entry)
    return about


def _copy(writer: DatasetWriter, folder: Path, entries: Sequence[Entry], number: int) -> None:
    contents = [layout.read_bytes(folder, entry) for entry in entries]
    if writer.commit_bytes(number, list(zip(entries, contents, strict=True))):
        return
    # Another process wrote it since the plan was made, or its manifest was lost.
    files = [layout.episode_path(number, kind) for kind in ("parquet", "tar")]
    file = next((each for each in files if (writer.folder / each).exists()), "")
    found = layout.entries_in(writer.folder, file)[0] if file else []
    if sorted(each.sha256 for each in found) != sorted(each.sha256 for each in entries):
        message = f"{writer.folder} has an unexpected episode {number}: it is not {entries[0].name} of {folder}"
        raise TiltyardError(message, f"try again, and if that does not help: tiltyard data repair {writer.folder}")
    writer.list_existing(number)
