"""The reaper: a small process that outlives this one, even when this one is killed, and cleans up after it.

    this process ── starts ──> reaper: python -I -S reaper.py     waits until this process has ended
                               ends the processes that envs have started and left behind (Linux, through /proc)
                               removes their folders and shared memory, as announced by `Reaper.announce`
                               shows the terminal's cursor again and restores the terminal's mode

Programs started by envs carry a mark in their environment; plain forks of this process hold the pipe to the reaper.
Trackers' helpers are started without the mark and are left alone. The fork server is the reaper of its workers; what it
leaves, because it was killed, carries the mark of the process that started it, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

MARK = "TILTYARD_GUARDED"  # environment variable of programs started by envs: which process they must not outlive
WORKER = "TILTYARD_WORKER"  # the same in a worker: that mark, a name of the fork server, and the worker's pid
GRACE = 1.0  # seconds that a process left behind has to exit and tidy up
TIMEOUT = 10.0  # seconds that the kernel may take to end a killed process
_SHOW_CURSOR = b"\x1b[?25h"


class Reaper:
    """Ends all processes with `mark` when this process is gone, and restores `terminal` to its present mode."""

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
        """Stop waiting: there is nothing left to clean up."""
        self._process.kill()
        self._process.communicate()

    def announce(self, folder: Path, option: str, files: Sequence[str], value: str = "") -> None:
        """Clean up after a program if `folder` is still there after this process: kill it, which has the folder in its
        command line, remove `files` + the value of its command line's `option`, and the folder. The program may exit
        before this process: announce it again with the `value` once that is known."""
        assert self._process.stdin is not None
        line = json.dumps({"folder": str(folder), "option": option, "files": list(files), "value": value})
        with contextlib.suppress(BrokenPipeError):  # somebody has killed the reaper
            os.write(self._process.stdin.fileno(), line.encode() + b"\n")

    def release(self) -> None:
        """In a fork of this process: do not count it among what the reaper ends."""
        assert self._process.stdin is not None
        self._process.stdin.close()


# ---------------------------------------------------------------------------------------------- processes of envs

_own: Reaper | None = None
_open = 0


def own() -> Reaper:
    """The reaper of this process; a fork has its own."""
    global _own
    if _own is None or _own.owner != os.getpid():
        _own = Reaper(mark=f"{os.getpid()}-{os.urandom(8).hex()}")
    return _own


def own_mark() -> str:
    """The mark of this process: what carries it, alone or followed by a dot and more, is ended after this process."""
    return own().mark


def begin() -> None:
    """Call before making envs: from now on, programs started here are marked, unless they are already."""
    global _open
    _open += 1
    if not {MARK, WORKER} & os.environ.keys():
        os.environ[MARK] = own_mark()


def end() -> None:
    """Call when those envs are closed. What they left behind may serve later ones; it ends with this process."""
    global _open
    _open -= 1
    if _open == 0 and _own is not None and os.environ.get(MARK) == _own.mark:
        del os.environ[MARK]


def _forked() -> None:
    if _open == 0 and _own is not None:  # no env made this fork
        _own.release()


os.register_at_fork(after_in_child=_forked)


@contextlib.contextmanager
def unmarked() -> Iterator[None]:
    """Start processes here that must outlive this one, such as a tracker's upload."""
    mark = os.environ.pop(MARK, None)
    try:
        yield
    finally:
        if mark is not None:
            os.environ[MARK] = mark


def marks_of(pid: int) -> dict[str, str]:
    """The marks in a program's environment; empty for a plain fork, and where we may not read it."""
    found = {}
    with contextlib.suppress(OSError):
        for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = word.decode(errors="replace").partition("=")
            if name in (MARK, WORKER):
                found[name] = value
    return found


def end_marked(mark: str, pipe: str = "", sessions: Collection[int] = ()) -> None:
    """End all processes that carry a mark, hold a pipe or are in a session, after a moment to exit by themselves."""
    start = time.monotonic()
    while (found := _marked(mark, pipe, sessions)) and (passed := time.monotonic() - start) < GRACE + TIMEOUT:
        for pid in found if passed >= GRACE else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _marked(mark: str, pipe: str, sessions: Collection[int]) -> list[int]:
    if not mark or not Path("/proc/self").exists():
        return []
    others = {int(folder.name) for folder in Path("/proc").glob("[0-9]*")} - {os.getpid()}
    return [
        pid
        for pid in others
        if any(f"{each}.".startswith(f"{mark}.") for each in marks_of(pid).values())
        or (pipe and pipe in _files(pid))
        or (sessions and _session(pid) in sessions)
    ]


