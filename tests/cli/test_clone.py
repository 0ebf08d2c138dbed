"""`tiltyard clone`: its defaults, its options, what it refuses, and the commands that take its result."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Command
from tests.engines.recordings import cartpole
from tiltyard.cli.clone import clone_experiment
from tiltyard.data import dataset_file
from tiltyard.run import atomic
from tiltyard.run.events import read_events
from tiltyard.run.folder import find

QUICK = ["algo.batch=256", "algo.minibatch=64", "engine.threads=1", "track.tensorboard=false", "eval.episodes=2"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return cartpole(tmp_path / "data", 5, limit=100)


def test_clone_evaluate_show_list_and_fork(tiltyard: Command, runs: Path, data: Path) -> None:
    done = tiltyard("clone", "data", *QUICK, "algo.validation=0", "--epochs", "4", "--plain", "--json")
    outcome = json.loads(done.stdout)
    assert outcome["state"] == "finished" and outcome["progress"]["env_steps"] >= 2000
    assert "algo    clone: a batch of 260 env steps (5 rows x 52) per update, 5 gradient steps on 64" in done.stderr
    assert "5 episodes with 500 env steps, none for validation" in done.stderr
    assert outcome["metrics"]["learn/passes"] > 4 and "eval/return" in outcome["metrics"]
    run = find("last", runs)
    experiment = run.experiment()
    assert experiment.env.time_limit == 100, "the env of the dataset"
    assert experiment.algo.model_dump()["dataset"] == str(data), "absolute"
    assert (experiment.stop.env_steps, experiment.eval.every) == (2000, 200)
    assert "CartPole-v1, clone, local engine" in tiltyard("show", "last").stdout
    assert json.loads(tiltyard("ls", "--json").stdout)[0]["state"] == "finished"
    assert "return" in tiltyard("eval", "last", "--episodes", "2").stdout
    assert "continue" in tiltyard("resume", "last", "--plain").stderr

    forked = tiltyard("fork", "last", "algo=ppo", "stop.updates=10", "--plain")
    reached = outcome["progress"]["env_steps"]
    assert f"stop.env_steps is {reached + 1_000_000:,}" in forked.stderr and "eval.every is 50,000" in forked.stderr
    fork = find("last", runs)
    assert fork.experiment().algo.id == "ppo" and fork.experiment().eval.every == 50_000
    assert any("algo.id = clone: weights are loaded" in str(event) for event in read_events(fork))
    assert fork.status()["progress"]["updates"] == 10, "it was trained"


def test_default_is_ten_passes_or_two_thousand_gradient_steps(data: Path) -> None:
    few = clone_experiment(str(data), ["algo.validation=0"], None)
    assert few["stop"]["env_steps"] == 1024 * 500 and few["eval"]["every"] == 51_200
    assert clone_experiment(str(data), ["algo.validation=0", "algo.minibatch=2"], None)["stop"]["env_steps"] == 5000
    assert clone_experiment(str(data), ["algo.validation=0"], 3)["stop"]["env_steps"] == 1500
    held_out = clone_experiment(str(data), ["algo.validation=0.5"], 1)["stop"]["env_steps"]
    assert held_out < 500 and held_out % 100 == 0


def test_epochs_are_whole_passes_over_a_set_smaller_than_a_batch(tiltyard: Command, runs: Path, data: Path) -> None:
    words = ["clone", "data", "algo.validation=0", "engine.threads=1", "eval.episodes=1", "--plain", "--json"]
    outcome = json.loads(tiltyard(*words, "--epochs", "2").stdout)
    assert outcome["progress"]["env_steps"] == 1000 and outcome["metrics"]["learn/passes"] == 2
    batch = find("last", runs).experiment().algo.model_dump()["batch"]
    assert batch == 500 and outcome["progress"]["updates"] == 2
    assert "batch" not in clone_experiment(str(data), ["algo.validation=0"], None)["algo"], "only with --epochs"
    parts = clone_experiment(str(data), ["algo.validation=0", "algo.batch=400"], 2)
    assert parts["algo"]["batch"] == 250, "two equal parts, unless algo.batch is typed"


def test_dataset_of_an_unknown_env_needs_one(tiltyard: Command, runs: Path, data: Path) -> None:
    tiltyard("data", "export", "data", "--to", "npz", "--out", "files")
    for path in Path("files").iterdir():
        with np.load(path) as arrays:
            action = arrays["action"].reshape(-1).astype(np.int64)
            np.savez(path, obs=arrays["obs.obs"], action=action, reward=arrays["reward"])
    tiltyard("data", "import", "files", "--out", "set")
    refused = tiltyard("clone", "set", expect=2).stderr
    assert "does not say of which env it is" in refused
    assert "hint: import it again with --env ENV, or set env.id=ENV" in refused and not runs.exists()
    wrong = tiltyard("clone", "set", "env.id=Pendulum-v1", expect=2).stderr
    assert "has the observations obs (4,)" in wrong and "import it again with --env Pendulum-v1" in wrong
    tiltyard("clone", "set", "env.id=CartPole-v1", *QUICK, "--epochs", "1", "--plain")
    assert find("last", runs).experiment().env.id == "CartPole-v1"


def test_file_with_a_relative_dataset_and_dry_run(tiltyard: Command, runs: Path, data: Path, tmp_path: Path) -> None:
    text = "env: {id: CartPole-v1, time_limit: 100}\nalgo: {id: clone, dataset: data}\nstop: {updates: 2}\n"
    (tmp_path / "x.yaml").write_text(text)
    plan = tiltyard("train", "x.yaml", *QUICK, "--dry-run").stdout
    assert "algo    clone" in plan and not runs.exists()
    tiltyard("train", "x.yaml", *QUICK, "--plain")
    assert find("last", runs).experiment().algo.model_dump()["dataset"] == str(data)
    tiltyard("clone", "data", *QUICK, "--debug", "--seeds", "1-2", "--plain")
    assert [find(f"{folder}").experiment().seed for folder in sorted(runs.glob("*/0*"))] == [0, 1, 2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "there is no dataset"),
        (["."], "is not a dataset"),
        (["data", "env.id=Pendulum-v1"], "is a dataset of CartPole-v1, but env.id = Pendulum-v1"),
        (
            ["data", "env.frame_stack=2"],
            "has the observations obs (4,) float32 (box), but env CartPole-v1 has obs (8,)",
        ),
        (["data", "algo=ppo"], "`tiltyard clone` learns with algo.id = clone"),
        (["data", "algo.agents=[left]"], "algo.agents names 'left'"),
        (["data", "engine.kind=rllib"], "engine.kind = rllib: is not supported by algo.id = clone"),
        (["data", "engine.workers=2"], "engine.workers = 2: is not supported by algo.id = clone"),
        (["data", "algo.rollout=4"], "algo.rollout"),
        (["data", "--epochs", "0"], "must be a whole number"),
        ([], "tiltyard clone needs DATASET"),
    ],
)
def test_wrong_use_is_one_sentence(tiltyard: Command, runs: Path, data: Path, words: list[str], message: str) -> None:
    assert message in tiltyard("clone", *words, expect=2).stderr
    assert not runs.exists()


def test_tune_refuses_a_clone(tiltyard: Command, runs: Path, data: Path) -> None:
    words = ["CartPole-v1", "env.time_limit=100", "algo.id=clone", "algo.dataset=data"]
    assert "algo.id = clone cannot be tuned: it steps no envs" in tiltyard("tune", *words, expect=2).stderr


def test_masked_option_of_the_env_must_be_given(tiltyard: Command, runs: Path, data: Path) -> None:
    about = json.loads((data / dataset_file.NAME).read_text())
    about.pop("sha256")
    about["env"]["options"] = {"api_key": "***"}
    atomic.write_sealed(data / dataset_file.NAME, about)
    done = tiltyard("clone", "data", expect=2)
    assert "does not contain env.options.api_key" in done.stderr and "give it: env.options.api_key=..." in done.stderr
