"""Unexpected output of sbatch. Here sbatch and scancel are small scripts on PATH."""

from pathlib import Path

import pytest

from tiltyard.errors import TiltyardError
from tiltyard.slurm.commands import sbatch


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "scancel").write_text('#!/bin/sh\necho "$@" >> "$(dirname "$0")/cancelled"\n')
    (tmp_path / "scancel").chmod(0o755)
    return tmp_path


def make_sbatch(site: Path, output: str, code: int = 0) -> None:
    (site / "sbatch").write_text(f"#!/bin/sh\nprintf '{output}'\nexit {code}\n")
    (site / "sbatch").chmod(0o755)


def test_job_id_is_read_from_the_last_line(site: Path) -> None:
    for output in ("17\\n", "17;cluster\\n", "Welcome to the 3 clusters\\n17\\n"):
        make_sbatch(site, output)
        assert sbatch(site / "script.sh", "job") == "17"
    assert not (site / "cancelled").exists()


def test_job_without_id_is_cancelled(site: Path) -> None:
    make_sbatch(site, "submitted, thank you\\n")
    with pytest.raises(TiltyardError, match="printed no job id: submitted, thank you"):
        sbatch(site / "script.sh", "its-name")
    assert "--name its-name" in (site / "cancelled").read_text()


def test_refusal_is_reported(site: Path) -> None:
    make_sbatch(site, "no such partition", 1)
    with pytest.raises(TiltyardError, match="Slurm refused the job: no such partition"):
        sbatch(site / "script.sh", "job")
