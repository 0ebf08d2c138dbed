"""What is said of the end of a process."""

import signal
from pathlib import Path

from tiltyard.processes.child import OutOfMemory, killed_by


def test_memory_is_blamed_only_where_the_kernel_counts_that_it_ran_out(tmp_path: Path) -> None:
    nothing, counter = tmp_path / "nothing", tmp_path / "memory.events"
    assert OutOfMemory([nothing]).explain() == "the kernel does that when memory runs out"  # nobody can know
    counter.write_text("low 0\noom 7\noom_kill 2\n")
    memory = OutOfMemory([nothing, counter])
    assert memory.explain() == "from outside: the kernel had memory left"
    counter.write_text("low 0\noom 9\noom_kill 4\n")
    assert [memory.explain() for _ in range(2)] == ["memory ran out"] * 2, "there were two"
    assert memory.explain() == "from outside: the kernel had memory left"


def test_signals_are_named() -> None:
    assert killed_by(signal.SIGSEGV, explained=True) == "was killed by SIGSEGV"
    assert killed_by(signal.SIGKILL) == "was killed by SIGKILL"
    assert killed_by(signal.SIGKILL, explained=True).startswith("was killed by SIGKILL (")
    assert killed_by(signal.SIGRTMIN + 1) == f"was killed by signal {signal.SIGRTMIN + 1}"
