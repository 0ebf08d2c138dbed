"""How long a process lives and what it is called: the calls that every process of ours makes first."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from tiltyard.errors import EXIT_FAILED

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36  # linux/prctl.h


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies (Linux; elsewhere, closed channels end it)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(EXIT_FAILED)


def adopt_orphans() -> None:
    """Become the parent of processes that descendants leave behind (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """Set what `ps` and `top` show (Linux)."""
    _prctl(_PR_SET_NAME, name.encode()[:15])


def take_no_action_on(*numbers: int) -> None:
    """Handle signals by doing nothing; another process decides what follows. SIG_IGN would be inherited by simulators,
    which could then not be terminated."""
    for number in numbers:
        signal.signal(number, lambda number, frame: None)
        signal.siginterrupt(number, False)


def _prctl(option: int, value: int | bytes) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)
