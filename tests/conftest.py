"""Shared by all tests: a runs folder of their own, and no site file but the one a test writes."""

from pathlib import Path

import pytest


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty runs root that this test's process and its children use."""
    root = tmp_path / "runs"
    monkeypatch.setenv("TILTYARD_RUNS", str(root))
    monkeypatch.chdir(tmp_path)
    return root
