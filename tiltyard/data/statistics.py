"""What is in a dataset, in numbers: returns, lengths and policies from its manifests, arrays from its files.

Files are read one by one and block by block, so memory does not grow with the dataset.

    image        one row of numbers per channel          categorical action   how often each option was chosen
    other array  one per element, if they are few        other action         one row of numbers per dimension
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from tiltyard.data import folder as layout
from tiltyard.data import manifest
from tiltyard.data.episode_file import ROW_GROUP, EpisodeFile
from tiltyard.data.manifest import Manifest
from tiltyard.data.moments import ActionNumbers, Moments, Summary, summary
from tiltyard.errors import TiltyardError, UseError
from tiltyard.types import Array, ArraySpec, EnvSpec

BINS = 10
MOST_ELEMENTS = 32  # of an array whose elements have a row of numbers each
BLOCK = 1 << 25  # bytes read at once, but at least a row group
UNKNOWN = "unknown"
Progress = Callable[[int, int], None]


@dataclass
class Measured:
    """What the files of episodes hold: of all of them, or of a sample."""

    episodes: int = 0
    damaged: list[str] = field(default_factory=list)
    """episodes that cannot be read, and why"""
    reward: Summary | None = None
    actions: list[dict[str, Any]] = field(default_factory=list)
    observations: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Statistics:
    """All numbers of a dataset."""

    folder: str
    env: str
    episodes: int
    """one for each agent, without damaged ones"""
    steps: int
    returns: Summary
    without_return: int
    """episodes whose return is not finite"""
    histogram: list[dict[str, Any]]
    lengths: Summary
    ends: dict[str, int]
    policies: list[dict[str, Any]]
    agents: dict[str, int]
    disk_bytes: int
    file_bytes: int
    raw_bytes: int
    measured: Measured

    @property
    def compression(self) -> float:
        """Bytes of the arrays for each byte of the episodes' files."""
        return self.raw_bytes / self.file_bytes if self.file_bytes else math.nan


def describe(folder: Path, *, sample: int | None = None, progress: Progress = lambda done, all_: None) -> Statistics:
    """Measure a dataset without its damaged episodes.

    With `sample`, files of that many episodes are read; numbers of the manifests are of all others, too.
    """
    about = layout.read_about(folder)
    found = with_meta(folder, layout.read_manifest(folder))
    measured, row_bytes, damaged = _measure(folder, found, about.spec, sample, progress)
    found = found.take(np.setdiff1d(np.arange(len(found)), damaged)) if damaged else found
    returns, lengths = found.column("return"), found.column("length")
    finite = returns[np.isfinite(returns)]
    names, counts = np.unique(np.asarray(found.table.column("agent").to_pylist(), str), return_counts=True)
    return Statistics(
        folder=str(folder),
        env=about.env_id,
        episodes=len(found),
        steps=int(lengths.sum()),
        returns=summary(finite),
        without_return=len(returns) - len(finite),
        histogram=histogram(finite),
        lengths=summary(lengths),
        ends=_ends(found),
        policies=_policies(found),
        agents={str(name): int(number) for name, number in zip(names, counts, strict=True) if name},
        disk_bytes=bytes_on_disk(folder),
        file_bytes=int(found.column("bytes").sum()),
        raw_bytes=int(found.column("rows").sum()) * row_bytes[0] + int(lengths.sum()) * row_bytes[1],
        measured=measured,
    )


# ---------------------------------------------------------------------------------------------- from the manifests


def histogram(values: Array) -> list[dict[str, Any]]:
    """Bins of equal width from the least to the greatest value; equal values have one bin."""
    if not len(values):
        return []
    bins = 1 if values.min() == values.max() else BINS
    counts, edges = np.histogram(values, bins, (values.min(), values.max()) if bins > 1 else None)
    edges = edges if bins > 1 else np.asarray([values.min(), values.max()])
    return [
        {"low": float(low), "high": float(high), "episodes": int(number)}
        for low, high, number in zip(edges, edges[1:], counts, strict=False)
    ]


def _ends(found: Manifest) -> dict[str, int]:
    terminated, truncated = (found.column(name).astype(bool) for name in ("terminated", "truncated"))
    ends = {
        "terminated": terminated & ~truncated,
        "truncated": truncated & ~terminated,
        "both": terminated & truncated,
        "unfinished": ~terminated & ~truncated,
    }
    return {name: int(rows.sum()) for name, rows in ends.items()}


def policy_codes(found: Manifest) -> tuple[Array, list[str]]:
    """int [N]: which policy played each episode, and the policies' names."""
    encoded = pc.dictionary_encode(found.table.column("meta").combine_chunks())
    if not len(encoded):
        return np.zeros(0, int), []
    per_meta = [_policy(text) for text in encoded.dictionary.to_pylist()]
    names = sorted(set(per_meta))
    codes = np.searchsorted(np.asarray(names, object), np.asarray(per_meta, object))
    return codes[np.asarray(encoded.indices)], names


def _policy(text: str) -> str:
    try:
        meta = json.loads(text)
        name = meta.get("policy") or meta.get("run") or UNKNOWN
    except (ValueError, AttributeError, RecursionError):
        return UNKNOWN
    return name if isinstance(name, str) else json.dumps(name)


