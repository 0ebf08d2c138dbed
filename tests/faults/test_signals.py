"""SIGTERM, SIGUSR2, SIGINT and SIGHUP end a training at the end of its update: a committed checkpoint and exit code 75."""

import os
import signal
from pathlib import Path

import pytest

from tests.faults.test_kill import SETTINGS, tiltyard, wait_until
from tiltyard.run import checkpoint
from tiltyard.run.folder import find


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_and_exits_75(runs: Path, number: signal.Signals) -> None:
    child = tiltyard("train", "CartPole-v1", *SETTINGS[1:], "save.env_steps=1e9", "--plain")
    wait_until(lambda: any(path.read_text().count("\n") > 3 for path in runs.glob("*/0*/metrics.jsonl")))
    os.kill(child.pid, number)
    _, errors = child.communicate(timeout=100)
    assert child.returncode == 75, errors
    run = find("last", runs)
    status = run.status()
    assert (status["state"], status["reason"]) == ("stopped", f"asked by {number.name}")
    newest, _ = checkpoint.newest_valid(run)
    assert newest is not None and newest.env_steps == status["progress"]["env_steps"] > 0
    assert f"tiltyard resume {run.id}" in errors
