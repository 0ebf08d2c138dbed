"""`tiltyard bench`: measurements of envs with known costs, and where the result is shown later."""

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


def test_two_processes_step_a_sleeping_env_faster_than_one(tiltyard: Command, env: str) -> None:
    found = measured(tiltyard, env, "env.options.step=0.02", "engine.envs=4", "--seconds", "2.2", "--workers", "2")
    one, two = found["sampled"]
    assert (one["processes"], two["processes"], two["envs"]) == (1, 2, 4)
    assert two["env_steps_per_second"] > 1.2 * one["env_steps_per_second"]
    assert found["best"] == two
    assert list(one["windows"]) == ["1"]
    assert one["windows"]["1"] == pytest.approx(one["env_steps_per_second"], rel=0.2)
    assert one["reset_share"] < 0.1


def test_resets_frames_and_memory_are_measured_separately(tiltyard: Command, env: str) -> None:
    options = ("env.options.reset=0.01", "env.options.mib=6", "env.frameskip=2", "env.options.length=4")
    found = measured(tiltyard, env, *options, "engine.envs=3", "--seconds", "0.5", "--workers", "1")
    (only,) = found["sampled"]
    assert only["reset_share"] > 0.5
    assert only["frames_per_second"] == pytest.approx(2 * only["env_steps_per_second"], rel=0.01)
    assert 4 << 20 < only["env_bytes"] < 12 << 20
    assert only["windows"] == {}


def test_training_speed_is_shown_as_a_percentage_of_the_measured_env_speed(
    tiltyard: Command, runs: Path, env: str
) -> None:
    tiltyard("train", env, "engine.envs=2", "engine.workers=0", *TRAIN)

    def speed() -> str:
        return next(line for line in tiltyard("show", "last").stdout.splitlines() if line.startswith("speed"))

    table = tiltyard("bench", env, "engine.envs=4", "--seconds", "0.2", "--workers", "1").stdout.splitlines()
    assert table[0].split() == ["processes", "envs", "env", "steps/s", "frames/s", "resets", "env"]
    assert table[1].split()[:2] == ["1", "4"]
    assert speed().endswith("env steps per second")  # the measurement is of 4 envs, but the run has 2
    tiltyard("bench", env, "engine.envs=2", "--seconds", "0.2", "--workers", "1")
    assert " % of what the env alone does here" in speed()
    assert " % of what the env alone does here\n" in tiltyard("resume", "last", "stop.updates=4").stderr
    (runs / "bench.json").write_text("{")
    assert speed().endswith("env steps per second")


def test_env_error_is_attributed_to_the_env(tiltyard: Command, env: str) -> None:
    output = tiltyard("bench", env, "env.options.fails_at=200", "--seconds", "5", "--workers", "1", expect=1).stderr
    assert "step() raised RuntimeError: out of fuel" in output
    assert (
        "out of fuel" in tiltyard("bench", env, "env.options.fails_at=3", expect=2).stderr
    )  # the probe finds this one


@pytest.mark.parametrize("words", [("--seconds", "0"), ("--seconds", "nan"), ("--workers", "0"), ("engine.envs=0",)])
def test_invalid_arguments_are_refused(tiltyard: Command, words: tuple[str, ...]) -> None:
    assert tiltyard("bench", "CartPole-v1", *words, expect=2).stderr.startswith("error: ")


def test_samplers_exit_when_their_parent_is_killed(runs: Path, env: str) -> None:
    command = [sys.executable, "-m", "tiltyard", "bench", env, "--seconds", "600", "--workers", "2", "engine.envs=2"]
    parent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: len(samplers(parent.pid)) == 1)
    children = samplers(parent.pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert children
    wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))


def samplers(parent: int) -> list[int]:
    """Pids of the sampler children of a process."""
    listed = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in listed if b"tiltyard.tuning.sampler" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def wait_until(true: Any) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_process_counts_are_powers_of_two_and_the_maximum() -> None:
    assert [process_counts(most) for most in (1, 2, 3, 8, 12)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4, 8],
        [1, 2, 4, 8, 12],
    ]
    assert usable_cores() >= 1


def test_summary_covers_only_the_time_when_all_processes_ran() -> None:
    """Two processes at 100 and 50 env steps per second, 4 frames per step; the second starts and ends later."""

    def ticks(began: float, speed: float, resets: float) -> Any:
        at = np.arange(0, 21.01, 0.5)
        return np.stack([began + at, speed * at, 4 * speed * at, resets * at], axis=1)

    found = summary([ticks(5.0, 100.0, 0.0), ticks(5.5, 50.0, 0.5)], 8, 1000)
    assert found.env_steps_per_second == pytest.approx(150)
    assert found.frames_per_second == pytest.approx(600)
    assert found.windows == {"1": pytest.approx(150), "10": pytest.approx(150)}
    assert found.reset_share == pytest.approx(0.25)
    assert (found.processes, found.envs, found.seconds) == (2, 8, pytest.approx(20.5))
