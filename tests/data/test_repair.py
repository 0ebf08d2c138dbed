"""repair: what goes into quarantine, what is listed again, kills, live collectors, old folders."""

import gc
import multiprocessing
import shutil
import signal
from pathlib import Path

import pytest

from tests.data.episodes import assert_equal, episode, writer
from tests.data.kills import killed_at, operations
from tests.data.test_shards import contents, filled, single
from tiltyard.data import claims, dataset_file, manifest
from tiltyard.data import folder as layout
from tiltyard.data.folder import read_about, read_episodes
from tiltyard.data.repair import repair
from tiltyard.data.shards import pack
from tiltyard.data.verify import examine
from tiltyard.errors import UseError

OLD = Path(__file__).parents[1] / "old" / "episodes-schema-1"


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def everything(place: Path) -> dict[str, bytes]:
    hidden = (".claims", ".lock", ".packing")
    paths = (path for path in place.rglob("*") if path.is_file() and path.name not in hidden)
    return {path.relative_to(place).as_posix(): path.read_bytes() for path in paths}


def test_sound_dataset_is_left_alone(tmp_path: Path) -> None:
    filled(tmp_path)
    pack(tmp_path, 30_000)
    before = everything(tmp_path)
    found, steps = repair(tmp_path)
    assert steps == [] and found.damages == [] and everything(tmp_path) == before


def test_damaged_file_goes_to_quarantine_and_out_of_the_manifest(tmp_path: Path) -> None:
    before = filled(tmp_path, 4)
    victim = next(entry for entry in manifest.read(tmp_path) if entry.file.endswith(".parquet"))
    flip(tmp_path / victim.file, 40)
    data = (tmp_path / victim.file).read_bytes()
    untouched = everything(tmp_path)
    _, planned = repair(tmp_path, dry_run=True)
    assert everything(tmp_path) == untouched
    _, done = repair(tmp_path)
    assert planned == done and any(victim.file in line for line in done)
    assert (tmp_path / layout.QUARANTINE / victim.file).read_bytes() == data
    assert examine(tmp_path).damages == [] and contents(tmp_path) == {
        k: v for k, v in before.items() if k != victim.key
    }
    made = writer(tmp_path)  # its number is free again
    assert made.commit(victim.episode, [episode(3, 1)])
    made.close()
    assert examine(tmp_path).damages == []


def test_shard_with_a_damaged_member_is_written_again_without_it(tmp_path: Path) -> None:
    before = filled(tmp_path)
    pack(tmp_path, 10**9)
    (shard,) = tmp_path.glob("shards/*.tar")
    victim = list(manifest.read(tmp_path))[3]
    flip(shard, victim.offset + 50)
    flip(shard, 10)  # and a header, which costs no episode
    data = shard.read_bytes()
    found, _ = repair(tmp_path)
    assert [entry.key for entry in found.episodes] == [victim.key]
    assert contents(tmp_path) == {key: sha for key, sha in before.items() if key != victim.key}
    assert (tmp_path / layout.QUARANTINE / "shards" / shard.name).read_bytes() == data
    assert not shard.exists() and len(list(tmp_path.glob("shards/*.tar"))) == 1
    assert examine(tmp_path).damages == []


def test_header_alone_costs_no_episode(tmp_path: Path) -> None:
    before = filled(tmp_path)
    pack(tmp_path, 10**9)
    (shard,) = tmp_path.glob("shards/*.tar")
    flip(shard, 10)
    repair(tmp_path)
    assert contents(tmp_path) == before and examine(tmp_path).damages == [] and not shard.exists()


def test_agent_whose_episode_is_damaged_costs_no_other(tmp_path: Path) -> None:
    made = writer(tmp_path)
    pair = [episode(5, 0, agent="left"), episode(6, 0, agent="right")]
    made.commit(0, pair)
    made.close()
    flip(tmp_path / "episodes/00000/000000000.tar", 600)
    repair(tmp_path)
    (left,) = read_episodes(tmp_path)
    assert_equal(left, pair[1])
    assert examine(tmp_path).damages == [] and single(tmp_path) == []


def test_dataset_file_is_written_from_an_episode(tmp_path: Path) -> None:
    filled(tmp_path, 2)
    before = read_about(tmp_path)
    flip(tmp_path / "dataset.json", 30)
    damaged = (tmp_path / "dataset.json").read_bytes()
    repair(tmp_path)
    after = dataset_file.read(tmp_path)
    assert after is not None and (after.env, after.digest, after.seed, after.spec) == (
        before.env,
        before.digest,
        before.seed,
        before.spec,
    )
    assert after.schema == 2 and after.made[-1]["command"][:3] == ["tiltyard", "data", "repair"]
    assert (tmp_path / layout.QUARANTINE / "dataset.json").read_bytes() == damaged
    dataset_file.create_or_check(tmp_path, before, {"command": ["test"]})


