"""`tiltyard env`: every fault that `check` looks for is found in an env made for it, ids are listed, episodes are filmed."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Command
from tests.evaluation.test_video import read_frames

FAULTY = """
import random, time
import numpy as np
import gymnasium
from gymnasium import spaces

kept = []

class CustomEnv(gymnasium.Env):
    metadata = {"render_modes": []}

    def __init__(self, *, fault):
        self.fault, self.resets, self.steps = fault, 0, 0
        self.observation_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.array = np.zeros(4, np.float32)

    def observe(self):
        drawn = self.np_random.uniform(-1, 1, 4)
        if self.fault == "seed":
            drawn[0] = random.random()
        if self.fault == "fixed":
            drawn[:] = 0.5
        if self.fault == "dtype" and self.steps > 3:
            return drawn
        if self.fault == "shape" and self.steps > 3:
            return np.zeros(5, np.float32)
        if self.fault == "same array":
            self.array[:] = drawn
            return self.array
        return drawn.astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.resets, self.steps = self.resets + 1, 0
        if self.fault == "leak":
            kept.append(np.ones(4096))
        if self.fault == "files":
            kept.append(open(__file__))
        if self.fault == "slower":
            time.sleep(self.resets * 2e-5)
        return self.observe(), {}

    def step(self, action):
        self.steps += 1
        return self.observe(), 1.0, self.steps >= 30, False, {}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "check", "result", "text"),
    [
        ("none", None, "ok", ""),
        ("dtype", "interface", "wrong", "has dtype float64 but its space declares float32"),
        ("shape", "interface", "wrong", "has shape [5] but its space declares [4]"),
        ("seed", "seed", "wrong", "the seed has no effect"),
        ("fixed", "seed", "note", "every seed gives the same episode"),
        ("same array", "observations", "wrong", "returns the same array for 'obs'"),
        ("leak", "leaks", "wrong", "memory grows by 3"),
        ("files", "leaks", "wrong", "700 open files behind"),
        ("slower", "resets", "wrong", "reset() is slower every time"),
    ],
)
def test_check_finds_the_fault(
    fault: str,
    check: str | None,
    result: str,
    text: str,
    tiltyard: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("faulty.py").write_text(FAULTY)
    words = ("env", "check", "faulty.py", f"env.options.fault={fault}", "--json")
    found = json.loads(tiltyard(*words, expect=int(result == "wrong")).stdout)
    others = {row["check"]: row for row in found["checks"] if row["check"] != check}
    assert all(row["result"] == "ok" for row in others.values()), others
    assert found["ok"] == (result != "wrong")
    if check is not None:
        (row,) = [row for row in found["checks"] if row["check"] == check]
        assert row["result"] == result and text in row["text"]


def test_check_prints_a_table(tiltyard: Command) -> None:
    lines = tiltyard("env", "check", "CartPole-v1", "--resets", "100").stdout.splitlines()
    assert lines[0].split() == ["check", "found"]
    names = [line.split()[0] for line in lines[1:]]
    assert names == ["interface", "seed", "observations", "resets", "leaks", "speed", "memory", "threads"]


def test_check_of_an_env_that_cannot_be_made_is_wrong_use(tiltyard: Command) -> None:
    output = tiltyard("env", "check", "CartPole-v9", expect=2)
    assert "error: " in output.stderr and "hint: " in output.stderr and not output.stdout


def test_list_shows_families_and_what_an_extra_would_add(tiltyard: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = json.loads(tiltyard("env", "list", "--json").stdout)
    listed = {row["id"]: row for row in rows}
    for name, family in (
        ("CartPole-v1", "classic"),
        ("atari:pong", "atari"),
        ("car-racing:fast", "car-racing"),
        ("doom:basic", "doom"),
        ("Hopper-v5", "mujoco"),
    ):
        assert listed[name]["family"] == family and listed[name]["installed"]
    assert listed["MiniGrid-Empty-8x8-v0"]["extra"] == "minigrid" and "Hopper-v4" not in listed
    assert tiltyard("env", "list", "doom:d*").stdout.split("\n")[1:3] == ["  doom:deadly_corridor", "  doom:deathmatch"]
    assert "no env matches" in tiltyard("env", "list", "nothing-like-it", expect=2).stderr
    monkeypatch.setitem(sys.modules, "vizdoom", None)  # Python's own way to make an import fail
    assert "pip install 'tiltyard[vizdoom]' adds doom:NAME" in tiltyard("env", "list").stdout


def test_play_films_random_actions_and_a_run(tiltyard: Command, runs: Path, tmp_path: Path) -> None:
    film = tmp_path / "random.mp4"
    output = tiltyard("env", "play", "CartPole-v1", "--video", str(film), "--seed", "3").stdout
    length = int(output.split()[3])
    assert len(read_frames(film)[1]) == length + 1
    assert output == tiltyard("env", "play", "CartPole-v1", "--video", str(film), "--seed", "3").stdout
    assert output != tiltyard("env", "play", "CartPole-v1", "--video", str(film), "--seed", "4").stdout
    tiltyard("train", "CartPole-v1", "stop.env_steps=256", "engine.envs=2", "algo.minibatch=32", "eval.every=0")
    assert "return " in tiltyard("env", "play", "CartPole-v1", "--policy", "last").stdout
    refused = tiltyard("env", "play", "Pendulum-v1", "--policy", "last", expect=2).stderr
    assert "error: " in refused and "hint: " in refused


def test_window_needs_a_display(tiltyard: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    assert "--video FILE" in tiltyard("env", "play", "CartPole-v1", "--window", expect=2).stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("xvfb-run") is None, reason="no Xvfb here: apt-get install xvfb")
def test_window_shows_an_episode(runs: Path) -> None:
    command = ["xvfb-run", "-a", sys.executable, "-m", "tiltyard", "env", "play", "CartPole-v1", "--window"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "return " in done.stdout, done.stderr
