"""Random damage to any file of a dataset: verify names it, readers keep the rest, repair leaves a sound dataset."""

import gc
import hashlib
import io
import json
import random
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.counts import count
from tests.data.episodes import episode, writer
from tiltyard.data import folder as layout
from tiltyard.data import manifest
from tiltyard.data.folder import open_episode, read_about, read_manifest
from tiltyard.data.loader import Dataset
from tiltyard.data.manifest import Damage, Entry
from tiltyard.data.repair import repair
from tiltyard.data.shards import pack
from tiltyard.data.verify import examine
from tiltyard.errors import TiltyardError

Key = tuple[int, str]
REPAIRED = 8  # every so many damages are repaired


@dataclass
class Sample:
    """A dataset with all kinds of files, and what it holds."""

    folder: Path
    files: dict[str, bytes]
    entries: dict[Key, Entry]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """Two shards, files of one and of two agents, sealed manifests, and one of a writer that was killed."""
    place = tmp_path_factory.mktemp("sample")
    made = writer(place)
    for number in range(4):
        made.commit(number, [episode(130 if number == 1 else 5, number)])
    made.commit(4, [episode(4, 4, agent="left"), episode(6, 4, agent="right")])
    made.close()
    pack(place, 40_000)
    for numbers, closed in (((5, 6), True), ((8, 9), False)):
        made = writer(place)
        for number in numbers:
            made.commit(number, [episode(70, number)])
        made.commit(numbers[0] + 2, [episode(3, 7, agent="left"), episode(4, 7, agent="right")])
        if closed:
            made.close()
    del made
    gc.collect()
    files = {path.relative_to(place).as_posix(): path.read_bytes() for path in _data_files(place)}
    names = sorted(Path(name).parent.name + Path(name).suffix for name in files)
    assert names.count("shards.tar") >= 2 and names.count("00000.parquet") == 4 and names.count("00000.tar") == 2
    assert sum(name.endswith(manifest.OPEN) for name in files) == 1
    entries = {entry.key: entry for entry in manifest.read(place)}
    assert len(entries) == 14 and not examine(place, wait=0).damages
    return Sample(place, files, entries)


def _data_files(place: Path) -> list[Path]:
    hidden = (".claims", ".lock", ".packing")
    return [path for path in sorted(place.rglob("*")) if path.is_file() and path.name not in hidden]


def _truncate(data: bytes, rng: random.Random) -> tuple[bytes, range]:
    """Cut at any byte, to nothing, or after a line; and the bytes that are gone."""
    breaks = [index + 1 for index, byte in enumerate(data[:-1]) if byte == 10]
    size = rng.choice([0, rng.randrange(len(data)), rng.randrange(len(data)), rng.choice(breaks or [0])])
    return data[:size], range(size, len(data))


def _flip(data: bytes, rng: random.Random) -> tuple[bytes, range]:
    place = rng.randrange(len(data))
    changed = bytearray(data)
    changed[place] ^= 1 << rng.randrange(8)
    return bytes(changed), range(place, place + 1)


def _hit(sample: Sample, name: str, gone: range) -> set[Key]:
    """The episodes whose own bytes are damaged."""
    inside = [entry for entry in sample.entries.values() if entry.file == name]
    return {each.key for each in inside if each.offset < gone.stop and gone.start < each.offset + each.bytes}


def _row_group(sample: Sample, entry: Entry, byte: int) -> int | None:
    """The row group to which a byte of an episode belongs; None for the footer and the magic bytes."""
    content = sample.files[entry.file][entry.offset : entry.offset + entry.bytes]
    known = pq.read_metadata(io.BytesIO(content))
    for index in range(known.num_row_groups):
        columns = [known.row_group(index).column(column) for column in range(known.num_columns)]
        end = columns[-1].data_page_offset + columns[-1].total_compressed_size
        if columns[0].data_page_offset <= byte - entry.offset < end:
            return index
    return None


