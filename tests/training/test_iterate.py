"""A loop that the caller drives: a curriculum by env options, kills in the middle, and ways to leave the block."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest

import tiltyard as product
from tests.training.test_loop import TINY
from tiltyard.errors import UseError
from tiltyard.run import checkpoint, metrics
from tiltyard.run.events import read_events
from tiltyard.run.folder import Run
from tiltyard.run.state_file import read_tree
from tiltyard.training.loop import Training

ARMS = """
import gymnasium
import numpy as np

class CustomEnv(gymnasium.Env):
    '''Reward for one of three actions; episodes of 3 to 6 steps, so that rows are reset at different times.'''

    def __init__(self, *, best: int = 0):
        self.observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(3)
        self.best = best

    def set_options(self, *, best):
        assert self.left == 0, "in the middle of an episode"
        self.best = best

    left = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(3, 7))
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.left -= 1
        over = self.left == 0
        return np.zeros(1, np.float32), 1.0 if action == self.best else -1.0, over, False, {"best": self.best} if over else {}
"""

CURRICULUM: dict[str, Any] = {
    **TINY,
    "name": "arms",
    "env": {"id": "arms.py", "options": {"best": 0}},
    "engine": {"kind": "serial", "envs": 4, "workers": 2},
    "algo": {"rollout": 16, "minibatch": 16, "epochs": 2, "lr": 0.005, "entropy": 0.1},
    "stop": {"updates": 24},
    "save": {"updates": 4, "async": False},  # the kill comes two updates after a save
}

SCRIPT = """
import os, signal
import tiltyard
from tests.training.test_iterate import CURRICULUM, drive

def kill_at_10(report):
    if report.progress.updates == 10:
        os.kill(os.getpid(), signal.SIGKILL)

with tiltyard.iterate(CURRICULUM, live=False) as training:
    drive(training, kill_at_10)
