"""Submitting to Slurm, where what sbatch says is not what it should be: the commands here are small ones on PATH."""

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


def say(site: Path, words: str, code: int = 0) -> None:
    (site / "sbatch").write_text(f"#!/bin/sh\nprintf '{words}'\nexit {code}\n")
    (site / "sbatch").chmod(0o755)


def test_the_id_comes_last_after_what_a_site_has_to_say(site: Path) -> None:
    for words in ("17\\n", "17;cluster\\n", "Welcome to the 3 clusters\\n17\\n"):
        say(site, words)
        assert sbatch(site / "script.sh", "job") == "17"
    assert not (site / "cancelled").exists()


def test_a_job_whose_id_is_not_told_is_not_left_in_the_queue(site: Path) -> None:
    say(site, "submitted, thank you\\n")
    with pytest.raises(TiltyardError, match="printed no job id: submitted, thank you"):
        sbatch(site / "script.sh", "its-name")
    assert "--name its-name" in (site / "cancelled").read_text()


def test_a_refusal_is_told_as_such(site: Path) -> None:
    say(site, "no such partition", 1)
    with pytest.raises(TiltyardError, match="Slurm refused the job: no such partition"):
        sbatch(site / "script.sh", "job")
