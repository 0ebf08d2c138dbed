"""Imports: our own exports bit for bit, other programs' data by their names, never twice, nothing executed."""

import json
import os
import pickle
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium
import minari
import numpy as np
import pytest
from gymnasium import spaces
from minari.data_collector.episode_buffer import EpisodeBuffer

from tests.data.episodes import assert_equal, episode
from tests.data.test_exports import agents, dataset
from tests.data.test_unpickle import Calls
from tiltyard.config.sections import Env
from tiltyard.data import dataset_file, folder, manifest, tfrecord
from tiltyard.data.exports import Wanted, export
from tiltyard.data.imports import detect, import_data
from tiltyard.envs.actions import ActionCodec
from tiltyard.envs.probe import probe
from tiltyard.errors import TiltyardError, UseError
from tiltyard.types import Episode

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:minari.*")  # advice when a dataset is made
COMPLETE = ("tfrecord", "npz")


def read(place: Path) -> list[Episode]:
    return list(folder.read_episodes(place))


# ---------------------------------------------------------------------------------------------- our own exports


@pytest.mark.parametrize("form", COMPLETE)
def test_own_exports_come_back_bit_for_bit(tmp_path: Path, form: str):
    dataset(tmp_path / "set", [3, 70, 1], save_info=True)
    export(tmp_path / "set", Wanted(form, tmp_path / "out"))
    done = import_data(str(tmp_path / "out"), tmp_path / "again", command=["tiltyard", "data", "import"])
    assert (done.episodes, done.steps, done.present, done.format, done.notes) == (3, 74, 0, form, [])
    for before, after in zip(read(tmp_path / "set"), read(tmp_path / "again"), strict=True):
        assert_equal(before, after)
        assert before.meta == after.meta and before.info == after.info
    one, two = folder.read_about(tmp_path / "set"), folder.read_about(tmp_path / "again")
    assert (one.env, one.spec, one.digest, one.seed) == (two.env, two.spec, two.digest, two.seed)
    assert two.made[0]["command"] == ["tiltyard", "data", "import"]
    # the same files: not only equal arrays
    hashes = [[entry.sha256 for entry in folder.read_manifest(tmp_path / name)] for name in ("set", "again")]
    assert hashes[0] == hashes[1]


def test_minari_comes_back_except_for_clipped_actions(tmp_path: Path):
    dataset(tmp_path / "set", [3, 70, 1])
    export(tmp_path / "set", Wanted("minari", tmp_path / "out-v0"))
    import_data(str(tmp_path / "out-v0"), tmp_path / "again")
    codec = ActionCodec(folder.read_about(tmp_path / "set").spec.action)
    for before, after in zip(read(tmp_path / "set"), read(tmp_path / "again"), strict=True):
        before.action = codec.inside(before.action)
        before.obs = {name: before.obs[name] for name in after.obs}  # in the order of the space
        assert_equal(before, after)
        assert before.meta == after.meta
    assert folder.read_about(tmp_path / "again").digest == folder.read_about(tmp_path / "set").digest


@pytest.mark.parametrize("form", [*COMPLETE, "minari"])
def test_agents_and_numbers_are_kept(tmp_path: Path, form: str):
    agents(tmp_path / "set", [0, 2])
    export(tmp_path / "set", Wanted(form, tmp_path / "out-v0"))
    import_data(str(tmp_path / "out-v0"), tmp_path / "again")
    keys = [entry.key for entry in folder.read_manifest(tmp_path / "again")]
    assert keys == [(0, "left"), (0, "right"), (2, "left"), (2, "right")]


@pytest.mark.parametrize("form", [*COMPLETE, "minari"])
def test_an_import_can_be_repeated_and_grows_nothing(tmp_path: Path, form: str):
    dataset(tmp_path / "set", [3, 2, 5, 1])
    export(tmp_path / "set", Wanted(form, tmp_path / "out-v0"))
    import_data(str(tmp_path / "out-v0"), tmp_path / "again")
    again = import_data(str(tmp_path / "out-v0"), tmp_path / "again")
    assert (again.episodes, again.present) == (0, 4) and len(read(tmp_path / "again")) == 4
    assert len(folder.read_about(tmp_path / "again").made) == 1


