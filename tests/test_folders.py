"""The tests pass in a clone with any name. `git clone` creates a folder with the name of the package.

The tracked files are copied into such a folder, and tests that depend on paths run there with the package of the copy.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.counts import only_when_long

ROOT = Path(__file__).parents[1]
# Tests of messages with paths, copies of plug-ins, child processes that import the package, and scripts.
QUICK = (
    "tests/cli/test_wrong_input.py",
    "tests/plugins",
    "tests/slurm/test_script.py",
    "-knot memory and not hang and not hung and not valid_envs",
)
ALL = ("tests",)


def tracked_files() -> list[str]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git clone: which files belong to it is not known")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def copy_to(folder: Path) -> Path:
    """Copy the clone without benchmark results, which no test reads."""
    for name in tracked_files():
        if not (name.startswith("bench/results/") and name.endswith(".json")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def run_tests(folder: Path, chosen: tuple[str, ...], timeout: float) -> None:
    """Run tests of the copy, which must import the package of the copy."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TILTYARD_"))}
    environment |= {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    found = subprocess.run(
        [sys.executable, "-c", "import tiltyard; print(tiltyard.__file__)"],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
    )
    assert found.stdout.strip() == str(folder / "tiltyard" / "__init__.py"), found.stderr
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-m", "not slow", *chosen],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert re.search(r"\[100%\]", done.stdout), done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)  # takes half a minute, or more if the machine is busy
def test_tests_that_depend_on_paths_pass_in_a_folder_named_tiltyard(tmp_path: Path) -> None:
    run_tests(copy_to(tmp_path / "tiltyard"), QUICK, timeout=880)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_all_tests_pass_in_a_folder_with_a_space_and_an_umlaut(tmp_path: Path) -> None:
    only_when_long("three minutes")
    run_tests(copy_to(tmp_path / "mein schöner Turnierplatz"), ALL, timeout=1400)
