"""A process that was suspended while its run was taken over stops writing; a second interrupt exits at once."""

import fcntl
import os
import signal
import time
from pathlib import Path

import pytest

from tests.faults.test_kill import SETTINGS, tiltyard, wait_until
from tests.test_api import every_byte
from tiltyard.run.folder import Run, find
from tiltyard.run.lock import GUARD, UNSEEN_PERIODS, Lock

HOLDS = """
import time
from pathlib import Path
from gymnasium.envs.classic_control import CartPoleEnv
class Holds(CartPoleEnv):
    def step(self, action):
        while Path("hold").exists():
            Path("holding").touch()
            time.sleep(0.01)
        return super().step(action)
"""
PERIOD = 0.05


@pytest.fixture
def holding(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A training that waits inside a step of its env, in the middle of an update, while the file `hold` exists."""
    monkeypatch.setenv("TILTYARD_HEARTBEAT", str(PERIOD))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    (tmp_path / "holds.py").write_text(HOLDS)
    child = tiltyard("train", "holds.py:Holds", *SETTINGS[1:], "--plain")
    wait_until(lambda: any(path.read_text().count("\n") > 1 for path in runs.glob("*/0*/metrics.jsonl")))
    (tmp_path / "hold").touch()
    wait_until(lambda: (tmp_path / "holding").exists())
    yield child
    if child.poll() is None:
        child.kill()
    child.communicate()


def suspend(pid: int, guard: Path) -> None:
    """Suspend the process, but not while it holds the guard of the lock: the test would then wait forever."""
    while True:
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        with guard.open("r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                os.kill(pid, signal.SIGCONT)
        time.sleep(PERIOD / 5)


def _written(run: Run) -> dict[str, object]:
    """All files, without the mutex, which names its last holder."""
    return {path: content for path, content in every_byte(run.folder).items() if not path.endswith(GUARD)}


def test_process_whose_run_was_taken_over_stops_writing(
    holding, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = find("last", runs)
    suspend(holding.pid, run.folder / GUARD)
    time.sleep(2 * UNSEEN_PERIODS * PERIOD)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # the same job after a requeue may take over at once
    with Lock.acquire(run, period=1000):
        before = _written(run)
        (tmp_path / "hold").unlink()
        os.kill(holding.pid, signal.SIGCONT)
        _, errors = holding.communicate(timeout=100)
        assert holding.returncode == 1 and "was taken over by" in errors, errors
        assert _written(run) == before
        assert run.state == "running"


def test_second_interrupt_exits_at_once(holding, runs: Path) -> None:
    os.kill(holding.pid, signal.SIGINT)
    time.sleep(1)  # two signals at the same moment count as one
    os.kill(holding.pid, signal.SIGINT)
    _, errors = holding.communicate(timeout=100)
    assert holding.returncode == 130, errors
    assert find("last", runs).status()["reason"] == "interrupted twice: exited without saving"
