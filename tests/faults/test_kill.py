"""kill -9 at random moments: every resume continues from a valid checkpoint, at most two intervals back."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.counts import LONG, count
from tiltyard.run import checkpoint, metrics
from tiltyard.run.events import read_events
from tiltyard.run.folder import Run, find

INTERVAL = 256  # env steps between checkpoints; 4 updates
SETTINGS = [
    "env.id=CartPole-v1",
    "engine.envs=4",
    "algo.rollout=16",
    "algo.minibatch=64",
    "algo.epochs=1",
    f"save.env_steps={INTERVAL}",
    "save.last=3",
    "stop.env_steps=1e9",
    "eval.every=0",
    "track.tensorboard=false",
]


def tiltyard(*words: str, **options: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "tiltyard", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,  # type: ignore[call-overload]
    )


def wait_until(condition: object, seconds: float = 100.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(3000 if LONG else 300)
def test_kill_9_at_random_moments_loses_at_most_two_intervals(runs: Path) -> None:
    rng = random.Random(7)
    kills = count(50)
    child = tiltyard("train", "CartPole-v1", *SETTINGS[1:], "--plain")
    wait_until(lambda: list(runs.glob("*/0*/checkpoints/0*")))
    run = find("last", runs)
    reached = 0
    for _ in range(kills):
        if rng.random() < 0.5:  # half of the kills are during a save
            wait_until(lambda: list((run.folder / "checkpoints").glob(".tmp-*")) or child.poll() is not None)  # noqa: B023
        else:
            time.sleep(rng.uniform(0.0, 0.4))
        assert child.poll() is None, child.stderr.read() if child.stderr else ""
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        trained = max((record["env_steps"] for record in metrics.read(run.metrics_file)), default=0)
        newest, complaints = checkpoint.newest_valid(run)
        assert complaints == []
        assert newest is not None
        # One update may have run beyond the interval, and one interval while the checkpoint was being written.
        assert trained - newest.env_steps <= 2 * INTERVAL + 64
        assert newest.env_steps >= reached
        reached = newest.env_steps

        before = len(read_events(run))
        child = tiltyard("resume", str(run.folder), "--plain")
        wait_until(lambda: any(event["kind"] == "resumed" for event in read_events(run)[before:]))  # noqa: B023
        event = next(event for event in read_events(run)[before:] if event["kind"] == "resumed")
        assert f"{newest.env_steps:,}" in event["sentence"]
        wait_until(lambda: checkpoint.list_checkpoints(run)[-1].env_steps > reached)  # noqa: B023
    os.killpg(child.pid, signal.SIGTERM)
    assert child.wait(100) == 75
    assert Run(run.folder).state == "stopped"
    steps = [record["env_steps"] for record in metrics.read(run.metrics_file)]
    assert steps == sorted(set(steps)), "after all rewinds the metrics are one growing history"


def small_run(runs: Path, *more: str) -> Run:
    child = tiltyard(
        "train", "CartPole-v1", *SETTINGS[1:], "stop.env_steps=1024", "eval.at_end=false", "--plain", *more
    )
    _, errors = child.communicate(timeout=100)
    assert child.returncode == 0, errors
    return find("last", runs)


def test_corrupted_newest_checkpoint_is_reported_and_the_previous_one_is_used(runs: Path) -> None:
    run = small_run(runs)
    kept = checkpoint.list_checkpoints(run)
    weights = kept[-1].folder / "policies" / "main.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    child = tiltyard("resume", str(run.folder), "stop.env_steps=1280", "--plain")
    _, errors = child.communicate(timeout=100)
    assert child.returncode == 0, errors
    assert kept[-1].folder.name in errors and "checksum" in errors
    assert f"continues from the checkpoint at env step {kept[-2].env_steps:,}" in errors
    assert checkpoint.newest_valid(run)[0].env_steps == 1280  # type: ignore[union-attr]


def test_resume_fails_without_starting_over_if_all_checkpoints_are_corrupted(runs: Path) -> None:
    run = small_run(runs)
    for one in checkpoint.list_checkpoints(run):
        (one.folder / "loop.json").write_text("{}")
    child = tiltyard("resume", str(run.folder), "stop.env_steps=2048", "--plain")
    _, errors = child.communicate(timeout=100)
    assert child.returncode == 1
    assert "does not start over" in errors and "Traceback" not in errors
    assert max(record["env_steps"] for record in metrics.read(run.metrics_file)) == 1024
