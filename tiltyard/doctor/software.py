"""Checks of installed software: Python, packages, torch and its GPUs, ffmpeg, git."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from tiltyard.doctor.finding import Finding
from tiltyard.run.provenance import PACKAGES, package_version
from tiltyard.slurm.usage import gpu_count

EXTRAS = {
    "ale-py": "atari",
    "box2d": "box2d",
    "numba": "car-racing",
    "pygame-ce": "classic",
    "minari": "data",
    "envpool": "envpool",
    "pettingzoo": "pettingzoo",
    "matplotlib": "plot",
    "ray": "ray",
    "vizdoom": "vizdoom",
    "wandb": "wandb",
}


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that matter to a run."""
    found = {name: package_version(name) for name in PACKAGES}
    return {"python": platform.python_version(), **{name: version for name, version in found.items() if version}}


def check_python() -> Finding:
    fits = sys.version_info >= (3, 11)
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {sys.executable}"
    return Finding("python", "ok" if fits else "bad", found, "" if fits else "install Python 3.11 or newer")


def check_packages(version: Callable[[str], str | None] = package_version) -> Finding:
    """Whether all required packages are installed."""
    try:
        needed = [line for line in requires("tiltyard") or [] if "extra ==" not in line]
    except PackageNotFoundError:
        return Finding("packages", "note", "Tiltyard is importable, but not installed", "pip install tiltyard")
    names = [line.split(";")[0].rstrip("<>=!~.,0123456789 *") for line in needed]
    missing = [name for name in names if version(name) is None]
    if missing:
        return Finding("packages", "bad", f"not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    installed = ", ".join(f"{name} {version(name)}" for name in ("tiltyard", "numpy", "gymnasium", "ray"))
    return Finding("packages", "ok", installed.replace("ray None", "no ray"))


def check_torch() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("torch", "bad", f"cannot be imported: {error}", "pip install torch")
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU, training runs on the CPU"
    return Finding("torch", "ok", f"{torch.__version__}, {device}")


def check_gpus() -> Finding:
    """Whether torch sees the GPUs of the machine and of the job."""
    try:
        import torch

        seen, build = torch.cuda.device_count(), torch.version.cuda
    except (ImportError, OSError) as error:
        return Finding("gpus", "note", f"torch cannot be imported: {error}")
    there, given = gpu_count(), os.environ.get("SLURM_GPUS_ON_NODE", "")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    limits = "" if visible is None else f", CUDA_VISIBLE_DEVICES={visible!r}"
    expected = int(given) if given.isdecimal() else 0
    found = f"torch sees {seen} of {there}{limits}"
    why = _why_unseen(build, there, visible)
    if expected > seen:
        return Finding("gpus", "bad", f"the job has {expected}, but torch sees {seen}{limits}", why)
    if seen < there and visible is None:
        return Finding("gpus", "bad", found, why)
    if there and visible is not None and not visible.strip():
        return Finding("gpus", "note", found, "unset CUDA_VISIBLE_DEVICES: it is empty, which hides all GPUs")
    if visible and len(visible.split(",")) > seen:
        return Finding("gpus", "note", found, "CUDA_VISIBLE_DEVICES names missing GPUs: unset or correct it")
    return Finding("gpus", "ok", found if there or seen else f"none{limits}")


def _why_unseen(build: str | None, there: int, visible: str | None) -> str:
    if visible is not None and not visible.strip():
        return "CUDA_VISIBLE_DEVICES is empty, which hides all GPUs: unset it in slurm.setup"
    if build is None:
        return "this torch has no CUDA support: install one that has, see https://pytorch.org"
    if not there:
        missing = "the driver or device files are missing on this node"
        return f"nvidia-smi lists none: {missing}; ask the site's administrators"
    return f"the driver may be too old for CUDA {build}: nvidia-smi shows the newest version that it supports"


def check_extras(version: Callable[[str], str | None] = package_version) -> Finding:
    missing = [extra for package, extra in EXTRAS.items() if version(package) is None]
    present = [extra for extra in EXTRAS.values() if extra not in missing]
    found = f"installed: {', '.join(present) or 'none'}"
    hint = f"for the others: pip install 'tiltyard[{','.join(missing)}]'" if missing else ""
    return Finding("extras", "ok", found, hint)


def check_video() -> Finding:
    try:
        import imageio_ffmpeg

        program = imageio_ffmpeg.get_ffmpeg_exe()
        with tempfile.TemporaryDirectory() as folder:
            command = [program, "-v", "error", "-f", "lavfi", "-i", "color=size=64x64:duration=0.1"]
            subprocess.run([*command, str(Path(folder) / "try.mp4")], check=True, capture_output=True, timeout=60)
    except (ImportError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        return Finding("video", "note", f"cannot write videos: {error}", "pip install imageio-ffmpeg")
    return Finding("video", "ok", "ffmpeg writes mp4")


def check_git() -> Finding:
    if shutil.which("git") is None:
        return Finding("git", "note", "not found", "without git, runs do not record their commit")
    return Finding("git", "ok", "found; runs record commit and changes")
