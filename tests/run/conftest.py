"""Fixtures for real faults: a small disk, child processes to kill, an empty run folder."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tiltyard.run.folder import Run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bare_run(tmp_path):
    """An empty run folder, which is enough for checkpoints, locks, metrics and events."""
    folder = tmp_path / "runs" / "toy" / "0001-brisk-otter"
    folder.mkdir(parents=True)
    return Run(folder)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 512 KiB. It requires the permission to mount."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = (
        shutil.which("mount")
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)], capture_output=True, check=False
        ).returncode
    )
    if not mounted:
        pytest.skip("mounting a file system is not permitted here")
    yield place
    subprocess.run(["mount", "-o", "remount,rw", str(place)], capture_output=True, check=False)
    subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def child():
    """Function that starts Python code in its own process; remaining processes are killed at the end."""
    started = []

    def start(code, *arguments, **environment):
        import os

        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **environment},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
