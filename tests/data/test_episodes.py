"""Recorded episodes: exact round trip, detected damage, crashes, several writers."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from gymnasium import spaces

from tests.counts import count
from tiltyard.data.episodes import MANIFEST, EpisodeWriter, _machine, read_episodes, read_manifest
from tiltyard.envs.actions import action_spec
from tiltyard.envs.spaces import observation_specs
from tiltyard.errors import TiltyardError, UseError
from tiltyard.run import mutex
from tiltyard.types import EnvSpec, Episode

SPACE = spaces.Dict(
    {
        "eye": spaces.Box(0, 255, (8, 8, 3), np.uint8),
        "arm": spaces.Box(-1, 1, (3,), np.float32),
        "code": spaces.Discrete(5),
    }
)
SPEC = EnvSpec(obs=observation_specs(SPACE, 1), action=action_spec(spaces.Box(-1, 1, (2,), np.float32)))


def episode(steps: int, seed: int) -> Episode:
    rng = np.random.default_rng(seed)
    return Episode(
        obs={
            "eye": rng.integers(0, 256, (steps + 1, 8, 8, 3)).astype(np.uint8),
            "arm": rng.normal(size=(steps + 1, 3)).astype(np.float32),
            "code": rng.integers(0, 5, steps + 1),
        },
        action=rng.normal(size=(steps, 2)).astype(np.float32),
        reward=rng.normal(size=steps).astype(np.float32),
        terminated=seed % 2 == 0,
        truncated=seed % 2 == 1,
        seed=seed,
        info=[{"i": i, "position": np.arange(2), "odd": float("nan")} for i in range(steps)],
        meta={"index": seed},
    )


def assert_equal(one: Episode, two: Episode) -> None:
    assert list(one.obs) == list(two.obs)
    for left, right in [
        *((one.obs[n], two.obs[n]) for n in one.obs),
        (one.action, two.action),
        (one.reward, two.reward),
    ]:
        assert left.dtype == right.dtype and np.array_equal(left, right)
    assert (one.terminated, one.truncated, one.seed) == (two.terminated, two.truncated, two.seed)


@pytest.mark.parametrize("steps", [1, 2, 63, 64, 65, 200])
def test_round_trip_is_exact(tmp_path: Path, steps: int) -> None:
    written = episode(steps, steps)
    path = EpisodeWriter(tmp_path, SPEC, {"run": "r"}).write(written)
    (read,) = read_episodes(tmp_path)
    assert_equal(read, written)
    assert read.meta == {"run": "r", "index": steps} and read.info == []
    file = pq.ParquetFile(path)
    assert file.metadata.num_rows == steps + 1 and file.metadata.num_row_groups == -(-(steps + 1) // 64)
    assert file.metadata.row_group(0).column(1).compression == "ZSTD"
    (line,) = read_manifest(tmp_path)
    assert line["rows"] == steps + 1 and line["return"] == pytest.approx(float(written.reward.astype(np.float64).sum()))


def test_file_has_its_columns_and_metadata(tmp_path: Path) -> None:
    path = EpisodeWriter(tmp_path, SPEC, {}).write(episode(3, 4))
    table = pq.read_table(path)
    assert table.column_names == [
        "step",
        "obs.eye",
        "obs.arm",
        "obs.code",
        "action",
        "reward",
        "terminated",
        "truncated",
    ]
    assert table.column("terminated").to_pylist() == [False, False, True, False]
    assert table.column("action").null_count == 1 and table.column("reward").null_count == 1
    about = json.loads(table.schema.metadata[b"tiltyard"])
    assert about["arrays"]["obs.eye"] == {"shape": [8, 8, 3], "dtype": "uint8"} and about["spec"]["action"]["parts"]


def test_info_is_saved_on_request(tmp_path: Path) -> None:
    EpisodeWriter(tmp_path, SPEC, {}, save_info=True).write(episode(3, 0))
    (read,) = read_episodes(tmp_path)
    assert read.info == [{"i": i, "position": [0, 1], "odd": "nan"} for i in range(3)]


def test_new_writer_appends_to_a_folder(tmp_path: Path) -> None:
    EpisodeWriter(tmp_path, SPEC, {}).write(episode(3, 0))
    path = EpisodeWriter(tmp_path, SPEC, {}).write(episode(3, 1))
    assert path.name == "episode-000001.parquet"
    assert [one.seed for one in read_episodes(tmp_path)] == [0, 1]


def test_any_flipped_bit_is_detected_and_the_file_is_named(tmp_path: Path) -> None:
    writer = EpisodeWriter(tmp_path, SPEC, {})
    paths = [writer.write(episode(20, seed)) for seed in range(3)]
    whole, rng = paths[1].read_bytes(), np.random.default_rng(0)
    for _ in range(count(500)):
        at = int(rng.integers(len(whole)))
        paths[1].write_bytes(whole[:at] + bytes([whole[at] ^ 1 << int(rng.integers(8))]) + whole[at + 1 :])
        with pytest.raises(TiltyardError, match=r"episode-000001\.parquet is damaged"):
            list(read_episodes(tmp_path))
    paths[1].write_bytes(whole[:-5])
    with pytest.raises(TiltyardError, match="its size"):
        list(read_episodes(tmp_path))
    paths[1].unlink()
    with pytest.raises(TiltyardError, match="cannot read"):
        list(read_episodes(tmp_path))


def test_next_writer_recovers_the_episodes_of_a_killed_one(tmp_path: Path) -> None:
    writer = EpisodeWriter(tmp_path, SPEC, {})
    writer.write(episode(3, 0))
    writer.write(episode(4, 1))
    lines = (tmp_path / MANIFEST).read_bytes().splitlines(keepends=True)
    (tmp_path / MANIFEST).write_bytes(lines[0] + lines[1][:20])  # killed while adding the second to the manifest
    (tmp_path / f".tmp-{_machine()}-999999999-1").write_bytes(b"half")  # killed while writing a third
    assert [one.seed for one in read_episodes(tmp_path)] == [0]
    EpisodeWriter(tmp_path, SPEC, {}).write(episode(2, 2))
    assert [one.seed for one in read_episodes(tmp_path)] == [0, 1, 2]
    assert not list(tmp_path.glob(".tmp-*"))


def test_unfinished_file_is_removed_only_if_its_writer_is_surely_dead(tmp_path: Path) -> None:
    live = f".tmp-{_machine()}-{os.getpid()}-1"
    away = {".tmp-0123456789ab-999999999-1", ".tmp-999999999-1"}  # of another machine; of an earlier version
    for name in (live, *away):
        (tmp_path / name).write_bytes(b"half")
    EpisodeWriter(tmp_path, SPEC, {}).write(episode(2, 2))
    assert {path.name for path in tmp_path.glob(".tmp-*")} == {live, *away}
    for name in (live, *away):
        os.utime(tmp_path / name, (0, 0))
    EpisodeWriter(tmp_path, SPEC, {})
    assert {path.name for path in tmp_path.glob(".tmp-*")} == {live}


def test_writer_does_not_wait_for_ever_for_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = EpisodeWriter(tmp_path, SPEC, {})
    monkeypatch.setattr("tiltyard.run.mutex.TIMEOUT", 0.01)
    with mutex.hold(tmp_path / ".lock"), pytest.raises(mutex.MutexHeld, match=f"locked by pid {os.getpid()}"):
        writer.write(episode(2, 0))
    writer.write(episode(2, 1))
    assert [one.seed for one in read_episodes(tmp_path)] == [1]
    assert not list(tmp_path.glob(".tmp-*"))
    assert (tmp_path / ".lock").stat().st_mode & 0o777 == 0o600


KILLED = """
import sys; sys.path.insert(0, {root!r})
from pathlib import Path
from tests.data.test_episodes import SPEC, episode
from tiltyard.data.episodes import EpisodeWriter
writer = EpisodeWriter(Path({folder!r}), SPEC, {{}})
writer.write(episode(30, {start}))  # the first one imports what pyarrow needs
print("ready", flush=True)
for seed in range({start} + 1, 10**6):
    writer.write(episode(30, seed))
