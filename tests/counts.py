"""Number of repetitions in a test: all with TILTYARD_LONG=1 (`make test-long`), otherwise a tenth."""

import os

import pytest

LONG = os.environ.get("TILTYARD_LONG") == "1"


def only_when_long(takes: str) -> None:
    """Skip a test, except in the long run. `takes` is its duration, for the reason."""
    if not LONG:
        pytest.skip(f"{takes}: make test-long runs it")


def count(long: int) -> int:
    """Return `long` in the long run, and otherwise about a tenth of it, at least 1."""
    return long if LONG else max(1, long // 10)
