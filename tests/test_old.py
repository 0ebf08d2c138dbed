"""Run folders and checkpoints of every past schema version still load, act, resume and fork."""

import json
import shutil
from pathlib import Path

import pytest

import tiltyard as product
from tests.conftest import Command
from tiltyard.run import checkpoint, metrics
from tiltyard.run.folder import Run
from tiltyard.run.status import SCHEMA

OLD = sorted((Path(__file__).parent / "old").glob("run-v*"))


def test_there_is_a_run_folder_of_every_schema_version() -> None:
    assert [folder.name for folder in OLD] == [f"run-v{number}" for number in range(1, SCHEMA + 1)]
    for number, folder in enumerate(OLD, 1):
        assert json.loads((folder / "status.json").read_text())["schema"] == number


@pytest.mark.parametrize("old", OLD, ids=lambda folder: folder.name)
def test_old_run_can_be_listed_evaluated_resumed_and_forked(tiltyard: Command, runs: Path, old: Path) -> None:
    home = runs / "old" / "0001-brisk-otter"
    shutil.copytree(old, home)
    run = Run(home)
    assert checkpoint.newest_valid(run)[0].env_steps == 128  # type: ignore[union-attr]
    assert [record["env_steps"] for record in metrics.read(run.metrics_file)] == [32, 64, 96, 128]
    assert "old/0001-brisk-otter" in tiltyard("ls").stdout
    assert "finished" in tiltyard("show", "old").stdout
    assert len(json.loads(tiltyard("eval", "old", "--episodes", "3", "--json").stdout)["returns"]) == 3
    assert product.load_policy(run.folder).net.parameter_count == 4 * 3 + 3 + 3 * 2 + 2 + 3 + 1
    tiltyard("resume", "old", "stop.env_steps=192")
    assert run.status()["progress"]["env_steps"] == 192
    tiltyard("fork", "old", "--at", "160", "stop.env_steps=256", "name=young")
