"""Read data of other programs, or our own exports, into a dataset.

    tfrecord    our own export: bit for bit                  minari    our own export, or another program's dataset
    npz         our own export, or arrays by their usual names (rollouts.py)
    pickle      records and arrays by their usual names; unpickle.py refuses everything else

Episodes get fixed numbers: their own in our exports, else their place in the source. An import that was killed can be
repeated: it skips what is there. A dataset that was made otherwise is refused, because its numbers mean other episodes.
What the env is comes from the source, or from an env that is probed; an env that only a file names is never made.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tiltyard.config.sections import Env
from tiltyard.data import dataset_file, exchange, manifest, minari_format, rollouts, tfrecord, unpickle
from tiltyard.data.dataset_file import About, about_env
from tiltyard.data.exchange import Recording
from tiltyard.data.rollouts import Rollout
from tiltyard.data.writer import DatasetWriter
from tiltyard.errors import TiltyardError, UseError
from tiltyard.run import atomic
from tiltyard.run.redact import mask_all
from tiltyard.types import Arrays, EnvSpec, Episode

FORMATS = ("minari", "tfrecord", "npz", "pickle")
_SHARD = re.compile(r"(.+)\.tfrecord-(\d{5})-of-(\d{5})")
_UNFIT = (KeyError, TypeError, ValueError, AttributeError)
_OF_THE_ENV = ("env", "env_settings", "env_digest", "dataset_seed")  # in an episode's meta data

Probed = tuple[Env, EnvSpec]
"""The env that the data is of, if the user names it."""


@dataclass
class Imported:
    """What was read. Episodes that were there already are counted in `present` only."""

    out: Path
    format: str
    episodes: int = 0
    steps: int = 0
    present: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass
class _Source:
    """An opened source: what it is of, its episodes by number, and counts for the user's notes."""

    about: About
    groups: Iterator[tuple[int, list[Episode]]]
    meta: Mapping[str, Any] = field(default_factory=dict)
    inexact: int = 0
    repeated: int = 0
    seedless: int = 0

    def notes(self) -> list[str]:
        counts = {
            "action{s} cannot be stored exactly as float32; the nearest is stored": self.inexact,
            "episode{s} without a final observation: the last one is repeated (meta: final_obs)": self.repeated,
            "episode{s} without a seed: a negative one is given": self.seedless,
        }
        return [f"{count:,} {text.format(s='s' if count > 1 else '')}" for text, count in counts.items() if count]


def import_data(
    source: str,
    out: Path,
    *,
    format: str | None = None,
    probed: Probed | None = None,
    command: Sequence[str] = (),
    progress: Callable[[int], None] = lambda done: None,
) -> Imported:
    """Read a source into a new dataset, or continue with one that this import began."""
    kind = format or detect(source)
    place = _place(source, kind)
    files = _files(place, kind)
    origin = mask_all({"source": _name(place), "format": kind, "fingerprint": fingerprint(place, files)})
    there = _begun(out, origin)
    opened = _OPEN[kind](place, files, probed)
    first = next(opened.groups, None)  # before anything is written
    if first is None:
        raise UseError(f"{source} has no episodes", "check the path")
    about = there or dataset_file.create_or_check(
        out, opened.about, dataset_file.provenance(list(command), imported=origin)
    )
    result = Imported(out, kind)
    try:
        _write(out, about, opened, itertools.chain([first], opened.groups), result, progress)
    except UseError as error:  # something is written by now
        done = result.episodes + result.present
        hint = f"{error.hint}; {done:,} {'episode is' if done == 1 else 'episodes are'} in {out}"
        raise TiltyardError(error.message, hint) from error
    result.notes += opened.notes()
    return result