def _policies(found: Manifest) -> list[dict[str, Any]]:
    codes, names = policy_codes(found)
    returns, lengths = found.column("return"), found.column("length")
    rows = [(name, codes == code) for code, name in enumerate(names)]
    return [
        {
            "policy": name,
            "episodes": int(chosen.sum()),
            "steps": int(lengths[chosen].sum()),
            "return": summary(returns[chosen & np.isfinite(returns)]).mean,
        }
        for name, chosen in rows
    ]


def with_meta(folder: Path, found: Manifest) -> Manifest:
    """The manifest; what that of schema 1 lacks (policy, agent) is read from the episodes' files."""
    if not (folder / manifest.OLD).is_file():
        return found
    entries = []
    for entry in found:
        try:
            old = "/" not in entry.file
            entries.append(
                layout.entry_of(layout.read_bytes(folder, entry), entry.episode, entry.file) if old else entry
            )
        except UseError:
            raise
        except TiltyardError:  # damaged: whoever reads the episode itself reports it
            entries.append(entry)
    return manifest.from_entries(entries, found.damages)


def bytes_on_disk(folder: Path) -> int:
    """Bytes of all files in a folder."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += Path(where, name).lstat().st_size
            except FileNotFoundError:  # a writer has just finished it
                continue
    return total


# ---------------------------------------------------------------------------------------------- from the files


def _measure(
    folder: Path, found: Manifest, spec: EnvSpec, sample: int | None, progress: Progress
) -> tuple[Measured, tuple[int, int], list[int]]:
    """Numbers of the arrays, the bytes of all arrays for each observation and for each step, and damaged rows."""
    rows = np.arange(len(found))
    if sample is not None and sample < len(rows):
        rows = np.sort(np.random.default_rng(0).choice(rows, sample, replace=False))
    measured, row_bytes, damaged = Measured(), (0, 0), list[int]()
    observations = {name: Moments(_features(item)) for name, item in spec.obs.items()}
    actions, reward = ActionNumbers(spec.action), Moments(1)
    for done, row in enumerate(rows.tolist()):
        entry = found.entry(row)
        try:
            opened = layout.open_episode(folder, entry)
            row_bytes = row_bytes if any(row_bytes) else _row_bytes(opened)
            for start, stop in _blocks(opened, sum(row_bytes)):
                arrays = opened.read(start, stop, [*(f"obs.{name}" for name in spec.obs), "action", "reward"])
                steps = min(stop, opened.steps) - start  # the last row has no action
                for name, item in spec.obs.items():
                    observations[name].add(_by_feature(arrays[f"obs.{name}"], item))
                actions.add(arrays["action"][:steps])
                reward.add(arrays["reward"][None, :steps])
            measured.episodes += 1
        except UseError:
            raise
        except TiltyardError as error:
            measured.damaged.append(error.message)
            damaged.append(row)
        progress(done + 1, len(rows))
    measured.reward = reward.summaries()[0]
    measured.actions = actions.numbers()
    measured.observations = {name: _numbers(observations[name], item) for name, item in spec.obs.items()}
    return measured, row_bytes, damaged


def _blocks(opened: EpisodeFile, row_bytes: int) -> list[tuple[int, int]]:
    """Ranges of rows that are read at once: whole row groups."""
    step = max(1, BLOCK // max(1, row_bytes * ROW_GROUP)) * ROW_GROUP
    return [(start, min(start + step, opened.rows)) for start in range(0, opened.rows, step)]


def _row_bytes(opened: EpisodeFile) -> tuple[int, int]:
    """Bytes of the arrays for each observation, and for each step: action, reward and two flags."""
    sizes = {name: dtype.itemsize * math.prod(shape) for name, (dtype, shape) in opened.columns.items()}
    action = sizes.pop("action")
    return sum(sizes.values()), action + np.dtype(opened.about["reward"]).itemsize + 2


def _channels_first(item: ArraySpec) -> bool:
    return item.shape[0] < item.shape[-1]


def _features(item: ArraySpec) -> int:
    """How many rows of numbers an observation has."""
    if item.image:
        return item.shape[0] if _channels_first(item) else item.shape[-1]
    size = math.prod(item.shape)
    return size if size <= MOST_ELEMENTS else 1


def _by_feature(block: Array, item: ArraySpec) -> Array:
    """[N, ...] -> [features, M]."""
    if item.image:
        return np.moveaxis(block, 1 if _channels_first(item) else -1, 0).reshape(_features(item), -1)
    flat = block.reshape(len(block), -1)
    return flat.T if _features(item) == flat.shape[1] else flat.reshape(1, -1)


def _numbers(moments: Moments, item: ArraySpec) -> dict[str, Any]:
    """An observation's numbers: of all its values, and of each channel or element."""
    parts = moments.summaries()
    inner = "channels" if item.image else "elements"
    about = {"shape": list(item.shape), "dtype": item.dtype, "kind": item.kind, "image": item.image}
    return {**about, "all": moments.total(), inner: parts if len(parts) > 1 or item.image else []}
