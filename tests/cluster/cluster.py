"""Temporary Slurm clusters for tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("mini_slurm.sh")
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch")
PACKAGES = "slurmctld slurmd slurm-client munge libfaketime"
missing = [name for name in NEEDED if shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None]
needs_slurm = pytest.mark.skipif(
    bool(missing), reason=f"no {', '.join(missing)} here: apt-get install --no-install-recommends {PACKAGES}"
)


class Cluster:
    """A temporary Slurm cluster, in a folder with a short path because the length of socket paths is limited."""

    def __init__(self, *options: str, conf: str = "") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ms-", dir="/tmp"))
        self.conf = self.folder / "etc" / "slurm.conf"
        if conf:
            (self.folder / "extra.conf").write_text(conf)
            options = (*options, "--conf", str(self.folder / "extra.conf"))
        try:
            self.script("up", *options)
        except BaseException:
            self.close()
            raise

    def script(self, word: str, *options: str) -> str:
        done = subprocess.run(
            [str(SCRIPT), word, str(self.folder), *options], capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, f"mini_slurm.sh {word}: {done.stdout}{done.stderr}"
        return done.stdout

    def close(self) -> None:
        try:
            self.script("down", "--wipe")
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, *command: str) -> str:
        """Run a Slurm command and return its stdout."""
        done = subprocess.run(
            command, env={**os.environ, "SLURM_CONF": str(self.conf)}, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def state(self, job: str) -> str:
        return self.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%T")

    def restarts(self, job: str) -> int:
        found = [
            word for word in self.run("scontrol", "-o", "show", "job", job).split() if word.startswith("Restarts=")
        ]
        return int(found[0].partition("=")[2])


def wait_for(condition: Callable[[], object], what: str, seconds: float = 100.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds:.0f} s"
        time.sleep(0.1)