def test_a_killed_import_is_continued(tmp_path: Path):
    dataset(tmp_path / "set", [2] * 30)
    export(tmp_path / "set", Wanted("npz", tmp_path / "out"))
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tiltyard.data.imports import import_data\n"
        "def stop(done):\n"
        "    if done == 11: os.kill(os.getpid(), signal.SIGKILL)\n"
        "import_data(sys.argv[1], Path(sys.argv[2]), progress=stop)\n"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "out"), str(tmp_path / "again")]
    assert subprocess.run(arguments, check=False).returncode == -signal.SIGKILL
    (listing,) = (tmp_path / "again" / "manifests").iterdir()
    lines = listing.read_text().splitlines(keepends=True)
    listing.write_text("".join(lines[:-1]))  # as if it was killed before it listed the last file
    done = import_data(str(tmp_path / "out"), tmp_path / "again")
    assert (len(lines), done.episodes, done.present) == (11, 19, 11)
    assert manifest.read(tmp_path / "again").numbers().tolist() == list(range(30))
    for before, after in zip(read(tmp_path / "set"), read(tmp_path / "again"), strict=True):
        assert_equal(before, after)


def test_another_dataset_is_not_added_to(tmp_path: Path):
    dataset(tmp_path / "set", [3, 2])
    export(tmp_path / "set", Wanted("npz", tmp_path / "out"))
    for place in ("set", "out"):
        with pytest.raises(UseError, match=r"already|exists"):
            import_data(str(tmp_path / "out"), tmp_path / place)
    import_data(str(tmp_path / "out"), tmp_path / "again")
    dataset(tmp_path / "other", [9])
    export(tmp_path / "other", Wanted("npz", tmp_path / "changed"))
    with pytest.raises(UseError, match="not of this import") as caught:
        import_data(str(tmp_path / "changed"), tmp_path / "again")
    assert "data merge" in caught.value.hint and len(read(tmp_path / "again")) == 2


def test_damage_and_missing_shards_are_found(tmp_path: Path):
    dataset(tmp_path / "set", [3, 2, 5])
    export(tmp_path / "set", Wanted("tfrecord", tmp_path / "out", shards=3))
    shard = tmp_path / "out" / "set.tfrecord-00002-of-00003"
    data = shard.read_bytes()
    shard.write_bytes(data[:50] + bytes([data[50] ^ 4]) + data[51:])
    with pytest.raises(TiltyardError, match="checksum of its data is wrong"):
        import_data(str(tmp_path / "out"), tmp_path / "again")
    assert [entry.episode for entry in folder.read_manifest(tmp_path / "again")] == [0]
    shard.write_bytes(data)
    assert import_data(str(tmp_path / "out"), tmp_path / "again").episodes == 2
    shard.unlink()
    with pytest.raises(UseError, match=r"lacks set\.tfrecord-00002-of-00003"):
        import_data(str(tmp_path / "out"), tmp_path / "new")
    assert not (tmp_path / "new").exists()
    one = tmp_path / "out" / "set.tfrecord-00001-of-00003"
    assert import_data(str(one), tmp_path / "one").episodes == 1


