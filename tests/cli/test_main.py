"""A failed write to stdout is reported as such, never as an internal error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Command


def typed(*words: str, stdout: int, unbuffered: str = "") -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "tiltyard", *words]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
def test_unprintable_letters_are_escaped_and_a_full_disk_is_reported(tiltyard: Command, runs: Path) -> None:
    tiny = ["engine.envs=1", "algo.rollout=8", "algo.minibatch=8", "stop.env_steps=8", "eval.at_end=false"]
    tiltyard("train", "CartPole-v1", *tiny, "notes=für später")
    done = typed("ls", stdout=subprocess.PIPE)
    assert done.returncode == 0 and "f\\xfcr sp\\xe4ter" in done.stdout, done.stderr
    full = os.open("/dev/full", os.O_WRONLY)
    for words, unbuffered in (("ls", ""), ("ls", "1"), ("--help", ""), ("resume last --plain", "")):
        done = typed(*words.split(), stdout=full, unbuffered=unbuffered)
        assert done.returncode == 1 and "error: stdout cannot be written: No space left on device" in done.stderr
        assert "internal error" not in done.stderr and "Exception ignored" not in done.stderr
    os.close(full)


def test_closed_pipe_on_stdout_does_not_count_as_an_error(runs: Path) -> None:
    there, here = os.pipe()
    os.close(there)
    done = subprocess.run([sys.executable, "-m", "tiltyard", "--help"], stdout=here, stderr=subprocess.PIPE, text=True)
    os.close(here)
    assert (done.returncode, done.stderr) == (0, "")