"""


def drive(training: Training, after: Callable[[Any], None] = lambda report: None) -> None:
    for report in training:
        if report.progress.updates == 6:
            training.set({"env.options.best": 2, "algo.lr": 0.01})
        if report.progress.updates == 9:
            training.set({"env.options.best": 1})
        after(report)


def driven(**engine: Any) -> Run:
    settings = {**CURRICULUM, **engine}
    with product.iterate(settings, live=False) as training:
        drive(training)
    return training.run


def weights(run: Run) -> dict[str, Any]:
    newest, _ = checkpoint.newest_valid(run)
    assert newest is not None
    tree: dict[str, Any] = read_tree(newest.folder / "policies", "main")["weights"]
    return tree


def same(one: Run, other: Run) -> bool:
    mine, theirs = weights(one), weights(other)
    return all(np.array_equal(array, theirs[name]) for name, array in mine.items())


@pytest.fixture
def arms(runs: Path, tmp_path: Path) -> Path:
    (tmp_path / "arms.py").write_text(ARMS)
    return runs


def test_curriculum_survives_a_kill_and_continues_bit_for_bit(arms: Path) -> None:
    whole = driven()
    result = product.evaluate(whole, episodes=20)
    assert result.returns == tuple(map(float, result.lengths)), "the last lesson is learned"
    assert product.evaluate(whole, ["env.options.best=2"], episodes=4).mean < 0
    found = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=found, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    killed = Run(max(arms.glob("arms/0*")))
    changed = [event["settings"] for event in read_events(killed) if event["kind"] == "changed"]
    assert changed == [{"env.options.best": 2, "algo.lr": 0.01}, {"env.options.best": 1}]
    other = Run(copytree(killed.folder, killed.folder.with_name("0099-by-resume")))

    with product.iterate(killed, live=False) as training:
        assert training.progress.updates == 8, "the newest checkpoint"
        assert (training.experiment.env.options["best"], training.experiment.algo.lr) == (2, 0.01)
        drive(training)
    assert same(whole, killed), "driven by the same script"
    product.resume(other, live=False)
    assert same(whole, other), "the settings that were scheduled take effect at their env step"
    used = {line["updates"]: line["metrics"]["setting/lr"] for line in metrics.read(other)}
    assert used == {**dict.fromkeys(range(1, 7), 0.005), **dict.fromkeys(range(7, 25), 0.01)}


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": {**CURRICULUM["engine"], "kind": "local"}},
        {"env": {**CURRICULUM["env"], "isolate": "thread"}},
        {"env": {**CURRICULUM["env"], "isolate": "process"}},
    ],
    ids=["workers", "threads", "processes"],
)
def test_options_reach_envs_in_other_processes_and_threads(arms: Path, changes: dict[str, Any]) -> None:
    """Each of them must get the options before the same episode to learn the same."""
    assert same(driven(), driven(**changes))


def test_changed_setting_is_used_by_the_next_update(runs: Path) -> None:
    ends = []
    for lr in (None, 0.05):
        with product.iterate({**TINY, "stop": {"updates": 4}}, live=False) as training:
            used = []
            for report in training:
                used.append(report.metrics["setting/lr"])
                if lr and report.progress.updates == 2:
                    training.set({"algo.lr": lr})
        ends.append((training.run, used))
    (plain, before), (changed, after) = ends
    assert after == [*before[:2], 0.05, 0.05] and not same(plain, changed)


def test_settings_that_cannot_change_are_refused_before_anything_changes(arms: Path) -> None:
    with product.iterate({**CURRICULUM, "stop": {"updates": 1}}, live=False) as training:
        for changes, message in (
            ({"env.options.bets": 1}, "bets is not among"),
            ({"algo.lr": 0.5, "algo.minibatch": 4}, r"algo\.minibatch cannot change"),
            ({"algo.lr": "fast"}, "must be a number"),
            ({"algo.lr": -1.0}, "1 problem in the settings"),
        ):
            with pytest.raises(UseError, match=message):
                training.set(changes)
        assert training.experiment.algo.lr == 0.005 and not (training.run.folder / "stretches.json").exists()
    with (
        product.iterate({**TINY, "env": {"id": "CartPole-v1", "options": {"sutton_barto_reward": False}}}) as training,
        pytest.raises(UseError, match=r"env CartPole-v1 has no method set_options\(\)") as raised,
    ):
        training.set({"env.options.sutton_barto_reward": True})
    assert "def set_options(self, *, sutton_barto_reward)" in raised.value.hint


def test_leaving_the_block_saves_the_run_and_releases_it(runs: Path) -> None:
    with product.iterate(TINY, live=False) as training:
        for report in training:
            if report.progress.updates == 2:
                assert (found := training.evaluate()) is not None
                training.save()
            if report.progress.updates == 3:
                break
    run, status = training.run, training.run.status()
    assert (status["state"], status["reason"]) == ("stopped", "the loop was left")
    assert [each.progress.updates for each in checkpoint.list_checkpoints(run)] == [2, 3]
    measured = [line for line in metrics.read(run) if "eval/return" in line["metrics"]]
    assert [(line["updates"], line["metrics"]["eval/return"]) for line in measured] == [(2, found.mean)]
    with product.iterate(run.folder, live=False) as training:
        for report in training:
            if report.progress.updates == 5:
                training.stop()
    assert run.status()["reason"] == "stop() was called" and run.status()["progress"]["updates"] == 5


def test_error_in_the_block_is_the_runs_failure(runs: Path) -> None:
    seen: list[Training] = []
    with pytest.raises(ZeroDivisionError):
        _fail(seen)
    run = seen[0].run
    assert (run.status()["state"], run.status()["reason"]) == ("failed", "ZeroDivisionError: mine")
    assert "ZeroDivisionError: mine" in (run.folder / "error.txt").read_text()
    assert [each.progress.updates for each in checkpoint.list_checkpoints(run)] == [1], "nothing is lost"
    with pytest.raises(SystemExit), product.iterate(run, live=False):
        sys.exit(0)
    assert run.status()["state"] == "stopped"


def _fail(seen: list[Training]) -> None:
    with product.iterate(TINY, live=False) as training:
        seen.append(training)
        next(training)
        raise ZeroDivisionError("mine")


def test_setting_that_was_set_back_is_in_effect_after_a_resume(runs: Path) -> None:
    """The checkpoint was made with the other value."""
    with product.iterate({**TINY, "algo": {**TINY["algo"], "lr": 3e-3}}, live=False) as training:
        next(training)
        training.set({"algo.lr": np.float64(1e-3)})
        next(training)
    with product.iterate(training.run, live=False) as again:
        again.set({"algo.lr": 3e-3})
    with product.iterate(training.run, ["stop.updates=9"], live=False) as again:
        assert next(again).metrics["setting/lr"] == 3e-3


def test_score_and_milestone_are_kept_when_the_loop_is_left(runs: Path) -> None:
    with product.iterate({**TINY, "save": {"milestones": [1]}}, live=False) as training:
        next(training)
        training.save()
        found = training.evaluate()
    newest = checkpoint.list_checkpoints(training.run)[-1]
    manifest = json.loads((newest.folder / "manifest.json").read_text())
    assert found is not None and newest.score == found.mean and manifest["milestone"]


def test_training_that_has_ended_refuses_to_act(runs: Path) -> None:
    with product.iterate(TINY, live=False) as training:
        next(training)
    for act in (training.save, training.evaluate, lambda: training.set({"algo.lr": 1.0}), lambda: next(training)):
        with pytest.raises(UseError, match="this training has ended"):
            act()