"""


def test_kill_9_at_any_moment_loses_no_finished_episode(tmp_path: Path) -> None:
    rng, root = np.random.default_rng(0), str(Path(__file__).parents[2])
    for round_number in range(count(30)):
        code = KILLED.format(root=root, folder=str(tmp_path), start=round_number * 1000)
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        try:
            child.wait(float(rng.uniform(0.02, 0.2)))
        except subprocess.TimeoutExpired:
            os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
        for one in read_episodes(tmp_path):
            assert_equal(one, episode(30, one.seed))
    EpisodeWriter(tmp_path, SPEC, {})
    listed = {line["file"] for line in read_manifest(tmp_path)}
    assert listed == {path.name for path in tmp_path.glob("*.parquet")} and listed


def _write_some(folder: str, first: int) -> None:
    writer = EpisodeWriter(Path(folder), SPEC, {})
    for seed in range(first, first + 10):
        writer.write(episode(3, seed))


def test_several_processes_can_write_to_one_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_write_some, args=(str(tmp_path), first)) for first in (0, 100)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert sorted(one.seed for one in read_episodes(tmp_path)) == [*range(10), *range(100, 110)]


def test_invalid_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UseError, match="no recorded episodes"):
        list(read_episodes(tmp_path))
    (tmp_path / MANIFEST).write_text('{"file": "../../etc/passwd"}\n')
    with pytest.raises(TiltyardError, match="line 1"):
        list(read_episodes(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(UseError, match="cannot write episodes"):
        EpisodeWriter(tmp_path / "file", SPEC, {})


def test_episode_without_its_last_observation_is_refused(tmp_path: Path) -> None:
    short = episode(3, 0)
    short.obs["arm"] = short.obs["arm"][:-1]
    with pytest.raises(TiltyardError, match="'arm' has 3 entries; 3 actions need 4"):
        EpisodeWriter(tmp_path, SPEC, {}).write(short)