def _session(pid: int) -> int:
    """The session of a process; 0 for one that has exited."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return 0 if fields[0] in b"ZX" else int(fields[3])
    return 0


def _files(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):  # it exited, or we may not read it
        for link in Path(f"/proc/{pid}/fd").iterdir():
            found.add(str(link.readlink()))
    return found


# ---------------------------------------------------------------------------------------------- the terminal


def foreground_group(terminal: int) -> int:
    """The foreground process group, the only one that may set the terminal's mode; 0 if it is not our terminal."""
    with contextlib.suppress(OSError):
        return os.tcgetpgrp(terminal)
    return 0


def terminal_mode(terminal: int) -> list[Any]:
    """The terminal's mode, as JSON."""
    *numbers, characters = termios.tcgetattr(terminal)
    return [*numbers, [each if isinstance(each, int) else each.decode("latin-1") for each in characters]]


def set_terminal_mode(terminal: int, mode: list[Any]) -> None:
    """Set a terminal's mode to what `terminal_mode` returned."""
    *numbers, characters = mode
    characters = [each if isinstance(each, int) else each.encode("latin-1") for each in characters]
    termios.tcsetattr(terminal, termios.TCSADRAIN, [*numbers, characters])


def _restore_terminal(terminal: int, mode: list[Any], session: int, group: int) -> None:
    """Show the cursor; set the mode unless a shell has taken the terminal and set its own."""
    with contextlib.suppress(OSError, termios.error):  # the terminal may be gone, too
        os.write(terminal, _SHOW_CURSOR)
        if _session_foreground(session) in (0, group):
            set_terminal_mode(terminal, mode)


def _session_foreground(session: int) -> int:
    """The foreground process group of a session's terminal; 0 if unknown."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{session}/stat").read_bytes().rpartition(b")")[2].split()[5])
    return 0


# ---------------------------------------------------------------------------------------------- in the reaper


def main(task: dict[str, Any]) -> None:
    """Wait for the owner's end, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a signal to the whole job ends the owner first
        signal.signal(number, signal.SIG_IGN)
    announced = _wait_for(task["owner"])
    if task["mode"] is not None:
        _restore_terminal(1, task["mode"], task["session"], task["group"])
    for folder in {each["folder"] for each in announced}:
        if Path(folder).is_dir():
            _remove(Path(folder), [each for each in announced if each["folder"] == folder])
    end_marked(task["mark"], str(Path("/proc/self/fd/0").readlink()) if sys.platform == "linux" else "")


def _wait_for(owner: int) -> list[dict[str, Any]]:
    """Wait until a process has ended; returns what it has announced. Its pipe alone does not show the end: forks may
    hold it, an exec closes it."""
    pipe, text = {0}, b""
    try:
        ended = {os.pidfd_open(owner)}
    except (AttributeError, OSError):  # not Linux, an old kernel, or already ended: the pipe must do
        ended = set[int]()
    over = os.getppid() != owner
    while True:
        ready = select.select(pipe | ended, [], [], 0 if over else None)[0] if pipe | ended else []
        if 0 in ready:
            got = os.read(0, 1 << 16)
            text, pipe = text + got, pipe if got else set()
        over = over or bool(ended & set(ready)) or not (pipe or ended)
        if over and 0 not in ready:  # nothing is left in the pipe
            return [json.loads(line) for line in text.split(b"\n")[:-1]]


def _remove(folder: Path, announced: Sequence[dict[str, Any]]) -> None:
    """Kill the program of a folder, and remove the folder and the files named after it."""
    option, values = announced[0]["option"].encode(), {each["value"] for each in announced} - {""}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # exited meanwhile, or another user's
            words = (process / "cmdline").read_bytes().split(b"\0")
            if any(word.startswith(os.fsencode(folder) + b"/") for word in words):
                values.add(os.fsdecode(words[words.index(option) + 1]))
                os.kill(int(process.name), signal.SIGKILL)
    for name in announced[0]["files"]:
        for value in values:
            Path(f"{name}{value}").unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