def test_tfrecords_of_other_programs_are_named(tmp_path: Path):
    with (tmp_path / "x.tfrecord").open("wb") as file:
        tfrecord.write_record(file, tfrecord.encode_example({"observations": b"x", "rewards": [1]}))
    with pytest.raises(UseError, match="features observations, rewards"):
        import_data(str(tmp_path / "x.tfrecord"), tmp_path / "out")
    with (tmp_path / "y.tfrecord").open("wb") as file:
        tfrecord.write_record(file, b"\xff\xff")
    with pytest.raises(UseError, match=r"not a tf\.train\.Example"):
        import_data(str(tmp_path / "y.tfrecord"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------- pickles and npz


def steps_of(lengths: list[int], rng: np.random.Generator) -> dict[str, Any]:
    """Episodes one after the other, as many programs store them."""
    total = sum(lengths)
    ends = np.zeros(total, bool)
    ends[np.cumsum(lengths) - 1] = True
    return {
        "observations": rng.normal(size=(total, 4)).astype(np.float32),
        "actions": rng.integers(0, 3, total),
        "rewards": rng.normal(size=total),
        "dones": ends,
    }


def test_pickled_rollouts_are_cut_at_their_ends(tmp_path: Path):
    record = steps_of([4, 1, 6], np.random.default_rng(0))
    record["actions"][0] = 2
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(record))
    done = import_data(str(tmp_path / "x.pkl"), tmp_path / "set")
    found = read(tmp_path / "set")
    assert (done.format, done.episodes, done.steps) == ("pickle", 3, 11)
    assert [len(each.action) for each in found] == [4, 1, 6] and all(each.terminated for each in found)
    assert np.array_equal(np.concatenate([each.action[:, 0] for each in found]), record["actions"])
    assert np.array_equal(np.concatenate([each.reward for each in found]), record["rewards"])
    assert np.array_equal(np.concatenate([each.obs["obs"][:-1] for each in found]), record["observations"])
    assert np.array_equal(found[0].obs["obs"][-1], record["observations"][3])  # repeated
    assert found[0].meta["final_obs"] == "repeated" and found[0].meta["imported_from"] == "x.pkl"
    assert [each.seed for each in found] == [-1, -2, -3]
    assert "3 episodes without a final observation" in done.notes[0] and "without a seed" in done.notes[1]
    spec = folder.read_about(tmp_path / "set").spec
    assert spec.action.parts[0].options == 3 and spec.obs["obs"].shape == (4,)


def test_several_files_are_one_dataset(tmp_path: Path):
    rng = np.random.default_rng(1)
    (tmp_path / "in").mkdir()
    for name, most in (("b.pickle", 9), ("a.pickle", 2)):
        record = steps_of([2, 3], rng)
        record["actions"][:] = most
        (tmp_path / "in" / name).write_bytes(pickle.dumps([record, steps_of([5], rng)]))
    done = import_data(str(tmp_path / "in"), tmp_path / "set")
    assert done.episodes == 6
    found = read(tmp_path / "set")
    assert [len(each.action) for each in found] == [2, 3, 5, 2, 3, 5]
    assert found[0].action[0, 0] == 2 and found[3].action[0, 0] == 9
    assert folder.read_about(tmp_path / "set").spec.action.parts[0].options == 10


FORMS = {
    "final observation": lambda r: {**r, "observations": np.concatenate([r["observations"], r["observations"][:1]])},
    "next observations": lambda r: {**r, "next_observations": np.roll(r["observations"], -1, axis=0)},
    "list": lambda r: [r],
    "tuple in a list": lambda r: [(r,)],
    "steps": lambda r: [{name: array[i] for name, array in r.items()} for i in range(len(r["rewards"]))],
    "lists": lambda r: {name: list(array) for name, array in r.items()},
    "nested lists": lambda r: {name: array.tolist() for name, array in r.items()},
    "names": lambda r: {"obs": r["observations"], "action": r["actions"], "reward": r["rewards"], "done": True},
    "attributes": lambda r: {"obs_l": r["observations"], "action_l": r["actions"], "reward_l": r["rewards"], "done": True},
    "images": lambda r: {**{k: v for k, v in r.items() if k != "observations"}, "frames": r["observations"]},
    "gymnasium": lambda r: {
        "observations": {"a": r["observations"], "b": r["observations"][:, 0]},
        "actions": r["actions"],
        "rewards": r["rewards"][:, None],
        "terminated": np.zeros(len(r["rewards"]), bool),
        "truncated": r["dones"],
        "seed": 12,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_usual_forms_of_rollouts_are_understood(tmp_path: Path, name: str):
    record = steps_of([5], np.random.default_rng(2))
    (tmp_path / "x.pickle").write_bytes(pickle.dumps(FORMS[name](record)))
    import_data(str(tmp_path / "x.pickle"), tmp_path / "set")
    (found,) = read(tmp_path / "set")
    obs = next(iter(found.obs.values()))
    assert np.array_equal(obs[:-1], record["observations"]) and np.array_equal(found.reward, record["rewards"])
    assert np.array_equal(found.action[:, 0], record["actions"])
    gymnasium = name == "gymnasium"
    assert (found.terminated, found.truncated) == (not gymnasium, gymnasium) and found.seed == (12 if gymnasium else -1)
    final = record["observations"][0 if name in ("final observation", "next observations") else -1]
    assert np.array_equal(obs[-1], final)
    assert ("final_obs" in found.meta) == (name not in ("final observation", "next observations"))


def test_npz_of_other_programs_is_read(tmp_path: Path):
    rng = np.random.default_rng(3)
    images, actions = rng.integers(0, 256, (7, 16, 16, 3)).astype(np.uint8), rng.normal(size=(6, 3)).astype(np.float32)
    np.savez(tmp_path / "x.npz", obs=images, actions=actions, rewards=np.arange(6), terminals=np.zeros(6), seed=4)
    done = import_data(str(tmp_path / "x.npz"), tmp_path / "set")
    (found,) = read(tmp_path / "set")
    assert np.array_equal(found.obs["obs"], images) and np.array_equal(found.action, actions) and found.seed == 4
    assert (found.terminated, found.truncated) == (False, True) and done.notes == []
    spec = folder.read_about(tmp_path / "set").spec
    assert spec.obs["obs"].image and spec.action.parts[0].low == (-np.inf,) * 3


def test_actions_that_float32_cannot_hold_are_counted(tmp_path: Path):
    record = {"obs": np.zeros((3, 1)), "action": np.asarray([[0.1], [0.5], [1 / 3]]), "reward": np.zeros(3)}
    np.savez(tmp_path / "x.npz", **record)
    assert "2 actions cannot be stored exactly" in import_data(str(tmp_path / "x.npz"), tmp_path / "set").notes[0]


UNKNOWN = {
    "a number": (3, "holds a int"),
    "an empty list": ([], "a list of 0 with nothing"),
    "other names": ({"x": np.zeros(3), "y": 1}, "a dict with x, y"),
    "an array": (np.zeros(3), "holds a ndarray"),
    "lengths": ({"obs": np.zeros((5, 2)), "actions": np.zeros(3), "rewards": np.zeros(3)}, "lengths"),
    "ragged": ({"obs": [[1, 2], [3]], "actions": [0, 0], "rewards": [0, 0]}, "not an array of numbers"),
    "strings": ({"obs": ["a", "b"], "actions": [0, 0], "rewards": [0, 0]}, "not an array of numbers"),
    "negative": ({"obs": np.zeros((2, 1)), "actions": np.asarray([0, -1]), "rewards": np.zeros(2)}, "down to -1"),
    "ends": ({"obs": np.zeros((2, 1)), "actions": [0, 1], "rewards": [0, 0], "dones": [0, 0, 1]}, "3 entries for 2"),
    "twice": ({"obs": np.zeros((2, 1)), "frames": np.zeros((2, 1)), "actions": [0, 1], "rewards": [0, 0]}, "two arrays"),
    "nothing": ({"obs": np.zeros((0, 1)), "actions": np.zeros(0), "rewards": np.zeros(0)}, "lengths"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_records_are_named_in_one_sentence(tmp_path: Path, name: str):
    value, sentence = UNKNOWN[name]
    (tmp_path / "x.pickle").write_bytes(pickle.dumps(value))
    with pytest.raises(UseError, match=sentence) as caught:
        import_data(str(tmp_path / "x.pickle"), tmp_path / "set")
    assert caught.value.hint and not (tmp_path / "set").exists()


def test_files_of_different_shapes_are_refused(tmp_path: Path):
    for name, size in (("a.npz", 3), ("b.npz", 4)):
        np.savez(tmp_path / name, obs=np.zeros((3, size)), action=np.zeros(2), reward=np.zeros(2))
    with pytest.raises(UseError, match=r"obs\.obs is float64 \[4\] in .*b\.npz"):
        import_data(str(tmp_path), tmp_path / "set", format="npz")
    assert not (tmp_path / "set").exists()


def test_malicious_files_run_nothing(tmp_path: Path):
    mark = tmp_path / "mark"
    objects = np.empty(2, object)
    objects[:] = [Calls(os.mkdir, str(mark)), 1]
    (tmp_path / "x.pickle").write_bytes(pickle.dumps({"obs": objects, "actions": [1], "rewards": [1]}))
    with pytest.raises(UseError, match="is refused"):
        import_data(str(tmp_path / "x.pickle"), tmp_path / "set")
    np.savez(tmp_path / "y.npz", obs=objects, action=np.zeros(2), reward=np.zeros(2))
    with pytest.raises(TiltyardError, match="arrays of objects"):
        import_data(str(tmp_path / "y.npz"), tmp_path / "set")
    (tmp_path / "z.npz").write_bytes(pickle.dumps(Calls(os.mkdir, str(mark))))
    with pytest.raises(UseError, match=r"z\.npz is not an npz file"):
        import_data(str(tmp_path / "z.npz"), tmp_path / "set")
    assert not mark.exists() and not (tmp_path / "set").exists()


# ---------------------------------------------------------------------------------------------- Minari of others


def foreign_minari(root: Path, monkeypatch: pytest.MonkeyPatch, **changed: Any) -> Path:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(root))
    rng = np.random.default_rng(5)
    buffers = [
        EpisodeBuffer(
            seed=seed,
            observations={"at": list(rng.normal(size=(4, 2))), "goal": list(rng.integers(3, 8, 4))},
            actions=list(rng.uniform(-2, 2, (3, 1)).astype(np.float32)),
            rewards=[0.5, 1.0, -1.0],
            terminations=[False, False, seed == 7],
            truncations=[False, False, False],
            infos={},
        )
        for seed in (7, None)
    ]
    minari.create_dataset_from_buffers(
        "other-v1",
        buffers,
        observation_space=spaces.Dict({"at": spaces.Box(-9, 9, (2,), np.float64), "goal": spaces.Discrete(5, start=3)}),
        action_space=spaces.Box(-2, 2, (1,), np.float32),
    )
    path = root / "other-v1" / "data" / "metadata.json"
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in {**saved, **changed}.items() if value is not None}))
    return root / "other-v1"


@pytest.mark.parametrize("by", ["folder", "data folder", "id"])
def test_minari_datasets_of_others_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str):
    place = foreign_minari(
        tmp_path, monkeypatch, env_spec=gymnasium.spec("Pendulum-v1").to_json().replace("{}", '{"g": 9.8}', 1)
    )
    data = list(minari.load_dataset("other-v1"))
    source = {"folder": str(place), "data folder": str(place / "data"), "id": "other-v1"}[by]
    done = import_data(source, tmp_path / "set")
    found = read(tmp_path / "set")
    assert done.format == "minari" and done.episodes == 2 and any("without a seed" in note for note in done.notes)
    assert [each.seed for each in found] == [7, -2]
    assert [(each.terminated, each.truncated) for each in found] == [(True, False), (False, True)]
    codec = ActionCodec(folder.read_about(tmp_path / "set").spec.action)
    for each, other in zip(found, data, strict=True):
        assert np.array_equal(each.obs["at"], other.observations["at"].astype(np.float32))
        assert np.array_equal(each.obs["goal"], other.observations["goal"] - 3)  # counted from 0
        assert each.reward.tolist() == [0.5, 1.0, -1.0]
        assert np.allclose(np.stack(codec.decode_rows(each.action)), other.actions, rtol=0, atol=2e-7)
    assert folder.read_about(tmp_path / "set").env == {"id": "Pendulum-v1", "options": {"g": 9.8}}


