"""How often a repeated test repeats: the full count with TILTYARD_LONG=1 (`make test-long`), a tenth of it otherwise."""

import os

import pytest

LONG = os.environ.get("TILTYARD_LONG") == "1"


def only_when_long(takes: str) -> None:
    """Skip a test that takes that long, except in the long run."""
    if not LONG:
        pytest.skip(f"{takes}: make test-long runs it")


def count(long: int) -> int:
    """`long` repetitions in the long run, about a tenth (at least one) in the ordinary one."""
    return long if LONG else max(1, long // 10)
