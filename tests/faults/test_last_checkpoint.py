"""A failing run saves a checkpoint from before the failure, whatever failed. A hanging env is a failure."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import Command, in_own_process
from tiltyard.run import checkpoint, state_file
from tiltyard.run.events import read_events
from tiltyard.run.folder import Run, find

pytestmark = pytest.mark.slow
# So short that no regular save or evaluation is due.
SHORT = [
    "engine.envs=2",
    "algo.rollout=16",
    "algo.minibatch=16",
    "algo.epochs=2",
    "eval.every=0",
    "eval.at_end=false",
    "track.tensorboard=false",
]
BREAKS = """
import pathlib, torch
from torch import nn
class CustomModel(nn.Module):
    def __init__(self, spec, outputs, *, after, well):
        super().__init__()
        self.body, self.value = nn.Linear(4, outputs), nn.Linear(4, 1)
        self.left, self.well = after, pathlib.Path(well)
    def forward(self, obs):
        if torch.is_grad_enabled():
            self.left -= 1
            if self.left < 0 and not self.well.exists():
                raise RuntimeError("the layer broke")
        return self.body(obs["obs"]), self.value(obs["obs"]).squeeze(-1)
"""
HANGS = """
import ctypes, os, time
from gymnasium.envs.classic_control import CartPoleEnv
class CustomEnv(CartPoleEnv):
    def __init__(self, *, where, after=100, how="sleep", render_mode=None):
        super().__init__(render_mode=render_mode)
        self.where, self.left, self.how = where, after, how
    def step(self, action):
        place = "worker" if "TILTYARD_WORKER" in os.environ else "driver"
        if self.where in (place, os.getpid()):
            self.left -= 1
            if self.left < 0:
                self.hang()
        return super().step(action)
    def hang(self):
        if self.how == "sleep":
            time.sleep(1000)
        libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(lock)
        libc.pthread_mutex_lock(lock)
"""
SLOW = """
import os, time
from gymnasium.envs.classic_control import CartPoleEnv
class CustomEnv(CartPoleEnv):
    def __init__(self, *, where, render_mode=None):
        super().__init__(render_mode=render_mode)
        if where == os.getpid():
            time.sleep(2)
    def close(self):
        time.sleep(2)