def test_minari_without_spaces_is_refused_because_it_would_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mark = tmp_path / "mark"
    bad = {"id": "x-v0", "entry_point": "os:mkdir", "kwargs": {"path": str(mark)}, "additional_wrappers": []}
    foreign_minari(tmp_path, monkeypatch, env_spec=json.dumps(bad), observation_space=None)
    with pytest.raises(UseError, match="does not say what its observations"):
        import_data("other-v1", tmp_path / "set")
    assert not mark.exists() and not (tmp_path / "set").exists()
    with suppress(Exception):
        minari.load_dataset("other-v1")
    assert mark.exists()  # so the refusal is needed


def test_damaged_minari_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place = foreign_minari(tmp_path, monkeypatch)
    (place / "data" / "main_data.hdf5").write_bytes(b"not HDF5")
    with pytest.raises(TiltyardError, match="not a readable Minari dataset"):
        import_data(str(place), tmp_path / "set")
    (place / "data" / "metadata.json").write_text("{")
    with pytest.raises(TiltyardError, match="not a readable Minari dataset"):
        import_data(str(place), tmp_path / "set")
    assert not (tmp_path / "set").exists()


# ---------------------------------------------------------------------------------------------- with an env


def cartpole(steps: int = 5) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "observations": rng.normal(size=(steps + 1, 4)),
        "actions": np.zeros(steps, np.int64),
        "rewards": np.ones(steps),
        "dones": np.arange(steps) == steps - 1,
    }


