"""tiltyard.Dataset: random windows and observations, exactly once per epoch, resumable, of a dataset that changes."""

import hashlib
import json
import pickle  # as torch does it to send a dataset to its workers
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from tests.counts import count
from tests.data.episodes import SPEC, assert_equal, episode, new_dataset, writer
from tiltyard.data import folder as layout
from tiltyard.data import manifest
from tiltyard.data.episode_file import ROW_GROUP, encode
from tiltyard.data.loader import Dataset
from tiltyard.data.torch_loader import TorchWindows, delivered
from tiltyard.data.windows import Batch, Windows
from tiltyard.envs.spaces import spec_to_json
from tiltyard.errors import TiltyardError, UseError
from tiltyard.run import atomic
from tiltyard.types import Episode

LENGTHS = [200, 5, 64, 63, 65, 1, 130, 31, 32, 33]


def make(folder: Path, lengths: list[int] = LENGTHS) -> list[Episode]:
    """A dataset of episodes with these lengths; seed and number are the same."""
    out, made = writer(folder), [episode(steps, seed) for seed, steps in enumerate(lengths)]
    for number, each in enumerate(made):
        assert out.commit(number, [each])
    out.close()
    return made


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Episode]]:
    folder = tmp_path_factory.mktemp("data") / "set"
    return folder, make(folder)


def keys(batches: Any) -> list[tuple[int, int]]:
    """(episode, start) of each window, in order."""
    return [(int(e), int(s)) for batch in batches for e, s in zip(batch["episode"], batch["start"], strict=True)]


def assert_same(one: list[Batch], two: list[Batch]) -> None:
    assert len(one) == len(two) > 0
    for left, right in zip(one, two, strict=True):
        assert left.keys() == right.keys()
        for name, value in left.items():
            pairs = [(value[n], right[name][n]) for n in value] if name == "obs" else [(value, right[name])]
            assert all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


def all_starts(lengths: list[int], window: int) -> set[tuple[int, int]]:
    return {(e, s) for e, steps in enumerate(lengths) for s in range(max(1, steps - window + 1))}


# ------------------------------------------------------------------------------------------------ contents


@pytest.mark.parametrize("final_obs", [False, True])
@pytest.mark.parametrize("length", [1, 32, 100])
def test_windows_hold_what_was_recorded(data, length, final_obs):
    folder, made = data
    seen = 0
    for batch in Dataset(folder).windows(length, batch=7, final_obs=final_obs, epochs=1, per_read=16):
        for row, (number, start) in enumerate(keys([batch])):
            whole = made[number]
            steps = min(length, len(whole.action) - start)
            assert steps == length or (start == 0 and len(whole.action) < length)
            wanted = {"action": whole.action, "reward": whole.reward}
            ends = np.zeros((2, len(whole.action)), bool)
            ends[:, -1] = whole.terminated, whole.truncated
            for name, array in {**wanted, "terminated": ends[0], "truncated": ends[1]}.items():
                found = batch[name][row]
                assert found.dtype == array.dtype and found.shape == (length, *array.shape[1:])
                assert np.array_equal(found[:steps], array[start : start + steps]) and not found[steps:].any()
            for name, array in whole.obs.items():
                found, size = batch["obs"][name][row], steps + final_obs
                assert found.dtype == array.dtype and found.shape == (length + final_obs, *array.shape[1:])
                assert np.array_equal(found[:size], array[start : start + size]) and not found[size:].any()
            assert batch["valid"][row].tolist() == [True] * steps + [False] * (length - steps)
            seen += 1
    assert seen >= len(made)


def test_all_windows_once_if_all_are_drawn(data):
    folder, _ = data
    for window in (1, 7, 32, 64, 65, 500):
        found = keys(Dataset(folder).windows(window, per_read=ROW_GROUP, epochs=1))
        assert len(found) == len(set(found)) and set(found) == all_starts(LENGTHS, window)


def test_observations_include_the_final_one(data):
    folder, made = data
    found = list(Dataset(folder).observations(batch=50, per_read=ROW_GROUP, epochs=1))
    assert sorted(keys(found)) == [(e, s) for e, steps in enumerate(LENGTHS) for s in range(steps + 1)]
    for batch in found:
        assert batch.keys() == {"obs", "episode", "start"}
        for name, array in batch["obs"].items():
            for row, (number, start) in zip(array, keys([batch]), strict=True):
                assert np.array_equal(row, made[number].obs[name][start])


