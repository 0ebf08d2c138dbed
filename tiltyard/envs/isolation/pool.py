"""Copies of an env, each in a thread or a process of its own, as `env.isolate` says.

    process of the group                                           processes of the envs
      make_isolated ── EnvProcessPool ── starts ─────────────────> fork server (server.py: main)
         │                 ^ {"env": 2, "status": -9} at an exit ──    │ forks one process per env
         │                                                             v
      EnvProxy (proxy.py) ── Channel: send/recv ── socket (wire.py) ── EnvServer (server.py) ── the env

With `thread`, the channel is a pair of queues and EnvServer runs in a thread of the group's process. Some envs need
isolation (a graphics context per thread, one simulator per process); others gain from it, because all step at once.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiltyard.config.experiment import Env
from tiltyard.envs.episode_stats import episode_seed
from tiltyard.envs.isolation.proxy import Channel, EnvProxy
from tiltyard.envs.isolation.server import EnvServer
from tiltyard.envs.isolation.wire import Connection
from tiltyard.envs.pettingzoo import Parallel
from tiltyard.errors import ConfigError, EnvError, Problem, RaisedElsewhere, TiltyardError, UseError, raised
from tiltyard.plugins.resolve import user_traceback
from tiltyard.processes.exit_reason import killed_by
from tiltyard.processes.platforms import require_linux

if TYPE_CHECKING:
    from tiltyard.types import Array

_START = (
    "import sys; sys.path.append({root!r}); "
    "from tiltyard.envs.isolation.server import main; main({owner}, {control}, {fds})"
)
_CLOSE_SECONDS = 5.0  # that an env may take to close
_ERRORS = {kind.__name__: kind for kind in (TiltyardError, UseError, EnvError)}


def make_isolated(
    env: Env, base: Sequence[Path], copies: int, render: bool, seed: int, heartbeat: Array
) -> list[EnvProxy | Parallel]:
    """Make copies of an env in threads or processes of their own, see `make_copies`."""
    made: list[EnvProxy | Parallel] = []
    channels: Sequence[Channel] = (
        [_ThreadChannel(n) for n in range(copies)] if env.isolate == "thread" else EnvProcessPool(copies).channels
    )
    settings, folders = env.model_dump(mode="json"), [str(Path(folder).absolute()) for folder in base]
    try:
        for copy, channel in enumerate(channels):
            channel.send("make", settings, folders, render and copy == 0, episode_seed(seed, "make", copy, 0))
        for channel in channels:
            made.append(_make_proxy(channel, env))
            heartbeat[0] += 1
        return made
    except BaseException:
        for channel in channels:
            channel.close()
        raise


def _make_proxy(channel: Channel, env: Env) -> EnvProxy | Parallel:
    try:
        proxy = EnvProxy(channel, channel.recv())
    except RaisedElsewhere as error:  # its process is gone
        raise UseError(f"env {env.id} could not be made: it {error.message}", "run it by itself to see why") from error
    return proxy if proxy.possible_agents is None else Parallel(proxy, env.id)


# ---------------------------------------------------------------------------------------------- threads


class _ThreadChannel:
    """An env in a thread of this process."""

    def __init__(self, number: int) -> None:
        self._requests: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"env-{number}", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        server = EnvServer()
        while (request := self._requests.get()) is not None:
            method, arguments = request
            try:
                self._answers.put((getattr(server, method)(*arguments), None))
            except KeyboardInterrupt as error:  # the env's: threads get no signals
                self._answers.put((None, RaisedElsewhere(raised(error), user_traceback(error))))
            except BaseException as error:  # noqa: BLE001 - recv() raises it again
                self._answers.put((None, error))

    def send(self, method: str, *arguments: Any) -> None:
        self._requests.put((method, arguments))

    def recv(self) -> Any:
        value, error = self._answers.get()
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """A thread that hangs cannot be ended; as a daemon it does not delay the end of the process."""
        self.send("close")
        self._requests.put(None)
        self._thread.join(_CLOSE_SECONDS)


# ---------------------------------------------------------------------------------------------- processes


class EnvProcessPool:
    """A fork server and the processes of `count` envs that it has forked."""

    def __init__(self, count: int) -> None:
        require_linux("env.isolate = process", "set env.isolate=thread, or none")
        pairs = [socket.socketpair() for _ in range(count)]
        self._exits, control = socket.socketpair()
        theirs = [pair[1].fileno() for pair in pairs]
        root = str(Path(__file__).resolve().parents[3])
        start = _START.format(root=root, owner=os.getpid(), control=control.fileno(), fds=theirs)
        self._fork_server = subprocess.Popen(
            [sys.executable, "-P", "-c", start],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            pass_fds=[control.fileno(), *theirs],
            start_new_session=True,
        )
        control.close()
        for _, end in pairs:
            end.close()
        self._text, self._exit_codes = b"", dict[int, int]()
        self._open = set(range(count))
        self.channels = [_ProcessChannel(self, index, pair[0]) for index, pair in enumerate(pairs)]

    def explain_exit(self, index: int) -> str:
        """How a process that is gone has ended."""
        while index not in self._exit_codes:
            received = self._exits.recv(1 << 16)
            if not received:
                code = self._fork_server.wait()
                return f"its process ended with its fork server ({_status(code)})"
            *lines, self._text = (self._text + received).split(b"\n")
            for line in lines:
                message = json.loads(line)
                self._exit_codes[message["env"]] = message["status"]
        return f"its process {_status(self._exit_codes[index])}"

    def release(self, index: int) -> None:
        """An env is closed; the fork server ends with the last one."""
        self._open.discard(index)
        if not self._open:
            self._exits.close()
            self._fork_server.wait()


def _status(code: int) -> str:
    return killed_by(-code, explained=True) if code < 0 else f"exited with code {code}"


class _ProcessChannel:
    """An env in a process of its own."""

    def __init__(self, pool: EnvProcessPool, index: int, end: socket.socket) -> None:
        self._pool, self._index = pool, index
        self._socket, self._connection = end, Connection(end)
        self._busy = False

    def send(self, method: str, *arguments: Any) -> None:
        self._busy = True
        with suppress(BrokenPipeError, ConnectionResetError):  # recv() reports that the process is gone
            self._connection.send((method, arguments))

    def recv(self) -> Any:
        try:
            answer = self._connection.recv()
        except EOFError:
            raise RaisedElsewhere(f"did not return: {self._pool.explain_exit(self._index)}", "") from None
        self._busy = False
        match answer:
            case "returned", value:
                return value
            case "config_error", problems, source:
                raise ConfigError([Problem(**problem) for problem in problems], source)
            case "tiltyard_error", kind, message, hint, details:
                raise _ERRORS.get(kind, TiltyardError)(message, hint, details)
            case _:
                raise RaisedElsewhere(*answer[1:])

    def close(self) -> None:
        """Let the env finish its call and close; if it hangs, its process ends with the fork server."""
        if self._socket.fileno() < 0:
            return
        self._socket.settimeout(_CLOSE_SECONDS)
        with suppress(Exception):
            if self._busy:
                self._connection.recv()
            self._connection.send(("close", ()))
            self._connection.recv()
        self._connection.close()
        self._pool.release(self._index)