def test_an_env_gives_the_spec(tmp_path: Path):
    env = Env(id="CartPole-v1")
    spec = probe(env, base=[tmp_path])
    (tmp_path / "x.pickle").write_bytes(pickle.dumps(cartpole()))
    import_data(str(tmp_path / "x.pickle"), tmp_path / "set", probed=(env, spec))
    about = folder.read_about(tmp_path / "set")
    assert about.env == {"id": "CartPole-v1"} and about.digest == dataset_file.about_env(env, spec).digest
    assert about.spec.action.parts[0].options == 2  # the data has only action 0
    (found,) = read(tmp_path / "set")
    assert found.obs["obs"].dtype == np.float32 and found.meta["env"] == "CartPole-v1"

    for name, change in {"shape": {"observations": np.zeros((6, 3))}, "option": {"actions": np.full(5, 2)}}.items():
        (tmp_path / "bad.pickle").write_bytes(pickle.dumps({**cartpole(), **change}))
        with pytest.raises(UseError, match=name):
            import_data(str(tmp_path / "bad.pickle"), tmp_path / "bad", probed=(env, spec))
    # an error after the first episode is no longer wrong use: some is written
    (tmp_path / "bad.pickle").write_bytes(pickle.dumps([cartpole(), {**cartpole(), "actions": np.full(5, 2)}]))
    with pytest.raises(TiltyardError, match="option 2") as caught:
        import_data(str(tmp_path / "bad.pickle"), tmp_path / "half", probed=(env, spec))
    assert not isinstance(caught.value, UseError) and "1 episode is in" in caught.value.hint


