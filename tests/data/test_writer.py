"""Writing datasets: exact round trip, several agents, several writers, killed writers, old folders."""

import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.counts import count
from tests.data.episodes import assert_equal, episode, new_dataset, writer
from tiltyard.data import dataset_file, folder, manifest
from tiltyard.data.claims import Claims
from tiltyard.data.folder import read_episodes, read_manifest
from tiltyard.data.writer import TEMPORARY, _machine
from tiltyard.errors import TiltyardError, TiltyardWarning, UseError

OLD = Path(__file__).parents[1] / "old" / "episodes-schema-1"


@pytest.mark.parametrize("steps", [1, 2, 63, 64, 65, 200])
def test_round_trip_is_exact(tmp_path: Path, steps: int) -> None:
    written = episode(steps, steps)
    assert writer(tmp_path, run="r").commit(7, [written])
    (read,) = read_episodes(tmp_path)
    assert_equal(read, written)
    assert read.meta["run"] == "r" and read.meta["index"] == steps and read.info == []
    (entry,) = read_manifest(tmp_path)
    file = pq.ParquetFile(tmp_path / entry.file)
    assert file.metadata.num_rows == steps + 1 and file.metadata.num_row_groups == -(-(steps + 1) // 64)
    assert file.metadata.row_group(0).column(1).compression == "ZSTD"
    assert (entry.rows, entry.length, entry.episode) == (steps + 1, steps, 7)
    assert entry.total == pytest.approx(float(written.reward.astype(np.float64).sum()))
    assert json.loads(entry.meta) == {"env": "CartPole-v1", "run": "r", "index": steps}


def test_file_has_its_columns_and_explains_itself(tmp_path: Path) -> None:
    writer(tmp_path).commit(0, [episode(3, 4)])
    table = pq.read_table(tmp_path / folder.episode_path(0))
    expected = ["step", "obs.eye", "obs.arm", "obs.code", "action", "reward", "terminated", "truncated"]
    assert table.column_names == expected
    assert table.column("terminated").to_pylist() == [False, False, True, False]
    assert table.column("action").null_count == 1 and table.column("reward").null_count == 1
    about = json.loads(table.schema.metadata[b"tiltyard"])
    assert about["arrays"]["obs.eye"] == {"shape": [8, 8, 3], "dtype": "uint8"} and about["spec"]["action"]["parts"]
    assert about["meta"]["env_settings"] == {"id": "CartPole-v1"} and about["meta"]["dataset_seed"] == 3


def test_info_is_saved_on_request(tmp_path: Path) -> None:
    writer(tmp_path, save_info=True).append([episode(3, 0)])
    (read,) = read_episodes(tmp_path)
    assert read.info == [{"i": i, "position": [0, 1], "odd": "nan"} for i in range(3)]


def test_agents_of_one_env_are_committed_together(tmp_path: Path) -> None:
    pair = [episode(5, 1, agent="left"), episode(70, 1, agent="right")]
    writer(tmp_path).commit(4, pair)
    entries = list(read_manifest(tmp_path))
    assert [entry.key for entry in entries] == [(4, "left"), (4, "right")]
    assert {entry.file for entry in entries} == {"episodes/00000/000000004.tar"}
    for read, written in zip(read_episodes(tmp_path), pair, strict=True):
        assert_equal(read, written)
    shutil.unpack_archive(tmp_path / entries[0].file, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["000000004.0.parquet", "000000004.1.parquet"]


def test_number_is_written_once(tmp_path: Path) -> None:
    one, other = writer(tmp_path), writer(tmp_path)
    assert one.commit(0, [episode(3, 0)]) and not other.commit(0, [episode(9, 1)])
    assert not other.commit(0, [episode(9, 1, agent="a"), episode(9, 1, agent="b")])
    assert other.append([episode(4, 2)]) == 1 and one.append([episode(4, 3)]) == 2
    assert [each.seed for each in read_episodes(tmp_path)] == [0, 2, 3]
    assert not list((tmp_path / TEMPORARY).iterdir())


def test_file_of_a_writer_that_was_killed_before_its_manifest_line_is_listed_by_the_next(tmp_path: Path) -> None:
    first = writer(tmp_path)
    first.commit(0, [episode(3, 0)])
    first.commit(1, [episode(4, 1)])
    (path,) = manifest.files(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:20])
    (tmp_path / TEMPORARY / f"{_machine()}-999999999-1").write_bytes(b"half")  # killed while writing a third
    assert [one.seed for one in read_episodes(tmp_path)] == [0]
    second = writer(tmp_path)
    assert not second.list_existing(0) and not second.list_existing(2) and second.list_existing(1)
    assert not second.list_existing(1)
    assert second.append([episode(2, 2)]) == 2
    assert [one.seed for one in read_episodes(tmp_path)] == [0, 1, 2]
    assert not list((tmp_path / TEMPORARY).iterdir())


def test_unfinished_file_is_removed_only_if_its_writer_is_surely_dead(tmp_path: Path) -> None:
    writer(tmp_path)
    live = f"{_machine()}-{os.getpid()}-1"
    away = {"0123456789ab-999999999-1", "other"}  # of another machine; of an unknown writer
    for name in (live, *away):
        (tmp_path / TEMPORARY / name).write_bytes(b"half")
    writer(tmp_path)
    assert {path.name for path in (tmp_path / TEMPORARY).iterdir()} == {live, *away}
    for name in (live, *away):
        os.utime(tmp_path / TEMPORARY / name, (0, 0))
    writer(tmp_path)
    assert {path.name for path in (tmp_path / TEMPORARY).iterdir()} == {live}


def test_sealed_manifests_are_equal_to_open_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "SEALED_AFTER", 3)
    made = writer(tmp_path)
    for number in range(7):
        made.commit(number, [episode(3, number)])
    paths = manifest.files(tmp_path)
    assert [b"seal" in path.read_bytes() for path in paths] == [True, True, False]
    before = list(read_manifest(tmp_path))
    made.close()
    assert [b"seal" in path.read_bytes() for path in manifest.files(tmp_path)] == [True, True, True]
    assert list(read_manifest(tmp_path)) == before and [each.episode for each in before] == list(range(7))


