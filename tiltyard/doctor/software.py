"""Checks of what is installed: Python, packages, torch and the GPUs it sees, ffmpeg, git."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from tiltyard.doctor.finding import Finding
from tiltyard.run.provenance import PACKAGES, package_version

EXTRAS = {
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


def versions() -> dict[str, str]:
    """Of Python and of the packages that matter to a run; a package that is not installed has none."""
    found = {name: package_version(name) for name in PACKAGES}
    return {"python": platform.python_version(), **{name: version for name, version in found.items() if version}}


def check_python() -> Finding:
    fits = sys.version_info >= (3, 11)
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {sys.executable}"
    return Finding("python", "ok" if fits else "bad", found, "" if fits else "install Python 3.11 or newer")


def check_packages() -> Finding:
    """What Tiltyard cannot do without, whether it is there."""
    try:
        needed = [line for line in requires("tiltyard") or [] if "extra ==" not in line]
    except PackageNotFoundError:
        return Finding("packages", "note", "Tiltyard itself is not installed, only found", "pip install tiltyard")
    names = [line.split(";")[0].rstrip("<>=!~.,0123456789 *") for line in needed]
    missing = [name for name in names if package_version(name) is None]
    if missing:
        return Finding("packages", "bad", f"not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    said = ", ".join(f"{name} {package_version(name)}" for name in ("tiltyard", "numpy", "gymnasium", "ray"))
    return Finding("packages", "ok", said.replace("ray None", "no ray"))


def check_torch() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("torch", "bad", f"cannot be imported: {error}", "pip install torch")
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU, training runs on the CPU"
    return Finding("torch", "ok", f"{torch.__version__}, {device}")


def check_gpus() -> Finding:
    """Whether torch sees the GPUs that the machine has and the job was given."""
    try:
        import torch

        seen, build = torch.cuda.device_count(), torch.version.cuda
    except (ImportError, OSError) as error:
        return Finding("gpus", "note", f"torch cannot be asked: {error}")
    there, given = gpus_of_machine(), os.environ.get("SLURM_GPUS_ON_NODE", "")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    limits = "" if visible is None else f", CUDA_VISIBLE_DEVICES={visible!r}"
    expected = int(given) if given.isdecimal() else 0
    found = f"torch sees {seen} of {there}{limits}"
    if expected > seen:
        hint = _why_unseen(build, there, visible)
        return Finding("gpus", "bad", f"the job was given {expected}, and torch sees {seen}{limits}", hint)
    if seen < there and visible is None:
        return Finding("gpus", "bad", found, _why_unseen(build, there, visible))
    if there and visible is not None and not visible.strip():
        return Finding("gpus", "note", found, "unset CUDA_VISIBLE_DEVICES: empty, it hides them all")
    if visible and len(visible.split(",")) > seen:
        hint = "CUDA_VISIBLE_DEVICES names GPUs that are not there: unset it, or correct it"
        return Finding("gpus", "note", found, hint)
    return Finding("gpus", "ok", found if there or seen else f"none here{limits}")


def _why_unseen(build: str | None, there: int, visible: str | None) -> str:
    if visible is not None and not visible.strip():
        return "CUDA_VISIBLE_DEVICES is empty, which hides them: unset it in slurm.setup"
    if build is None:
        return "this torch is built without CUDA: install one with it, see https://pytorch.org"
    if not there:
        return "nvidia-smi lists none: the driver or the device files are missing on this node, tell the site"
    return f"the driver may be too old for CUDA {build}: nvidia-smi says what it takes"


def gpus_of_machine() -> int:
    """How many nvidia-smi lists; 0 where there is none."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines()) if done.returncode == 0 else 0


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
    missing = [extra for package, extra in EXTRAS.items() if package_version(package) is None]
    present = [extra for extra in EXTRAS.values() if extra not in missing]
    found = f"installed: {', '.join(present) or 'none'}"
    hint = f"for the others: pip install 'tiltyard[{','.join(missing)}]'" if missing else ""
    return Finding("extras", "ok", found, hint)


def check_git() -> Finding:
    if shutil.which("git") is None:
        return Finding("git", "note", "not found", "without it a run does not record the commit it was started from")
    return Finding("git", "ok", "found: runs record commit and changes")