def test_files_of_killed_writers_are_listed_or_put_aside(tmp_path: Path) -> None:
    made = writer(tmp_path)
    for number in range(3):
        made.commit(number, [episode(4, number)])
    (path,) = manifest.files(tmp_path)
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0] + b'{"epis')
    flip(tmp_path / layout.episode_path(2), 60)
    with pytest.raises(UseError, match="while a process writes"):
        repair(tmp_path)
    del made
    gc.collect()
    repair(tmp_path)
    assert sorted(contents(tmp_path)) == [(0, ""), (1, "")] and examine(tmp_path).damages == []
    assert not any(each.name.endswith(manifest.OPEN) for each in manifest.files(tmp_path))
    assert (tmp_path / layout.QUARANTINE / layout.episode_path(2)).exists()


def test_second_copy_of_a_lost_episode_is_used(tmp_path: Path) -> None:
    """A pack was killed before it removed the single files."""
    before = filled(tmp_path, 3)
    files = {file: (tmp_path / file).read_bytes() for file in single(tmp_path)}
    lines = {path: path.read_bytes() for path in manifest.files(tmp_path)}
    pack(tmp_path)
    for path, data in lines.items():
        path.write_bytes(data)
    for file, data in files.items():
        (tmp_path / file).write_bytes(data)
    (shard,) = tmp_path.glob("shards/*.tar")
    flip(shard, next(iter(manifest.read(tmp_path))).offset + 40)
    repair(tmp_path)
    assert contents(tmp_path) == before and examine(tmp_path).damages == []


def test_repair_that_is_killed_anywhere_loses_nothing(tmp_path: Path) -> None:
    start = tmp_path / "start"
    before = filled(start, 7)
    pack(start, 30_000)
    made = writer(start)
    for number in (20, 21):
        made.commit(number, [episode(5, number)])
        before |= {entry.key: entry.sha256 for entry in manifest.read(start) if entry.episode == number}
    made.close()
    one, other = sorted(start.glob("shards/*.tar"))[:2]
    lost = next(entry for entry in manifest.read(start) if entry.file == f"shards/{one.name}")
    flip(one, lost.offset + 60)
    flip(start / "manifests" / f"{other.stem}.jsonl", 30)
    flip(start / layout.episode_path(20), 70)
    flip(start / "dataset.json", 30)
    kept = {key: sha for key, sha in before.items() if key not in (lost.key, (20, ""))}
    broken = {
        name: data
        for name, data in everything(start).items()
        if name in (f"shards/{one.name}", layout.episode_path(20))
    }
    for operation in operations():
        place = tmp_path / str(operation)
        shutil.copytree(start, place)
        killed = killed_at(lambda place=place: repair(place), operation)
        repair(place)
        assert contents(place) == kept and examine(place, wait=0).damages == []
        assert set(broken.values()) <= set(everything(place / layout.QUARANTINE).values())
        shutil.rmtree(place)
        if not killed:
            break
    assert operation > 15


def _claim(place: Path, ready: "multiprocessing.SimpleQueue[bool]") -> None:
    claims.Claims(place).take(77)
    ready.put(True)
    signal.pause()


def test_repair_is_refused_while_a_collector_is_at_work(tmp_path: Path) -> None:
    filled(tmp_path, 2)
    context = multiprocessing.get_context("fork")
    ready: multiprocessing.SimpleQueue[bool] = context.SimpleQueue()
    child = context.Process(target=_claim, args=(tmp_path, ready))
    child.start()
    try:
        ready.get()
        with pytest.raises(UseError, match=f"while process {child.pid} collects"):
            repair(tmp_path)
    finally:
        child.kill()
        child.join()
    assert repair(tmp_path)[1] == []


def test_old_folder_is_repaired(tmp_path: Path) -> None:
    place = tmp_path / "old"
    shutil.copytree(OLD, place)
    before = contents(place)
    flip(place / manifest.OLD, 30)
    assert examine(place, wait=0).damages
    repair(place)
    assert contents(place) == before
    repair(place)  # writes dataset.json, which a folder with manifests has
    assert contents(place) == before and examine(place).damages == []
