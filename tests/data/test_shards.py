"""pack: the same episodes in any number of shards, next to collectors, after kills, and by one process at a time."""

import gc
import multiprocessing
import random
import shutil
import tarfile
from collections import Counter
from pathlib import Path

import pytest

from tests.counts import LONG, count
from tests.data.episodes import assert_equal, episode, new_dataset, writer
from tests.data.kills import killed_at, operations
from tiltyard.data import folder as layout
from tiltyard.data import manifest, shards
from tiltyard.data.claims import Claims
from tiltyard.data.folder import read_episodes, read_manifest
from tiltyard.data.partition import part
from tiltyard.data.shards import pack
from tiltyard.data.verify import examine
from tiltyard.errors import TiltyardError, UseError
from tiltyard.run import mutex


def filled(place: Path, episodes: int = 12, seed: int = 0) -> dict[tuple[int, str], str]:
    """A dataset of episodes of different lengths, some with two agents; their checksums."""
    rng, made = random.Random(seed), writer(place)
    for number in range(episodes):
        agents = ["left", "right"] if rng.random() < 0.3 else [""]
        made.commit(number, [episode(rng.randrange(1, 30), number, **({"agent": a} if a else {})) for a in agents])
        if number % 5 == 4:
            made.close()
            made = writer(place)
    made.close()
    return contents(place)


def contents(place: Path) -> dict[tuple[int, str], str]:
    """Checksums of all episodes, as they can be read."""
    found = {}
    for entry in read_manifest(place):
        layout.read_bytes(place, entry)
        found[entry.key] = entry.sha256
    return found


def single(place: Path) -> list[str]:
    return [file for file in layout.files_on_disk(place) if file.startswith(layout.EPISODES)]


def test_packed_episodes_are_identical(tmp_path: Path) -> None:
    before = filled(tmp_path)
    episodes = list(read_episodes(tmp_path))
    done = pack(tmp_path, 30_000)
    assert done.episodes == len(before) == len(episodes) and done.shards > 1 and done.skipped == []
    assert contents(tmp_path) == before and single(tmp_path) == []
    for one, other in zip(read_episodes(tmp_path), episodes, strict=True):
        assert_equal(one, other)
    assert {path.name[:6] for path in manifest.files(tmp_path)} == {"shard-"}
    assert examine(tmp_path).damages == [] and done.removed == 12
    again = pack(tmp_path, 30_000)
    assert (again.shards, again.episodes, again.removed) == (0, 0, 0)


def test_shard_is_a_tar_of_the_files(tmp_path: Path) -> None:
    made = writer(tmp_path)
    made.commit(0, [episode(3, 0)])
    made.commit(1, [episode(3, 1, agent="a"), episode(4, 1, agent="b")])
    made.close()
    alone = (tmp_path / layout.episode_path(0)).read_bytes()
    pack(tmp_path)
    (path,) = (tmp_path / layout.SHARDS).iterdir()
    with tarfile.open(path) as tar:
        assert tar.getnames() == ["000000000.parquet", "000000001.0.parquet", "000000001.1.parquet"]
        inside = tar.extractfile("000000000.parquet")
        assert inside is not None and inside.read() == alone


def test_any_number_of_shards_and_parts_gives_the_same_samples(tmp_path: Path) -> None:
    rng = random.Random(1)
    for case in range(count(60)):
        place = tmp_path / str(case)
        before = filled(place, rng.randrange(1, 9), seed=case)
        size = rng.choice([1, 3_000, 20_000, 50_000, 10**9])
        pack(place, size)
        if rng.random() < 0.5:
            made = writer(place)
            made.commit(100, [episode(4, 100)])
            made.close()
            before |= {entry.key: entry.sha256 for entry in manifest.read(place) if entry.episode == 100}
            pack(place, rng.choice([1, 10**9]))
        known, parts = read_manifest(place), rng.randrange(1, 12)
        split = Counter(known.entry(row).sha256 for index in range(parts) for row in part(len(known), parts, index))
        assert split == Counter(before.values()) and examine(place).damages == []
        sizes = [path.stat().st_size for path in (place / layout.SHARDS).iterdir()]
        largest = max(entry.bytes for entry in known)
        assert size == 1 or max(sizes) <= 2 * size + 2 * largest + 3072