"""


def newest(run: Run) -> int:
    found, complaints = checkpoint.newest_valid(run)
    assert found is not None and complaints == []
    return found.env_steps


@pytest.mark.parametrize("processes", [["engine.workers=0"], ["engine.workers=1", "engine.mode=async"]])
def test_failing_learner_saves_a_checkpoint_from_before_the_update(
    tiltyard: Command, runs: Path, tmp_path: Path, processes: list[str]
) -> None:
    Path("breaks.py").write_text(BREAKS)
    well = tmp_path / "well"
    # Four gradient steps per update: it fails in the second gradient step of the sixth update.
    model = ["model.id=breaks.py", "model.options.after=21", f"model.options.well={well}"]
    output = tiltyard("train", "CartPole-v1", *SHORT, *model, *processes, "stop.env_steps=320", expect=1)
    run = find("last", runs)
    assert "the layer broke" in output.stderr and "the layer broke" in run.status()["reason"]
    assert newest(run) == 160
    if processes == ["engine.workers=0"]:  # the policy from before the failed update, bit for bit
        tiltyard("train", "CartPole-v1", *SHORT, *model, *processes, "stop.updates=5", "name=five")
        weights, theirs = (
            state_file.read_tree(checkpoint.newest_valid(each)[0].folder / "policies", "main")["weights"]  # type: ignore[union-attr]
            for each in (run, find("five", runs))
        )
        assert all((theirs[name] == array).all() for name, array in weights.items())
    well.touch()
    output = tiltyard("resume", run.id)
    assert "continues from the checkpoint at env step 160" in output.stderr and "begin new episodes" in output.stderr
    assert run.state == "finished" and run.status()["progress"]["env_steps"] == 320


def test_checkpoint_after_a_failure_does_not_replace_regular_ones(
    tiltyard: Command, runs: Path, tmp_path: Path
) -> None:
    """Otherwise repeated failures would leave only checkpoints of a policy that is about to fail."""
    Path("breaks.py").write_text(BREAKS)
    model = ["model.id=breaks.py", "model.options.after=21", f"model.options.well={tmp_path / 'well'}"]
    save = ["save.env_steps=64", "save.last=1", "save.best=0"]
    tiltyard("train", "CartPole-v1", *SHORT, *model, *save, "engine.workers=0", "stop.env_steps=1e6", expect=1)
    assert [each.env_steps for each in checkpoint.list_checkpoints(find("last", runs))] == [128, 160]


def test_run_without_restarts_left_saves_a_checkpoint(tiltyard: Command, runs: Path) -> None:
    Path("hangs.py").write_text(HANGS)
    env = ["env.options.where=worker", "env.step_timeout=1", "engine.workers=1"]
    output = tiltyard("train", "hangs.py", *SHORT, *env, "engine.restarts=0", "stop.env_steps=1e6", expect=1)
    run = find("last", runs)
    assert "engine.restarts is exhausted" in output.stderr
    assert newest(run) == 192, "six updates were whole"


@pytest.mark.parametrize("isolate", ["none", "process"])
def test_hanging_env_in_the_main_process_is_a_failure_with_a_checkpoint(
    tiltyard: Command, runs: Path, isolate: str
) -> None:
    Path("hangs.py").write_text(HANGS)
    env = ["env.options.where=driver", "env.step_timeout=1", f"env.isolate={isolate}"]
    output = tiltyard("train", "hangs.py", *SHORT, *env, "engine.workers=0", "stop.env_steps=1e6", expect=1)
    run = find("last", runs)
    printed = "it did not return from step() within 1 s (env.step_timeout)"
    assert printed in output.stderr and printed in run.status()["reason"]
    assert isolate == "process" or "time.sleep(1000)" in output.stderr, "where it hangs is shown"
    assert newest(run) == 192


def test_hanging_env_in_an_evaluation_is_a_failure_and_can_be_resumed(tiltyard: Command, runs: Path) -> None:
    Path("hangs.py").write_text(HANGS)
    here = [
        f"env.options.where={os.getpid()}",
        "env.options.after=5",
    ]  # after five steps, but not in the process of the probe
    evaluation = ["eval.at_end=true", "eval.episodes=2", "env.step_timeout=1", "stop.env_steps=96"]
    output = tiltyard("train", "hangs.py", *SHORT, *here, *evaluation, "engine.workers=2", expect=1)
    run = find("last", runs)
    assert "it did not return from step() within 1 s" in output.stderr and newest(run) == 96
    output = in_own_process("resume", run.id)  # it does not hang in another process
    assert "begin new episodes" not in output.stderr, "training itself was not cut"
    assert run.state == "finished" and run.status()["eval_return"] is not None


def test_slow_creation_of_evaluation_envs_does_not_count_as_a_hang(tiltyard: Command, runs: Path) -> None:
    Path("slow.py").write_text(SLOW)
    here = [f"env.options.where={os.getpid()}", "env.step_timeout=1", "engine.workers=2", "stop.env_steps=64"]
    tiltyard("train", "slow.py", *SHORT, *here, "eval.at_end=true", "eval.episodes=1")
    assert find("last", runs).status()["eval_return"] is not None


def test_env_that_never_returns_to_python_is_a_failure_with_a_checkpoint(runs: Path) -> None:
    Path("hangs.py").write_text(HANGS)
    env = ["env.options.where=driver", "env.options.how=lock", "env.step_timeout=1"]
    output = in_own_process("train", "hangs.py", *SHORT, *env, "engine.workers=0", "stop.env_steps=1e6", expect=1)
    run = find("last", runs)
    printed = "an env hangs: it did not return from step() within 1 s"
    assert f"error: {printed}" in output.stderr and "hangs.py, line" in run.status()["reason"]
    assert run.state == "failed" and newest(run) == 192
    assert [event["kind"] for event in read_events(run)][-2:] == ["saved", "failed"]
