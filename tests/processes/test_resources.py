"""The limit of open files: raised where it may be, refused with advice where it may not."""

import resource
import subprocess
import sys

import pytest

from tiltyard.run.folder import find

TRAIN = [
    *("tiltyard", "train", "CartPole-v1", "--plain"),
    *("engine.workers=24", "engine.envs=24", "algo.rollout=8", "algo.minibatch=96", "algo.epochs=1"),
    *("stop.updates=1", "eval.at_end=false", "eval.every=0", "track.tensorboard=false"),
]


def train(soft: int, hard: int) -> "subprocess.CompletedProcess[str]":
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    return subprocess.run(
        [sys.executable, "-m", *TRAIN], preexec_fn=limit, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.slow
def test_many_workers_raise_the_soft_limit_of_open_files(runs):
    done = train(56, 4096)
    assert done.returncode == 0, done.stderr
    assert find("last", runs).state == "finished"


def test_too_many_workers_for_the_hard_limit_are_refused_before_a_run_exists(runs):
    done = train(100, 100)
    assert done.returncode == 2, done.stderr
    assert "engine.workers = 24 needs " in done.stderr and "but this process may open 100 (ulimit -n)" in done.stderr
    assert "hint: use fewer workers, or ask" in done.stderr
    assert not list(runs.glob("*/0*"))
