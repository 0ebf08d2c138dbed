"""Where a hung worker is: the innermost Python frame that it, or an env process below it, writes on SIGUSR1."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from tiltyard.envs.isolation.server import STACK
from tiltyard.processes.proc import tree

STACK_BYTES = 1 << 16
STACK_SECONDS = 2.0  # that a process has to write its stack
WAITING = ("tiltyard/envs/isolation/pool.py", "tiltyard/processes/channel.py")  # frames that wait for an isolated env


def hang_location(pid: int, stack: int) -> str:
    """The innermost frame in a worker's `stack` file, else in that of one of its env processes; empty if unknown."""
    if found := _innermost(stack):
        return found
    for below in _request_stacks(pid):
        found = found or _innermost(below)
        os.close(below)
    return found


def _request_stacks(pid: int) -> list[int]:
    """Ask the env processes below a worker for their stacks; returns the files that they write them to."""
    found = []
    for process in tree(pid):
        with contextlib.suppress(OSError):  # it exited meanwhile
            for link in Path(f"/proc/{process.pid}/fd").iterdir():
                if STACK in link.readlink().name:
                    found.append(os.open(link, os.O_RDONLY))
                    os.kill(process.pid, signal.SIGUSR1)
    return found


def _innermost(stack: int) -> str:
    """Wait for the stack; returns the innermost frame of a thread that does not wait for another."""
    until, before = time.monotonic() + STACK_SECONDS, ""
    while time.monotonic() < until:
        text = os.pread(stack, STACK_BYTES, 0).decode(errors="replace")
        for thread in text.split("(most recent call first):\n")[1:]:
            line, complete, _ = thread.partition("\n")  # the process may still be writing the line
            frame = line.strip()
            if complete and frame.startswith("File ") and not any(place in frame for place in WAITING):
                return frame.removeprefix("File ")
        if before.rstrip("\0") and text == before:  # complete, and every thread waits
            break
        before = text
        time.sleep(0.02)
    return ""
