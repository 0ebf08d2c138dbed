"""`doctor` and `version`: what this machine has, what is missing, and what to type about it.

Each check is a function that returns a Finding; `ok` needs nothing, `note` limits something, `bad` must be mended.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tiltyard import __version__
from tiltyard.errors import EXIT_DONE, EXIT_FAILED, TiltyardError
from tiltyard.run.provenance import package_version

LOW_DISK = 2 << 30  # bytes: a few checkpoints and a video
LOW_MEMORY = 2 << 30


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report."""

    what: str
    state: Literal["ok", "note", "bad"]
    found: str
    hint: str = ""


def configure_version(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="with Python and the main packages, as JSON")


def run_version(args: argparse.Namespace) -> int:
    if args.json:
        packages = {name: package_version(name) for name in ("torch", "gymnasium", "numpy", "pydantic", "pyarrow")}
        whole = {"tiltyard": __version__, "python": platform.python_version(), **packages}
        sys.stdout.write(json.dumps(whole) + "\n")
    else:
        sys.stdout.write(f"{__version__}\n")
    return EXIT_DONE


def configure_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as JSON on stdout")


def run_doctor(args: argparse.Namespace) -> int:
    findings = [check() for check in CHECKS]
    if args.json:
        sys.stdout.write(json.dumps([asdict(finding) for finding in findings]) + "\n")
    else:
        for finding in findings:
            sys.stdout.write(f"{finding.state:<5} {finding.what:<10} {finding.found}\n")
            if finding.hint:
                sys.stdout.write(f"{'':<16} hint: {finding.hint}\n")
    return EXIT_FAILED if any(finding.state == "bad" for finding in findings) else EXIT_DONE


# ------------------------------------------------------------------------------------------------ checks


def check_python() -> Finding:
    fits = sys.version_info >= (3, 11)
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Finding("python", "ok" if fits else "bad", found, "" if fits else "install Python 3.11 or newer")


def check_torch() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("torch", "bad", f"cannot be imported: {error}", "pip install torch")
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU, training runs on the CPU"
    return Finding("torch", "ok", f"{torch.__version__}, {device}")


def check_cores() -> Finding:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    here = os.cpu_count() or 1
    found = f"{allowed} of {here} usable, load {os.getloadavg()[0]:.1f}"
    if os.getloadavg()[0] > allowed:
        return Finding("cores", "note", found, "other programs use them: training will be slower than it could be")
    return Finding("cores", "ok", found)


def check_memory() -> Finding:
    from tiltyard.machine import free_memory

    free = free_memory()
    if free is None:
        return Finding("memory", "note", "this system does not say how much is free")
    state: Literal["ok", "note"] = "ok" if free > LOW_MEMORY else "note"
    return Finding("memory", state, f"{free / 2**30:.1f} GiB free", "" if state == "ok" else "use fewer envs")


def check_runs() -> Finding:
    from tiltyard.config.place import runs_root

    try:
        root = runs_root()
    except TiltyardError as error:
        return Finding("runs", "bad", error.message, error.hint)
    place = root
    while not place.exists():
        place = place.parent
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        reason = f"{root} cannot be written: {error.strerror}"
        return Finding("runs", "bad", reason, "set TILTYARD_RUNS to a folder of yours")
    free = shutil.disk_usage(place).free
    found = f"{root}, {free / 2**30:.1f} GiB free"
    if free < LOW_DISK:
        return Finding("runs", "note", found, "checkpoints need room: free some, or set TILTYARD_RUNS to another disk")
    return Finding("runs", "ok", found)


def check_video() -> Finding:
    try:
        import imageio_ffmpeg

        program = imageio_ffmpeg.get_ffmpeg_exe()
        with tempfile.TemporaryDirectory() as folder:
            command = [program, "-v", "error", "-f", "lavfi", "-i", "color=size=64x64:duration=0.1"]
            subprocess.run([*command, str(Path(folder) / "try.mp4")], check=True, capture_output=True, timeout=60)
    except (ImportError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        return Finding("video", "note", f"no film can be written: {error}", "pip install imageio-ffmpeg")
    return Finding("video", "ok", "ffmpeg writes mp4")


def check_extras() -> Finding:
    extras = {
        "ale-py": "atari",
        "box2d": "box2d",
        "pygame-ce": "classic",
        "envpool": "envpool",
        "pettingzoo": "pettingzoo",
        "matplotlib": "plot",
        "ray": "ray",
        "vizdoom": "vizdoom",
        "wandb": "wandb",
    }
    missing = [extra for package, extra in extras.items() if package_version(package) is None]
    present = [extra for extra in extras.values() if extra not in missing]
    found = f"installed: {', '.join(present) or 'none'}"
    hint = f"for the others: pip install 'tiltyard[{','.join(missing)}]'" if missing else ""
    return Finding("extras", "ok", found, hint)


def check_git() -> Finding:
    if shutil.which("git") is None:
        return Finding("git", "note", "not found", "without it a run does not record the commit it was started from")
    return Finding("git", "ok", "found: runs record commit and changes")


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_torch,
    check_cores,
    check_memory,
    check_runs,
    check_video,
    check_extras,
    check_git,
)
