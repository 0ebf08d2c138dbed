"""`tiltyard data split`, `merge` and `filter`: names, counts, JSON, repeated commands, wrong use."""

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import Command, in_own_process
from tests.data.episodes import episode, new_dataset, writer
from tests.data.test_transform import OLD
from tiltyard.data import dataset_file
from tiltyard.data.folder import read_manifest


def make(folder: str, seeds: range) -> Path:
    made = writer(Path(folder), policy=folder)
    for seed in seeds:
        made.append([episode(4, seed)])
    made.close()
    return Path(folder)


def seeds(folder: str) -> list[int]:
    return [entry.seed for entry in read_manifest(Path(folder))]


def test_split_makes_two_datasets(tiltyard: Command) -> None:
    make("set", range(12))
    output = tiltyard("data", "split", "set", "--validation", "0.4")
    parts = [seeds("set-train"), seeds("set-validation")]
    assert sorted(parts[0] + parts[1]) == list(range(12)) and all(parts)
    lines = [line.split() for line in output.stdout.splitlines()[1:]]
    assert lines == [
        ["set-train", str(len(parts[0])), str(4 * len(parts[0])), str(len(parts[0]))],
        ["set-validation", str(len(parts[1])), str(4 * len(parts[1])), str(len(parts[1]))],
    ]
    assert "next: tiltyard data stats set-train" in output.stderr
    again = json.loads(tiltyard("data", "split", "set", "--validation", "0.4", "--json").stdout)
    assert [(each["folder"], each["added"]) for each in again] == [("set-train", 0), ("set-validation", 0)]
    tiltyard("data", "split", "set", "--out", "t", "v", "--validation", "0.4")
    assert [seeds("t"), seeds("v")] == parts
    refused = tiltyard("data", "split", "set", "--validation", "0.1", expect=2).stderr
    assert "episodes that this command does not write" in refused


def test_split_of_a_small_dataset_warns_about_an_empty_part(tiltyard: Command) -> None:
    make("set", range(1))
    output = tiltyard("data", "split", "set", "--validation", "0.001")
    assert "warning: set-validation has no episodes" in output.stderr and seeds("set-validation") == []


def test_merge_joins_datasets_in_its_own_process(runs: Path) -> None:
    make("a", range(3))
    make("b", range(10, 12))
    output = in_own_process("data", "merge", "a", "b", "--out", "m")
    assert output.stdout.splitlines()[1].split() == ["m", "5", "20", "5"] and seeds("m") == [0, 1, 2, 10, 11]
    about = dataset_file.read(Path("m"))
    assert about is not None
    assert about.made[-1]["command"][1:] == ["data", "merge", "a", "b", "--out", "m"]


def test_merge_says_what_it_leaves_out(tiltyard: Command) -> None:
    make("a", range(3))
    tiltyard("data", "filter", "a", "--out", "b", "--where", "seed>=1")
    output = tiltyard("data", "merge", "a", "b", "--out", "m")
    assert "left out 2 episodes" in output.stderr and seeds("m") == [0, 1, 2]
    tiltyard("data", "filter", "a", "--out", "c", "--where", "seed=1")
    assert "left out 1 episode that" in tiltyard("data", "merge", "a", "c", "--out", "n").stderr


def test_folder_that_pack_refuses_is_copied_by_the_command_that_it_hints_at(tiltyard: Command) -> None:
    shutil.copytree(OLD, "old")
    hint = tiltyard("data", "pack", "old", expect=2).stderr.splitlines()[-1]
    assert hint.endswith("tiltyard data merge old --out FOLDER")
    assert tiltyard(*hint.split()[-5:]).stdout.splitlines()[1].split()[:2] == ["FOLDER", "3"]
    assert "3 episodes packed into 1 shard," in tiltyard("data", "pack", "FOLDER").stdout


def test_filter_takes_conditions(tiltyard: Command) -> None:
    make("a", range(4))
    make("b", range(10, 14))
    tiltyard("data", "merge", "a", "b", "--out", "m")
    tiltyard("data", "filter", "m", "--out", "f", "--where", "policy=b", "--where", "!terminated", "--where", "seed<13")
    assert seeds("f") == [11]
    about = dataset_file.read(Path("f"))
    assert about is not None and about.made[-1]["where"] == ["policy=b", "!terminated", "seed<13"]
    assert len(about.made) == 4, "of both sources, of the merge, and of the filter"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["split", "none"], "there is no dataset none"),
        (["split", "set", "--validation", "1"], "between 0 and 1"),
        (["split", "set", "--validation", "most"], "between 0 and 1"),
        (["split", "set", "--out", "new", "new"], "--out names new twice"),
        (["split", "set", "--out", "new", "plain"], "plain exists and is not a dataset"),
        (["merge", "set", "pendulum", "--out", "new"], "pendulum and set are not of the same env"),
        (["merge", "set", "other"], "tiltyard data merge needs --out"),
        (["merge"], "tiltyard data merge needs FOLDER and --out"),
        (["merge", "--out", "new"], "tiltyard data merge needs FOLDER"),
        (["filter", "set"], "tiltyard data filter needs --out and --where"),
        (["merge", "set", "other", "--out", "set"], "set is a source"),
        (["filter", "set", "--out", "new"], "--where"),
        (["filter", "set", "--out", "new", "--where", "lenght>3"], "unknown name 'lenght'"),
        (["filter", "set", "--out", "new", "--where", "length>300"], "none of the 2 episodes of set meets length>300"),
        (["filter", "set", "--out", "other", "--where", "length>0"], "other has episodes that this command"),
    ],
)
def test_wrong_use_is_one_sentence_and_a_hint(tiltyard: Command, words: list[str], message: str) -> None:
    make("set", range(2))
    make("other", range(50, 51))
    new_dataset(Path("pendulum"), "Pendulum-v1")
    Path("plain").mkdir()
    Path("plain/notes").write_text("mine")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    output = tiltyard("data", *words, expect=2)
    assert message in output.stderr and "hint:" in output.stderr and not output.stdout
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before
    assert not Path("new").exists()
