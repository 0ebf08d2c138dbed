"""`tiltyard data stats`, `head` and `ls`: text and JSON, damaged and old datasets, wrong use."""

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import Command
from tests.data.episodes import SPEC, episode, new_dataset, writer
from tiltyard.data import dataset_file
from tiltyard.data.writer import DatasetWriter
from tiltyard.envs.actions import ActionCodec

OLD = Path(__file__).parents[1] / "old" / "episodes-schema-1"


def make(folder: str, episodes: int = 3) -> Path:
    made = writer(Path(folder), policy="random")
    for number in range(episodes):
        made.commit(number, [episode(4, number)])
    made.close()
    return Path(folder)


def test_stats_are_printed(tiltyard: Command) -> None:
    make("set")
    text = tiltyard("data", "stats", "set").stdout
    for part in ("CartPole-v1", "terminated 2 (67 %), truncated 1 (33 %)", "random", "obs.eye (8 x 8 x 3 uint8)", "█"):
        assert part in text
    assert "obs.eye[channel 2]" in text and "obs.arm[2]" in text and "action[1]" in text and "in all episodes" in text
    sampled = tiltyard("data", "stats", "set", "--episodes", "2").stdout
    assert "in 2 of 3 episodes" in sampled
    found = json.loads(tiltyard("data", "stats", "set", "--json").stdout)
    assert (found["episodes"], found["steps"], found["measured"]["episodes"]) == (3, 12, 3)
    assert found["compression"] == found["raw_bytes"] / found["file_bytes"]
    assert found["measured"]["observations"]["eye"]["channels"][0]["count"] == 3 * 5 * 64


def test_stats_of_damaged_empty_and_old_datasets(tiltyard: Command) -> None:
    damaged = make("damaged") / "episodes" / "00000" / "000000001.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    output = tiltyard("data", "stats", "damaged")
    assert "warning: 1 episode is damaged and left out: " in output.stderr and "000000001.parquet" in output.stderr
    assert "episodes   2, without 1 damaged\n" in output.stdout and "steps      8\n" in output.stdout
    assert "in all episodes" in output.stdout
    new_dataset(Path("empty"))
    empty = tiltyard("data", "stats", "empty").stdout
    assert "episodes   0\n" in empty and "compression" not in empty and "nan" not in empty
    assert json.loads(tiltyard("data", "stats", "empty", "--json").stdout)["returns"]["mean"] == "nan"
    shutil.copytree(OLD, "old")
    assert "Old-v0" in tiltyard("data", "stats", "old").stdout


def test_head_shows_the_first_steps(tiltyard: Command) -> None:
    make("set")
    text = tiltyard("data", "head", "set", "--steps", "2").stdout
    assert "episode  0 of CartPole-v1" in text and "8 x 8 x 3 uint8" in text and len(text.splitlines()) == 11
    found = json.loads(tiltyard("data", "head", "set", "--episode", "2", "--steps", "100", "--json").stdout)
    written = episode(4, 2)
    assert (found["episode"], found["seed"], found["length"], found["meta"]["policy"]) == (2, 2, 4, "random")
    assert [row["step"] for row in found["steps"]] == [0, 1, 2, 3, 4]
    codec = ActionCodec(SPEC.action)
    for step, row in enumerate(found["steps"][:4]):
        assert (
            row["obs"]["arm"] == written.obs["arm"][step].tolist() and row["obs"]["code"] == written.obs["code"][step]
        )
        assert row["obs"]["eye"] == {"shape": [8, 8, 3], "dtype": "uint8"}
        assert row["action"] == codec.decode(written.action[step]).tolist() and row["reward"] == written.reward[step]
    last = found["steps"][4]
    assert last["action"] is None and last["reward"] is None and last["obs"]["arm"] == written.obs["arm"][4].tolist()
    assert [row["terminated"] for row in found["steps"]] == [False, False, False, True, False]


