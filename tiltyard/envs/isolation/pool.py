"""Copies of an env, each in a thread or a process of its own, as `env.isolate` says.

    process of the group                                           processes of the envs
      make_isolated ── _ProcessChannel ── starts ────────────────> fork server (processes/fork_server.py)
         │                                                             │ forks one process per env
         │                                                             v
      EnvProxy (proxy.py) ── send/recv ── processes/channel.py ── EnvServer (server.py) ── the env

With `thread`, the channel is a pair of queues and EnvServer runs in a thread of the group's process. Some envs need
isolation (a graphics context per thread, one simulator per process); others gain from it, because all step at once.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiltyard.config.sections import Env
from tiltyard.envs.episodes import episode_seed
from tiltyard.envs.isolation.proxy import EnvChannel, EnvProxy
from tiltyard.envs.isolation.server import EnvServer
from tiltyard.envs.pettingzoo import Parallel
from tiltyard.errors import RaisedElsewhere, TiltyardError, UseError, raised
from tiltyard.plugins.resolve import user_traceback
from tiltyard.processes.channel import error_from
from tiltyard.processes.fork_server import ForkServer
from tiltyard.processes.platforms import require_linux
from tiltyard.processes.resources import require_files

if TYPE_CHECKING:
    from tiltyard.types import Array

_CLOSE_SECONDS = 5.0  # that an env may take to close


def make_isolated(
    env: Env, base: Sequence[Path], copies: int, render: bool, seed: int, heartbeat: Array
) -> list[EnvProxy | Parallel]:
    """Make copies of an env in threads or processes of their own, see `make_copies`."""
    made: list[EnvProxy | Parallel] = []
    channels: Sequence[EnvChannel] = (
        [_ThreadChannel(n) for n in range(copies)] if env.isolate == "thread" else _process_channels(copies)
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


def _make_proxy(channel: EnvChannel, env: Env) -> EnvProxy | Parallel:
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


def _process_channels(count: int) -> list[_ProcessChannel]:
    hint = "set env.isolate=thread, or none"
    require_linux("env.isolate = process", hint)
    require_files(count, f"env.isolate = process with {count} envs", hint)
    server, open_channels = ForkServer(["tiltyard.envs.isolation.server"], hint, mark=False), set[int]()
    return [_ProcessChannel(server, number, open_channels) for number in range(count)]


class _ProcessChannel:
    """An env in a process of its own. The fork server is closed with the last env."""

    def __init__(self, server: ForkServer, number: int, open_channels: set[int]) -> None:
        self._server, self._number, self._open = server, number, open_channels
        self._process = server.fork("tiltyard.envs.isolation.server:work", {}, name=f"tiltyard-e{number}")
        self._busy = False
        open_channels.add(number)

    def send(self, method: str, *arguments: Any) -> None:
        self._busy = True
        self._process.send((method, arguments))

    def recv(self) -> Any:
        try:
            answer = self._process.channel.recv()
        except EOFError:
            raise RaisedElsewhere(f"did not return: {self._explain_exit()}", "") from None
        self._busy = False
        match answer:
            case "returned", value:
                return value
            case "failed", message:
                raise error_from(message)
            case _:
                raise RaisedElsewhere(*answer[1:])

    def _explain_exit(self) -> str:
        """How the process has ended. Exits of the others are kept in their objects."""
        try:
            while self._process.status is None:
                self._server.exits(1.0)
        except TiltyardError as error:
            return f"its process ended, and {error.message}"
        return f"its process {self._process.how()}"

    def close(self) -> None:
        """Let the env finish its call and close; if it hangs, its process ends with the fork server."""
        if self._number not in self._open:
            return
        channel = self._process.channel
        with suppress(Exception):
            if self._busy:
                channel.recv(_CLOSE_SECONDS)
            channel.send(("close", ()))
            channel.recv(_CLOSE_SECONDS)
        channel.close()
        self._open.remove(self._number)
        if not self._open:
            self._server.close()
