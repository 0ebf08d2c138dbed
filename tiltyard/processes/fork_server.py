"""A fork server: a process that has torch imported already and forks others on request, in milliseconds each.

    driver ── {"run": "module:function", "name": ..., "number": 3, ...} + file descriptors ──> fork server ── fork
    driver <── {"started": pid, "number": 3} / {"exited": pid, "status": code} ── fork server

Messages are JSON, one per datagram of a socket pair; nothing is pickled. When the driver ends, the socket closes and
the fork server ends its children and itself; when the fork server is killed, the kernel kills its children. Processes
that an env leaves behind, such as a simulator, become children of the fork server and are ended too (on Linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tiltyard.errors import TiltyardError
from tiltyard.processes import reaper
from tiltyard.processes.child import die_with, take_no_action_on
from tiltyard.processes.platforms import require_linux

MAX_BYTES = 1 << 20  # of a message: an experiment with its spec
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36  # linux/prctl.h
TIMEOUT = 10.0  # seconds that a fork server may take to exit
_COPY = "copy"  # as `run`: a copy of the fork server itself
_START = "import sys; sys.path.append({root!r}); from tiltyard.processes.fork_server import main; main({fd}, {preload})"
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class ForkServer:
    """The driver's end. `preload` are modules to import before the first fork; `hint` is for errors. With a `parent` it
    is a copy of that one, which is ready at once."""

    def __init__(
        self,
        preload: Sequence[str] = (),
        hint: str = "engine.workers=0 needs no worker processes",
        *,
        parent: ForkServer | None = None,
    ) -> None:
        self._hint = f"see the messages above; {hint}"
        require_linux("the fork server, which starts workers and learners,", hint)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_BYTES)
        self._process = self._start(theirs, preload) if parent is None else None
        if parent is not None:
            while parent.poll_events() is not None:  # events of other copies would fill the socket in the end
                pass
            parent.fork({"run": _COPY, "number": 0}, [theirs.fileno()])
        theirs.close()
        self._socket = ours

    @staticmethod
    def _start(theirs: socket.socket, preload: Sequence[str]) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).resolve().parents[2])
        start = _START.format(root=root, fd=theirs.fileno(), preload=list(preload))
        return subprocess.Popen(
            [sys.executable, "-P", "-c", start],
            stdin=subprocess.DEVNULL,
            stdout=2,  # stdout is the driver's, for data
            env={**_environment(), **_ONE_THREAD},  # a thread pool does not survive a fork
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )

    def fileno(self) -> int:
        return self._socket.fileno()

    def fork(self, task: dict[str, Any], fds: list[int]) -> None:
        """Call `task["run"]`, a "module:function", with (task, fds) in a new process, shown as `task["name"]` by `ps`.
        Its pid is reported by `poll_events`, with `task["number"]`."""
        try:
            socket.send_fds(self._socket, [json.dumps(task).encode()], fds)
        except OSError as error:
            raise TiltyardError(f"cannot start processes: {error.strerror}", self._hint) from error

    def poll_events(self) -> dict[str, Any] | None:
        """The next event, if there is one; an error if the fork server is gone."""
        if not select.select([self._socket], [], [], 0)[0]:
            return None
        try:
            message = self._socket.recv(MAX_BYTES)
        except ConnectionError:  # it exited before it read our last message
            message = b""
        if not message:
            code = "" if self._process is None else f" with code {self._process.wait()}"
            raise TiltyardError(f"the fork server exited{code}", self._hint)
        event: dict[str, Any] = json.loads(message)
        return event

    def discard(self) -> None:
        """End one that has not forked anything yet, without waiting for its imports."""
        if self._process is not None:
            self._process.kill()
        self.close()

    def close(self) -> None:
        """End the fork server and its children, and wait until they are gone."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(TIMEOUT)
            while self._socket.recv(MAX_BYTES):  # exits of children, then the end of the socket
                pass
        self._socket.close()
        if self._process is None:
            return
        try:
            self._process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass
