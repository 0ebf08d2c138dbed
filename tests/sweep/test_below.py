"""Trials of a sweep are one folder deeper than other runs; they are found, listed and removed in the same way."""

import shutil
from pathlib import Path

import pytest

from tests.conftest import Command
from tiltyard.config.experiment import Experiment
from tiltyard.errors import UseError
from tiltyard.run.create import create
from tiltyard.run.folder import Run, find, remove
from tiltyard.run.status import list_runs

EXPERIMENT = Experiment.model_validate({"env": {"id": "CartPole-v1"}, "name": "cartpole"})


@pytest.fixture
def trial(runs: Path) -> Run:
    place = runs / "cartpole" / "sweep-0001" / "0003-calm-crow"
    place.parent.mkdir(parents=True)
    return create(runs, EXPERIMENT, place=place)


def test_trial_is_created_in_the_given_folder(trial: Run, runs: Path) -> None:
    assert trial.id == "cartpole/sweep-0001/0003-calm-crow"
    assert trial.name == "cartpole"
    assert trial.status()["id"] == trial.id
    assert [row["id"] for row in list_runs(runs)] == [trial.id]


@pytest.mark.parametrize(
    "text",
    ["cartpole/sweep-0001/0003-calm-crow", "sweep-0001/3", "cartpole/sweep-0001/3", "calm-crow", "cartpole", "last"],
)
def test_trial_is_found_by_each_of_its_names(trial: Run, runs: Path, text: str) -> None:
    assert find(text, runs) == trial


def test_name_matches_a_standalone_run_before_a_trial(trial: Run, runs: Path) -> None:
    own = create(runs, EXPERIMENT)
    assert find("cartpole", runs) == own
    assert len(list_runs(runs)) == 2


def test_leftovers_of_a_killed_process_are_removed(trial: Run, runs: Path) -> None:
    place = trial.folder.with_name("0004-calm-crow")
    leftover = trial.folder.with_name(".new-0004-calm-crow")
    leftover.mkdir()
    (leftover / "half").write_text("")
    assert not (create(runs, EXPERIMENT, place=place).folder / "half").exists()
    assert not leftover.exists()


def test_run_commands_accept_trials(trial: Run, tiltyard: Command, tmp_path: Path) -> None:
    assert trial.id in tiltyard("ls").stdout
    assert "CartPole-v1" in tiltyard("show", trial.id).stdout
    tiltyard("rm", trial.id, "--yes")
    assert not trial.folder.exists()


def test_removal_does_not_follow_symlinks(trial: Run, runs: Path, tmp_path: Path) -> None:
    real = tmp_path / "elsewhere"
    shutil.move(trial.folder.parent, real)
    trial.folder.parent.symlink_to(real)
    with pytest.raises(UseError, match="not a run folder inside"):
        remove(trial, runs)


def test_run_name_cannot_be_that_of_a_sweep_folder(tiltyard: Command) -> None:
    assert "folder of a sweep" in tiltyard("train", "CartPole-v1", "name=sweep-0001", expect=2).stderr
