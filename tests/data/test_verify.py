"""verify: what is sound, which place it names, and what live writers and packs may do meanwhile."""

import fcntl
import gc
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.data.episodes import episode, new_dataset, writer
from tiltyard.data import claims, manifest, verify
from tiltyard.data import folder as layout
from tiltyard.data.manifest import Damage
from tiltyard.data.shards import pack
from tiltyard.data.verify import examine
from tiltyard.errors import UseError
from tiltyard.run import atomic

OLD = Path(__file__).parents[1] / "old" / "episodes-schema-1"


def filled(place: Path, episodes: int = 3, steps: int = 150) -> list[manifest.Entry]:
    made = writer(place)
    for number in range(episodes):
        made.commit(number, [episode(steps, number)])
    made.close()
    return list(manifest.read(place))


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_sound_datasets_have_no_damage(tmp_path: Path) -> None:
    new_dataset(tmp_path / "empty")
    assert examine(tmp_path / "empty").damages == []
    entries = filled(tmp_path / "full")
    found = examine(tmp_path / "full")
    assert found.damages == [] and found.bytes == sum(entry.bytes for entry in entries)
    assert examine(OLD).damages == []


def test_row_group_of_a_damaged_page_is_named(tmp_path: Path) -> None:
    entry = filled(tmp_path)[1]
    opened = layout.open_episode(tmp_path, entry)
    column = opened._file.metadata.row_group(1).column(1)
    flip(tmp_path / entry.file, column.data_page_offset + column.total_compressed_size - 5)
    (damage,) = examine(tmp_path).damages
    assert damage == Damage(entry.file, "row group 1", "its checksum differs from the manifest", "episode 1")
    assert str(damage) == f"{entry.file}, row group 1, episode 1: its checksum differs from the manifest"


def test_damage_in_the_footer_size_and_missing_files_are_named(tmp_path: Path) -> None:
    one, two, three = filled(tmp_path)
    flip(tmp_path / one.file, one.bytes - 1)
    (tmp_path / two.file).write_bytes((tmp_path / two.file).read_bytes() + b"x")
    (tmp_path / three.file).unlink()
    found = {each.file: (each.place, each.what) for each in examine(tmp_path).damages}
    assert found[one.file] == ("footer", "its checksum differs from the manifest")
    assert found[two.file] == ("", f"its size is {two.bytes + 1:,} instead of {two.bytes:,} bytes")
    assert found[three.file] == ("", "is missing")


def test_structure_of_a_shard_is_checked(tmp_path: Path) -> None:
    filled(tmp_path, steps=3)
    pack(tmp_path)
    (shard,) = (tmp_path / layout.SHARDS).iterdir()
    whole, entries = shard.read_bytes(), list(manifest.read(tmp_path))
    cases = {
        0: ("tar header", "episode 0"),
        entries[1].offset - 3: ("tar header", "episode 1"),
        entries[1].offset + entries[1].bytes: ("padding after the episode", "episode 1"),
        len(whole) - 1: ("end", ""),
        len(whole) - 1024: ("end", ""),
    }
    for place, expected in cases.items():
        flip(shard, place)
        (damage,) = examine(tmp_path).damages
        assert (damage.place, damage.episode) == expected
        shard.write_bytes(whole)
    shard.write_bytes(whole + bytes(512))
    assert [each.file for each in examine(tmp_path).damages] == [f"shards/{shard.name}"]


@pytest.mark.parametrize("kind", ["value", "cut", "case", "schema", "missing"])
def test_damaged_dataset_file_is_named(tmp_path: Path, kind: str) -> None:
    filled(tmp_path, 1)
    path = tmp_path / "dataset.json"
    text = path.read_text()
    changed = {
        "value": text.replace("CartPole", "CartPule"),
        "cut": text[:-1],
        "case": text.replace('"seed": 3', '"seed" : 3'),
        "schema": text.replace('"schema": 2', '"schema": 3'),
    }
    if kind == "missing":
        path.unlink()
    else:
        assert changed[kind] != text
        path.write_text(changed[kind])
    assert [each.file for each in examine(tmp_path).damages] == ["dataset.json"]


def test_newer_schema_is_refused(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    atomic.write_sealed(tmp_path / "dataset.json", {"schema": 3, "more": 1})
    with pytest.raises(UseError, match="newer Tiltyard"):
        examine(tmp_path)


def test_cut_manifest_is_named_although_every_line_is_sound(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    (path,) = manifest.files(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]))
    found = examine(tmp_path, wait=0)
    assert {each.file for each in found.damages} == {f"manifests/{path.name}", layout.episode_path(2)}
    path.write_bytes(b"".join(lines[:3]))  # only the seal
    assert [str(each) for each in examine(tmp_path).damages] == [
        f"manifests/{path.name}, last line: the seal is missing"
    ]