def test_names_choose_columns(data):
    folder, _ = data
    batch = next(Dataset(folder).windows(8, names=["obs.arm", "reward"]))
    assert batch.keys() == {"obs", "reward", "valid", "episode", "start"} and batch["obs"].keys() == {"arm"}
    assert next(Dataset(folder).observations(names=["obs.code"]))["obs"].keys() == {"code"}
    with pytest.raises(UseError, match=r"unknown column 'obs\.ram'") as wrong:
        Dataset(folder).windows(8, names=["obs.ram"])
    assert "obs.arm" in wrong.value.hint
    with pytest.raises(UseError, match="unknown column 'action'"):
        Dataset(folder).observations(names=["action"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 0}, "batch = 0"),
        ({"per_read": 1.5}, r"per_read = 1\.5"),
        ({"pool": -1}, "pool = -1"),
        ({"seed": -1}, "seed = -1"),
        ({"epochs": 0}, "epochs = 0"),
        ({"shard": (2, 2)}, r"shard = \(2, 2\)"),
        ({"length": 0}, "length = 0"),
        ({"length": "8"}, "length = '8'"),
    ],
)
def test_wrong_settings_are_refused(data, settings, message):
    with pytest.raises(UseError, match=message):
        Dataset(data[0]).windows(**{"length": 8, **settings})


# ------------------------------------------------------------------------------------------------ order


def test_batches_follow_from_the_seed(data):
    folder, _ = data
    first = list(islice(Dataset(folder).windows(16, seed=4, pool=3), 40))
    assert_same(first, list(islice(Dataset(folder).windows(16, seed=4, pool=3), 40)))
    assert keys(first) != keys(islice(Dataset(folder).windows(16, seed=5, pool=3), 40))


