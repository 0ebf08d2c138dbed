"""The process that others are forked from is started early where it is certain to be needed."""

import os
from pathlib import Path

import pytest

import tiltyard as product
from tiltyard.engines.nursery import early
from tiltyard.errors import UseError

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
        found += int(parent) == os.getpid() and state != "Z" and "tiltyard.engines.nursery" in words
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