def test_line_of_one_agent_that_is_lost_is_noticed(tmp_path: Path) -> None:
    made = writer(tmp_path)
    made.commit(0, [episode(3, 0, agent="left"), episode(3, 0, agent="right")])
    (path,) = manifest.files(tmp_path)
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    (damage,) = examine(tmp_path, wait=0).damages
    assert (damage.file, damage.place) == ("episodes/00000/000000000.tar", "000000000.1.parquet")
    del made
    gc.collect()
    with pytest.warns(UserWarning, match="episodes taken from their files: 1"):
        assert [entry.agent for entry in layout.read_manifest(tmp_path)] == ["left", "right"]


def test_file_that_a_live_writer_has_not_listed_yet_is_no_damage(tmp_path: Path) -> None:
    entry = filled(tmp_path, 2)[1]
    (path,) = manifest.files(tmp_path)
    manifest.write_sealed(path, list(manifest.read(tmp_path))[:1])
    assert [each.file for each in examine(tmp_path, wait=0).damages] == [entry.file]

    late = threading.Timer(0.3, manifest.write_sealed, (tmp_path / "manifests" / "late-0000.jsonl", [entry]))
    late.start()
    assert examine(tmp_path, wait=60).damages == []
    late.join()


def _claim(place: Path, number: int, ready: "multiprocessing.SimpleQueue[bool]") -> None:
    claims.Claims(place).take(number)
    ready.put(True)
    signal.pause()


def test_claims_of_other_processes_are_seen_and_their_files_left_alone(tmp_path: Path) -> None:
    entries = filled(tmp_path, 2)
    (path,) = manifest.files(tmp_path)
    manifest.write_sealed(path, entries[:1])
    assert claims.holder(tmp_path) is None
    context = multiprocessing.get_context("fork")
    ready: multiprocessing.SimpleQueue[bool] = context.SimpleQueue()
    child = context.Process(target=_claim, args=(tmp_path, 1, ready))
    child.start()
    try:
        ready.get()
        assert claims.holder(tmp_path) == claims.holder(tmp_path, 1) == child.pid
        assert claims.holder(tmp_path, 0) is None
        assert examine(tmp_path, wait=0).damages == []
        with claims.Claims(tmp_path) as mine:
            assert not mine.take_all() and mine.take(0)
    finally:
        child.kill()
        child.join()
    assert [each.episode for each in examine(tmp_path, wait=0).damages] == ["episode 1"]
    with claims.Claims(tmp_path) as mine:
        assert mine.take_all()


def test_open_manifest_is_live_as_long_as_its_writer(tmp_path: Path) -> None:
    made = writer(tmp_path)
    (path,) = manifest.files(tmp_path)
    assert manifest.is_live(path) and manifest.abandoned(tmp_path) == []
    made.commit(0, [episode(3, 0)])
    del made
    gc.collect()
    assert manifest.abandoned(tmp_path) == [path] and examine(tmp_path).damages == []
    writer(tmp_path).close()
    assert manifest.files(tmp_path) == [path]  # the second has written nothing
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert manifest.is_live(path)


def _pack_when_told(place: Path, told: "multiprocessing.SimpleQueue[bool]") -> None:
    told.get()
    for size in (200_000, 100_000):
        pack(place, size)
    os._exit(0)


def test_dataset_that_is_packed_meanwhile_is_sound(tmp_path: Path) -> None:
    """Readers with the manifest from before find the episodes, too."""
    entries = filled(tmp_path, 30, steps=20)
    context = multiprocessing.get_context("fork")
    told: multiprocessing.SimpleQueue[bool] = context.SimpleQueue()
    child = context.Process(target=_pack_when_told, args=(tmp_path, told))
    child.start()
    told.put(True)
    while child.is_alive():
        assert examine(tmp_path).damages == []
        assert len(layout.read_manifest(tmp_path)) == 30
        time.sleep(0.001)
    assert child.exitcode == 0 and not (tmp_path / entries[0].file).exists()
    rng = np.random.default_rng(0)
    for index in rng.permutation(30):
        assert layout.open_episode(tmp_path, entries[index]).about["seed"] == index
    assert verify.examine(tmp_path).damages == []
