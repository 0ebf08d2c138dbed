"""What an env has started itself ends with the training: closed by the env, or ended where the env does not."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tiltyard as product

pytestmark = pytest.mark.slow

# A simulator that notices nothing of its owner's end: it has a session of its own.
ENV = """
import os, subprocess
from pathlib import Path
from gymnasium.envs.classic_control import CartPoleEnv
class CustomEnv(CartPoleEnv):
    def __init__(self):
        super().__init__()
        self.simulator = subprocess.Popen(["sleep", "600"], start_new_session=True)
        Path(f"started-{self.simulator.pid}").touch()
    def close(self):
        if Path("tidy").exists():
            self.simulator.kill()
            self.simulator.wait()
            Path(f"closed-{self.simulator.pid}").touch()
"""
WORDS = [
    "engine.workers=2",
    "engine.envs=4",
    "algo.rollout=16",
    "algo.minibatch=32",
    "eval.at_end=false",
    "eval.every=0",
]
PATIENCE = 60


def pids(kind: str, folder: Path) -> set[int]:
    return {int(path.name.rpartition("-")[2]) for path in folder.glob(f"{kind}-*")}


def running(folder: Path) -> set[int]:
    """Those of the simulators that still run."""
    found = set()
    for pid in pids("started", folder):
        stat = Path(f"/proc/{pid}/stat")
        if stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
            found.add(pid)
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_envs_in_workers_are_closed(runs: Path, tmp_path: Path, mode: str) -> None:
    (tmp_path / "env.py").write_text(ENV)
    (tmp_path / "tidy").touch()
    product.train("env.py", [*WORDS, f"engine.mode={mode}", "stop.updates=3"], live=False)
    assert len(pids("closed", tmp_path)) >= 4
    assert not running(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody can know what an env has started")
def test_what_envs_leave_behind_is_ended(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(ENV)
    product.train("env.py", [*WORDS, "stop.updates=3"], live=False)
    mine = {pid for pid in running(tmp_path) if parent(pid) == os.getpid()}  # of the probe, which this process ran
    assert running(tmp_path) == mine
    assert len(pids("started", tmp_path) - mine) >= 4
    for pid in mine:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody can know what an env has started")
def test_what_envs_leave_behind_is_ended_when_the_driver_is_killed(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(ENV)
    command = [sys.executable, "-m", "tiltyard", "train", "env.py", *WORDS, "stop.env_steps=100_000_000"]
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path)
    until = time.monotonic() + PATIENCE
    while not list(runs.glob("*/*/metrics.jsonl")) and time.monotonic() < until:
        time.sleep(0.05)
    own = {pid for pid in running(tmp_path) if parent(pid) in (1, driver.pid)}  # of the probe
    theirs = running(tmp_path) - own
    assert len(theirs) == 4
    driver.kill()
    driver.wait()
    while running(tmp_path) & theirs and time.monotonic() < until:
        time.sleep(0.05)
    assert not running(tmp_path) & theirs
    for pid in own:
        os.kill(pid, signal.SIGKILL)