def test_pack_that_is_killed_anywhere_loses_nothing_and_is_continued(tmp_path: Path) -> None:
    start = tmp_path / "start"
    before = filled(start, 6)
    leftovers = Counter[str]()
    for operation in operations():
        place = tmp_path / str(operation)
        shutil.copytree(start, place)
        killed = killed_at(lambda place=place: pack(place, 20_000), operation)
        assert contents(place) == before and examine(place, wait=0).damages == []
        leftovers["shard without manifest"] += len(list(place.glob("shards/*.tar"))) > len(
            list(place.glob("manifests/shard-*"))
        )
        leftovers["file and shard"] += bool(single(place)) and bool(list(place.glob("manifests/shard-*")))
        made = writer(place)
        assert all(made.exists(number) for number in range(6)) and not made.exists(6)
        made.close()
        pack(place, 20_000)
        assert contents(place) == before and single(place) == [] and examine(place, wait=0).damages == []
        assert all(path.name.startswith("shard-") for path in manifest.files(place))
        shutil.rmtree(place)
        if not killed:
            break
    assert operation > 15
    assert not LONG or all(leftovers.values())


def _collect(place: Path, start: int, step: int, episodes: int) -> None:
    made = writer(place)
    with Claims(place) as claims:
        for number in range(start, episodes, step):
            if claims.take(number):
                if not made.exists(number):
                    assert made.commit(number, [episode(10, number)])
                claims.release(number)
    made.close()


def test_packs_next_to_collectors_lose_and_repeat_nothing(tmp_path: Path) -> None:
    new_dataset(tmp_path)
    context, total = multiprocessing.get_context("fork"), 10 * count(60)
    # Both come to every number, so that the second must see what was packed.
    children = [context.Process(target=_collect, args=(tmp_path, 0, 1, total)) for _ in range(2)]
    for child in children:
        child.start()
    while any(child.is_alive() for child in children):
        pack(tmp_path, 50_000)
        numbers = [entry.episode for entry in read_manifest(tmp_path)]
        assert len(numbers) == len(set(numbers))
    for child in children:
        child.join()
        assert child.exitcode == 0
    pack(tmp_path, 10**9)
    found = [each.seed for each in read_episodes(tmp_path)]
    lines = [
        entry.episode
        for path in manifest.files(tmp_path)
        for entry in manifest.Manifest(manifest.read_file(path, path.name)[0])
    ]
    assert found == list(range(total)) and examine(tmp_path).damages == []
    assert sorted(lines) == list(range(total)) and single(tmp_path) == []


def test_manifest_of_a_live_writer_stays(tmp_path: Path) -> None:
    made = writer(tmp_path)
    made.commit(0, [episode(3, 0)])
    pack(tmp_path)
    assert sum(path.name.endswith(manifest.OPEN) for path in manifest.files(tmp_path)) == 1
    assert made.commit(1, [episode(3, 1)]) and not made.commit(0, [episode(9, 0)])
    assert sorted(contents(tmp_path)) == [(0, ""), (1, "")]
    del made
    gc.collect()
    pack(tmp_path)
    assert {path.name[:6] for path in manifest.files(tmp_path)} == {"shard-"} and len(contents(tmp_path)) == 2


def test_damaged_episode_is_not_packed(tmp_path: Path) -> None:
    filled(tmp_path, 4)
    victim = next(entry for entry in manifest.read(tmp_path))
    data = bytearray((tmp_path / victim.file).read_bytes())
    data[victim.offset + 30] ^= 1
    (tmp_path / victim.file).write_bytes(data)
    done = pack(tmp_path)
    assert len(done.skipped) == 1 and "is damaged" in done.skipped[0]
    assert single(tmp_path) == [victim.file] and (tmp_path / victim.file).read_bytes() == data


def test_two_packs_exclude_each_other(tmp_path: Path) -> None:
    filled(tmp_path, 2)
    with mutex.hold(tmp_path / shards.LOCK), pytest.raises(mutex.MutexHeld, match="locked by pid"):
        pack(tmp_path)
    assert len(single(tmp_path)) == 2


def test_shard_that_lost_its_manifest_is_not_removed(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    pack(tmp_path)
    (tmp_path / "manifests" / next(tmp_path.glob("manifests/shard-*")).name).unlink()
    with pytest.raises(TiltyardError, match="has no manifest"):
        pack(tmp_path)
    assert len(list(tmp_path.glob("shards/*.tar"))) == 1 and examine(tmp_path, wait=0).damages


def test_old_folder_is_not_packed(tmp_path: Path) -> None:
    place = tmp_path / "old"
    shutil.copytree(Path(__file__).parents[1] / "old" / "episodes-schema-1", place)
    with pytest.raises(UseError, match="from before datasets"):
        pack(place)
