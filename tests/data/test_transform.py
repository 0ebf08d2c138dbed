"""Split, merge and filter: no sample is lost or doubled, bytes are unchanged, killed commands are completed exactly."""

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from tests.counts import count
from tests.data.episodes import assert_equal, episode, new_dataset, writer
from tiltyard.data import dataset_file, manifest
from tiltyard.data.claims import Claims
from tiltyard.data.conditions import parse
from tiltyard.data.folder import EPISODES, read_bytes, read_episodes, read_manifest, to_tar
from tiltyard.data.split import is_validation
from tiltyard.data.transform import (
    _COPYING,
    Command,
    Result,
    filter_dataset,
    merge_datasets,
    split_dataset,
)
from tiltyard.errors import TiltyardError, UseError
from tiltyard.run.mutex import MutexHeld

OLD = Path(__file__).parents[1] / "old" / "episodes-schema-1"
COMMAND = Command(["tiltyard", "data", "test"])


def fill(folder: Path, seeds: Iterable[int], **meta: str) -> Path:
    """A dataset with short episodes of these seeds, added after those it has."""
    made = writer(folder, **meta)
    for seed in seeds:
        made.append([episode(1 + seed % 4, seed)])
    made.close()
    return folder


def checksums(*folders: Path) -> Counter[str]:
    """All episodes, as often as they are there; each is compared with its bytes."""
    found: Counter[str] = Counter()
    for folder in folders:
        for entry in read_manifest(folder):
            assert hashlib.sha256(read_bytes(folder, entry)).hexdigest() == entry.sha256
            found[entry.sha256] += 1
    return found


def listing(folder: Path) -> list[tuple[int, str, str]]:
    return [(entry.episode, entry.agent, entry.sha256) for entry in read_manifest(folder)]