def _write(
    out: Path,
    about: About,
    opened: _Source,
    groups: Iterator[tuple[int, list[Episode]]],
    result: Imported,
    progress: Callable[[int], None],
) -> None:
    listed = set(manifest.read(out).numbers().tolist())  # without files that a killed writer has not listed
    writers: dict[bool, DatasetWriter] = {}
    seen: set[int] = set()
    try:
        for number, episodes in groups:
            if number in seen or number < 0:
                raise TiltyardError(f"the source has episode {number} twice", "remove one of its files")
            seen.add(number)
            if number in listed:
                result.present += 1
                continue
            info = any(each.info for each in episodes)
            if info not in writers:
                writers[info] = DatasetWriter(out, about, opened.meta, save_info=info)
            if writers[info].commit(number, episodes):
                result.episodes += 1
                result.steps += sum(len(each.action) for each in episodes)
            else:
                writers[info].list_existing(number)
                result.present += 1
            progress(result.episodes + result.present)
    finally:
        for writer in writers.values():
            writer.close()


# ---------------------------------------------------------------------------------------------- sources


def detect(source: str) -> str:
    """The format of a source, by the names of its files. UseError if there is none or more than one."""
    path = Path(source)
    if minari_format.find(source) is not None:
        return "minari"
    if not path.exists():
        hint = "give a file, a folder, or the id of a Minari dataset below MINARI_DATASETS_PATH"
        raise UseError(f"there is no {source}", hint)
    if path.is_dir() and ((path / dataset_file.NAME).exists() or manifest.files(path)):
        raise UseError(f"{source} is a dataset already", f"copy it with: tiltyard data merge {source} --out FOLDER")
    found = [kind for kind in ("tfrecord", "npz", "pickle") if _named_files(path, kind)]
    if len(found) != 1:
        what = f"has files of {' and '.join(found)}" if found else "has no files of a known format"
        raise UseError(f"{source} {what}", f"give a file, or --from {'|'.join(FORMATS)}")
    return found[0]


def _place(source: str, kind: str) -> Path:
    place = minari_format.find(source) if kind == "minari" else Path(source)
    if place is None or not place.exists():
        raise UseError(f"there is no {kind} data at {source}", "check the path")
    return place


def _name(place: Path) -> str:
    """How messages and meta data call a source."""
    place = atomic.absolute(place)
    return place.parent.name if (place / minari_format.METADATA).is_file() and place.name == "data" else place.name


def _named_files(place: Path, kind: str) -> list[Path]:
    """The files of a format: a file itself, or all in a folder, by name."""
    files = [place] if place.is_file() else sorted(path for path in place.iterdir() if path.is_file())
    if kind == "tfrecord":
        return [path for path in files if ".tfrecord" in path.name]
    suffixes = unpickle.SUFFIXES if kind == "pickle" else (".npz",)
    return [path for path in files if path.suffix in suffixes and not path.name.startswith(".")]


def _files(place: Path, kind: str) -> list[Path]:
    if kind == "minari":
        return sorted(path for path in place.rglob("*") if path.is_file())
    files = [place] if place.is_file() else _named_files(place, kind)
    if not files:
        raise UseError(f"{place} has no {kind} files", f"give a file, or --from {'|'.join(FORMATS)}")
    if kind == "tfrecord" and place.is_dir():
        _require_all_shards(place, files)
    return files


def _require_all_shards(place: Path, files: list[Path]) -> None:
    found = [match for path in files if (match := _SHARD.fullmatch(path.name))]
    sets = {(match[1], int(match[3])) for match in found}
    if len(found) < len(files) or len(sets) > 1:
        raise UseError(f"{place} has TFRecord files of more than one set", "give a folder with one set, or a file")
    ((name, count),) = sets
    missing = set(range(count)) - {int(match[2]) for match in found}
    if missing:
        shard = tfrecord.shard_name(name, min(missing), count)
        raise UseError(f"{place} lacks {shard} ({len(missing)} of {count} files are missing)", "copy it there")


def fingerprint(place: Path, files: Sequence[Path]) -> str:
    """A hash of the names and sizes of a source's files."""
    names = [(os.path.relpath(path, place), path.stat().st_size) for path in files]
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()[:16]


