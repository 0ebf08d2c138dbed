"""The process that others are forked from is started early where it is certain to be needed."""

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
from tiltyard.errors import UseError
from tiltyard.processes.fork_server import ForkServer, early

pytestmark = pytest.mark.slow


def nurseries() -> int:
    """Children of this process that are nurseries, dead ones not counted."""
    found = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            words = (stat.parent / "cmdline").read_text()
        except OSError:  # ended meanwhile
            continue
        found += int(parent) == os.getpid() and state != "Z" and "tiltyard.processes.fork_server" in words
    return found


def test_it_is_used_where_it_fits_and_ended_where_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = early.start()
    assert early.take() is started
    started.close()
    started = early.start()
    monkeypatch.chdir(tmp_path)  # a worker would look for the user's files in the wrong folder
    other = early.take()
    assert other is not started and nurseries() == 1
    other.close()
    assert nurseries() == 0


def test_an_experiment_that_is_refused_leaves_none(runs: Path) -> None:
    with pytest.raises(UseError):
        product.train("CartPole-v1", ["engine.mode=async", "engine.envs=100000", "algo.rollout=1e6"], live=False)
    assert nurseries() == 0


def test_a_training_uses_one_and_ends_it(runs: Path) -> None:
    small = ["engine.envs=4", "algo.rollout=16", "algo.minibatch=32", "eval.at_end=false", "stop.updates=2"]
    product.train("CartPole-v1", ["engine.mode=async", *small], live=False)
    assert nurseries() == 0


# ------------------------------------------------------------------------------------------------ copies

TIMEOUT = 60


def heard(nursery: ForkServer) -> dict[str, Any]:
    """The next message."""
    assert select.select([nursery], [], [], TIMEOUT)[0]
    word = nursery.poll_events()
    assert word is not None
    return word


def descendants(pid: int) -> set[int]:
    """All processes below one, dead ones not counted."""
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


def test_who_builds_engine_after_engine_has_copies_of_one() -> None:
    with early.many():
        one, other = early.take(), early.take()
        assert nurseries() == 1
        below = descendants(os.getpid())
        one.fork({"role": "w", "number": 7}, [])  # told nothing, its life fails at once
        started = heard(one)
        assert started["number"] == 7 and started["started"] not in below
        assert heard(one) == {"exited": started["started"], "status": 1}
        assert other.poll_events() is None  # which is nothing to the other
        one.close()
        other.fork({"role": "w", "number": 8}, [])
        assert heard(other)["number"] == 8
        other.close()
        assert nurseries() == 1
    assert nurseries() == 0


def test_a_killed_tune_leaves_nobody(runs: Path) -> None:
    """Two copies at once, each with workers: the experiment's own engine and the one that is tried."""
    words = ["engine.envs=4", "algo.rollout=16", "algo.minibatch=32", "--seconds", "100"]
    command = [sys.executable, "-m", "tiltyard", "tune", "LunarLander-v3", *words]
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert driver.stderr is not None
    for _ in range(3):  # that have been tried
        assert "env steps/s" in driver.stderr.readline()
    below = descendants(driver.pid)
    assert len(below) > 3
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    until = time.monotonic() + TIMEOUT
    while any(Path(f"/proc/{pid}").exists() for pid in below) and time.monotonic() < until:
        time.sleep(0.02)
    assert [pid for pid in below if Path(f"/proc/{pid}").exists()] == []
