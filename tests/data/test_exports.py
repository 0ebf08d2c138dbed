"""Exports: complete, read by other programs, never half written, never over something else."""

import collections
import hashlib
import json
import random
from pathlib import Path

import minari
import numpy as np
import pytest
import webdataset
from gymnasium import spaces
from PIL import Image

from tests.counts import count
from tests.data.episodes import SPEC, assert_equal, episode, new_dataset, writer
from tests.data.test_tfrecord import tensorboard_records
from tiltyard.data import exports, folder, gif
from tiltyard.data.exports import Wanted, export
from tiltyard.data.imports import import_data
from tiltyard.data.tfrecord import decode_example
from tiltyard.data.writer import DatasetWriter
from tiltyard.envs.actions import ActionCodec, action_spec
from tiltyard.envs.spaces import observation_specs
from tiltyard.errors import TiltyardError, UseError
from tiltyard.types import EnvSpec, Episode

OUT = {"tfrecord": "out", "npz": "out", "webdataset": "out", "minari": "out-v0", "gif": "out"}


def dataset(place: Path, lengths: list[int], *, save_info: bool = False) -> list[Episode]:
    made = [episode(steps, seed) for seed, steps in enumerate(lengths)]
    adding = writer(place, save_info=save_info, policy="random")
    for number, each in enumerate(made):
        adding.commit(number, [each])
    adding.close()
    return made


def agents(place: Path, numbers: list[int]) -> None:
    """A dataset of two agents."""
    adding = writer(place)
    for number in numbers:
        adding.commit(number, [episode(3, number, agent=name) for name in ("left", "right")])
    adding.close()


# ---------------------------------------------------------------------------------------------- TFRecord


def test_tfrecord_is_read_by_another_reader(tmp_path: Path):
    made = dataset(tmp_path / "set", [3, 70, 1, 5, 2])
    done = export(tmp_path / "set", Wanted("tfrecord", tmp_path / "out", name="car", shards=3))
    names = [f"car.tfrecord-{index:05d}-of-00003" for index in range(3)]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert (done.episodes, done.recordings, done.steps, done.files) == (5, 5, 81, 3)
    assert done.bytes == sum((tmp_path / "out" / name).stat().st_size for name in names)
    found = [decode_example(data) for name in names for data in tensorboard_records(tmp_path / "out" / name)]
    assert [features["seed"] for features in found] == [[0], [1], [2], [3], [4]]
    for features, each in zip(found, made, strict=True):
        steps = len(each.action)
        assert features["length"] == [steps] and features["terminated"] == [int(each.terminated)]
        assert (
            np.frombuffer(features["obs.eye"], np.uint8).reshape(steps + 1, 8, 8, 3).tolist()
            == each.obs["eye"].tolist()
        )
        assert np.array_equal(features["obs.arm"].reshape(steps + 1, 3), each.obs["arm"])
        assert np.array_equal(features["action"].reshape(steps, 2), each.action)
        assert np.array_equal(features["reward"], each.reward)


@pytest.mark.parametrize("seed", range(count(60)))
def test_no_episode_is_lost_or_repeated_for_any_number_of_shards(tmp_path: Path, seed: int):
    rng = random.Random(seed)
    lengths = [rng.randrange(1, 9) for _ in range(rng.randrange(1, 12))]
    shards, form = rng.randrange(1, 20), rng.choice(["tfrecord", "webdataset"])
    made = dataset(tmp_path / "set", lengths)
    export(tmp_path / "set", Wanted(form, tmp_path / "out", shards=shards))
    files = sorted((tmp_path / "out").iterdir())
    assert len(files) == shards
    expected = collections.Counter(digest(each.obs["eye"][t]) for each in made for t in range(len(each.action) + 1))
    found: collections.Counter[str] = collections.Counter()
    sizes = []
    for path in files:
        if form == "tfrecord":
            eyes = [np.frombuffer(decode_example(data)["obs.eye"], np.uint8) for data in tensorboard_records(path)]
        else:
            eyes = [sample["obs.eye.npy"] for sample in samples(path)]
        sizes.append(len(eyes))
        found.update(digest(frame) for eye in eyes for frame in eye.reshape(-1, 8, 8, 3))
    assert found == expected and max(sizes) - min(sizes) <= 1


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


