"""A fork server: a process that has torch imported already and forks others on request, in milliseconds each.

    driver ── {"run": "module:function", "name": ..., "number": 3} + file descriptors ──> fork server ── fork
    driver <── {"number": 3, "started": pid} / {"number": 3, "exited": code} ── fork server
    driver <── channel ──> function(task, channel, fds) in the forked process

When the driver ends, the socket closes and the fork server ends its children and itself. Processes that an env leaves
behind, such as a simulator, become children of the fork server and are ended too. When the fork server is killed, the
kernel kills its children, and the driver, or at the latest its reaper, ends what those leave behind.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, NoReturn, Self

import psutil

from tiltyard.errors import ResumableError, TiltyardError
from tiltyard.processes import reaper
from tiltyard.processes.channel import Channel
from tiltyard.processes.child import ONE_THREAD, start_python
from tiltyard.processes.exit_reason import exit_text
from tiltyard.processes.lifetime import adopt_orphans, die_with, name_process, take_no_action_on
from tiltyard.processes.platforms import require_linux

MAX_BYTES = 1 << 16  # of a message
TIMEOUT = 10.0  # seconds that a fork server may take to exit
_COPY = "copy"  # as `run`: a copy of the fork server itself


@dataclass(eq=False)
class Forked:
    """A process that a fork server has forked, and the channel to it."""

    channel: Channel
    pid: int | None = None
    """once the fork server has reported it"""
    status: int | None = None
    """once it has exited: its code, negative for a signal"""

    def how(self) -> str:
        """How it has exited."""
        assert self.status is not None
        return exit_text(self.status)

    def send(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its exit is reported
            self.channel.send(message)


class ForkServer:
    """The driver's end, as a context: `close` ends the fork server and its children. Its process starts with `start`,
    or with the first fork or copy, in the folder and with the environment variables of that moment.

    `preload` are modules to import before the first fork; `hint` is for errors. With `mark`, what a child leaves behind
    is ended soon after it; otherwise, with the fork server.
    """

    def __init__(
        self,
        preload: Sequence[str] = (),
        hint: str = "engine.workers=0 needs no worker processes",
        *,
        mark: bool = True,
    ) -> None:
        self._preload, self._hint, self._mark = preload, hint, mark
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._numbers = itertools.count()
        self._forked: dict[int, Forked] = {}
        self._exited: list[Forked] = []
        self._name = os.urandom(4).hex()  # tells fork servers of this process apart

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def start(self) -> socket.socket:
        """Start the process if there is none; it imports `preload` meanwhile. Returns the socket."""
        if self._socket is None:
            require_linux("the fork server, which starts workers and learners,", self._hint)
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._process = start_python(
                "tiltyard.processes.fork_server:main",
                *(theirs.fileno(), list(self._preload)),
                fds=[theirs.fileno()],
                environment={**_environment(), **ONE_THREAD},  # a thread pool does not survive a fork
            )
            theirs.close()
        return self._socket

    def copy(self) -> ForkServer:
        """A fork of this fork server: ready at once, with children of its own. It ends with this one at the latest."""
        made = ForkServer(self._preload, self._hint)
        made._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._request(_COPY, "", [theirs.fileno()])
        self._read_events(0.0)  # of many copies, they would fill the socket in the end
        theirs.close()
        return made

    def fork(self, function: str, task: Mapping[str, Any], fds: Sequence[int] = (), *, name: str) -> Forked:
        """Call a "module:function" with (task, channel, fds) in a new process, shown as `name` by `ps`."""
        ours, theirs = socket.socketpair()
        number = self._request(function, name, [theirs.fileno(), *fds])
        theirs.close()
        forked = self._forked[number] = Forked(Channel(ours))
        forked.send(task)
        return forked

    def _request(self, function: str, name: str, fds: Sequence[int]) -> int:
        number = next(self._numbers)
        mark = self._env_mark if self._mark else ""
        message = json.dumps({"run": function, "name": name, "number": number, "mark": mark}).encode()
        try:
            socket.send_fds(self.start(), [message], fds)
        except OSError as error:
            self._end_orphans()
            raise TiltyardError(f"cannot start processes: {error.strerror}", self._advice) from error
        return number

    @property
    def _env_mark(self) -> str:
        """The mark of programs that envs start below this fork server."""
        return f"{reaper.own_mark()}.{self._name}"

    def _end_orphans(self) -> None:
        """End what envs have started, after the fork server was killed."""
        if self._mark:
            sessions = {forked.pid for forked in self._forked.values() if forked.pid is not None}
            reaper.end_marked(self._env_mark, sessions=sessions)

    def fileno(self) -> int:
        return self.start().fileno()

    def exits(self, seconds: float = 0.0) -> list[Forked]:
        """Those that have exited since the last call; if none has, wait for an event for at most so many seconds.
        An error if the fork server is gone."""
        self._read_events(0.0 if self._exited else seconds)
        found, self._exited = self._exited, []
        return found

    def _read_events(self, seconds: float) -> None:
        while wait([self.fileno()], seconds):  # select() does not work beyond 1,024 open files
            seconds = 0.0
            try:
                message = self.start().recv(MAX_BYTES)
            except ConnectionError:  # it exited before it read our last message
                message = b""
            if not message:
                code = "" if self._process is None else f" with code {self._process.wait()}"
                self._end_orphans()
                raise ResumableError(f"the fork server exited{code}", self._advice)  # killed: it runs no user's code
            event = json.loads(message)
            forked = self._forked.get(event["number"])
            if forked is not None and "started" in event:
                forked.pid = event["started"]
            elif forked is not None:
                forked.status = event["exited"]
                self._exited.append(self._forked.pop(event["number"]))

    @property
    def _advice(self) -> str:
        return f"see the messages above; {self._hint}"

    def close(self) -> None:
        """End the fork server and its children, and wait until they are gone."""
        if self._socket is None:
            return
        if self._process is not None and next(self._numbers) == 0:  # it has forked nothing
            self._process.kill()  # without waiting for its imports
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(TIMEOUT)
            while self._socket.recv(MAX_BYTES):  # exits of children, then the end of the socket
                pass
        self._socket.close()
        self._socket = None
        if self._process is None:
            return
        try:
            self._process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _environment() -> dict[str, str]:
    """This process's, without the reaper's mark: a fork server has children to end before it exits."""
    return {name: value for name, value in os.environ.items() if name != reaper.MARK}


# ------------------------------------------------------------------------------------------------ in the fork server


def main(fd: int, preload: Sequence[str]) -> None:
    """Import the modules that children need, then fork until the driver is gone.

    The kernel is not asked to end this process with the driver: it must first end what envs have left behind.
    """
    take_no_action_on(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
    for module in preload:
        importlib.import_module(module)
    _serve(fd)


def _serve(fd: int) -> NoReturn:
    """Fork on request, report exits, and end all children when the driver is gone."""
    adopt_orphans()
    channel = socket.socket(fileno=fd)
    alive: dict[int, int] = {}  # pid -> number
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
            alive[pid] = task["number"]
            _send(channel, {"number": task["number"], "started": pid})
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
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error, OSError):  # exited meanwhile
            if child.pid in alive:
                continue
            if child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)
            else:
                # The worker that started a program; for a plain fork, whose environment is older, the session.
                worker = reaper.marks_of(child.pid).get(reaper.WORKER, "").rpartition(".")[2]
                found[child.pid] = int(worker) if worker.isdecimal() else os.getsid(child.pid)
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
        if task["mark"]:
            os.environ[reaper.WORKER] = f"{task['mark']}.{os.getpid()}"
        die_with(server)
        name_process(task["name"])
        module, _, function = task["run"].partition(":")
        channel = Channel(fds[0])
        getattr(importlib.import_module(module), function)(channel.recv(), channel, fds[1:])
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - a forked child must end here, whatever it is
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _reap(channel: socket.socket, alive: dict[int, int]) -> list[int]:
    """Report every child that has exited; returns their pids."""
    reaped = []
    while alive:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            break
        if pid in alive:
            reaped.append(pid)
            _send(channel, {"number": alive.pop(pid), "exited": os.waitstatus_to_exitcode(status)})
    return reaped


def _send(channel: socket.socket, event: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the driver is gone, which the loop will see
        channel.send(json.dumps(event).encode())
