"""Why a process was killed: the signal, and whether the kernel had run out of memory."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path


def exit_text(status: int) -> str:
    """Describe an exit code, negative for a death by signal."""
    return killed_by(-status) if status < 0 else f"exited with code {status}"


def killed_by(number: int) -> str:
    """Describe a death by signal; a SIGKILL is attributed to the kernel or to another process."""
    more = f" ({_memory.explain()})" if number == signal.SIGKILL else ""
    with suppress(ValueError):  # real-time signals have no name
        return f"was killed by {signal.Signals(number).name}{more}"
    return f"was killed by signal {number}"


class OutOfMemory:
    """Counts the kernel's out-of-memory kills: in our control group, else on the whole machine."""

    def __init__(self, counters: Sequence[Path]) -> None:
        self._counters = counters
        self._seen = self._kills()

    def explain(self) -> str:
        """Attribute one SIGKILL: out of memory if there are kernel kills that no earlier call has used up."""
        now = self._kills()
        if self._seen is None or now is None:
            return "possibly out of memory"
        if now <= self._seen:
            return "sent by another process; memory had not run out"
        self._seen += 1
        return "out of memory"

    def _kills(self) -> int | None:
        for counter in self._counters:
            with suppress(OSError, ValueError, KeyError):
                return int(dict(line.split(maxsplit=1) for line in counter.read_text().splitlines())["oom_kill"])
        return None


def _counters() -> Iterator[Path]:
    groups = Path("/sys/fs/cgroup")
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, kind, group = line.split(":", 2)
            if number == "0":
                yield groups / group.lstrip("/") / "memory.events"
            elif kind == "memory":
                yield groups / "memory" / group.lstrip("/") / "memory.oom_control"
    yield Path("/proc/vmstat")


_memory = OutOfMemory(list(_counters()))