def test_size_of_shards_gives_their_number(tmp_path: Path):
    dataset(tmp_path / "set", [40] * 10)  # about 90 kB of arrays
    assert export(tmp_path / "set", Wanted("tfrecord", tmp_path / "a")).files == 1
    assert export(tmp_path / "set", Wanted("tfrecord", tmp_path / "b", shard_mb=0.03)).files == 3
    assert export(tmp_path / "set", Wanted("tfrecord", tmp_path / "c", shard_mb=1e-9)).files == 10


# ---------------------------------------------------------------------------------------------- WebDataset, npz


def samples(path: Path) -> list[dict]:
    return list(webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False).decode())


def test_webdataset_is_read_by_its_package(tmp_path: Path):
    made = dataset(tmp_path / "set", [3, 5, 2], save_info=True)
    export(tmp_path / "set", Wanted("webdataset", tmp_path / "out", shards=2))
    files = sorted((tmp_path / "out").iterdir())
    assert [path.name for path in files] == ["set-000000.tar", "set-000001.tar"]
    found = [sample for path in files for sample in samples(path)]
    assert [sample["__key__"] for sample in found] == ["000000000", "000000001", "000000002"]
    for sample, each in zip(found, made, strict=True):
        for name, array in {"obs.eye": each.obs["eye"], "obs.code": each.obs["code"], "action": each.action}.items():
            assert sample[f"{name}.npy"].dtype == array.dtype and np.array_equal(sample[f"{name}.npy"], array)
        facts = sample["facts.json"]
        assert facts["seed"] == each.seed and facts["meta"]["policy"] == "random" and facts["info"][0]["odd"] == "nan"


def test_webdataset_keeps_agents_apart(tmp_path: Path):
    agents(tmp_path / "set", [0, 1])
    done = export(tmp_path / "set", Wanted("webdataset", tmp_path / "out", shards=1))
    assert (done.episodes, done.recordings, done.steps) == (2, 4, 12)
    found = samples(tmp_path / "out" / "set-000000.tar")
    keys = [(sample["__key__"], sample["facts.json"]["agent"]) for sample in found]
    assert keys == [
        (f"00000000{number}_{place}", name) for number in (0, 1) for place, name in enumerate(("left", "right"))
    ]


def test_npz_is_read_by_numpy(tmp_path: Path):
    made = dataset(tmp_path / "set", [3, 70])
    export(tmp_path / "set", Wanted("npz", tmp_path / "out"))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "episode-000000000.npz",
        "episode-000000001.npz",
    ]
    with np.load(tmp_path / "out" / "episode-000000001.npz", allow_pickle=False) as archive:
        assert set(archive.files) == {"obs.eye", "obs.arm", "obs.code", "action", "reward", "facts"}
        assert np.array_equal(archive["obs.eye"], made[1].obs["eye"]) and archive["reward"].dtype == np.float32
        assert json.loads(archive["facts"].tobytes())["length"] == 70


def test_npz_is_compressed(tmp_path: Path):
    made = episode(50, 0)
    made.obs["eye"][:] = 7
    writer(tmp_path / "set").commit(0, [made])
    assert export(tmp_path / "set", Wanted("npz", tmp_path / "out")).bytes < made.obs["eye"].nbytes
    with np.load(tmp_path / "out" / "episode-000000000.npz", allow_pickle=False) as archive:
        assert np.array_equal(archive["obs.eye"], made.obs["eye"])


# ---------------------------------------------------------------------------------------------- Minari