def _check_names(sample: Sample, name: str, gone: range, hit: set[Key], damages: list[Damage]) -> None:
    """Verify names the damaged file and its episodes, and nothing else."""
    assert damages, "the damage was not found"
    named = [each for each in damages if each.file == name]
    flipped = len(gone) == 1 and gone.stop < len(sample.files[name])
    if not name.startswith(manifest.FOLDER):
        assert {each.file for each in damages} == {name}
        assert {each.episode for each in named if each.episode} >= {sample.entries[key].name for key in hit}
    elif name.endswith(manifest.OPEN) and not flipped:
        # A killed writer leaves the same. What it did not list is named, and a torn line.
        kept = sample.files[name][: gone.start]
        assert bool(named) == (not kept.endswith(b"\n") and bool(kept))
        lost = [json.loads(line) for line in sample.files[name].splitlines()[kept.count(b"\n") :]]
        assert {each.file for each in damages if each not in named} == {line["file"] for line in lost}
        assert {each.episode for each in damages if each not in named} == {
            f"episode {each['episode']}" for each in lost
        }
    else:
        assert named
    if flipped and hit:
        (key,), (damage,) = hit, named
        group = _row_group(sample, sample.entries[key], gone.start)
        assert damage.episode == sample.entries[key].name
        if group is not None:
            assert damage.place in (f"row group {group}", "footer or page headers")


def _readable(sample: Sample, place: Path, hit: set[Key]) -> None:
    """All other episodes can be read, and are identical."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        known = {entry.key: entry for entry in read_manifest(place)}
        assert read_about(place).env_id == "CartPole-v1" and read_about(place).seed == 3
    for key, entry in sample.entries.items():
        if key not in hit:
            assert known[key].sha256 == entry.sha256
            assert open_episode(place, known[key]).rows == entry.rows


def _loadable(sample: Sample, hit: set[Key]) -> None:
    """`Dataset` gives all other episodes, and an error for each that is damaged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = Dataset(sample.folder)
    assert len(dataset) == len(sample.entries)
    for index, entry in enumerate(dataset.manifest):
        if entry.key in hit:
            with pytest.raises(TiltyardError, match=r"damaged|checksum|size"):
                dataset.episode(index)
        else:
            assert len(dataset.episode(index).action) == entry.length


@pytest.mark.parametrize(("change", "seed"), [(_truncate, 1), (_flip, 2)], ids=["truncation", "bit flip"])
def test_every_damage_is_found_named_survived_and_repaired(
    sample: Sample, tmp_path: Path, change: Callable[[bytes, random.Random], tuple[bytes, range]], seed: int
) -> None:
    rng = random.Random(seed)
    kinds = [
        [name for name in sample.files if name.startswith(start) and name.endswith(end)]
        for start in ("shards", "episodes", "manifests", "dataset.json")
        for end in ("tar", "parquet", "jsonl", "json")
    ]
    kinds = [names for names in kinds if names]
    for number in range(count(1000)):
        name = rng.choice(rng.choice(kinds))
        data, gone = change(sample.files[name], rng)
        path = sample.folder / name
        path.write_bytes(data)
        what = f"damage {number}: {name}, bytes {gone}"
        try:
            hit = _hit(sample, name, gone)
            found = examine(sample.folder, wait=0)
            _check_names(sample, name, gone, hit, found.damages)
            _readable(sample, sample.folder, hit)
            if number % REPAIRED == 0:
                _loadable(sample, hit)
                place = tmp_path / str(number)
                shutil.copytree(sample.folder, place)
                repair(place)
                assert examine(place, wait=0).damages == []
                _readable(sample, place, hit)
                assert set(manifest.read(place).numbers()) <= {key[0] for key in sample.entries}
                assert {entry.key for entry in manifest.read(place)} == sample.entries.keys() - hit
                kept = [hashlib.sha256(each.read_bytes()).digest() for each in (place / layout.QUARANTINE).rglob("*.*")]
                assert hashlib.sha256(data).digest() in kept or name.endswith(manifest.OPEN)
                shutil.rmtree(place)
        except Exception as error:
            error.add_note(what)
            raise
        finally:
            path.write_bytes(sample.files[name])
