"""`tiltyard data export` and `import`: what they print, their exit codes, and options that do not fit."""

import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Command
from tests.data.test_exports import agents, dataset
from tests.data.test_imports import cartpole, read
from tests.data.test_transform import OLD
from tests.data.test_unpickle import Calls


def test_export_and_import_print_exact_counts(tiltyard: Command, tmp_path: Path):
    made = dataset(tmp_path / "set", [3, 70, 1])
    done = tiltyard("data", "export", "set", "--to", "tfrecord", "--out", "out", "--shards", "2")
    size = sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert done.stdout == f"out: 3 episodes, 74 steps, 2 files, {size / 1e6:,.1f} MB\n"
    assert "tiltyard data import out --out FOLDER" in done.stderr
    again = tiltyard("data", "import", "out", "--out", "again", "--json")
    found = json.loads(again.stdout)
    assert found == {"out": "again", "format": "tfrecord", "episodes": 3, "steps": 74, "present": 0, "notes": []}
    assert [len(each.action) for each in read(tmp_path / "again")] == [len(each.action) for each in made]
    repeated = tiltyard("data", "import", "out", "--out", "again")
    assert repeated.stdout == "again: 0 episodes, 0 steps; 3 were there already\n"


@pytest.mark.parametrize(("form", "out"), [("minari", "set-v0"), ("npz", "x"), ("webdataset", "x"), ("gif", "x")])
def test_every_format_has_json(tiltyard: Command, tmp_path: Path, form: str, out: str):
    agents(tmp_path / "set", [0, 1, 2])
    done = tiltyard("data", "export", "set", "--to", form, "--out", out, "--episodes", "2", "--json")
    found = json.loads(done.stdout)
    assert (found["format"], found["episodes"], found["recordings"], found["steps"]) == (form, 2, 4, 12)
    files = [path for path in (tmp_path / out).rglob("*") if path.is_file()]
    assert found["files"] == len(files) and found["bytes"] == sum(path.stat().st_size for path in files)


WRONG = {
    "exists": (["set", "--to", "npz", "--out", "taken"], "taken exists already"),
    "option": (["set", "--to", "npz", "--out", "x", "--fps", "5"], "--fps is an option of --to gif"),
    "shards": (["set", "--to", "minari", "--out", "x-v0", "--shards", "5"], "--shards is an option of"),
    "many": (["set", "--to", "tfrecord", "--out", "x", "--shards", "100000"], "must be at most 99,999"),
    "both": (["set", "--to", "tfrecord", "--out", "x", "--shards", "5", "--shard-mb", "3"], "not allowed with"),
    "format": (["set", "--to", "hdf5", "--out", "x"], "invalid choice: 'hdf5'"),
    "id": (["set", "--to", "minari", "--out", "x"], "not the name of a Minari dataset"),
    "missing": (["nothing", "--to", "npz", "--out", "x"], "there is no dataset nothing"),
    "image": (["set", "--to", "gif", "--out", "x", "--obs", "arm"], "'arm' is not an image"),
    "fps": (["set", "--to", "gif", "--out", "x", "--fps", "nan"], "must be a number from 0.1 to 50"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_of_export_exits_with_2(tiltyard: Command, tmp_path: Path, name: str):
    dataset(tmp_path / "set", [1])
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    words, sentence = WRONG[name]
    done = tiltyard("data", "export", *words, expect=2)
    assert sentence in done.stderr and "hint: " in done.stderr and done.stdout == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set", "taken"]


def test_import_with_an_env(tiltyard: Command, tmp_path: Path):
    (tmp_path / "x.pickle").write_bytes(pickle.dumps(cartpole()))
    done = tiltyard("data", "import", "x.pickle", "--out", "set", "--env", "CartPole-v1")
    assert done.stdout == "set: 1 episode, 5 steps\n" and "note: 1 episode without a seed" in done.stderr
    about = json.loads((tmp_path / "set" / "dataset.json").read_text())
    assert about["env"] == {"id": "CartPole-v1"} and about["made"][0]["command"][-2:] == ["--env", "CartPole-v1"]
    other = tiltyard("data", "import", "x.pickle", "--out", "other", "--env", "MountainCar-v0", expect=2)
    assert "has the shape [4]; the env has [2]" in other.stderr
    assert not (tmp_path / "other").exists()


def test_wrong_use_of_import_exits_with_2(tiltyard: Command, tmp_path: Path):
    (tmp_path / "bad.pickle").write_bytes(pickle.dumps([Calls(os.mkdir, str(tmp_path / "mark"))]))
    np.savez(tmp_path / "x.npz", a=np.zeros(3))
    (tmp_path / "junk.npz").write_bytes(bytes(range(200)))
    dataset(tmp_path / "own", [1])
    shutil.copytree(OLD, tmp_path / "old")
    for words, sentence in {
        ("bad.pickle",): "is refused: it contains posix.mkdir",
        ("x.npz",): "holds a dict with a, which is not a rollout",
        ("junk.npz",): "junk.npz is not an npz file",
        ("own",): "own is a dataset already",
        ("old",): "old is a dataset already",
        ("missing",): "there is no missing",
        ("x.npz", "--from", "minari"): "there is no minari data at x.npz",
        ("x.npz", "--env", "NoSuchEnv-v0"): "NoSuchEnv",
    }.items():
        done = tiltyard("data", "import", *words, "--out", "set", expect=2)
        assert sentence in done.stderr and "hint: " in done.stderr, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.pickle", "junk.npz", "old", "own", "x.npz"]


def test_help_says_what_a_format_cannot_hold(tiltyard: Command):
    done = tiltyard("data", "export", "--help")
    assert "info dicts are left out" in done.stdout and "256 colours" in done.stdout
