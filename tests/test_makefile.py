"""The Makefile without installing anything: which commands it would run, and which Python it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def make(*words: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *words], cwd=ROOT, env=clean, capture_output=True, text=True)


@pytest.mark.parametrize("target", ["venv", "lint", "check", "test", "test-long", "docs", "dist", "demo", "clean"])
def test_every_target_can_be_shown_without_running_it(target, tmp_path):
    shown = make("-n", target, f"VENV={tmp_path / 'env'}")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.strip()
    assert list(tmp_path.iterdir()) == []


def test_torch_is_installed_first_and_everything_is_pinned(tmp_path):
    commands = [line for line in make("-n", "venv", f"VENV={tmp_path / 'env'}").stdout.splitlines() if "pip" in line]
    installs = [line for line in commands if " install " in line]
    assert "torch==" in installs[0] and "-e '.[dev]'" in installs[1]
    assert all("-c constraints.txt" in line for line in installs)
    assert "check" in commands[-1]


def test_test_targets_lint_first_and_check_skips_slow_tests(tmp_path):
    for target, expected in (("check", '-m "not slow"'), ("test", "pytest -n 4"), ("test-long", "TILTYARD_LONG=1")):
        lines = make("-n", target, f"VENV={tmp_path / 'env'}").stdout.splitlines()
        assert expected in lines[-1]
        assert [word in "\n".join(lines[:-1]) for word in ("ruff check", "ruff format --check", "/mypy")] == [True] * 3


def test_up_to_date_environment_is_not_changed(tmp_path):
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / ".installed").touch()
    assert "pip" not in make("-n", "demo", f"VENV={tmp_path / 'env'}").stdout


def test_old_python_is_refused(tmp_path):
    old = tmp_path / "python3.9"
    old.write_text(f"#!{sys.executable}\nimport sys\nsys.version_info = (3, 9, 18)\nexec(sys.argv[2])\n")
    old.chmod(0o755)
    refused = make("venv", f"PYTHON={old}", f"VENV={tmp_path / 'env'}")
    assert refused.returncode != 0
    assert refused.stderr.startswith(f"error: Tiltyard needs Python 3.11 or newer and {old} is 3.9; name another")
    assert not (tmp_path / "env").exists()


def test_missing_python_is_reported(tmp_path):
    refused = make("venv", "PYTHON=python-that-is-not-there", f"VENV={tmp_path / 'env'}")
    assert refused.stderr.startswith("error: there is no 'python-that-is-not-there'; install Python 3.11 or newer")


def test_test_targets_install_slurm_if_root_and_otherwise_report_skipped_tests(tmp_path):
    for target in ("check", "test", "test-long"):
        assert "tests/cluster/install.sh" in make("-n", target, f"VENV={tmp_path / 'env'}").stdout
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "id").write_text("#!/bin/sh\necho 1000\n")
    (tools / "id").chmod(0o755)
    script = (ROOT / "tests" / "cluster" / "install.sh").read_text().replace(":/usr/sbin:/sbin", "")
    words = ["/bin/bash", "-c", script, "install.sh", str(tmp_path / "stamp")]
    output = subprocess.run(words, env={"PATH": str(tools)}, capture_output=True, text=True)
    assert output.returncode == 0 and not (tmp_path / "stamp").exists()
    assert "zsh and fish may be skipped: packages are missing, and only root may install them" in output.stderr
    assert "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge libfaketime" in output.stderr
