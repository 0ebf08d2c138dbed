"""Plug-ins that call sys.exit or raise a BaseException: attributed to the plug-in, always with exit code 1."""

from pathlib import Path

import pytest

from tests.cli.test_train import QUICK
from tests.conftest import Command
from tiltyard.run.folder import find

ENV = """
import os, sys
from gymnasium.envs.classic_control import CartPoleEnv
class Quits(CartPoleEnv):
    taken = 0
    def step(self, action):
        self.taken += 1
        if self.taken > 40:
            {"exit": lambda: sys.exit(75), "generator": self.leave, "interrupt": self.interrupt}.get(os.environ["HOW"], id)(0)
        return super().step(action)
    def leave(self, _):
        raise GeneratorExit
    def interrupt(self, _):
        raise KeyboardInterrupt
""".replace("lambda: sys", "lambda _: sys")
MODEL = """
import os, sys, torch
class CustomModel(torch.nn.Module):
    def __init__(self, spec, outputs):
        super().__init__()
        self.last, self.calls = torch.nn.Linear(4, outputs + 1), 0
    def forward(self, obs):
        self.calls += 1
        if self.calls > 20 and os.environ["HOW"] == "exit":
            sys.exit(0)
        if self.calls > 20 and os.environ["HOW"] == "raise":
            raise ValueError("out of ideas")
        out = self.last(obs["obs"])
        return out[:, :-1], out[:, -1]
"""


@pytest.mark.parametrize(
    ("how", "output"),
    [
        ("exit", "step() called sys.exit(75)"),
        ("generator", "step() raised GeneratorExit"),
        (
            "interrupt",
            "env plugins/quits.py:Quits or model actor_critic raised KeyboardInterrupt, which no signal asked for",
        ),
    ],
)
def test_exit_or_interrupt_in_an_env_fails_the_run(
    tiltyard: Command, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, output: str
) -> None:
    (tmp_path / "quits.py").write_text(ENV)
    monkeypatch.setenv("HOW", how)
    done = tiltyard("train", "quits.py:Quits", *QUICK, expect=1)
    assert output in done.stderr and "plugins/quits.py" in done.stderr and "in step" in done.stderr
    run = find("last", runs)
    assert run.state == "failed" and output in run.status()["reason"]
    monkeypatch.setenv("HOW", "not")
    tiltyard("resume", "last")


def test_exit_in_an_env_or_policy_fails_the_evaluation(
    tiltyard: Command, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quits.py").write_text(ENV)
    (tmp_path / "hand.py").write_text("class CustomPolicy:\n    def __init__(self, spec): raise SystemExit\n")
    monkeypatch.setenv("HOW", "not")
    tiltyard("train", "quits.py:Quits", *QUICK, "eval.at_end=false")
    assert "hand.py called sys.exit()" in tiltyard("eval", "last", "--policy", "hand.py", expect=1).stderr
    monkeypatch.setenv("HOW", "exit")
    assert "step() called sys.exit(75)" in tiltyard("eval", "last", "--episodes", "80", expect=1).stderr


@pytest.mark.parametrize(
    ("how", "output"), [("exit", "called sys.exit(0)"), ("raise", "raised ValueError: out of ideas")]
)
def test_exit_or_error_in_a_model_fails_the_run(
    tiltyard: Command, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, output: str
) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    monkeypatch.setenv("HOW", how)
    words = ["train", "CartPole-v1", "model.id=net.py", *QUICK]
    done = tiltyard(*words, expect=1)
    assert f"model plugins/net.py:CustomModel {output}" in done.stderr and "in forward" in done.stderr
    assert "tiltyard/models" not in done.stderr
    monkeypatch.setenv("HOW", "not")
    tiltyard(*words, "eval.at_end=false")
    monkeypatch.setenv("HOW", how)
    assert f"model plugins/net.py:CustomModel {output}" in tiltyard("eval", "last", "--episodes", "40", expect=1).stderr