def test_return_that_is_not_finite_is_kept(tmp_path: Path) -> None:
    broken = episode(3, 0)
    broken.reward[1] = np.nan
    made = writer(tmp_path)
    made.commit(0, [broken])
    assert np.isnan(next(iter(read_manifest(tmp_path))).total)
    made.close()
    assert np.isnan(next(iter(read_manifest(tmp_path))).total)


def _write_until_killed(place: Path, start: int, written: "multiprocessing.SimpleQueue[int]") -> None:
    made = writer(place)
    for seed in range(start, 10**6):
        written.put(made.append([episode(30, seed)]))


@pytest.mark.filterwarnings("ignore:.*a writer was killed")
def test_kill_9_at_any_moment_loses_no_finished_episode(tmp_path: Path) -> None:
    """A forked child writes and is killed; pyarrow is imported before, so that it is killed while it writes."""
    rng = np.random.default_rng(0)
    writer(tmp_path).append([episode(30, 0)])
    seen: set[str] = set()
    for number in range(count(30)):
        context = multiprocessing.get_context("fork")
        written: multiprocessing.SimpleQueue[int] = context.SimpleQueue()
        child = context.Process(target=_write_until_killed, args=(tmp_path, 1000 * (number + 1), written))
        child.start()
        written.get()
        child.join(float(rng.uniform(0, 0.1)))
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        entries = list(read_manifest(tmp_path))
        assert seen <= {entry.sha256 for entry in entries}, "an episode is lost"
        seen = {entry.sha256 for entry in entries}
        for one in read_episodes(tmp_path):
            assert_equal(one, episode(30, one.seed))
    last = writer(tmp_path)
    for number in range(10_000):
        last.list_existing(number)
        if not last.exists(number):
            break
    listed = [entry.file for entry in read_manifest(tmp_path)]
    assert listed == sorted(folder.files_on_disk(tmp_path)) and len(listed) > count(30)


def _write_some(place: Path, first: int) -> None:
    made = writer(place)
    for seed in range(first, first + 10):
        made.append([episode(3, seed)])


def test_several_processes_can_write_to_one_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_write_some, args=(tmp_path, first)) for first in (0, 100, 200)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    seeds = sorted(one.seed for one in read_episodes(tmp_path))
    assert seeds == [*range(10), *range(100, 110), *range(200, 210)]


def _try_claims(place: Path, numbers: list[int], answers: "multiprocessing.SimpleQueue[list[bool]]") -> None:
    with Claims(place) as claims:
        answers.put([claims.take(number) for number in numbers])