def test_head_of_one_of_several_agents(tiltyard: Command) -> None:
    made = DatasetWriter(Path("set"), new_dataset(Path("set")), {})
    made.commit(0, [episode(4, 0, agent="left"), episode(6, 0, agent="right")])
    made.close()
    assert "left (others: right)" in tiltyard("data", "head", "set").stdout
    assert "length   6" in tiltyard("data", "head", "set", "--agent", "right").stdout
    assert "its agents: left, right" in tiltyard("data", "head", "set", "--agent", "up", expect=2).stderr
    shutil.copytree(OLD, "old")
    assert '"env": "Old-v0"' in tiltyard("data", "head", "old").stdout


def test_ls_lists_datasets_and_says_what_is_wrong_with_one(tiltyard: Command) -> None:
    nothing = tiltyard("data", "ls")
    assert not nothing.stdout and "no dataset below .\nhint: " in nothing.stderr
    assert json.loads(tiltyard("data", "ls", "--json").stdout) == []
    make("one")
    make("data/deep/two", 5)
    shutil.copytree(OLD, "data/old")
    make("data/damaged")
    Path("data/damaged/dataset.json").write_text("{}")
    make("data/newer")
    about = dataset_file.read(Path("data/newer"))
    assert about is not None
    dataset_file.atomic.write_sealed(Path("data/newer/dataset.json"), {**about.to_json(), "schema": 3, "new": 1})
    (manifest,) = make("data/torn").glob("manifests/*")
    manifest.write_bytes(manifest.read_bytes().replace(b'"length": 4', b'"length": 5', 1))
    Path("data/nothing").mkdir()
    rows = {row["folder"]: row for row in json.loads(tiltyard("data", "ls", "--json").stdout)}
    expected = ["data/damaged", "data/deep/two", "data/newer", "data/old", "data/torn", "one"]
    assert sorted(rows) == expected
    two = rows["data/deep/two"]
    assert (two["env"], two["episodes"], two["steps"], two["policies"]) == ("CartPole-v1", 5, 20, ["random"])
    assert two["made"][0]["command"] == ["test"] and two["kind"] == "dataset" and not two["problem"] and two["bytes"]
    assert "is damaged" in rows["data/damaged"]["problem"] and rows["data/damaged"]["episodes"] == 3
    assert "newer Tiltyard" in rows["data/newer"]["problem"]
    assert "line 1: is damaged" in rows["data/torn"]["problem"] and rows["data/torn"]["episodes"] == 2
    assert rows["data/old"]["env"] == "Old-v0" and rows["data/old"]["episodes"] == 3 and not rows["data/old"]["problem"]
    text = tiltyard("data", "ls").stdout
    assert len(text.splitlines()) == 7 and "problem: data/damaged/dataset.json is damaged" in text
    assert sorted(row["folder"] for row in json.loads(tiltyard("data", "ls", "one", "data/deep", "--json").stdout)) == [
        "data/deep/two",
        "one",
    ]


def test_ls_reads_no_episodes(tiltyard: Command) -> None:
    for path in make("one").glob("episodes/*/*"):
        path.write_bytes(b"")
    (row,) = json.loads(tiltyard("data", "ls", "--json").stdout)
    assert row["episodes"] == 3 and not row["problem"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["stats", "none"], "there is no dataset none"),
        (["stats", "plain"], "plain is not a dataset"),
        (["stats", "set", "--episodes", "0"], "whole number"),
        (["head", "none"], "there is no dataset none"),
        (["head", "set", "--episode", "9"], "set has no episode 9"),
        (["head", "empty"], "empty has no episodes yet"),
        (["ls", "none"], "there is no folder none"),
    ],
)
def test_wrong_use_is_one_sentence_and_a_hint(tiltyard: Command, words: list[str], message: str) -> None:
    make("set", 1)
    new_dataset(Path("empty"))
    Path("plain").mkdir()
    output = tiltyard("data", *words, expect=2)
    assert message in output.stderr and "hint:" in output.stderr and not output.stdout