def test_minari_is_read_by_minari(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = dataset(tmp_path / "set", [3, 70, 1])
    export(tmp_path / "set", Wanted("minari", tmp_path / "root" / "car-v0"))
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "root"))
    found = minari.load_dataset("car-v0")
    assert (found.total_episodes, found.total_steps) == (3, 74)
    assert found.action_space == spaces.Box(-1, 1, (2,), np.float32)
    codec = ActionCodec(SPEC.action)
    for data, each, known in zip(found, made, found.storage.get_episode_metadata(range(3)), strict=True):
        for name, array in each.obs.items():
            assert data.observations[name].dtype == array.dtype and np.array_equal(data.observations[name], array)
        assert np.array_equal(data.actions, np.stack(codec.decode_rows(each.action)))
        assert np.array_equal(data.rewards, each.reward) and known["seed"] == each.seed
        assert data.terminations[-1] == each.terminated and data.truncations[-1] == each.truncated
        assert not (data.terminations | data.truncations)[:-1].any()


ACTIONS = {
    "discrete": spaces.Discrete(4, start=-1),
    "multi_discrete": spaces.MultiDiscrete([2, 5, 3], start=[0, -2, 7]),
    "multi_binary": spaces.MultiBinary(3),
    "box": spaces.Box(np.float32([-0.4, 0, -np.inf]), np.float32([0.4, 1, np.inf]), dtype=np.float32),
    "tuple": spaces.Tuple([spaces.Discrete(3), spaces.Box(-2, 5, (2, 2), np.float32)]),
    "dict": spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Dict({"x": spaces.Box(0, 9, (1,), np.int32)})}),
}


@pytest.mark.parametrize("name", ACTIONS)
def test_actions_of_every_space_survive_minari(tmp_path: Path, name: str):
    space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    spec = EnvSpec(obs=observation_specs(space), action=action_spec(ACTIONS[name]))
    codec, rng = ActionCodec(spec.action), np.random.default_rng(0)
    about = new_dataset(tmp_path / "set", spec=spec)
    rows = codec.random_rows(rng, 200)
    obs = {"obs": rng.normal(size=(201, 2)).astype(np.float32)}
    adding = DatasetWriter(tmp_path / "set", about, {})
    adding.commit(0, [Episode(obs, rows, rng.normal(size=200), False, True, 5)])
    export(tmp_path / "set", Wanted("minari", tmp_path / "out-v0"))
    done = import_data(str(tmp_path / "out-v0"), tmp_path / "again")
    assert done.notes == []
    (entry,) = folder.read_manifest(tmp_path / "again")
    read = folder.open_episode(tmp_path / "again", entry).episode()
    assert str(codec.decode_rows(read.action)) == str(codec.decode_rows(rows))
    assert np.array_equal(read.obs["obs"], obs["obs"]) and read.reward.dtype == np.float64
    assert folder.read_about(tmp_path / "again").spec == spec


# ---------------------------------------------------------------------------------------------- GIF


def test_gif_shows_the_frames_of_an_episode(tmp_path: Path):
    made = dataset(tmp_path / "set", [3, 9, 4])
    done = export(tmp_path / "set", Wanted("gif", tmp_path / "out", episodes=2, fps=10))
    files = sorted((tmp_path / "out").iterdir())
    assert [path.name for path in files] == ["episode-000000000.gif", "episode-000000001.gif"] and done.episodes == 2
    with Image.open(files[1]) as image:
        assert image.n_frames == 10 and image.size == (8, 8) and image.info["duration"] == 100
        for index in range(10):
            image.seek(index)
            # 64 pixels have at most 64 colours, so nothing is lost
            assert np.array_equal(np.asarray(image.convert("RGB")), made[1].obs["eye"][index])


def test_gif_shows_the_newest_of_stacked_frames():
    stacked = np.arange(2 * 4 * 20 * 20, dtype=np.int64).reshape(2, 4, 20, 20).astype(np.uint8)
    spec = observation_specs(spaces.Box(0, 255, (4, 20, 20), np.uint8))["obs"]
    assert np.array_equal(gif.frames(stacked, spec), stacked[:, 3])
    colours = np.arange(2 * 20 * 20 * 6, dtype=np.int64).reshape(2, 20, 20, 6).astype(np.uint8)
    spec = observation_specs(spaces.Box(0, 255, (20, 20, 6), np.uint8))["obs"]
    assert np.array_equal(gif.frames(colours, spec), colours[..., 3:])