def test_claim_excludes_other_processes_until_its_process_is_gone(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers: multiprocessing.SimpleQueue[list[bool]] = context.SimpleQueue()
    with Claims(tmp_path) as claims:
        assert claims.take(5) and claims.take(2**40)
        child = context.Process(target=_try_claims, args=(tmp_path, [4, 5, 2**40], answers))
        child.start()
        assert answers.get() == [True, False, False]
        child.join()
        claims.release(5)
        assert claims.take(4), "its holder is gone"
        child = context.Process(target=_try_claims, args=(tmp_path, [5, 4], answers))
        child.start()
        assert answers.get() == [True, False]
        child.join()


def test_invalid_folders_are_refused(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "none"):
        with pytest.raises(UseError, match="dataset"):
            list(read_episodes(place))
    (tmp_path / "file").write_text("")
    with pytest.raises(UseError, match="cannot write a dataset"):
        new_dataset(tmp_path / "file")
    with pytest.raises(UseError, match="is not a dataset: it has file"):
        new_dataset(tmp_path)
    new_dataset(tmp_path / "set")
    with pytest.raises(UseError, match=r"is a dataset of CartPole-v1, not of Pendulum-v1"):
        new_dataset(tmp_path / "set", "Pendulum-v1")
    about = dataset_file.read(tmp_path / "set")
    assert about is not None and len(about.made) == 1, "a refused command leaves no trace"
    dataset_file.atomic.write_sealed(tmp_path / "set" / "dataset.json", {**about.to_json(), "schema": 3})
    with pytest.raises(UseError, match="newer Tiltyard"):
        folder.read_about(tmp_path / "set")


def test_line_of_a_manifest_cannot_name_a_file_elsewhere(tmp_path: Path) -> None:
    made = writer(tmp_path)
    made.commit(0, [episode(3, 0)])
    (path,) = manifest.files(tmp_path)
    (entry,) = read_manifest(tmp_path)
    for name in ("../../etc/passwd", "/etc/passwd", "episodes/00000/../../x.parquet"):
        line = entry.line().replace(entry.file, name)
        wrong = manifest.atomic.to_line({key: value for key, value in json.loads(line).items() if key != "crc"})
        data = f"{wrong}\n"
        path.write_text(data)
        with pytest.warns(UserWarning, match="line 1"):
            assert [each.file for each in read_manifest(tmp_path)] == [entry.file], "found on disk again"
        path.write_text(data + manifest.seal_line(data.encode()).decode())
        with pytest.warns(UserWarning, match="outside of the dataset"):
            assert [each.file for each in read_manifest(tmp_path)] == [entry.file]


def test_episode_without_its_last_observation_is_refused(tmp_path: Path) -> None:
    short = episode(3, 0)
    short.obs["arm"] = short.obs["arm"][:-1]
    with pytest.raises(TiltyardError, match="'arm' has 3 entries; 3 actions need 4"):
        writer(tmp_path).append([short])


def test_folder_of_schema_1_is_read(tmp_path: Path) -> None:
    place = tmp_path / "old"
    shutil.copytree(OLD, place)
    about = folder.read_about(place)
    assert about.env_id == "Old-v0" and about.schema == 1 and about.spec.obs["eye"].shape == (8, 8, 3)
    steps = {0: 5, 1: 70, 2: 1}
    read = list(read_episodes(place))
    assert [one.seed for one in read] == [0, 1, 2] and read[0].info[0] == {"i": 0, "position": [0, 1], "odd": "nan"}
    for one in read:
        assert_equal(one, episode(steps[one.seed], one.seed))
    with pytest.raises(UseError, match="read but not added to"):
        writer(place)
    whole = (place / "episode-000001.parquet").read_bytes()
    (place / "episode-000001.parquet").write_bytes(whole[:-1] + b"?")
    with pytest.raises(TiltyardError, match=r"episode-000001\.parquet is damaged: its checksum"):
        list(read_episodes(place))


def test_interrupt_between_a_file_and_its_line_hides_no_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = writer(tmp_path)
    made.commit(0, [episode(3, 0)])

    def interrupted(entries: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(made._manifest, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.commit(1, [episode(4, 1)])
    made.close()
    with pytest.warns(TiltyardWarning, match="episodes taken from their files: 1"):
        assert [one.seed for one in read_episodes(tmp_path)] == [0, 1]


def test_dataset_without_manifests_is_read_from_its_files(tmp_path: Path) -> None:
    made = writer(tmp_path)
    made.commit(0, [episode(3, 0)])
    made.close()
    shutil.rmtree(tmp_path / manifest.FOLDER)
    with pytest.warns(TiltyardWarning, match="no manifest; episodes taken from their files: 1"):
        assert [one.seed for one in read_episodes(tmp_path)] == [0]
