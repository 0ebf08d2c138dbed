"""A process that has torch imported already and forks workers on request, so that a new one is there in milliseconds.
Learners beside the driver's and an actor that decides for all workers are born and die in the same way.

    driver ── {"number": 3, ...} + file descriptors ──> nursery ── fork ──> worker, or another nursery
    driver <── {"started": pid} / {"exited": pid, "status": s} ── nursery

Messages are JSON, one per datagram of a socket pair; nothing is pickled. When the driver goes, in whatever way, the
socket closes, the nursery ends its workers and itself; when the nursery is killed, the kernel kills its workers. What
an env leaves behind, a simulator say, falls to the nursery when its worker ends, and is ended too (on Linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from tiltyard.errors import TiltyardError
from tiltyard.processes import reaper
from tiltyard.processes.child import die_with, leave_to_others

LARGEST = 1 << 20  # bytes of a message: an experiment with its spec
_START = "import sys; sys.path.append({root!r}); from tiltyard.processes.fork_server import main; main({fd})"
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36  # linux/prctl.h
NURSERY = "n"  # the role of a copy of the nursery itself
TIMEOUT = 10.0  # seconds that a nursery may take to end


class ForkServer:
    """The driver's end. `without` says how to do without those that are born here. A process of its own, or with a
    `mother` a copy of hers, which is there at once."""

    def __init__(
        self, without: str = "engine.workers=0 does without workers", *, parent: ForkServer | None = None
    ) -> None:
        self._without = without
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST)
        self._process = self._started(theirs) if parent is None else None
        if parent is not None:
            while (
                parent.poll_events() is not None
            ):  # births and deaths of others, which would fill the socket in the end
                pass
            parent.fork({"role": NURSERY, "number": 0}, [theirs.fileno()])
        theirs.close()
        self._socket = ours

    @staticmethod
    def _started(theirs: socket.socket) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).resolve().parents[2])
        command = [sys.executable, "-P", "-c", _START.format(root=root, fd=theirs.fileno())]
        # One thread until a worker asks for more: a pool of threads does not survive a fork.
        environment = {**_environment(), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=2,  # stdout is the driver's, for data
            env=environment,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )

    def fileno(self) -> int:
        return self._socket.fileno()

    def fork(self, task: dict[str, Any], fds: list[int]) -> None:
        """Ask for a worker (`role` w), an actor (a), a learner (l) or a copy (n); its birth is told by `news`."""
        try:
            socket.send_fds(self._socket, [json.dumps(task).encode()], fds)
        except OSError as error:
            raise TiltyardError(
                f"processes cannot be started: {error.strerror}", f"see the messages above; {self._without}"
            ) from error

    def poll_events(self) -> dict[str, Any] | None:
        """The next message if there is one; a nursery that is gone is an error."""
        if not select.select([self._socket], [], [], 0)[0]:
            return None
        try:
            word = self._socket.recv(LARGEST)
        except ConnectionError:  # it ended before it read what it was asked
            word = b""
        if not word:
            code = "" if self._process is None else f" with exit code {self._process.wait()}"
            raise TiltyardError(
                f"the process that starts others ended{code}", f"see the messages above; {self._without}"
            )
        found: dict[str, Any] = json.loads(word)
        return found

    def discard(self) -> None:
        """End one that nobody was born in yet, without waiting for its imports."""
        if self._process is not None:
            self._process.kill()
        self.close()

    def close(self) -> None:
        """End all workers and the nursery, and wait until they are gone."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(TIMEOUT)
            while self._socket.recv(LARGEST):  # deaths that nobody asks about any more, and then its own
                pass
        self._socket.close()
        if self._process is None:
            return
        try:
            self._process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Early:
    """At most one nursery that imports torch while the driver still looks at the env, and where it was started."""

    def __init__(self) -> None:
        self._kept: tuple[ForkServer, tuple[object, ...]] | None = None
        self._parent: tuple[ForkServer, tuple[object, ...]] | None = None
        self._many = False

    def start(self) -> ForkServer:
        self.end()
        self._kept = (ForkServer(), self._here())
        return self._kept[0]

    def take(self) -> ForkServer:
        """The one that was started in this folder with these environment variables; a new one if there is none, and a
        copy of the first within `many`."""
        if self._parent is not None and self._parent[1] == self._here():
            return ForkServer(parent=self._parent[0])
        if self._kept is None or self._kept[1] != self._here():
            self.start()
        assert self._kept is not None
        taken, self._kept = self._kept, None
        if self._many and self._parent is None:
            self._parent = taken
            return ForkServer(parent=taken[0])
        return taken[0]

    def end(self) -> None:
        if self._kept is not None:
            self._kept[0].discard()
            self._kept = None

    @contextlib.contextmanager
    def many(self) -> Iterator[None]:
        """Within this, all that are taken are copies of the first: for whoever builds engine after engine."""
        self._many = True
        try:
            yield
        finally:
            parent, self._parent, self._many = self._parent, None, False
            if parent is not None:
                parent[0].close()

    @staticmethod
    def _here() -> tuple[object, ...]:
        return os.getpid(), Path.cwd(), _environment()