def test_an_env_must_match_our_own_export(tmp_path: Path):
    dataset(tmp_path / "set", [3])
    export(tmp_path / "set", Wanted("npz", tmp_path / "out"))
    about = folder.read_about(tmp_path / "set")
    import_data(str(tmp_path / "out"), tmp_path / "same", probed=(Env(id="Other-v0"), about.spec))
    (found,) = read(tmp_path / "same")
    assert found.meta["env"] == "Other-v0" and folder.read_about(tmp_path / "same").env_id == "Other-v0"
    assert_equal(found, episode(3, 0))
    spec = probe(Env(id="CartPole-v1"), base=[tmp_path])
    with pytest.raises(UseError, match="differ from those of CartPole-v1"):
        import_data(str(tmp_path / "out"), tmp_path / "new", probed=(Env(id="CartPole-v1"), spec))


def test_format_is_detected_by_the_files(tmp_path: Path):
    with pytest.raises(UseError, match="there is no"):
        detect(str(tmp_path / "missing"))
    with pytest.raises(UseError, match="no files of a known format"):
        detect(str(tmp_path))
    (tmp_path / "a.npz").touch()
    assert detect(str(tmp_path)) == "npz"
    (tmp_path / "a.p").touch()
    with pytest.raises(UseError, match="npz and pickle"):
        detect(str(tmp_path))
    assert detect(str(tmp_path / "a.p")) == "pickle"