def _begun(out: Path, origin: Mapping[str, Any]) -> About | None:
    """The dataset if it was begun by the same import; None if there is none. UseError for any other dataset."""
    there = dataset_file.read(out) if out.is_dir() else None
    if there is None:
        # A killed import may have left hidden files only.
        if out.exists() and not (out.is_dir() and all(path.name.startswith(".") for path in out.iterdir())):
            raise UseError(f"{out} exists already", "give a new folder with --out")
        return None
    if [entry.get("imported") for entry in there.made] != [dict(origin)]:
        hint = f"give a new folder, then join both with: tiltyard data merge {out} NEW --out FOLDER"
        raise UseError(f"{out} is a dataset already, and not of this import", hint)
    return there


# ---------------------------------------------------------------------------------------------- our own exports


def _open_tfrecord(place: Path, files: list[Path], probed: Probed | None) -> _Source:
    def found() -> Iterator[tuple[Mapping[str, Any], Recording, str]]:
        for path in files:
            for index, data in enumerate(tfrecord.records(path)):
                yield *_from_example(data, f"record {index} of {path}"), f"record {index} of {path}"

    return _own(found(), place, probed)


def _from_example(data: bytes, where: str) -> tuple[Mapping[str, Any], Recording]:
    try:
        features = tfrecord.decode_example(data)
    except ValueError as error:
        raise UseError(f"{where} is not a tf.train.Example: {error}", "only our own export can be read") from None
    if not isinstance(features.get(exchange.FACTS), bytes):
        names = ", ".join(sorted(features)[:12])
        hint = "only `tiltyard data export --to tfrecord` writes records that can be read; use npz for other data"
        raise UseError(f"{where} is another program's: it has the features {names}", hint)
    try:
        facts = json.loads(features[exchange.FACTS])  # type: ignore[arg-type]
        arrays = {name: _array(features[name], saved) for name, saved in facts["arrays"].items()}
        return facts, exchange.restored(facts, arrays)
    except _UNFIT as error:
        raise TiltyardError(f"{where} is damaged: {type(error).__name__}: {error}", "export it again") from error


def _array(feature: tfrecord.Feature, saved: Mapping[str, Any]) -> Any:
    dtype = np.dtype(saved["dtype"])
    if dtype.kind not in "biuf":
        raise ValueError(f"unknown dtype {dtype}")
    flat = np.frombuffer(feature, dtype.newbyteorder("<")) if isinstance(feature, bytes) else np.asarray(feature)
    return flat.astype(dtype).reshape(saved["shape"])


def _own(found: Iterator[tuple[Mapping[str, Any], Recording, str]], place: Path, probed: Probed | None) -> _Source:
    """A source whose recordings have facts; the first one says what the dataset is."""
    first = next(found, None)
    if first is None:
        raise UseError(f"{place} has no episodes", "check the path")
    try:
        about = exchange.about_in(first[0], str(place))
    except _UNFIT as error:
        raise TiltyardError(f"{first[2]} is damaged: {error}", "export it again") from error
    about = _checked(about, probed, place)

    def groups() -> Iterator[tuple[int, list[Episode]]]:
        together = itertools.groupby(itertools.chain([first], found), key=lambda each: each[1].number)
        for number, same in together:
            episodes = []
            for facts, recording, where in same:
                if facts["spec"] != first[0]["spec"]:
                    raise UseError(f"{where} is of another env than {first[2]}", "import one env at a time")
                episodes.append(_without_env(recording.episode) if probed else recording.episode)
            yield number, episodes

    return _Source(about, groups())


def _checked(about: About, probed: Probed | None, place: Path) -> About:
    """What the source says, or the env that the user names, if it has the same observations and actions."""
    if probed is None:
        return replace(about, created=atomic.now())
    env, spec = probed
    if (spec.obs, spec.action) != (about.spec.obs, about.spec.action):
        message = f"{place} is of {about.env_id}, whose observations or actions differ from those of {env.id}"
        raise UseError(message, "leave out --env, or give the env that was recorded")
    return about_env(env, spec, seed=about.seed)


