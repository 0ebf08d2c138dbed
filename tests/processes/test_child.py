"""Descriptions of how a process ended."""

import signal
from pathlib import Path

from tiltyard.processes.exit_reason import OutOfMemory, killed_by


def test_kill_is_attributed_to_memory_only_if_the_kernel_counted_one(tmp_path: Path) -> None:
    nothing, counter = tmp_path / "nothing", tmp_path / "memory.events"
    assert OutOfMemory([nothing]).explain() == "possibly out of memory"
    counter.write_text("low 0\noom 7\noom_kill 2\n")
    memory = OutOfMemory([nothing, counter])
    assert memory.explain() == "sent by another process; memory had not run out"
    counter.write_text("low 0\noom 9\noom_kill 4\n")
    assert [memory.explain() for _ in range(2)] == ["out of memory"] * 2, "there were two"
    assert memory.explain() == "sent by another process; memory had not run out"


def test_signals_are_named() -> None:
    assert killed_by(signal.SIGSEGV) == "was killed by SIGSEGV"
    assert killed_by(signal.SIGKILL).startswith("was killed by SIGKILL (")
    assert killed_by(signal.SIGRTMIN + 1) == f"was killed by signal {signal.SIGRTMIN + 1}"
