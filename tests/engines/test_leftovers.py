"""Processes started by envs end with the training: closed by the env, or else ended by Tiltyard."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tiltyard as product
from tiltyard.config.sections import Env
from tiltyard.envs.probe import probe
from tiltyard.processes.proc import read, tree
from tiltyard.processes.reaper import GRACE, MARK, WORKER

pytestmark = pytest.mark.slow

# The simulator has its own session, so it does not notice that its owner exits.
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
TIMEOUT = 60


def workers(kind: str, folder: Path) -> set[int]:
    """Return the simulators that were started or closed in workers."""
    return simulators(f"{kind}-tiltyard-w", folder)


def simulators(kind: str, folder: Path) -> set[int]:
    return {int(path.name.rpartition("-")[2]) for path in folder.glob(f"{kind}*")}


def running(folder: Path) -> set[int]:
    """Return all simulators that still run, started by any process."""
    return {pid for pid in simulators("started", folder) if read(pid) is not None}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_envs_in_workers_are_closed(runs: Path, tmp_path: Path, mode: str) -> None:
    (tmp_path / "env.py").write_text(ENV)
    (tmp_path / "tidy").touch()
    product.train("env.py", [*WORDS, f"engine.mode={mode}", "stop.updates=3"], live=False)
    assert len(workers("closed", tmp_path)) == 4
    assert not running(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc to find what an env has started")
def test_processes_left_by_envs_in_workers_are_ended(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(ENV)
    product.train("env.py", [*WORDS, "stop.updates=3"], live=False)
    assert len(workers("started", tmp_path)) == 4
    assert not running(tmp_path)


HERE = ["engine.workers=0", "eval.at_end=true", "eval.episodes=2"]
FORKS = """
import multiprocessing, time
class CustomEnv(CustomEnv):
    def __init__(self):
        super().__init__()
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        child.start()
        Path(f"started-{self.who}-{child.pid}").touch()
        multiprocessing.process._children.discard(child)  # or Python would wait for it in the end
"""


def ended(folder: Path) -> bool:
    """Wait for all simulators to end; return whether they did."""
    until = time.monotonic() + TIMEOUT
    while running(folder) and time.monotonic() < until:
        time.sleep(0.05)
    return not running(folder)


def train(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tiltyard", "train", "env.py", *WORDS, *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=folder)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc to find what an env has started")
@pytest.mark.parametrize("isolate", ["none", "process"])
def test_processes_left_by_envs_of_the_driver_end_with_it(runs: Path, tmp_path: Path, isolate: str) -> None:
    (tmp_path / "env.py").write_text(ENV + FORKS)
    driver = train(tmp_path, *HERE, "stop.updates=2", f"env.isolate={isolate}")
    output = driver.communicate()[1]  # no process delays its exit
    assert driver.returncode == 0, output
    assert len(simulators("started", tmp_path)) >= 2 * (2 + 4 + 2)  # of probe, training and evaluation
    assert ended(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc to find what an env has started")
def test_processes_left_by_a_probed_env_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "env.py").write_text(ENV)
    monkeypatch.chdir(tmp_path)
    probe(Env(id="env.py"), base=[tmp_path])
    assert simulators("started", tmp_path) and not running(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc to find what an env has started")
@pytest.mark.parametrize("words", [[], HERE])
def test_processes_left_by_envs_are_ended_if_the_driver_is_killed(runs: Path, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "env.py").write_text(ENV + FORKS)
    driver = train(tmp_path, *words, "stop.env_steps=100_000_000")
    until = time.monotonic() + TIMEOUT
    while not list(runs.glob("*/*/metrics.jsonl")) and time.monotonic() < until:
        time.sleep(0.05)
    assert len(running(tmp_path)) == 2 * 4
    below = {each.pid for each in tree(driver.pid)}
    driver.kill()
    driver.communicate()
    assert ended(tmp_path)
    while any(map(read, below)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(read, below)), "nor does a guard stay"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc to find what an env has started")
@pytest.mark.parametrize("also_driver", [False, True])
def test_processes_left_by_envs_are_ended_if_the_fork_server_is_killed(
    runs: Path, tmp_path: Path, also_driver: bool
) -> None:
    # A driver that is killed too cannot end plain forks: only programs carry the mark that its reaper looks for.
    (tmp_path / "env.py").write_text(ENV + ("" if also_driver else FORKS))
    driver = train(tmp_path, "stop.env_steps=100_000_000")
    until = time.monotonic() + TIMEOUT
    while not list(runs.glob("*/*/metrics.jsonl")) and time.monotonic() < until:
        time.sleep(0.05)
    assert len(running(tmp_path)) == 4 * (1 if also_driver else 2)
    (server,) = [each.pid for each in tree(driver.pid) if each.parent == driver.pid and "fork_server" in each.command]
    if also_driver:
        driver.send_signal(signal.SIGSTOP)  # it must not notice
    os.kill(server, signal.SIGKILL)
    if also_driver:
        driver.kill()
    _, errors = driver.communicate(timeout=TIMEOUT)
    if not also_driver:
        assert driver.returncode == 75 and "the fork server exited" in errors, errors
    assert ended(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc to find what an env has started")
def test_processes_not_started_by_envs_keep_running() -> None:
    """Trackers' helpers and processes started after the envs were closed have their own work to finish."""
    code = (
        "import subprocess; from pathlib import Path\n"
        "from tiltyard.processes import reaper; from tiltyard.config.sections import Env\n"
        "from tiltyard.envs.make import make_copies\n"
        "def start():\n"
        "    return subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL, start_new_session=True).pid\n"
        "made = make_copies(Env(id='Pendulum-v1'), [Path()], 1)\n"
        "envs = start()\n"
        "with reaper.unmarked():\n"
        "    helper = start()\n"
        "made.clear()\n"
        "print(envs, helper, start())\n"
    )
    clean = {name: value for name, value in os.environ.items() if name not in (MARK, WORKER)}
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, timeout=TIMEOUT, env=clean
    )
    envs, *others = map(int, done.stdout.split())
    until = time.monotonic() + TIMEOUT
    while read(envs) and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(2 * GRACE)
    still = [read(pid) is not None for pid in others]
    for pid in others:
        os.kill(pid, signal.SIGKILL)
    assert read(envs) is None and still == [True, True]
