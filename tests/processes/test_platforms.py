"""Other operating systems: unsupported features are refused with an error message, the rest works.

A `sitecustomize` module makes Python in a child process look like the other system: its name, and for macOS the
functions, sockets and files that are missing there. psutil, which asks macOS itself, keeps its files.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WINDOWS = "import sys\nsys.platform = 'win32'\nsys.modules['fcntl'] = None\n"
MACOS = """
import asyncio, multiprocessing, os, psutil, shutil, socket, subprocess, sys, sysconfig, tempfile, urllib.request, uuid

sysconfig.get_config_vars()  # imported before the name changes: these would look for files of a real macOS
sys.platform = "darwin"
for name in ("sched_getaffinity", "sched_setaffinity", "memfd_create", "posix_fallocate", "pidfd_open", "pipe2"):
    if hasattr(os, name):
        delattr(os, name)


def without_packets(family=None, type=socket.SOCK_STREAM, proto=0, real=socket.socketpair):
    if type == socket.SOCK_SEQPACKET:
        raise OSError(43, "Protocol not supported")
    return real(socket.AF_UNIX, type, proto)


def without_proc(real):
    def call(path, *more, **named):
        if isinstance(path, (str, bytes, os.PathLike)) and os.fsdecode(path).startswith(("/proc", "/sys/")):
            raise FileNotFoundError(2, "No such file or directory", path)
        return real(path, *more, **named)

    return call


def missing(event, args):
    if event in ("open", "os.listdir", "os.scandir") and args and isinstance(args[0], (str, bytes)):
        path, caller = os.fsdecode(args[0]), sys._getframe(1).f_globals.get("__name__", "")
        if path.startswith(("/proc", "/sys/")) and "self/fd" not in path and not caller.startswith("psutil."):
            raise FileNotFoundError(2, "No such file or directory", path)


socket.socketpair = without_packets
os.stat, os.lstat, os.readlink = without_proc(os.stat), without_proc(os.lstat), without_proc(os.readlink)
sys.addaudithook(missing)
"""
TINY = ["stop.env_steps=64", "engine.envs=2", "algo.rollout=16", "algo.minibatch=32", "algo.epochs=1"]


def run_on(system: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments on the simulated system."""
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(system)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
        "TILTYARD_RUNS": str(folder / "runs"),
    }
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )


def test_windows_is_refused_by_every_command(tmp_path: Path) -> None:
    for words in (["train", "CartPole-v1"], ["ls"], ["--help"]):
        refused = run_on(WINDOWS, tmp_path, "-m", "tiltyard", *words)
        assert refused.returncode == 2
        assert refused.stderr == (
            "error: Tiltyard does not run on Windows\n"
            "hint: install it inside WSL 2, the Windows Subsystem for Linux; docs/platforms.md explains how\n"
        )
    assert not (tmp_path / "runs").exists()


def test_windows_is_refused_in_python_with_a_tiltyard_error(tmp_path: Path) -> None:
    code = (
        "import tiltyard\ntry:\n    tiltyard.train\nexcept tiltyard.TiltyardError as error:\n    print(error.message)\n"
    )
    assert run_on(WINDOWS, tmp_path, "-c", code).stdout == "Tiltyard does not run on Windows\n"


def test_macos_reports_all_settings_that_need_linux_at_once(tmp_path: Path) -> None:
    settings = ["engine.learners=2", "engine.workers=2", "engine.mode=async", "env.isolate=process"]
    refused = run_on(MACOS, tmp_path, "-m", "tiltyard", "train", "CartPole-v1", *settings)
    assert refused.returncode == 2, refused.stderr
    assert refused.stderr.startswith("error: 4 problems in the settings\n")
    for setting, value, instead in (
        ("engine.learners", "2", "engine.learners=1"),
        ("engine.workers", "2", "engine.workers=0"),
        ("engine.mode", "async", "engine.mode=sync"),
        ("env.isolate", "process", "env.isolate=thread, or none"),
    ):
        problem = f"{setting} = {value}: needs Linux, and this is macOS\n   hint: set {instead}"
        assert problem in refused.stderr
    assert not (tmp_path / "runs").exists()


def test_macos_refuses_a_local_sweep(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(
        "experiment: {env: {id: CartPole-v1}, stop: {env_steps: 64}}\nspace: {algo.lr: [0.001, 0.002]}\n"
    )
    refused = run_on(MACOS, tmp_path, "-m", "tiltyard", "sweep", "start", "plan.yaml")
    assert refused.returncode == 2
    assert refused.stderr == (
        "error: a sweep on this machine needs Linux, and this is macOS\n"
        "hint: start it on Linux, or as jobs with --on PROFILE\n"
    )
    assert not (tmp_path / "runs").exists()


def test_fork_server_refuses_macos(tmp_path: Path) -> None:
    code = "from tiltyard.processes.fork_server import ForkServer\nForkServer().start()\n"
    refused = run_on(MACOS, tmp_path, "-c", code)
    assert "UseError: the fork server, which starts workers and learners, needs Linux" in refused.stderr


@pytest.mark.slow
def test_macos_trains_resumes_and_evaluates_in_one_process(tmp_path: Path) -> None:
    command = ["-m", "tiltyard"]
    trained = run_on(MACOS, tmp_path, *command, "train", "Acrobot-v1", *TINY, "eval.at_end=false")
    assert trained.returncode == 0, trained.stderr
    assert "2 envs in this process (workers need Linux)" in trained.stderr
    resumed = run_on(MACOS, tmp_path, *command, "resume", "last", "stop.env_steps=128")
    assert resumed.returncode == 0, resumed.stderr
    evaluated = run_on(MACOS, tmp_path, *command, "eval", "last", "--episodes", "2", "--workers", "2")
    assert evaluated.returncode == 0, evaluated.stderr
