"""The loop's decisions: when it stops, what it saves and keeps, what it records; each seen in the run folder."""

import json
from pathlib import Path
from typing import Any

import pytest

import tiltyard as product
from tests.conftest import Command
from tiltyard.run import checkpoint, metrics
from tiltyard.run.events import read_events
from tiltyard.run.folder import Run, find

TINY: dict[str, Any] = {
    "env": "CartPole-v1",
    "engine": {"envs": 2},
    "algo": {"rollout": 16, "minibatch": 32, "epochs": 1},
    "eval": {"every": 0, "at_end": False, "episodes": 2},
    "track": {"tensorboard": False},
}


def train(*overrides: str, **sections: Any) -> Run:
    return product.train({**TINY, **sections}, overrides, live=False)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("env_steps=100", "stop.env_steps=100 reached (128)"),
        ("frames=100", "stop.frames=100 reached (128)"),
        ("updates=3", "stop.updates=3 reached (3)"),
        ("seconds=0.001", "stop.seconds=0.001 reached"),
        ("train_return=5", "stop.train_return=5.0 reached"),
        ("return=1", "stop.return=1.0 reached"),
    ],
)
def test_the_first_condition_met_is_named(runs: Path, setting: str, reason: str) -> None:
    run = train(f"stop.{setting}", "eval.every=32")
    status = run.status()
    assert status["state"] == "finished" and status["reason"].startswith(reason)


def test_frames_are_env_steps_times_the_frameskip(runs: Path) -> None:
    run = train("stop.env_steps=64", "env.frameskip=4", "env.time_limit=5")
    progress = run.status()["progress"]
    assert progress["env_steps"] == 64
    assert 64 * 3 < progress["frames"] <= 64 * 4, "an episode that ends within the skip takes fewer frames"
    assert train("stop.frames=100", "env.frameskip=4").status()["reason"].startswith("stop.frames=100 reached")


def test_seconds_are_counted_across_resumes(runs: Path) -> None:
    run = train("stop.updates=4")
    before = run.status()["progress"]["seconds"]
    product.resume(run, ["stop.updates=null", f"stop.seconds={before / 2}"], live=False)
    assert run.status()["progress"]["updates"] == 4, "the seconds of the first attempt count"


def steps(run: Run) -> list[int]:
    return [one.env_steps for one in checkpoint.list_checkpoints(run)]


def test_intervals_in_env_steps_updates_and_seconds(runs: Path) -> None:
    keep = "save.last=100"
    assert steps(train("stop.env_steps=160", keep, "save.env_steps=64")) == [64, 128, 160]
    assert steps(train("stop.env_steps=160", keep, "save.updates=2")) == [64, 128, 160]
    assert steps(train("stop.env_steps=160", keep, "save.seconds=1e-9")) == [32, 64, 96, 128, 160]
    assert steps(train("stop.env_steps=160", keep, "save.seconds=1000")) == [160]


def test_last_and_milestones_are_kept(runs: Path) -> None:
    run = train("stop.env_steps=320", "save.updates=1", "save.last=2", "save.milestones=[64, 100]")
    assert steps(run) == [64, 128, 288, 320]


@pytest.mark.parametrize("mode", ["max", "min"])
def test_best_is_kept_by_the_metric_and_mode_asked_for(tiltyard: Command, runs: Path, mode: str) -> None:
    run = train(
        "stop.env_steps=320", "eval.every=32", "save.last=1", "save.best=1", f"save.mode={mode}", "save.metric=eval/length",
        "algo.lr=0.05", "eval.episodes=1",
    )  # fmt: skip
    measured = dict(zip(*metrics.series(metrics.read(run.metrics_file), "eval/length"), strict=True))
    wanted = max(measured.values()) if mode == "max" else min(measured.values())
    assert measured[steps(run)[0]] == wanted and len(steps(run)) <= 2
    shown = json.loads(tiltyard("eval", run.id, "--best", "--episodes", "1", "--json").stdout)
    assert shown["lengths"] == [wanted] and shown["env_steps"] == steps(run)[0]


def test_every_recorded_metric_is_in_the_table_and_shares_add_up(runs: Path) -> None:
    run = train("stop.env_steps=320", "eval.every=64", "save.updates=3")
    records = metrics.read(run.metrics_file)
    names = {name for record in records for name in record["metrics"]}
    assert len(names) > 20
    assert [name for name in names if metrics.describe(name) is None] == []
    for record in records[:-1]:
        shares = [value for name, value in record["metrics"].items() if name.startswith("time/")]
        assert sum(shares) == pytest.approx(1.0, abs=0.02)


def test_records_can_be_fewer(runs: Path) -> None:
    run = train("stop.env_steps=320", "track.every=4")
    assert [record["updates"] for record in metrics.read(run.metrics_file)] == [4, 8, 10]


def test_an_env_that_does_not_replay_is_said_and_starts_fresh_episodes(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "moody.py").write_text(
        "import os\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Moody(CartPoleEnv):\n"
        "    def step(self, action):\n"
        "        obs, *rest = super().step(action)\n"
        "        return obs + float(os.environ.get('MOOD', '0')) * 1e-3, *rest\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        run = train("stop.env_steps=96", "env.id=moody.py:Moody", "env.strict=false", "seed=1")
        patch.setenv("MOOD", "1")
        product.resume(run, ["stop.env_steps=128"], live=False)
    warnings = [event["sentence"] for event in read_events(run) if event["kind"] == "warning"]
    assert any("replay" in sentence for sentence in warnings), warnings
    assert run.status()["progress"]["env_steps"] == 128


def test_a_profile_sets_engine_save_and_track_and_the_environment(
    tiltyard: Command, runs: Path, tmp_path: Path
) -> None:
    (tmp_path / "tiltyard.yaml").write_text(
        "profiles:\n  small: {set: {engine.envs: 2, track.tensorboard: false}, environment: {FROM_PROFILE: seen}}\n"
    )
    (tmp_path / "asks.py").write_text(
        "import os\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Asks(CartPoleEnv):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        assert os.environ['FROM_PROFILE'] == 'seen'\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FROM_PROFILE", "unseen")
        words = [
            "train",
            "asks.py:Asks",
            "algo.rollout=16",
            "algo.minibatch=32",
            "stop.env_steps=32",
            "eval.at_end=false",
        ]
        tiltyard(*words, "--on", "small")
    assert find("last", runs).experiment().engine.envs == 2
    assert "did you mean 'small'" in tiltyard(*words, "--on", "smal", expect=2).stderr


def test_a2c_is_the_same_update_once_and_unclipped(runs: Path) -> None:
    run = product.train({**TINY, "algo": {"id": "a2c", "rollout": 16}, "stop": {"env_steps": 96}}, live=False)
    record = metrics.read(run.metrics_file)[-1]["metrics"]
    assert record["learn/epochs"] == 1 and record["learn/clip_fraction"] == 0


def test_doctor_and_version(tiltyard: Command, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {finding["what"]: finding["state"] for finding in json.loads(tiltyard("doctor", "--json").stdout)}
    assert found.keys() == {"python", "torch", "cores", "memory", "runs", "video", "extras", "git"}
    assert "bad" not in found.values()
    assert tiltyard("version").stdout == f"{product.__version__}\n" == tiltyard("--version").stdout
    assert json.loads(tiltyard("version", "--json").stdout)["tiltyard"] == product.__version__
    monkeypatch.setenv("TILTYARD_RUNS", "/proc/nowhere")
    done = tiltyard("doctor", expect=1)
    assert "cannot be written" in done.stdout and "hint: set TILTYARD_RUNS" in done.stdout