def every_file(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def split(folder: Path, share: float, name: str = "") -> tuple[Path, Path, list[Result]]:
    train, validation = folder.parent / f"{folder.name}{name}-t", folder.parent / f"{folder.name}{name}-v"
    return train, validation, split_dataset(folder, share, (train, validation), COMMAND)


# ---------------------------------------------------------------------------------------------- properties


def test_parts_and_unions_have_exactly_the_samples_of_their_sources(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for trial in range(count(20)):
        root = tmp_path / str(trial)
        seeds = rng.permutation(200)[: int(rng.integers(2, 30))].tolist()
        one = fill(root / "one", seeds)
        share = float(rng.uniform(0, 1))
        train, validation, results = split(one, share)
        assert checksums(train) + checksums(validation) == checksums(one)
        assert [result.episodes for result in results] == [len(read_manifest(each)) for each in (train, validation)]
        assert sum(result.steps for result in results) == sum(1 + seed % 4 for seed in seeds)
        assert {entry.seed for entry in read_manifest(validation)} == {
            seed for seed, chosen in zip(seeds, is_validation(np.asarray(seeds), share), strict=True) if chosen
        }
        other = fill(root / "other", range(1000, 1005))
        result = merge_datasets([train, other, validation], root / "all", COMMAND)
        assert checksums(root / "all") == checksums(one, other) and result.repeated == 0
        assert [number for number, _, _ in listing(root / "all")] == list(range(len(seeds) + 5))
        above = filter_dataset(root / "all", root / "above", [parse("return>=0")], COMMAND)
        below = filter_dataset(root / "all", root / "below", [parse("return<0")], COMMAND)
        assert checksums(root / "above", root / "below") == checksums(root / "all")
        assert above.episodes + below.episodes == len(seeds) + 5


def test_arrays_of_a_copy_are_those_of_the_source(tmp_path: Path) -> None:
    source = fill(tmp_path / "a", range(6), policy="p")
    filter_dataset(source, tmp_path / "b", [parse("seed>=3")], COMMAND)
    for read, seed in zip(read_episodes(tmp_path / "b"), (3, 4, 5), strict=True):
        assert_equal(read, episode(1 + seed % 4, seed))
    before = {entry.key: entry for entry in read_manifest(source)}
    for entry in read_manifest(tmp_path / "b"):
        old = before[entry.key]
        assert (entry.sha256, entry.meta, entry.total, entry.seed) == (old.sha256, old.meta, old.total, old.seed)


def test_split_of_a_grown_dataset_gets_only_the_new_episodes(tmp_path: Path) -> None:
    source = fill(tmp_path / "a", range(20))
    train, validation, _ = split(source, 0.3)
    before = [every_file(folder / EPISODES) for folder in (train, validation)]
    about = (train / dataset_file.NAME).read_bytes()
    assert [result.added for result in split(source, 0.3)[2]] == [0, 0]
    assert (train / dataset_file.NAME).read_bytes() == about, "nothing was added, so nothing is written"
    fill(source, range(20, 30))
    results = split(source, 0.3)[2]
    assert sum(result.added for result in results) == 10
    assert checksums(train) + checksums(validation) == checksums(source)
    for files, folder in zip(before, (train, validation), strict=True):
        assert files.items() <= every_file(folder / EPISODES).items()
    with pytest.raises(UseError, match="episodes that this command does not write"):
        split(source, 0.6)
    smaller = {entry.seed for entry in read_manifest(validation)}
    larger = split(source, 0.6, "-larger")[1]
    assert smaller < {entry.seed for entry in read_manifest(larger)}


# ---------------------------------------------------------------------------------------------- merge


def test_episode_in_several_sources_is_kept_once(tmp_path: Path) -> None:
    one, two = fill(tmp_path / "a", [1, 2, 3]), fill(tmp_path / "b", [3, 4])
    result = merge_datasets([one, two], tmp_path / "m", COMMAND)
    assert (result.episodes, result.added, result.repeated) == (4, 4, 1)
    assert [entry.seed for entry in read_manifest(tmp_path / "m")] == [1, 2, 3, 4]
    fill(two, [5])
    fill(one, [6])
    again = merge_datasets([one, two], tmp_path / "m", COMMAND)
    assert (again.episodes, again.added) == (6, 2)
    assert [entry.seed for entry in read_manifest(tmp_path / "m")] == [1, 2, 3, 4, 6, 5], "numbers do not change"


def test_episode_that_one_dataset_has_twice_stays_twice(tmp_path: Path) -> None:
    one, two = fill(tmp_path / "a", [1, 2, 1]), fill(tmp_path / "b", [2, 1, 3])
    assert merge_datasets([one, two], tmp_path / "m", COMMAND).repeated == 2
    assert [entry.seed for entry in read_manifest(tmp_path / "m")] == [1, 2, 1, 3]
    assert merge_datasets([one, two], tmp_path / "m", COMMAND).added == 0
    train, validation, _ = split(one, 0.5)
    assert checksums(train) + checksums(validation) == checksums(one)


def test_agents_of_an_episode_stay_together(tmp_path: Path) -> None:
    for name, first in (("a", 0), ("b", 50)):
        made = writer(tmp_path / name)
        for number in range(12):
            made.commit(number, [episode(2, first + number, agent=agent) for agent in ("right", "left")])
    merge_datasets([tmp_path / "a", tmp_path / "b"], tmp_path / "m", COMMAND)
    assert checksums(tmp_path / "m") == checksums(tmp_path / "a", tmp_path / "b")
    assert [row[:2] for row in listing(tmp_path / "m")][:3] == [(0, "left"), (0, "right"), (1, "left")]
    train, validation, results = split(tmp_path / "m", 0.4)
    assert checksums(train) + checksums(validation) == checksums(tmp_path / "m")
    assert all(result.added == result.episodes for result in results)
    for folder in (train, validation):
        assert set(Counter(entry.episode for entry in read_manifest(folder)).values()) == {2}
    result = filter_dataset(tmp_path / "m", tmp_path / "left", [parse("agent=l*")], COMMAND)
    assert result.episodes == 24 and {entry.agent for entry in read_manifest(tmp_path / "left")} == {"left"}
    assert {entry.file[-8:] for entry in read_manifest(tmp_path / "left")} == {".parquet"}


def test_recordings_that_an_earlier_source_has_are_left_out(tmp_path: Path) -> None:
    """A source may have only some agents of an episode."""
    made = writer(tmp_path / "a")
    for number in range(4):
        made.commit(number, [episode(2, number, agent=agent) for agent in ("right", "left", "top")])
    made.close()
    whole, left = tmp_path / "a", tmp_path / "left"
    filter_dataset(whole, left, [parse("agent=left"), parse("seed<2")], COMMAND)
    result = merge_datasets([left, whole], tmp_path / "m", COMMAND)
    assert checksums(tmp_path / "m") == checksums(whole)
    assert (result.episodes, result.added, result.repeated) == (12, 12, 2)
    assert [row[:2] for row in listing(tmp_path / "m")] == [
        *[(0, "left"), (1, "left")],
        *[(number, agent) for number in (2, 3) for agent in ("right", "top")],
        *[(number, agent) for number in (4, 5) for agent in ("left", "right", "top")],
    ]
    again = merge_datasets([left, whole], tmp_path / "m", COMMAND)
    assert (again.added, again.repeated) == (0, 2)
    other = merge_datasets([whole, left], tmp_path / "n", COMMAND)
    assert listing(tmp_path / "n") == listing(whole) and other.repeated == 2
    made = writer(whole)
    made.append([episode(2, 9, agent=agent) for agent in ("left", "top")])
    made.close()
    assert merge_datasets([left, whole], tmp_path / "m", COMMAND).added == 2
    assert checksums(tmp_path / "m") == checksums(whole)


def test_one_source_is_copied(tmp_path: Path) -> None:
    shutil.copytree(OLD, tmp_path / "old")
    assert merge_datasets([tmp_path / "old"], tmp_path / "new", COMMAND).episodes == 3
    assert checksums(tmp_path / "new") == checksums(tmp_path / "old")
    about = dataset_file.read(tmp_path / "new")
    assert about is not None and about.schema == dataset_file.SCHEMA
    new_dataset(tmp_path / "empty")
    assert merge_datasets([tmp_path / "empty"], tmp_path / "copy", COMMAND).episodes == 0


def test_packed_source_gives_the_same_files(tmp_path: Path) -> None:
    source = fill(tmp_path / "a", range(8))
    before = listing(source)
    split(source, 0.4, "-1")
    # as `data pack` leaves it: one tar, a sealed manifest, no files of single episodes
    entries = list(read_manifest(source))
    contents = [read_bytes(source, entry) for entry in entries]
    (source / "shards").mkdir()
    names = [f"{entry.episode:09d}.0.parquet" for entry in entries]
    (source / "shards" / "shard-000000-abc.tar").write_bytes(to_tar(list(zip(names, contents, strict=True))))
    offset, packed = 0, []
    for entry, content in zip(entries, contents, strict=True):
        line = json.loads(entry.line()) | {"file": "shards/shard-000000-abc.tar", "offset": offset + 512}
        packed.append(manifest._entry({name: line[name] for name in manifest.FIELDS.names}))
        offset += 512 + -(-len(content) // 512) * 512
    shutil.rmtree(source / EPISODES)
    for path in manifest.files(source):
        path.unlink()
    manifest.write_sealed(source / "manifests" / "shard-000000-abc.jsonl", packed)
    assert listing(source) == before
    assert [result.added for result in split(source, 0.4, "-1")[2]] == [0, 0]
    train, validation, _ = split(source, 0.4, "-2")
    assert sorted(listing(train) + listing(validation)) == before
    assert_equal(next(iter(read_episodes(train))), episode(1 + (seed := read_manifest(train).entry(0).seed) % 4, seed))


def test_folders_of_schema_1_are_sources(tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(OLD, old)
    files = every_file(old)
    train, validation, _ = split(old, 0.5)
    assert checksums(train) + checksums(validation) == checksums(old) and len(checksums(old)) == 3
    filter_dataset(old, tmp_path / "one", [parse("length=70")], COMMAND)
    assert [entry.seed for entry in read_manifest(tmp_path / "one")] == [1]
    new_dataset(tmp_path / "new", "Old-v0")
    fill_old = dataset_file.read(tmp_path / "new")
    assert fill_old is not None and fill_old.digest
    result = merge_datasets([old, tmp_path / "new"], tmp_path / "m", COMMAND)
    assert result.episodes == 3 and merge_datasets([old, tmp_path / "new"], tmp_path / "m", COMMAND).added == 0
    there = dataset_file.read(tmp_path / "m")
    assert there is not None and there.digest == fill_old.digest and there.schema == dataset_file.SCHEMA
    assert every_file(old) == files, "a source is only read"


def test_dataset_file_says_where_the_episodes_are_from(tmp_path: Path) -> None:
    one, two = fill(tmp_path / "a", [1]), fill(tmp_path / "b", [2])
    merge_datasets([one, two], tmp_path / "m", Command(["tiltyard", "data", "merge", "a", "b", "--out", "m"]))
    about, first, second = (dataset_file.read(folder) for folder in (tmp_path / "m", one, two))
    assert about is not None and first is not None and second is not None
    assert about.made[:-1] == [*first.made, *second.made]
    assert about.made[-1]["command"][:3] == ["tiltyard", "data", "merge"]
    assert about.made[-1]["sources"] == [str(one), str(two)]
    assert about.seed is None, "a collector must not fill its gaps"
    assert (about.env, about.digest) == (first.env, first.digest)


# ---------------------------------------------------------------------------------------------- faults


def _merge_in_child(folders: list[Path], out: Path, begun: "multiprocessing.SimpleQueue[int]") -> None:
    merge_datasets(folders, out, Command(["x"], lambda place, done, total: begun.put(done)))


@pytest.mark.filterwarnings("ignore:.*a writer was killed")
def test_killed_merge_is_completed_exactly(tmp_path: Path) -> None:
    sources = [fill(tmp_path / "a", range(30)), fill(tmp_path / "b", range(20, 50))]
    merge_datasets(sources, tmp_path / "whole", COMMAND)
    rng = np.random.default_rng(0)
    context = multiprocessing.get_context("fork")
    for trial in range(count(20)):
        out = tmp_path / f"killed-{trial}"
        for _ in range(3):
            begun: multiprocessing.SimpleQueue[int] = context.SimpleQueue()
            child = context.Process(target=_merge_in_child, args=(sources, out, begun))
            child.start()
            begun.get()
            time.sleep(float(rng.uniform(0, 0.05)))
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
            child.join()
            there = listing(out) if (out / dataset_file.NAME).exists() else []
            assert there == listing(tmp_path / "whole")[: len(there)]
        merge_datasets(sources, out, COMMAND)
        assert listing(out) == listing(tmp_path / "whole")
        assert checksums(out) == checksums(tmp_path / "whole")


def cut_manifest(folder: Path, lines: int) -> None:
    """Leave a dataset as a writer does that is killed after it wrote the file of one more episode."""
    (path,) = manifest.files(folder)
    kept = path.read_bytes().splitlines(keepends=True)[:lines]
    path.unlink()
    path.with_name("killed-0000.open.jsonl").write_bytes(b"".join(kept))


def test_file_that_a_killed_command_has_not_listed_is_listed(tmp_path: Path) -> None:
    source = fill(tmp_path / "a", range(5))
    every = [parse("seed>=0")]
    filter_dataset(source, tmp_path / "b", every, COMMAND)
    for lines in (3, 4):
        cut_manifest(tmp_path / "b", lines)
        for file in list((tmp_path / "b" / EPISODES / "00000").iterdir())[lines + 1 :]:
            file.unlink()
        assert len(manifest.read(tmp_path / "b")) == lines
        result = filter_dataset(source, tmp_path / "b", every, COMMAND)
        assert result.episodes == 5 and listing(tmp_path / "b") == listing(source)
        assert len(manifest.read(tmp_path / "b")) == 5, "no reader has to look for it"
        assert filter_dataset(source, tmp_path / "b", every, COMMAND).added == 0
        (tmp_path / "b" / "manifests" / "killed-0000.open.jsonl").unlink()
        for path in manifest.files(tmp_path / "b"):
            path.unlink()
        manifest.write_sealed(tmp_path / "b" / "manifests" / "all-0000.jsonl", list(read_manifest(source)))


def test_killed_merge_of_grown_sources_loses_nothing(tmp_path: Path) -> None:
    one, two = fill(tmp_path / "a", range(3)), fill(tmp_path / "b", range(10, 13))
    merge_datasets([one, two], tmp_path / "m", COMMAND)
    cut_manifest(tmp_path / "m", 5)
    fill(one, [3])
    merge_datasets([one, two], tmp_path / "m", COMMAND)
    assert [entry.seed for entry in manifest.read(tmp_path / "m")] == [0, 1, 2, 10, 11, 12, 3]
    assert checksums(tmp_path / "m") == checksums(one, two)


def test_unlisted_file_of_another_episode_is_not_taken(tmp_path: Path) -> None:
    one, other = fill(tmp_path / "a", range(3)), fill(tmp_path / "b", [77])
    filter_dataset(one, tmp_path / "c", [parse("seed<2")], COMMAND)
    foreign = tmp_path / "c" / EPISODES / "00000" / "000000002.parquet"
    shutil.copy(other / EPISODES / "00000" / "000000000.parquet", foreign)
    with pytest.raises(UseError, match="none of the 3 episodes"):
        filter_dataset(one, tmp_path / "c", [parse("seed=77")], COMMAND)
    with pytest.raises(TiltyardError, match="unexpected episode 2: it is not episode 2 of"):
        filter_dataset(one, tmp_path / "c", [parse("seed<3")], COMMAND)
    cut_manifest(tmp_path / "c", 2)
    with pytest.raises(UseError, match="does not write, such as episode 2"):
        filter_dataset(one, tmp_path / "c", [parse("seed<3")], COMMAND)


def test_damaged_episode_is_not_copied(tmp_path: Path) -> None:
    source = fill(tmp_path / "a", range(4))
    path = source / EPISODES / "00000" / "000000002.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"?")
    with pytest.raises(TiltyardError, match=r"000000002\.parquet is damaged"):
        filter_dataset(source, tmp_path / "b", [parse("seed>=0")], COMMAND)
    path.write_bytes(whole)
    assert filter_dataset(source, tmp_path / "b", [parse("seed>=0")], COMMAND).added == 2
    assert listing(tmp_path / "b") == listing(source)


def _hold_claim(folder: Path, taken: "multiprocessing.SimpleQueue[bool]") -> None:
    with Claims(folder) as claims:
        taken.put(claims.take(_COPYING))
        time.sleep(600)


def test_two_processes_do_not_copy_into_one_folder(tmp_path: Path) -> None:
    source = fill(tmp_path / "a", range(3))
    (tmp_path / "b").mkdir()
    context = multiprocessing.get_context("fork")
    taken: multiprocessing.SimpleQueue[bool] = context.SimpleQueue()
    child = context.Process(target=_hold_claim, args=(tmp_path / "b", taken))
    child.start()
    assert taken.get()
    with pytest.raises(MutexHeld, match="another process is at work on"):
        filter_dataset(source, tmp_path / "b", [parse("seed>=0")], COMMAND)
    child.kill()
    child.join()
    assert filter_dataset(source, tmp_path / "b", [parse("seed>=0")], COMMAND).added == 3


# ---------------------------------------------------------------------------------------------- wrong use


def test_wrong_use_writes_nothing(tmp_path: Path) -> None:
    source = fill(tmp_path / "a", range(6))
    new_dataset(tmp_path / "pendulum", "Pendulum-v1")
    fill(tmp_path / "other", [50])
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("")
    shutil.copytree(OLD, tmp_path / "old")
    new_dataset(tmp_path / "newer")
    about = dataset_file.read(tmp_path / "newer")
    assert about is not None
    dataset_file.atomic.write_sealed(tmp_path / "newer" / "dataset.json", {**about.to_json(), "schema": 3})
    before = every_file(tmp_path)
    new = tmp_path / "new"
    every = [parse("seed>=0")]
    cases = [
        (
            lambda: merge_datasets([source, tmp_path / "pendulum"], new, COMMAND),
            "pendulum and .*/a are not of the same",
        ),
        (lambda: merge_datasets([source, tmp_path / "none"], new, COMMAND), "there is no dataset"),
        (lambda: merge_datasets([source, tmp_path / "files"], new, COMMAND), "files is not a dataset"),
        (lambda: merge_datasets([source, tmp_path / "newer"], new, COMMAND), "newer Tiltyard"),
        (lambda: merge_datasets([source, source], new, COMMAND), "given twice"),
        (lambda: merge_datasets([source, tmp_path / "old"], new, COMMAND), "old and .*/a are not of the same env"),
        (lambda: merge_datasets([source, tmp_path / "other"], source, COMMAND), "is a source"),
        (lambda: filter_dataset(source, tmp_path / "other", every, COMMAND), "does not write, such as episode 0"),
        (lambda: filter_dataset(source, tmp_path / "pendulum", every, COMMAND), "not of the same env"),
        (lambda: filter_dataset(source, tmp_path / "files", every, COMMAND), "is not a dataset that episodes"),
        (lambda: filter_dataset(source, tmp_path / "file", every, COMMAND), "is not a dataset that episodes"),
        (lambda: filter_dataset(source, tmp_path / "old", every, COMMAND), "is not a dataset that episodes"),
        (lambda: filter_dataset(source, tmp_path / "newer", every, COMMAND), "newer Tiltyard"),
        (lambda: filter_dataset(source, new, [parse("return>1e9")], COMMAND), "none of the 6 episodes"),
        (lambda: filter_dataset(source, tmp_path / "file" / "x", every, COMMAND), "cannot write a dataset"),
        (lambda: split_dataset(source, 0.5, (new, tmp_path / "files"), COMMAND), "is not a dataset that episodes"),
        (lambda: split_dataset(source, 0.5, (new, new), COMMAND), "twice"),
        (lambda: split_dataset(source, 1.5, (new, tmp_path / "v"), COMMAND), "fraction from 0 to 1"),
    ]
    for call, message in cases:
        with pytest.raises(UseError, match=message) as raised:
            call()
        assert raised.value.hint
        assert every_file(tmp_path) == before, message
        assert not new.exists()


# ---------------------------------------------------------------------------------------------- conditions


@pytest.mark.parametrize(
    ("texts", "seeds"),
    [
        (["seed=3"], [3]),
        (["seed == 3"], [3]),
        (["seed!=3"], [0, 1, 2, 4, 5, 6, 7]),
        (["seed=2..4"], [2, 3, 4]),
        (["seed!=2..6"], [0, 1, 7]),
        (["seed=..1"], [0, 1]),
        (["episode>=6"], [6, 7]),
        (["length<2"], [0, 4]),
        (["length>=2", "length<=3"], [1, 2, 5, 6]),
        (["terminated"], [0, 2, 4, 6]),
        (["!terminated"], [1, 3, 5, 7]),
        (["truncated = false"], [0, 2, 4, 6]),
        (["terminated!=true"], [1, 3, 5, 7]),
        (["policy=random"], [0, 1, 2, 3, 4, 5]),
        (["policy!=rand*"], [6, 7]),
        (["policy=?xpert"], [6, 7]),
        (["seed>-1e3", "seed<1_0"], list(range(8))),
        (["seed<=9223372036854775808", "seed>6.5"], [7]),
    ],
)
def test_conditions_choose_episodes(tmp_path: Path, texts: list[str], seeds: list[int]) -> None:
    fill(tmp_path / "a", range(6), policy="random")
    fill(tmp_path / "a", range(6, 8), policy="expert")
    filter_dataset(tmp_path / "a", tmp_path / "b", [parse(text) for text in texts], COMMAND)
    assert [entry.seed for entry in read_manifest(tmp_path / "b")] == seeds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("retrun>=1", "unknown name 'retrun'"),
        ("return", "needs a comparison"),
        ("return>=", "needs a comparison"),
        ("return>=many", "'many' is not a number"),
        ("return>=nan", "'nan' is not a number"),
        ("return>=1..2", "a range is compared"),
        ("policy>random", "compared with = or != only"),
        ("terminated=maybe", "must be true or false"),
        ("__import__('os')", "is not a condition"),
        ("", "is not a condition"),
        ("!return>=1", "needs a comparison"),
    ],
)
def test_wrong_conditions_are_refused(text: str, message: str) -> None:
    with pytest.raises(UseError, match=message) as raised:
        parse(text)
    assert raised.value.hint
