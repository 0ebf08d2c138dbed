"""The fork server: started early if it is certainly needed, copied, and ended afterwards."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tiltyard as product
from tiltyard.engines.local import PRELOAD, WORKER
from tiltyard.errors import UseError
from tiltyard.processes.fork_server import Forked, ForkServer

pytestmark = pytest.mark.slow


def fork_servers() -> int:
    """Return the number of fork servers among the children of this process, without dead ones."""
    found = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            words = (stat.parent / "cmdline").read_text()
        except OSError:  # ended meanwhile
            continue
        found += int(parent) == os.getpid() and state != "Z" and "tiltyard.processes.fork_server" in words
    return found


def test_process_starts_once_and_only_if_needed_and_ends_with_the_context() -> None:
    with ForkServer(PRELOAD) as server:
        assert fork_servers() == 0
        server.start()
        server.start()
        assert fork_servers() == 1
    assert fork_servers() == 0


def test_refused_experiment_leaves_no_fork_server(runs: Path) -> None:
    with pytest.raises(UseError):
        product.train("CartPole-v1", ["engine.mode=async", "engine.envs=100000", "algo.rollout=1e6"], live=False)
    assert fork_servers() == 0


def test_training_ends_its_fork_server(runs: Path) -> None:
    small = ["engine.envs=4", "algo.rollout=16", "algo.minibatch=32", "eval.at_end=false", "stop.updates=2"]
    product.train("CartPole-v1", ["engine.mode=async", *small], live=False)
    assert fork_servers() == 0


# ------------------------------------------------------------------------------------------------ copies

TIMEOUT = 60


def wait_for_exit(server: ForkServer, process: Forked) -> None:
    until = time.monotonic() + TIMEOUT
    while process.status is None:
        assert time.monotonic() < until
        server.exits(1.0)


def descendants(pid: int) -> set[int]:
    """Return all descendants of a process, without dead ones."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # ended meanwhile
            continue
        if state != "Z":
            parents[int(stat.parent.name)] = int(parent)
    found, before = {pid}, 0
    while len(found) > before:
        before = len(found)
        found |= {each for each, parent in parents.items() if parent in found}
    return found - {pid}


def test_copies_of_a_fork_server_do_not_affect_each_other() -> None:
    with ForkServer(PRELOAD) as server:
        one, other = server.copy(), server.copy()
        assert fork_servers() == 1
        below = descendants(os.getpid())
        started = one.fork(WORKER, {}, name="tiltyard-w7")  # fails at once: its task is empty
        wait_for_exit(one, started)
        assert started.pid is not None and started.pid not in below and started.status == 1
        assert not select.select([other], [], [], 0)[0]  # the copies do not see each other's events
        one.close()
        wait_for_exit(other, other.fork(WORKER, {}, name="tiltyard-w8"))
        other.close()
        assert fork_servers() == 1
    assert fork_servers() == 0


def test_killed_tune_command_leaves_no_process(runs: Path) -> None:
    """There are two copies, each with workers: for the experiment's own engine and for the candidate."""
    words = ["engine.envs=4", "algo.rollout=16", "algo.minibatch=32", "--seconds", "100"]
    command = [sys.executable, "-m", "tiltyard", "tune", "LunarLander-v3", *words]
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert driver.stderr is not None
    for _ in range(3):  # one line per candidate
        assert "env steps/s" in driver.stderr.readline()
    below = descendants(driver.pid)
    assert len(below) > 3
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    until = time.monotonic() + TIMEOUT
    while any(Path(f"/proc/{pid}").exists() for pid in below) and time.monotonic() < until:
        time.sleep(0.02)
    assert [pid for pid in below if Path(f"/proc/{pid}").exists()] == []
