"""Each check of the local machine finds its problem."""

from __future__ import annotations

import json
import mmap
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import Command
from tiltyard.doctor import checkup, display, slurm, software, storage, system
from tiltyard.doctor.finding import Finding
from tiltyard.slurm import job_state

PROGRAM = """
import json, sys
from dataclasses import asdict
from tiltyard.doctor import display, slurm, software, storage, system
print(json.dumps(asdict(eval(sys.argv[1])())))
"""


def in_child(check: str, prepare: Callable[[], None] | None = None, **environment: str) -> Finding:
    """Run a check in a child process with different limits and environment variables."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, check],
        env={**os.environ, **environment},
        preexec_fn=prepare,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return Finding(**json.loads(done.stdout.splitlines()[-1]))


def limit(which: int, soft: int, hard: int | None = None) -> Callable[[], None]:
    return lambda: resource.setrlimit(which, (soft, soft if hard is None else hard))


def program(folder: Path, name: str, text: str) -> str:
    """Write a program with that name, and return a PATH that finds it first."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


# ------------------------------------------------------------------------------------------------ the report


def test_report_is_printed_as_lines_or_json(tiltyard: Command, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "CHECKS", (storage.check_runs, system.check_preload, check_strange))
    monkeypatch.setenv("LD_PRELOAD", "")
    found = json.loads(tiltyard("doctor", "--json").stdout)
    assert [(each["what"], each["state"]) for each in found] == [("runs", "ok"), ("preload", "ok"), ("strange", "note")]
    monkeypatch.setenv("TILTYARD_RUNS", "/proc/nowhere")
    done = tiltyard("doctor", expect=1)
    assert "bad   runs       cannot write to /proc/nowhere" in done.stdout
    assert "hint: set TILTYARD_RUNS" in done.stdout
    assert "the check failed: ZeroDivisionError" in done.stdout
    assert "--nodes selects nodes of a profile" in tiltyard("doctor", "--nodes", "node1", expect=2).stderr


def check_strange() -> Finding:
    raise ZeroDivisionError("a strange machine")


@pytest.mark.slow
def test_this_machine_passes(runs: Path) -> None:
    found = list(checkup.run_checks())
    assert len({each.what for each in found}) == len(found) == len(checkup.CHECKS)
    assert [each for each in found if each.state == "bad" or "check failed" in each.found] == []
    assert [each for each in found if each.state == "note" and not each.hint and each.what != "cores"] == []


# ------------------------------------------------------------------------------------------------ software


def test_old_python_and_missing_packages_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert software.check_packages().state == "ok"
    monkeypatch.setattr(sys, "version_info", (3, 9))
    assert software.check_python().state == "bad"

    def version(name: str) -> str | None:
        return None if name in ("numpy", "ale-py") else "1"

    found = software.check_packages(version)
    assert (found.state, found.found, found.hint) == ("bad", "not installed: numpy", "pip install numpy")
    assert "tiltyard[atari]" in software.check_extras(version).hint


def test_gpus_that_torch_does_not_see_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("PATH", program(tmp_path, "nvidia-smi", "exit 9"))
    assert software.check_gpus() == Finding("gpus", "ok", "none")
    program(tmp_path, "nvidia-smi", "echo 'GPU 0: A100'; echo 'GPU 1: A100'")
    found = software.check_gpus()
    assert (found.state, found.found) == ("bad", "torch sees 0 of 2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert software.check_gpus().state == "note" and "unset CUDA_VISIBLE_DEVICES" in software.check_gpus().hint
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")
    assert software.check_gpus().state == "bad" and "the job has 2" in software.check_gpus().found
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert software.check_gpus().state == "ok"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,7")
    assert "names missing GPUs" in software.check_gpus().hint


def test_missing_ffmpeg_and_git_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert software.check_video().state == "ok"
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", program(tmp_path, "ffmpeg", "exit 1").split(":")[0] + "/ffmpeg")
    assert software.check_video().state == "note"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert software.check_git().state == "note"


def test_torch_that_cannot_be_imported_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert software.check_torch().state == "bad"
    assert software.check_gpus().state == "note"


# ------------------------------------------------------------------------------------------------ system


def test_low_limits_of_open_files_are_reported() -> None:
    found = in_child("system.check_files", limit(resource.RLIMIT_NOFILE, 200))
    assert (found.state, found.found) == ("bad", "a process may open only 200")
    found = in_child("system.check_files", limit(resource.RLIMIT_NOFILE, 512, 4096))
    assert (found.state, found.hint) == ("note", "ulimit -n 4096")


@pytest.mark.parametrize(("more", "state"), [(50, "bad"), (600, "note")])
def test_low_limits_of_processes_are_reported(monkeypatch: pytest.MonkeyPatch, more: int, state: str) -> None:
    """The number of threads is fixed, because other processes on this machine start and end during the test."""
    assert system.own_threads() >= 1
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1000 + more, 1000 + more))
    found = system.check_processes(threads=1000)
    assert found.state == state and "threads included" in found.found


