"""The fork server: started early if it is certainly needed, copied, and ended afterwards."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import tiltyard as product
from tiltyard.engines.local import PRELOAD, WORKER
from tiltyard.errors import UseError
from tiltyard.processes.fork_server import ForkServer, standby

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


def test_standby_fork_server_is_used_if_it_fits_and_ended_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = standby.start(PRELOAD)
    assert standby.take(PRELOAD) is started
    started.close()
    started = standby.start(PRELOAD)
    monkeypatch.chdir(tmp_path)  # the fork server does not fit: it would look for the user's files in the old folder
    other = standby.take(PRELOAD)
    assert other is not started and fork_servers() == 1
    other.close()
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


def next_event(server: ForkServer) -> dict[str, Any]:
    """Wait for the next event and return it."""
    assert select.select([server], [], [], TIMEOUT)[0]
    event = server.poll_events()
    assert event is not None
    return event


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


def test_shared_fork_servers_are_copies_of_one() -> None:
    with standby.shared():
        one, other = standby.take(PRELOAD), standby.take(PRELOAD)
        assert fork_servers() == 1
        below = descendants(os.getpid())
        one.fork({"run": WORKER, "name": "tiltyard-w7", "number": 7}, [])  # fails at once: its task is empty
        started = next_event(one)
        assert started["number"] == 7 and started["started"] not in below
        assert next_event(one) == {"exited": started["started"], "status": 1}
        assert other.poll_events() is None  # the copies do not see each other's events
        one.close()
        other.fork({"run": WORKER, "name": "tiltyard-w8", "number": 8}, [])
        assert next_event(other)["number"] == 8
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
