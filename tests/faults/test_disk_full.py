"""The disk is full while saving: an error is printed, and the run can continue from the previous checkpoint."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import in_own_process
from tiltyard.run import checkpoint
from tiltyard.run.folder import find


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """A separate file system of 2 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    monkeypatch.setenv("TILTYARD_RUNS", str(place / "runs"))
    monkeypatch.chdir(tmp_path)
    yield place
    subprocess.run(["umount", str(place)], check=True)


FILLS = """
from pathlib import Path
from gymnasium.envs.classic_control import CartPoleEnv
class CustomEnv(CartPoleEnv):
    def __init__(self, *, place, after=100, render_mode=None):
        super().__init__(render_mode=render_mode)
        self.place, self.left = Path(place), after
    def step(self, action):
        self.left -= 1
        if self.left == 0:
            with self.place.open("wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(1024))
                except OSError:
                    raise RuntimeError("the joint broke") from None
        return super().step(action)
"""


@pytest.mark.slow
def test_failure_is_printed_even_if_nothing_can_be_written(small_disk: Path) -> None:
    Path("fills.py").write_text(FILLS)
    words = [f"env.options.place={small_disk / 'ballast'}", "engine.envs=2", "algo.rollout=16", "algo.minibatch=32"]
    off = ["engine.workers=0", "eval.every=0", "eval.at_end=false", "track.tensorboard=false"]
    done = in_own_process("train", "fills.py", *words, *off, "stop.env_steps=1e6", expect=1)
    assert "the joint broke" in done.stderr


@pytest.mark.slow
def test_full_disk_leaves_the_previous_checkpoint_intact(small_disk: Path) -> None:
    settings = [
        "engine.envs=2",
        "algo.rollout=16",
        "algo.minibatch=32",
        "algo.epochs=1",
        "save.env_steps=32",
        "save.last=1",
    ]
    off = ["eval.every=0", "eval.at_end=false", "track.tensorboard=false"]
    in_own_process("train", "CartPole-v1", *settings, *off, "stop.env_steps=64", "name=full")
    run = find("full", small_disk / "runs")
    before, _ = checkpoint.newest_valid(run)
    assert before is not None
    ballast = small_disk / "ballast"
    free = shutil.disk_usage(small_disk).free
    ballast.write_bytes(os.urandom(free - 60_000))  # enough for events and metrics, but not for a checkpoint
    done = in_own_process("resume", "full", "stop.env_steps=1e6", "save.patience=1", expect=75)
    assert "No space left on device" in done.stderr and "is intact" in done.stderr
    assert "Traceback" not in done.stderr
    after, complaints = checkpoint.newest_valid(run)
    assert complaints == [] and after is not None and after.env_steps >= before.env_steps
    ballast.unlink()
    in_own_process("resume", "full", f"stop.env_steps={after.env_steps + 64}")
    assert run.state == "finished"