def test_threads_that_do_not_start_are_reported() -> None:
    """Limit the address space: each thread needs a stack."""
    found = in_child("system.check_threads", limit(resource.RLIMIT_AS, 1 << 30), OMP_NUM_THREADS="1")
    assert found.state == "bad" and "could start only" in found.found
    assert in_child("system.check_threads", OMP_NUM_THREADS="1000").state == "note"
    assert in_child("system.check_threads", OMP_NUM_THREADS="1").state == "ok"


def test_busy_cores_and_low_memory_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1e9, 0.0, 0.0))
    assert system.check_cores(os.cpu_count()).state == "note"
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert system.check_cores(os.cpu_count()).state == "ok"
    for free, state in ((1 << 20, "note"), (1 << 40, "ok")):
        assert system.memory_finding(free).state == state


def low_port() -> socket.socket:
    """Listen on a port below those that the system hands out, so that no other process gets it after this."""
    for number in range(21000, 22000):
        with suppress(OSError):
            return socket.create_server(("", number))
    raise AssertionError("no free port from 21000 to 22000")


def test_port_in_use_and_unknown_host_name_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert system.check_ports(()).state == "ok"
    with low_port() as taken:
        number = taken.getsockname()[1]
        found = system.check_ports((number,))
        assert found.state == "note" and f"in use: {number}" in found.found
    assert system.check_ports((number,)).state == "ok"
    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere.invalid")
    assert system.check_ports(()).state == "bad"
    assert in_child("system.check_ports", limit(resource.RLIMIT_NOFILE, 20)).found.startswith("none is available")


def test_preloaded_libraries_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/nowhere/libxalt.so")
    assert system.check_preload().state == "bad"
    monkeypatch.setenv("LD_PRELOAD", f"libm.so.6:{sys.executable}")
    assert system.check_preload().state == "note"
    monkeypatch.delenv("LD_PRELOAD")
    assert system.check_preload().state == "ok"


def test_wrong_clock_is_reported(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert system.check_clock().state == "ok"
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 90)
    assert system.check_clock().state == "bad" and "+90" in system.check_clock().found


# ------------------------------------------------------------------------------------------------ storage