def test_gif_needs_an_image(tmp_path: Path):
    spec = EnvSpec(observation_specs(spaces.Box(-1, 1, (4,), np.float32)), action_spec(spaces.Discrete(2)))
    about = new_dataset(tmp_path / "set", spec=spec)
    obs = {"obs": np.zeros((2, 4), np.float32)}
    DatasetWriter(tmp_path / "set", about, {}).commit(
        0, [Episode(obs, np.zeros((1, 1), np.float32), np.ones(1), True, False, 1)]
    )
    with pytest.raises(UseError, match="no image observation"):
        export(tmp_path / "set", Wanted("gif", tmp_path / "out"))
    dataset(tmp_path / "images", [2])
    with pytest.raises(UseError, match="'arm' is not an image") as caught:
        export(tmp_path / "images", Wanted("gif", tmp_path / "out", obs="arm"))
    assert "eye" in caught.value.hint and not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------- all formats


@pytest.mark.parametrize("form", exports.FORMATS)
def test_nothing_is_overwritten(tmp_path: Path, form: str):
    dataset(tmp_path / "set", [2])
    out = tmp_path / OUT[form]
    out.write_text("mine")
    with pytest.raises(UseError, match="exists already"):
        export(tmp_path / "set", Wanted(form, out))
    assert out.read_text() == "mine"
    out.unlink()
    out.mkdir()
    export(tmp_path / "set", Wanted(form, out))
    with pytest.raises(UseError, match="exists already"):
        export(tmp_path / "set", Wanted(form, out))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([out.name, "set"])


@pytest.mark.parametrize("form", exports.FORMATS)
def test_a_damaged_episode_stops_the_export_and_leaves_nothing(tmp_path: Path, form: str):
    dataset(tmp_path / "set", [2, 2, 2])
    path = tmp_path / "set" / folder.episode_path(1)
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(TiltyardError, match="is damaged"):
        export(tmp_path / "set", Wanted(form, tmp_path / OUT[form]))
    assert [each.name for each in tmp_path.iterdir()] == ["set"]


def test_a_killed_export_is_repeated(tmp_path: Path):
    dataset(tmp_path / "set", [2])
    (tmp_path / ".new-out").mkdir()
    (tmp_path / ".new-out" / "half.npz").write_bytes(b"half")
    export(tmp_path / "set", Wanted("npz", tmp_path / "out"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["episode-000000000.npz"]
    assert not (tmp_path / ".new-out").exists()


def test_progress_is_reported_for_every_episode(tmp_path: Path):
    dataset(tmp_path / "set", [2, 1, 4])
    seen: list[tuple[int, int]] = []
    export(tmp_path / "set", Wanted("npz", tmp_path / "out"), lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_wrong_use_is_refused(tmp_path: Path):
    dataset(tmp_path / "set", [2])
    with pytest.raises(UseError, match="not the name of a Minari dataset"):
        export(tmp_path / "set", Wanted("minari", tmp_path / "no version"))
    with pytest.raises(UseError, match="cannot be the name of a file"):
        export(tmp_path / "set", Wanted("tfrecord", tmp_path / "out", name="../x"))
    new_dataset(tmp_path / "empty")
    with pytest.raises(UseError, match="has no episodes"):
        export(tmp_path / "empty", Wanted("npz", tmp_path / "out"))
    with pytest.raises(UseError, match="no dataset"):
        export(tmp_path / "missing", Wanted("npz", tmp_path / "out"))


def test_old_folders_can_be_exported(tmp_path: Path):
    old = Path(__file__).parents[1] / "old" / "episodes-schema-1"
    done = export(old, Wanted("npz", tmp_path / "out"))
    import_data(str(tmp_path / "out"), tmp_path / "again")
    before, after = list(folder.read_episodes(old)), list(folder.read_episodes(tmp_path / "again"))
    assert done.episodes == len(before) == len(after) > 0
    for one, two in zip(before, after, strict=True):
        assert_equal(one, two)