def test_epochs_differ_and_end(data):
    windows = Dataset(data[0]).windows(16, batch=4, epochs=3)
    found: dict[int, list[tuple[int, int]]] = {}
    while True:
        epoch = windows.epoch
        if not (batch := next(windows, None)):
            break
        found.setdefault(epoch, []).extend(keys([batch]))
    assert list(found) == [0, 1, 2] and list(windows) == []
    assert len({tuple(each) for each in found.values()}) == 3
    # every row group with a possible start gives a window in every epoch, and none gives one twice
    reads = {(e, s // ROW_GROUP) for e, s in all_starts(LENGTHS, 16)}
    for each in found.values():
        assert len(set(each)) == len(each) and {(e, s // ROW_GROUP) for e, s in each} == reads


def test_a_batch_mixes_episodes(tmp_path):
    make(tmp_path / "set", [640] * 10)
    batch = next(Dataset(tmp_path / "set").windows(8, batch=32))
    assert len(set(batch["episode"].tolist())) > 5


def test_starts_are_equally_likely(tmp_path):
    """Over many epochs, each start of a full row group is drawn in an eighth of them."""
    make(tmp_path / "set", [64 + 31])
    epochs = count(4000)
    found = Counter(
        s for _, s in keys(Dataset(tmp_path / "set").windows(32, batch=64, epochs=epochs, names=["reward"]))
    )
    assert sum(found.values()) == 8 * epochs and set(found) <= set(range(64))
    spread = 6 * np.sqrt(epochs / 8 * 7 / 8)  # standard deviations of a binomial
    assert all(abs(found[start] - epochs / 8) < spread for start in range(64))


@pytest.mark.parametrize(("ranks", "workers"), [(1, 2), (2, 1), (3, 2), (2, 4), (5, 7)])
def test_each_window_once_over_ranks_and_workers(data, ranks, workers):
    folder, _ = data
    shards = ranks * workers
    alone = Dataset(folder).windows(20, batch=5, seed=9, epochs=2)
    divided = [Dataset(folder).windows(20, batch=5, seed=9, epochs=2, shard=(i, shards)) for i in range(shards)]
    assert sorted(keys(alone)) == sorted(key for each in divided for key in keys(each))


def test_each_window_once_over_random_sets(tmp_path):
    rng = np.random.default_rng(0)
    for repeat in range(count(30)):
        folder, lengths = tmp_path / str(repeat), [int(n) for n in rng.integers(1, 200, rng.integers(1, 6))]
        make(folder, lengths)
        shards, window = int(rng.integers(1, 9)), int(rng.integers(1, 90))
        found = Counter(
            key
            for shard in range(shards)
            for key in keys(
                Dataset(folder).windows(
                    window,
                    per_read=ROW_GROUP,
                    epochs=1,
                    seed=repeat,
                    pool=int(rng.integers(1, 5)),
                    shard=(shard, shards),
                )
            )
        )
        assert found == Counter(all_starts(lengths, window))


# ------------------------------------------------------------------------------------------------ resuming


def fresh(folder: Path) -> Windows:
    return Dataset(folder).windows(16, batch=6, seed=2, pool=3, epochs=2)


def test_resumed_in_the_middle_equals_uninterrupted(data):
    folder, _ = data
    whole = list(fresh(folder))
    for taken in range(0, len(whole), max(1, len(whole) // count(200))):
        interrupted = fresh(folder)
        assert len(list(islice(interrupted, taken))) == taken
        state = json.loads(json.dumps(interrupted.state()))
        resumed = fresh(folder)
        resumed.restore(state)
        assert_same(list(resumed), whole[taken:])
        skipping = fresh(folder)
        skipping.skip(taken)
        assert skipping.state() == state


def test_resuming_refuses_other_episodes_and_settings(data, tmp_path):
    folder, _ = data
    state = fresh(folder).state()
    make(tmp_path / "set", LENGTHS[:-1])
    with pytest.raises(UseError, match="another set of episodes"):
        fresh(tmp_path / "set").restore(state)
    with pytest.raises(UseError, match="batch = 6, but these have batch = 7"):
        Dataset(folder).windows(16, batch=7, seed=2, pool=3).restore(state)
    with pytest.raises(UseError, match="damaged"):
        fresh(folder).restore({**state, "offset": -1})
    with pytest.raises(UseError, match="not a state of windows"):
        fresh(folder).restore({})


# ------------------------------------------------------------------------------------------------ torch


def torch_windows(folder: Path, **settings: Any) -> TorchWindows:
    return Dataset(folder).windows(16, batch=6, seed=2, pool=3, **settings).torch()


def test_data_loader_with_two_workers(data):
    folder, _ = data
    alone = list(Dataset(folder).windows(16, batch=6, seed=2, pool=3, epochs=1))
    loader: Any = DataLoader(torch_windows(folder, epochs=1), batch_size=None, num_workers=2)
    found = list(loader)
    assert sorted(keys(found)) == sorted(keys(alone))
    assert found[0]["obs"]["eye"].shape == (6, 16, 8, 8, 3) and found[0]["valid"].dtype.is_floating_point is False
    for taken in (5, len(found) - 1):
        dataset = torch_windows(folder, epochs=1)
        dataset.restore(json.loads(json.dumps(dataset.state(taken, workers=2))))
        again: Any = DataLoader(dataset, batch_size=None, num_workers=2)
        assert keys(again) == keys(found[taken:])
    with pytest.raises(UseError, match="2 processes, but this one has 1"):
        next(iter(dataset))


def test_torch_ranks_and_epochs(data, monkeypatch):
    folder, _ = data
    both = [list(torch_windows(folder, epochs=1, shard=(rank, 2))) for rank in range(2)]
    assert sorted(keys(both[0] + both[1])) == sorted(keys(torch_windows(folder, epochs=1)))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    ranked = torch_windows(folder, epochs=1)
    assert keys(ranked) == keys(both[1]) == keys(ranked)
    ranked.set_epoch(1)
    later = Dataset(folder).windows(16, batch=6, seed=2, pool=3, epochs=2, shard=(1, 2))
    assert keys(ranked) == keys(later)[len(keys(both[1])) :]


def test_torch_observations_and_spawned_workers(data):
    """A dataset can be sent to a process that was not forked."""
    windows = Dataset(data[0]).observations(batch=9, epochs=1)
    copy = pickle.loads(pickle.dumps(windows.torch()))  # noqa: S301 - our own
    assert keys(copy) == keys(windows)


def test_delivered_counts_batches_in_turns():
    rng = np.random.default_rng(1)
    for _ in range(count(500)):
        left = [int(n) for n in rng.integers(0, 6, rng.integers(1, 5))]
        batches = int(rng.integers(0, sum(left) + 1))
        counts, worker = [0] * len(left), 0
        while sum(counts) < batches:
            counts[worker] += counts[worker] < left[worker]
            worker = (worker + 1) % len(left)
        found, following = delivered(list(left), batches)
        assert found == counts
        if batches < sum(left):
            after, _ = delivered(list(left), batches + 1)
            assert [one - two for one, two in zip(after, found, strict=True)].index(1) == following
    assert delivered([None, 0, None], 5) == ([3, 0, 2], 2)


# ------------------------------------------------------------------------------------------------ datasets


def test_episodes_in_order(data):
    folder, made = data
    dataset = Dataset(folder)
    assert (len(dataset), dataset.steps, dataset.spec.obs) == (len(made), sum(LENGTHS), SPEC.obs)
    for one, two in zip(dataset, made, strict=True):
        assert_equal(one, two)
    assert_equal(dataset.episode(-1), made[-1])
    with pytest.raises(IndexError):
        dataset.episode(len(made))


def test_views_and_split(tmp_path):
    make(tmp_path / "set", [3] * 40)
    dataset = Dataset(tmp_path / "set")
    training, validation = dataset.split(0.3)
    seeds = [{each.seed for each in side} for side in (training, validation)]
    assert not seeds[0] & seeds[1] and seeds[0] | seeds[1] == set(range(40)) and all(seeds)
    view = Dataset(tmp_path / "set", rows=np.array([4, 2]))
    assert [each.seed for each in view] == [2, 4] and view.steps == 6
    assert {each.seed for each in dataset.select(np.arange(40) < 2)} == {0, 1}
    assert set(view.windows(2, epochs=1, per_read=64).__next__()["episode"]) == {0, 1}
    for rows in ([40], [1, 1], [-1], [True]):
        with pytest.raises(UseError, match="rows"):
            dataset.select(np.array(rows))


def test_several_agents(tmp_path):
    out = writer(tmp_path / "set")
    made = [episode(40 + n, n, agent=name) for n in range(3) for name in ("left", "right")]
    for n in range(3):
        out.commit(n, made[2 * n : 2 * n + 2])
    out.close()
    dataset = Dataset(tmp_path / "set")
    assert len(dataset) == 6
    for one, two in zip(dataset, made, strict=True):
        assert_equal(one, two)
    windows = dataset.windows(41, per_read=64, epochs=1)
    found = sorted(keys(windows))
    assert found == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (4, 1), (5, 0), (5, 1)]
    assert set(dataset.to_arrow().column("agent").to_pylist()) == {"left", "right"}
    only = dataset.select(np.array([0, 2, 4]))
    with pytest.raises(UseError, match="another set"):
        only.windows(41, per_read=64, epochs=1).restore(windows.state())


def test_a_folder_from_before_datasets(tmp_path):
    made, lines = [episode(70, n) for n in range(3)], []
    for n, each in enumerate(made):
        content = encode(each, spec_to_json(SPEC), {"env": "CartPole-v1", **each.meta}).to_pybytes()
        (tmp_path / f"episode-{n:06d}.parquet").write_bytes(content)
        line = {
            "file": f"episode-{n:06d}.parquet",
            "rows": 71,
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            "seed": n,
            "return": float(each.reward.sum()),
            "terminated": each.terminated,
            "truncated": each.truncated,
        }
        lines.append(atomic.to_line(line) + "\n")
    (tmp_path / "manifest.jsonl").write_text("".join(lines))
    dataset = Dataset(tmp_path)
    for one, two in zip(dataset, made, strict=True):
        assert_equal(one, two)
    found = keys(dataset.windows(32, per_read=64, epochs=1))
    assert sorted(found) == sorted(all_starts([70] * 3, 32))


def test_a_dataset_that_grows_keeps_its_episodes(tmp_path):
    out = writer(tmp_path)
    out.commit(0, [episode(10, 0)])
    dataset = Dataset(tmp_path)
    out.commit(1, [episode(10, 1)])
    (tmp_path / ".tmp" / "half").write_bytes(b"PAR1")
    assert len(list(dataset)) == 1 and set(keys(dataset.windows(4, epochs=1, per_read=64))) == all_starts([10], 4)
    assert len(Dataset(tmp_path)) == 2


def pack(folder: Path) -> None:
    """Move all single files into a shard, as `tiltyard data pack` does."""
    entries = list(layout.read_manifest(folder))
    contents = [layout.read_bytes(folder, each) for each in entries]
    (folder / "shards").mkdir()
    file = "shards/shard-000000-abc123.tar"
    tar = layout.to_tar([(f"{e.episode:09d}.parquet", c) for e, c in zip(entries, contents, strict=True)])
    (folder / file).write_bytes(tar)
    places = [offset for offset, _, _ in layout.members(tar[: -2 * layout.HEADER])]
    moved = [replace(each, file=file, offset=place) for each, place in zip(entries, places, strict=True)]
    manifest.write_sealed(folder / "manifests" / "shard-000000-abc123.jsonl", moved)
    for each in entries:
        (folder / each.file).unlink()


def test_packed_while_it_is_read(tmp_path):
    made = make(tmp_path)
    whole = list(fresh(tmp_path))
    windows, episodes = fresh(tmp_path), iter(Dataset(tmp_path))
    started = list(islice(windows, 3))
    assert_equal(next(episodes), made[0])
    state = windows.state()
    pack(tmp_path)
    assert_same([*started, *windows], whole)
    for one, two in zip(episodes, made[1:], strict=True):
        assert_equal(one, two)
    resumed = fresh(tmp_path)
    resumed.restore(state)
    assert_same(list(resumed), whole[3:])


def test_a_missing_file_is_named(tmp_path):
    make(tmp_path, [20, 20])
    dataset = Dataset(tmp_path)
    missing = tmp_path / layout.episode_path(1)
    missing.unlink()
    with pytest.raises(TiltyardError, match=f"cannot read {missing}"):
        list(dataset.windows(4, epochs=1))
    with pytest.raises(TiltyardError, match=f"cannot read {missing}"):
        list(dataset)


def test_damage_is_named(tmp_path):
    """Whichever byte is damaged: the windows are right, or the error names the file."""
    made = make(tmp_path, [150, 20])
    path = tmp_path / layout.episode_path(0)
    sound = path.read_bytes()
    rng, messages = np.random.default_rng(0), []
    for place in rng.integers(4, len(sound), count(300)):
        damaged = bytearray(sound)
        damaged[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        try:
            for batch in Dataset(tmp_path).windows(64, per_read=64, epochs=1):
                for row, (number, start) in enumerate(keys([batch])):
                    steps = int(batch["valid"][row].sum())
                    right = made[number].obs["eye"][start : start + steps]
                    assert np.array_equal(batch["obs"]["eye"][row, :steps], right)
        except TiltyardError as error:
            messages.append(error.message)
    assert len(messages) > count(300) // 2
    assert [message for message in messages if str(path) not in message] == []
    path.write_bytes(sound[:-100])
    with pytest.raises(TiltyardError, match=f"{path}.* is damaged: its size is"):
        next(Dataset(tmp_path).windows(64, epochs=1))
    with pytest.raises(TiltyardError, match=f"{path} is damaged: its size is"):
        Dataset(tmp_path).episode(0)
    assert_equal(Dataset(tmp_path).episode(1), made[1])


def test_empty_datasets(tmp_path):
    new_dataset(tmp_path)
    dataset = Dataset(tmp_path)
    assert (len(dataset), dataset.steps, list(dataset), dataset.to_arrow().num_rows) == (0, 0, [], 0)
    with pytest.raises(UseError, match="no episodes"):
        dataset.windows(4)
    with pytest.raises(UseError, match="there is no dataset"):
        Dataset(tmp_path / "other")
    writer(tmp_path).commit(0, [episode(0, 0)])
    with pytest.raises(UseError, match="have no steps"):
        Dataset(tmp_path).windows(4)
    assert keys(Dataset(tmp_path).observations(epochs=1)) == [(0, 0)]


def test_tables(data):
    folder, made = data
    dataset = Dataset(folder)
    table = dataset.to_arrow()
    columns = ["episode", "agent", "step", "obs.arm", "obs.code", "action", "reward", "terminated", "truncated"]
    assert sorted(table.column_names) == sorted(columns) and table.num_rows == sum(LENGTHS) + len(LENGTHS)
    rewards = table.filter(np.asarray(table.column("episode")) == 2).column("reward").to_pylist()
    assert rewards == [*(float(each) for each in made[2].reward), None]
    assert table.column("action").null_count == table.column("reward").null_count == len(made)
    frame = dataset.to_pandas(names=["obs.eye", "action"])
    assert list(frame.columns) == ["episode", "agent", "step", "obs.eye", "action"]
    row = frame[(frame.episode == 0) & (frame.step == 77)].iloc[0]
    assert np.array_equal(np.reshape(row["obs.eye"], (8, 8, 3)), made[0].obs["eye"][77])
    assert np.array_equal(row["action"], made[0].action[77])
    with pytest.raises(UseError, match="unknown column"):
        dataset.to_arrow(names=["obs.ee"])