def test_low_disk_space_for_runs_is_reported(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert storage.check_runs().state == "ok"
    monkeypatch.setattr(storage, "LOW_DISK", 1 << 60)
    assert storage.check_runs().state == "note"


def test_full_quota_is_reported(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = in_child("storage.check_quota", limit(resource.RLIMIT_FSIZE, 1 << 20))
    assert found.state == "bad" and "cannot write" in found.found
    head = "echo 'Filesystem blocks quota limit grace files quota limit grace'"
    for used, state in (("500", "ok"), ("950", "note"), ("1100*", "bad")):
        path = program(tmp_path / "bin", "quota", f"{head}; echo '/home {used} 1000 2000 7 0 0'")
        monkeypatch.setenv("PATH", path)
        assert storage.check_quota().state == state, storage.check_quota()
    program(tmp_path / "bin", "quota", "exit 1")
    assert storage.check_quota().state == "ok"


def test_long_or_full_temporary_folders_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    found = in_child("storage.check_temporary", TMPDIR=str(long))
    assert found.state == "bad" and "too long" in found.found
    assert in_child("storage.check_temporary", TMPDIR="/tmp").state == "ok"
    monkeypatch.setattr(storage, "LOW_TEMPORARY", 1 << 60)
    assert storage.check_temporary().state == "note"


def test_missing_or_full_shared_memory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert storage.check_shared_memory(tmp_path / "nowhere").state == "note"
    monkeypatch.setattr(storage, "LOW_SHARED", 1 << 60)
    assert storage.check_shared_memory().state == "note"
    monkeypatch.setattr(storage, "FULL", 1 << 60)
    assert storage.check_shared_memory().state == "bad"


def test_leftovers_are_unused_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, temporary = tmp_path / "shm", tmp_path / "tmp"
    for folder in (shared, temporary / "ray" / "session_2026", temporary / "ty-abc", temporary / "tiltyard-doom-x"):
        folder.mkdir(parents=True)
    assert storage.check_leftovers(tmp_path / "empty", shared).state == "ok"
    (temporary / "ty-abc" / "log").write_bytes(b"x" * 5000)
    (shared / "ViZDoomSM1").write_bytes(b"x" * 100)
    (shared / "ViZDoomSM2").write_bytes(b"x" * 100)
    (shared / "mine.txt").write_text("of something else")
    with (shared / "ViZDoomSM2").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        # This test process is older than all folders, so it may use them.
        assert [path.name for path in storage.leftovers(shared, temporary)] == ["ViZDoomSM1"]
        for folder in (temporary / "ty-abc", temporary / "tiltyard-doom-x", temporary / "ray" / "session_2026"):
            os.utime(folder, (1, 1))
        names = [path.name for path in storage.leftovers(shared, temporary)]
        assert names == ["ViZDoomSM1", "ty-abc", "tiltyard-doom-x", "session_2026"]
        with (temporary / "ty-abc" / "log").open():
            assert "ty-abc" not in [path.name for path in storage.leftovers(shared, temporary)]
    found = storage.check_leftovers(shared, temporary)
    assert found.state == "note" and "5 of dead processes, 5200 bytes" in found.found
    gone = storage.leftovers(shared, temporary)
    monkeypatch.setattr(storage, "ALL_PROCESSES", str(Path("/proc/self/ns/pid").readlink()))
    assert storage.remove_leftovers(shared, temporary) == gone
    assert [path.name for path in shared.iterdir()] == ["mine.txt"]
    assert [path.name for path in temporary.rglob("*")] == ["ray"]


def test_clean_reports_what_it_removed(tiltyard: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / "ViZDoomSM7"
    left.touch()
    monkeypatch.setattr(storage, "SHARED", tmp_path)
    monkeypatch.setattr(storage, "TEMPORARY_NAMES", ())
    monkeypatch.setattr(checkup, "CHECKS", ())
    monkeypatch.setattr(storage, "ALL_PROCESSES", "pid:[0]")  # as in a container
    assert "cannot be seen" in tiltyard("doctor", "--clean", expect=2).stderr and left.exists()
    monkeypatch.setattr(storage, "ALL_PROCESSES", str(Path("/proc/self/ns/pid").readlink()))
    assert tiltyard("doctor", "--clean").stderr == f"removed {left}\n"
    assert not left.exists()


# ------------------------------------------------------------------------------------------------ display


def test_old_opengl_versions_are_reported() -> None:
    answer = {"version": "4.5 (Core Profile) Mesa 22.3.6", "renderer": "llvmpipe", "vendor": "Mesa"}
    assert display.opengl_finding("opengl", "here", answer).state == "ok"
    for version in ("3.1 Mesa 22.3.6", "2.1", "strange"):
        assert display.opengl_finding("opengl", "here", {**answer, "version": version}).state == "note"
    assert display.opengl_finding("opengl", "here", {"error": "no"}).state == "note"


def test_missing_display_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISPLAY", ":4711")
    assert display.check_opengl().state == "note"
    monkeypatch.delenv("DISPLAY")
    assert display.check_opengl().state == "ok"
    monkeypatch.setenv("PATH", "/nowhere")
    assert display.check_display().found == "none, and Xvfb is not installed"
    assert display.check_opengl_xvfb().found == "no Xvfb"


def test_driver_that_crashes_or_hangs_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "python", "kill -SEGV $$")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert display.query_driver("egl", None) == {"error": "the driver crashed"}
    program(tmp_path, "python", "exec sleep 100")
    monkeypatch.setattr(display, "TIMEOUT", 0.5)
    assert "did not answer" in display.query_driver("egl", None)["error"]


@pytest.mark.skipif(shutil.which("Xvfb") is None, reason="no Xvfb here: apt-get install xvfb")
def test_opengl_version_in_xvfb_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    found = display.check_opengl_xvfb()
    assert "in Xvfb" in found.found
    if found.state != "ok":
        pytest.skip(f"no driver: {found.found}")
    monkeypatch.setenv("MESA_GL_VERSION_OVERRIDE", "2.1")
    found = display.check_opengl_xvfb()
    assert found.state == "note" and found.found.startswith("2.1 ") and "3.2" in found.hint
    with display.virtual_display() as name:
        monkeypatch.setenv("DISPLAY", name or "")
        assert display.check_display().found.startswith(f"{name} answers")


# ------------------------------------------------------------------------------------------------ Slurm settings


@pytest.mark.parametrize(
    ("line", "check", "state"),
    [
        ("JobRequeue = 0", slurm.check_requeue, "note"),
        ("JobRequeue = 1", slurm.check_requeue, "ok"),
        ("KillWait = 3 sec", slurm.check_preemption, "note"),
        ("KillWait = 30 sec", slurm.check_preemption, "ok"),
        ("MaxArraySize = 0", slurm.check_arrays, "note"),
        ("MaxArraySize = 1001", slurm.check_arrays, "ok"),
        ("ClusterName = mini", slurm.check_slurm, "ok"),
    ],
)
def test_unsuitable_slurm_settings_are_reported(
    line: str, check: Callable[[], Finding], state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", program(tmp_path, "scontrol", f"echo 'Configuration data'; echo '{line}'"))
    slurm._known.cache_clear()
    try:
        assert check().state == state
    finally:
        slurm._known.cache_clear()


def test_slurm_settings_are_empty_without_an_answer_and_none_without_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", program(tmp_path, "scontrol", "exec sleep 100"))
    monkeypatch.setattr(job_state, "TIMEOUT", 0.5)
    assert job_state.site_config() == {}
    program(tmp_path, "scontrol", "echo no; exit 1")
    assert job_state.site_config() == {}
    monkeypatch.setenv("PATH", "/nowhere")
    assert job_state.site_config() is None