class _Standby:
    """At most one fork server, started early to import torch while the driver still probes the env. It fits only the
    folder and environment variables that it was started with."""

    _ready: tuple[ForkServer, tuple[object, ...]] | None = None
    _parent: tuple[ForkServer, tuple[object, ...]] | None = None
    _shared: bool = False

    def start(self, preload: Sequence[str]) -> ForkServer:
        self.end()
        self._ready = (ForkServer(preload), self._place(preload))
        return self._ready[0]

    def take(self, preload: Sequence[str]) -> ForkServer:
        """The one in standby if it fits, else a new one; within `shared`, a copy of the first."""
        place = self._place(preload)
        if self._parent is not None and self._parent[1] == place:
            return ForkServer(parent=self._parent[0])
        if self._ready is None or self._ready[1] != place:
            self.start(preload)
        assert self._ready is not None
        taken, self._ready = self._ready, None
        if self._shared and self._parent is None:
            self._parent = taken
            return ForkServer(parent=taken[0])
        return taken[0]

    def end(self) -> None:
        if self._ready is not None:
            self._ready[0].discard()
            self._ready = None

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Within this, every fork server taken is a copy of the first: for callers that build many engines."""
        self._shared = True
        try:
            yield
        finally:
            parent, self._parent, self._shared = self._parent, None, False
            if parent is not None:
                parent[0].close()

    @staticmethod
    def _place(preload: Sequence[str]) -> tuple[object, ...]:
        return os.getpid(), Path.cwd(), _environment(), tuple(preload)


standby = _Standby()


def _environment() -> dict[str, str]:
    """This process's, without the reaper's mark: a fork server has children to end before it exits."""
    return {name: value for name, value in os.environ.items() if name != reaper.MARK}


# ------------------------------------------------------------------------------------------------ in the fork server


def main(fd: int, preload: Sequence[str]) -> None:
    """Import the modules that children need, then fork until the driver is gone.

    The kernel is not asked to end this process with the driver: it must first end what envs have left behind.
    """
    take_no_action_on(signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)  # the driver decides what follows
    for module in preload:
        importlib.import_module(module)
    _serve(fd)


def _serve(fd: int) -> NoReturn:
    """Fork on request, report exits, and end all children when the driver is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    channel = socket.socket(fileno=fd)
    alive: set[int] = set()
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    due: dict[int, float] = {}  # pid of a dead child -> when the processes that it left behind are killed
    while True:
        left = max(0.0, min(due.values()) - time.monotonic()) if due else None
        ready, _, _ = select.select([fd, reader], [], [], left)
        now = time.monotonic()
        late = {pid for pid, at in due.items() if now >= at}
        if late:
            found = _kill_orphans(alive, late)  # whose own children become ours as well
            due = {pid: at for pid, at in due.items() if pid not in late} | dict.fromkeys(found, now + reaper.GRACE)
        if reader in ready:
            os.read(reader, 4096)
            due |= dict.fromkeys(_reap(channel, alive), now + reaper.GRACE)
        if fd in ready:
            try:
                message, fds, _, _ = socket.recv_fds(channel, MAX_BYTES, 16)
            except ConnectionError:
                break
            if not message:
                break
            task, server, pid = json.loads(message), os.getpid(), os.fork()
            if pid == 0:
                channel.close()
                os.close(reader)
                os.close(writer)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _run_child(server, task, fds)
            for each in fds:
                os.close(each)
            alive.add(pid)
            _send(channel, {"started": pid, "number": task["number"]})
    _end_all(alive)
    os._exit(0)


def _end_all(alive: Collection[int]) -> None:
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    for pid in alive:
        os.waitpid(pid, 0)
    until = time.monotonic() + reaper.GRACE
    while _orphans(()) and time.monotonic() < until:
        time.sleep(0.01)
    while _kill_orphans((), None):
        time.sleep(0.01)


def _orphans(alive: Collection[int]) -> dict[int, int]:
    """Children of this process that it has not forked itself -> the child that each comes from, 0 if unknown. Dead ones
    are reaped."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # exited meanwhile
            state, parent, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            pid = int(stat.parent.name)
            if int(parent) == os.getpid() and pid not in alive:
                if state == "Z":
                    os.waitpid(pid, os.WNOHANG)
                else:
                    # The worker that started a program; for a plain fork, whose environment is older, the session.
                    mark = reaper.mark_of(pid, reaper.WORKER)
                    found[pid] = int(mark if mark.isdecimal() else session)
    return found


def _kill_orphans(alive: Collection[int], owners: Collection[int] | None) -> set[int]:
    """Kill what these children left behind, or everything; returns those that had left something. Processes detached by
    a child that is still alive are left alone."""
    found = {pid: owner for pid, owner in _orphans(alive).items() if owners is None or owner in owners}
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return set(found.values())


def _run_child(server: int, task: dict[str, Any], fds: list[int]) -> NoReturn:
    """Run a task in a session of its own; never returns into the fork server's loop."""
    code = 1
    try:
        os.setsid()
        if task["run"] == _COPY:
            die_with(server)
            _serve(fds[0])
        os.environ[reaper.WORKER] = str(os.getpid())
        die_with(server)
        name_process(task["name"])
        module, _, function = task["run"].partition(":")
        getattr(importlib.import_module(module), function)(task, fds)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - a forked child must end here, whatever it is
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _reap(channel: socket.socket, alive: set[int]) -> list[int]:
    """Report every child that has exited; returns their pids."""
    reaped = []
    while alive:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            break
        if pid in alive:
            alive.remove(pid)
            reaped.append(pid)
            _send(channel, {"exited": pid, "status": os.waitstatus_to_exitcode(status)})
    return reaped


def _send(channel: socket.socket, event: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the driver is gone, which the loop will see
        channel.send(json.dumps(event).encode())


def name_process(name: str) -> None:
    """Set what `ps` and `top` show."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15])
