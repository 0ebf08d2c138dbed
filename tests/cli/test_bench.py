"""`tiltyard bench`: what it measures of envs whose costs are known, and where its figure turns up again."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Command
from tiltyard.processes.resources import usable_cores
from tiltyard.tuning.sampler import process_counts, summary

TRAIN = ("algo.rollout=16", "algo.minibatch=32", "stop.updates=3", "eval.at_end=false", "track.tensorboard=false")


@pytest.fixture
def env(runs: Path) -> str:
    shutil.copy(Path(__file__).parent / "pauses.py", runs.parent)
    return "pauses.py:Pauses"


def measured(tiltyard: Command, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(tiltyard("bench", *words, "--json").stdout)
    return found


def test_two_processes_step_an_env_that_waits_faster_than_one(tiltyard: Command, env: str) -> None:
    found = measured(tiltyard, env, "env.options.step=0.02", "engine.envs=4", "--seconds", "2.2", "--workers", "2")
    one, two = found["sampled"]
    assert (one["processes"], two["processes"], two["envs"]) == (1, 2, 4)
    assert two["env_steps_per_second"] > 1.2 * one["env_steps_per_second"]
    assert found["best"] == two
    assert list(one["windows"]) == ["1"]
    assert one["windows"]["1"] == pytest.approx(one["env_steps_per_second"], rel=0.2)
    assert one["reset_share"] < 0.1


def test_resets_frames_and_memory_are_told_apart(tiltyard: Command, env: str) -> None:
    options = ("env.options.reset=0.01", "env.options.mib=6", "env.frameskip=2", "env.options.length=4")
    found = measured(tiltyard, env, *options, "engine.envs=3", "--seconds", "0.5", "--workers", "1")
    (only,) = found["sampled"]
    assert only["reset_share"] > 0.5
    assert only["frames_per_second"] == pytest.approx(2 * only["env_steps_per_second"], rel=0.01)
    assert 4 << 20 < only["env_bytes"] < 12 << 20
    assert only["windows"] == {}


def test_training_is_told_beside_what_the_env_alone_does(tiltyard: Command, runs: Path, env: str) -> None:
    tiltyard("train", env, "engine.envs=2", "engine.workers=0", *TRAIN)

    def speed() -> str:
        return next(line for line in tiltyard("show", "last").stdout.splitlines() if line.startswith("speed"))

    table = tiltyard("bench", env, "engine.envs=4", "--seconds", "0.2", "--workers", "1").stdout.splitlines()
    assert table[0].split() == ["processes", "envs", "env", "steps/s", "frames/s", "resets", "env"]
    assert table[1].split()[:2] == ["1", "4"]
    assert speed().endswith("env steps per second")  # what was measured is 4 rows, and these are 2
    tiltyard("bench", env, "engine.envs=2", "--seconds", "0.2", "--workers", "1")
    assert " % of what the env alone does here" in speed()
    assert " % of what the env alone does here\n" in tiltyard("resume", "last", "stop.updates=4").stderr
    (runs / "bench.json").write_text("{")
    assert speed().endswith("env steps per second")


def test_an_env_that_fails_is_told_as_its_own(tiltyard: Command, env: str) -> None:
    output = tiltyard("bench", env, "env.options.fails_at=200", "--seconds", "5", "--workers", "1", expect=1).stderr
    assert "step() raised RuntimeError: out of fuel" in output
    assert "out of fuel" in tiltyard("bench", env, "env.options.fails_at=3", expect=2).stderr  # found by the probe


@pytest.mark.parametrize("words", [("--seconds", "0"), ("--seconds", "nan"), ("--workers", "0"), ("engine.envs=0",)])
def test_wrong_words_are_refused(tiltyard: Command, words: tuple[str, ...]) -> None:
    assert tiltyard("bench", "CartPole-v1", *words, expect=2).stderr.startswith("error: ")


def test_processes_die_with_their_parent(runs: Path, env: str) -> None:
    command = [sys.executable, "-m", "tiltyard", "bench", env, "--seconds", "600", "--workers", "2", "engine.envs=2"]
    parent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: len(samplers(parent.pid)) == 1)
    children = samplers(parent.pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert children
    wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))


def samplers(parent: int) -> list[int]:
    """Children of a process that are samplers."""
    listed = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in listed if b"tiltyard.tuning.sampler" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def wait_until(true: Any) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_counts_of_processes() -> None:
    assert [process_counts(most) for most in (1, 2, 3, 8, 12)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4, 8],
        [1, 2, 4, 8, 12],
    ]
    assert usable_cores() >= 1


def test_figures_are_of_the_time_that_all_processes_were_at_work() -> None:
    """Two processes at 100 and 50 env steps per second, 4 frames each; the second begins late and ends late."""

    def ticks(began: float, speed: float, resets: float) -> Any:
        at = np.arange(0, 21.01, 0.5)
        return np.stack([began + at, speed * at, 4 * speed * at, resets * at], axis=1)

    found = summary([ticks(5.0, 100.0, 0.0), ticks(5.5, 50.0, 0.5)], 8, 1000)
    assert found.env_steps_per_second == pytest.approx(150)
    assert found.frames_per_second == pytest.approx(600)
    assert found.windows == {"1": pytest.approx(150), "10": pytest.approx(150)}
    assert found.reset_share == pytest.approx(0.25)
    assert (found.processes, found.envs, found.seconds) == (2, 8, pytest.approx(20.5))
