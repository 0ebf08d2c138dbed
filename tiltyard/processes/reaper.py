"""A small process that stays a moment longer than this one, which may be killed at any time, and puts things in order.

    this process ── starts ──> guard: python -I -S guard.py     waits for the end of this process, however it comes
                               ends what envs have started here and left behind (Linux: /proc tells)
                               shows the terminal's cursor again and gives the terminal its mode back

What envs start is known by a mark in its environment, and a mere fork of this process by the pipe to the guard that it
holds. Nothing else is touched: a tracker's helpers are started without the mark. A worker's guard is its nursery.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MARK = "TILTYARD_GUARDED"  # in the environment of whatever an env starts: whose end is its own
WORKER = "TILTYARD_WORKER"  # the same in a worker, for its nursery
GRACE = 1.0  # seconds that what is left behind has to end by itself and tidy up
TIMEOUT = 10.0  # seconds that the kernel has to end what was killed
_SHOW_CURSOR = b"\x1b[?25h"


class Reaper:
    """Ends whatever carries `mark` when this process has gone, and gives `terminal` back as it is now."""

    def __init__(self, *, mark: str = "", terminal: int | None = None) -> None:
        self.mark, self.owner = mark, os.getpid()
        task = {"owner": self.owner, "mark": mark, "group": os.getpgrp(), "session": 0, "mode": None}
        if terminal is not None:
            task |= {"session": os.getsid(0) if foreground_group(terminal) else 0, "mode": terminal_mode(terminal)}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL if terminal is None else terminal,
            stderr=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if name != MARK},
            cwd="/",
            start_new_session=True,
        )

    def close(self) -> None:
        """Nothing is left to guard."""
        self._process.kill()
        self._process.communicate()

    def let_go(self) -> None:
        """In a fork of this process: it is nobody whom the guard ends."""
        assert self._process.stdin is not None
        self._process.stdin.close()


# ---------------------------------------------------------------------------------------------- what envs start

_own: Reaper | None = None
_open = 0


def own_mark() -> str:
    """What carries this in its environment, alone or followed by a dot and more, ends soon after this process."""
    global _own
    if _own is None or _own.owner != os.getpid():
        _own = Reaper(mark=f"{os.getpid()}-{os.urandom(8).hex()}")
    return _own.mark


def begin() -> None:
    """Envs are about to be made here: what this process starts is marked, unless somebody else has seen to that."""
    global _open
    _open += 1
    if not {MARK, WORKER} & os.environ.keys():
        os.environ[MARK] = own_mark()


def end() -> None:
    """They are gone. What they have left behind may be of use to later ones, and ends with this process."""
    global _open
    _open -= 1
    if _open == 0 and _own is not None and os.environ.get(MARK) == _own.mark:
        del os.environ[MARK]


def _forked() -> None:
    if _open == 0 and _own is not None:  # not an env's doing
        _own.let_go()


os.register_at_fork(after_in_child=_forked)


@contextlib.contextmanager
def unmarked() -> Iterator[None]:
    """For the start of processes that have to outlive this one: they finish their work by themselves."""
    mark = os.environ.pop(MARK, None)
    try:
        yield
    finally:
        if mark is not None:
            os.environ[MARK] = mark


def mark_of(pid: int, name: str = MARK) -> str:
    """What a program's environment says; nothing for a mere fork, and where it is not ours to read."""
    with contextlib.suppress(OSError):
        for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if word.startswith(f"{name}=".encode()):
                return word.partition(b"=")[2].decode(errors="replace")
    return ""


def end_marked(mark: str, pipe: str = "") -> None:
    """End whatever carries a mark or holds a pipe; first it has a moment to end by itself."""
    began = time.monotonic()
    while (found := _marked(mark, pipe)) and (passed := time.monotonic() - began) < GRACE + TIMEOUT:
        for pid in found if passed >= GRACE else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _marked(mark: str, pipe: str) -> list[int]:
    if not mark or not Path("/proc/self").exists():
        return []
    others = {int(folder.name) for folder in Path("/proc").glob("[0-9]*")} - {os.getpid()}
    return [pid for pid in others if f"{mark_of(pid)}.".startswith(f"{mark}.") or (pipe and pipe in _files(pid))]


def _files(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):  # ended meanwhile, or not ours to look at
        for link in Path(f"/proc/{pid}/fd").iterdir():
            found.add(str(link.readlink()))
    return found


# ---------------------------------------------------------------------------------------------- the terminal


def foreground_group(terminal: int) -> int:
    """The group of processes that the terminal's user looks at; others must not touch its mode. 0 where this is not the
    terminal that we were started from."""
    with contextlib.suppress(OSError):
        return os.tcgetpgrp(terminal)
    return 0


def terminal_mode(terminal: int) -> list[Any]:
    """The terminal's mode as JSON can carry it."""
    *numbers, characters = termios.tcgetattr(terminal)
    return [*numbers, [each if isinstance(each, int) else each.decode("latin-1") for each in characters]]


def set_terminal_mode(terminal: int, mode: list[Any]) -> None:
    """Give a terminal the mode that `mode_of` has told."""
    *numbers, characters = mode
    characters = [each if isinstance(each, int) else each.encode("latin-1") for each in characters]
    termios.tcsetattr(terminal, termios.TCSADRAIN, [*numbers, characters])


def _give_back(terminal: int, mode: list[Any], session: int, group: int) -> None:
    """Show the cursor, and set the mode unless a shell has taken the terminal and set its own by now."""
    with contextlib.suppress(OSError, termios.error):  # the terminal may have gone, too
        os.write(terminal, _SHOW_CURSOR)
        if _in_front_of(session) in (0, group):
            set_terminal_mode(terminal, mode)


def _in_front_of(session: int) -> int:
    """The group of processes that a session's terminal belongs to; 0 where nothing tells."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{session}/stat").read_bytes().rpartition(b")")[2].split()[5])
    return 0


# ---------------------------------------------------------------------------------------------- in the guard


def main(task: dict[str, Any]) -> None:
    """Wait, put in order, and end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # what ends a job first ends who is guarded
        signal.signal(number, signal.SIG_IGN)
    _wait_for(task["owner"])
    if task["mode"] is not None:
        _give_back(1, task["mode"], task["session"], task["group"])
    end_marked(task["mark"], str(Path("/proc/self/fd/0").readlink()) if sys.platform == "linux" else "")


def _wait_for(owner: int) -> None:
    """Until a process has ended. Its pipe does not tell: forks may hold it, and a program that it becomes does not."""
    try:
        ended = os.pidfd_open(owner)
    except (AttributeError, OSError):  # not Linux, an old one, or ended already: then the pipe has to do
        ended = 0
    if os.getppid() == owner:
        select.select([ended], [], [])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