early = _Early()


def _environment() -> dict[str, str]:
    """This process's, without the guard's mark: a nursery ends by itself, and has things to end before."""
    return {name: value for name, value in os.environ.items() if name != reaper.MARK}


# ------------------------------------------------------------------------------------------------ in the nursery


def main(fd: int) -> None:
    """Import what workers need, then fork until the driver goes.

    The kernel is not asked to end this process with the driver: it has to end what envs have left behind first.
    """
    leave_to_others(signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)  # the driver tells us what follows
    from tiltyard.engines.local import (
        inference_server,
        learner_worker,  # torch and all that is ours
        worker,
    )

    _serve(fd, {"w": worker.work, "a": inference_server.work, "l": learner_worker.work})


def _serve(fd: int, lives: dict[str, Any]) -> None:
    """Fork whoever is asked for, tell who ended, and end all when the driver goes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    channel = socket.socket(fileno=fd)
    alive: set[int] = set()
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    dead: dict[int, float] = {}  # workers, and when what they left behind is ended
    while True:
        left = max(0.0, min(dead.values()) - time.monotonic()) if dead else None
        ready, _, _ = select.select([fd, reader], [], [], left)
        now = time.monotonic()
        late = {pid for pid, due in dead.items() if now >= due}
        if late:
            found = _end_orphans(alive, late)  # what those leave in turn falls to us as well
            dead = {pid: due for pid, due in dead.items() if pid not in late} | dict.fromkeys(found, now + reaper.GRACE)
        if reader in ready:
            os.read(reader, 4096)
            dead |= dict.fromkeys(_reap(channel, alive), now + reaper.GRACE)
        if fd in ready:
            try:
                word, fds, _, _ = socket.recv_fds(channel, LARGEST, 16)
            except ConnectionError:
                break
            if not word:
                break
            here, pid = os.getpid(), os.fork()
            if pid == 0:
                channel.close()
                os.close(reader)
                os.close(writer)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                task = json.loads(word)
                if task["role"] == NURSERY:
                    os.setsid()
                    die_with(here)
                    _serve(fds[0], lives)
                _live(here, lives[task["role"]], task, fds)
            for each in fds:
                os.close(each)
            alive.add(pid)
            _tell(channel, {"started": pid, "number": json.loads(word)["number"]})
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    for pid in alive:
        os.waitpid(pid, 0)
    until = time.monotonic() + reaper.GRACE
    while _orphans(()) and time.monotonic() < until:
        time.sleep(0.01)
    while _end_orphans((), None):
        time.sleep(0.01)
    os._exit(0)


def _orphans(alive: Collection[int]) -> dict[int, int]:
    """Children of this process that it has not forked itself, and the worker that each comes from, 0 where nothing
    tells. The dead among them are buried."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # ended meanwhile
            state, parent, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            pid = int(stat.parent.name)
            if int(parent) == os.getpid() and pid not in alive:
                if state == "Z":
                    os.waitpid(pid, os.WNOHANG)
                else:
                    # The worker that a program was started in; of a mere fork, whose environment is older, the session.
                    mark = reaper.mark_of(pid, reaper.WORKER)
                    found[pid] = int(mark if mark.isdecimal() else session)
    return found


def _end_orphans(alive: Collection[int], owners: Collection[int] | None) -> set[int]:
    """End what these workers left behind, or everybody; whose there were. What a living worker sent away is its own."""
    found = {pid: owner for pid, owner in _orphans(alive).items() if owners is None or owner in owners}
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return set(found.values())


def _live(fork_server: int, work: Any, task: dict[str, Any], fds: list[int]) -> None:
    """A worker's life, in a session of its own; it never returns into the nursery's loop."""
    code = 1
    try:
        os.setsid()
        os.environ[reaper.WORKER] = str(os.getpid())
        die_with(fork_server)
        name_process(f"tiltyard-{task['role']}{task['number']}")
        work(task, fds)
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
    """Tell of every worker that ended; returns them."""
    buried = []
    while alive:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            break
        if pid in alive:
            alive.remove(pid)
            buried.append(pid)
            _tell(channel, {"exited": pid, "status": os.waitstatus_to_exitcode(status)})
    return buried


def _tell(channel: socket.socket, word: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the driver is gone, which the loop will see
        channel.send(json.dumps(word).encode())


def name_process(name: str) -> None:
    """What `ps` and `top` show."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15])
