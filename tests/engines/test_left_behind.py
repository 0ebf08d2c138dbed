"""What an env has started itself ends with the training: closed by the env, or ended where the env does not."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
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
        self.who = Path("/proc/self/comm").read_text().strip()  # a worker, or whoever looked at the env beforehand
        Path(f"started-{self.who}-{self.simulator.pid}").touch()
    def close(self):
        if Path("tidy").exists():
            self.simulator.kill()
            self.simulator.wait()
            Path(f"closed-{self.who}-{self.simulator.pid}").touch()
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


def workers(kind: str, folder: Path) -> set[int]:
    """The simulators that were started or closed in workers."""
    return {int(path.name.rpartition("-")[2]) for path in folder.glob(f"{kind}-tiltyard-w*")}


def running(folder: Path) -> set[int]:
    """Those of them that still run."""
    found = set()
    for pid in workers("started", folder):
        stat = Path(f"/proc/{pid}/stat")
        if stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
            found.add(pid)
    return found


@pytest.fixture(autouse=True)
def nothing_of_the_probe(tmp_path: Path) -> Iterator[None]:
    """What an env leaves behind that was only looked at is nobody's: it is ended here."""
    yield
    for path in tmp_path.glob("started-*"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.name.rpartition("-")[2]), signal.SIGKILL)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_envs_in_workers_are_closed(runs: Path, tmp_path: Path, mode: str) -> None:
    (tmp_path / "env.py").write_text(ENV)
    (tmp_path / "tidy").touch()
    product.train("env.py", [*WORDS, f"engine.mode={mode}", "stop.updates=3"], live=False)
    assert len(workers("closed", tmp_path)) == 4
    assert not running(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody can know what an env has started")
def test_what_envs_leave_behind_is_ended(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(ENV)
    product.train("env.py", [*WORDS, "stop.updates=3"], live=False)
    assert len(workers("started", tmp_path)) == 4
    assert not running(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody can know what an env has started")
def test_what_envs_leave_behind_is_ended_when_the_driver_is_killed(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(ENV)
    command = [sys.executable, "-m", "tiltyard", "train", "env.py", *WORDS, "stop.env_steps=100_000_000"]
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path)
    until = time.monotonic() + PATIENCE
    while not list(runs.glob("*/*/metrics.jsonl")) and time.monotonic() < until:
        time.sleep(0.05)
    assert len(running(tmp_path)) == 4
    driver.kill()
    driver.wait()
    while running(tmp_path) and time.monotonic() < until:
        time.sleep(0.05)
    assert not running(tmp_path)
