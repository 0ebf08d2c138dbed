"""Where a run comes from: code, packages, machine and command. Secrets are masked (redact.py) before it is written.

    provenance.json   commit, branch, packages, python, machine, user, command, allow-listed environment variables
    provenance.diff   uncommitted changes of the working tree, at most 1 MiB

For information, and unknown facts are null. Only the checksums of copied plug-ins are compared.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import platform
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tiltyard.run import atomic
from tiltyard.run.redact import mask_all, mask_command, mask_secrets

# fmt: off
PACKAGES = (
    "tiltyard", "torch", "numpy", "gymnasium", "pydantic", "ruamel.yaml", "pyarrow", "rich",
    "tensorboardX", "imageio-ffmpeg", "pillow", "matplotlib", "wandb", "pygame-ce", "ray", "ale-py", "mujoco",
    "box2d", "pettingzoo", "optuna",
)
# fmt: on
# Environment variables that are recorded; all others never are.
ALLOWED = re.compile(
    r"SLURM_\w+|TILTYARD_\w+|CUDA_VISIBLE_DEVICES|(?:OMP|MKL|OPENBLAS|NUMEXPR)_NUM_THREADS|MUJOCO_GL|PYOPENGL_PLATFORM"
    r"|CONDA_DEFAULT_ENV|CONDA_PREFIX|VIRTUAL_ENV|PYTHONHASHSEED|PYTHONPATH|LANG|LC_ALL|TZ|CUBLAS_WORKSPACE_CONFIG"
)
FILE = "provenance.json"
DIFF_LIMIT = 2**20
GIT_SECONDS = 20


def collect_with_diff(
    command: Sequence[str], base: Sequence[Path] = (), environment: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], str]:
    """The facts, and the text of provenance.diff (empty if the working tree is clean or not in git)."""
    environment = dict(os.environ) if environment is None else environment
    here = Path(base[0]) if base else Path.cwd()
    git, diff = _git(here)
    facts = {
        "schema": 1,
        "created": atomic.now(),
        "git": git,
        "packages": {name: found for name in PACKAGES if (found := package_version(name)) is not None},
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpus": os.cpu_count(),
        "usable_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "user": _user(),
        "cwd": str(Path.cwd()),
        "environment": {name: environment[name] for name in sorted(environment) if ALLOWED.fullmatch(name)},
    }
    masked: dict[str, Any] = mask_all(facts, environment)
    masked["command"] = mask_command(command, environment)
    diff = mask_secrets(diff, environment)
    if len(diff) > DIFF_LIMIT:
        diff = diff[:DIFF_LIMIT] + f"\n(cut here: the diff is longer than {DIFF_LIMIT} characters)\n"
    return masked, diff


def copied_files(folder: Path) -> dict[str, str]:
    """The checksums of a run's copies of plug-ins and frozen policies, by path; none if the file is damaged."""
    try:
        found = atomic.read_sealed(folder / FILE).get("plugins")
    except (OSError, ValueError):
        return {}
    return {str(name): str(checksum) for name, checksum in found.items()} if isinstance(found, dict) else {}


def changed_copies(folder: Path) -> list[str]:
    """A sentence about each copy of a plug-in that is not what was copied: it is used, but the run is another one."""
    found = []
    for name, expected in copied_files(folder).items():
        try:
            if sha256(folder / name) != expected:
                found.append(f"{folder / name} was changed after the run was created")
        except OSError as error:
            found.append(f"{folder / name} cannot be read: {error.strerror}")
    return found


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def package_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # a user id without a name, as in many containers
        return None


def _git(folder: Path) -> tuple[dict[str, Any] | None, str]:
    commit = _run_git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None, ""
    changed = _run_git(folder, "status", "--porcelain", "--untracked-files=normal") or ""
    untracked = [line[3:] for line in changed.splitlines() if line.startswith("??")]
    # No external diff or text conversion: a repository's settings could run any program.
    diff = _run_git(folder, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD") if changed else ""
    facts = {
        "commit": commit.strip(),
        "branch": (_run_git(folder, "rev-parse", "--abbrev-ref", "HEAD") or "").strip() or None,
        "dirty": bool(changed.strip()),
        "untracked": untracked[:100],
    }
    return facts, diff or ""


def _run_git(folder: Path, *words: str) -> str | None:
    """The output of git, or None. Reads little more than the diff's limit."""
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *words]
    env, null = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}, subprocess.DEVNULL
    try:
        process = subprocess.Popen(command, stdin=null, stdout=subprocess.PIPE, stderr=null, env=env)
    except OSError:  # no git here
        return None
    timer = threading.Timer(GIT_SECONDS, process.kill)
    timer.start()
    try:
        with process:
            assert process.stdout is not None
            # Read beyond the limit, so that a secret that crosses it is still complete and can be masked.
            data = process.stdout.read(DIFF_LIMIT + 65536)
            cut = len(data) == DIFF_LIMIT + 65536
            if cut:
                process.kill()
    finally:
        timer.cancel()
    return data.decode("utf-8", "replace") if process.returncode == 0 or cut else None