def _without_env(episode: Episode) -> Episode:
    return replace(episode, meta={name: value for name, value in episode.meta.items() if name not in _OF_THE_ENV})


# ---------------------------------------------------------------------------------------------- other programs


def _open_npz(place: Path, files: list[Path], probed: Probed | None) -> _Source:
    first = _load_npz(files[0])
    if exchange.FACTS not in first:
        return _foreign(place, files, probed, _load_npz)

    def found() -> Iterator[tuple[Mapping[str, Any], Recording, str]]:
        for path in files:
            arrays = _load_npz(path)
            try:
                facts = json.loads(arrays[exchange.FACTS].tobytes())
                yield facts, exchange.restored(facts, arrays), str(path)
            except _UNFIT as error:
                raise TiltyardError(f"{path} is damaged: {type(error).__name__}: {error}", "export it again") from error

    return _own(found(), place, probed)


def _load_npz(path: Path) -> Arrays:
    try:
        with path.open("rb") as file:
            is_zip = file.read(2) == b"PK"
        if not is_zip:
            raise UseError(f"{path} is not an npz file", "give a file that numpy.savez wrote, or another --from")
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except UseError:
        raise
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zipfile.LargeZipFile, MemoryError) as error:
        hint = "arrays of objects are refused" if "pickle" in str(error) else "restore it from a copy"
        reason = "it contains arrays of objects" if "pickle" in str(error) else error
        raise TiltyardError(f"{path} is not a readable npz file: {reason}", hint) from None
    except Exception as error:  # noqa: BLE001 - zlib.error and whatever else a damaged archive leads to
        raise TiltyardError(f"{path} is not a readable npz file: {error}", "restore it from a copy") from None


def _open_pickle(place: Path, files: list[Path], probed: Probed | None) -> _Source:
    return _foreign(place, files, probed, unpickle.read)


def _foreign(place: Path, files: list[Path], probed: Probed | None, load: Callable[[Path], Any]) -> _Source:
    def found() -> Iterator[tuple[str, Rollout]]:
        for path in files:
            for rollout in rollouts.rollouts_in(load(path), str(path)):
                yield str(path), rollout

    if probed is None:  # all files are read twice: the largest action counts
        about = About({"id": "unknown"}, rollouts.spec_of(found()), created=atomic.now())
    else:
        about = about_env(*probed)
    numbered = ((number, where, each) for number, (where, each) in enumerate(found()))
    return _fitted(about, numbered, {"imported_from": _name(place)})


def _open_minari(place: Path, files: list[Path], probed: Probed | None) -> _Source:
    reader = minari_format.Reader(place)
    about = replace(reader.about, created=atomic.now()) if probed is None else about_env(*probed)
    named = ((number, f"episode {index} of {place}", each) for index, (number, each) in enumerate(reader))
    return _fitted(about, named, {} if reader.own else {"imported_from": _name(place)}, drop_env=probed is not None)


def _fitted(
    about: About, found: Iterator[tuple[int, str, Rollout]], meta: Mapping[str, Any], *, drop_env: bool = False
) -> _Source:
    """A source whose episodes are fitted to the spec. `drop_env` removes what their meta data say about the env."""
    source = _Source(about, iter(()), meta)

    def groups() -> Iterator[tuple[int, list[Episode]]]:
        for number, same in itertools.groupby(found, key=lambda each: each[0]):
            episodes = []
            for _, where, rollout in same:
                episode, inexact = rollouts.to_episode(rollout, about.spec, number, where)
                source.inexact += inexact
                source.repeated += rollouts.FINAL in rollout.meta
                source.seedless += rollout.seed is None
                episodes.append(_without_env(episode) if drop_env else episode)
            yield number, episodes

    source.groups = groups()
    return source


_OPEN: dict[str, Callable[[Path, list[Path], Probed | None], _Source]] = {
    "tfrecord": _open_tfrecord,
    "npz": _open_npz,
    "pickle": _open_pickle,
    "minari": _open_minari,
}
