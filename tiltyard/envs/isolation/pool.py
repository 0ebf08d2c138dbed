"""Copies of an env, each as alone as `env.isolate` says: beside each other, in threads or in processes of their own.

Owns the threads and processes; what envs do there is resident.py, and how a group sees them is away.py. Some envs need
this (a graphics context per thread, a library with one simulator per process), others gain from it: while one steps,
the others do.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tiltyard.config.experiment import Env
from tiltyard.envs.episode_stats import episode_seed
from tiltyard.envs.isolation.proxy import Channel, EnvProxy
from tiltyard.envs.isolation.server import EnvServer
from tiltyard.envs.isolation.wire import Line
from tiltyard.envs.make import make_any
from tiltyard.envs.pettingzoo import Parallel
from tiltyard.errors import ConfigError, EnvError, Problem, RaisedElsewhere, TiltyardError, UseError, raised
from tiltyard.plugins.resolve import user_traceback
from tiltyard.processes import reaper
from tiltyard.processes.child import killed_by

_START = (
    "import sys; sys.path.append({root!r}); "
    "from tiltyard.envs.isolation.server import main; main({owner}, {news}, {fds})"
)
_CLOSING = 5.0  # seconds that an env has to close itself
_KINDS = {kind.__name__: kind for kind in (TiltyardError, UseError, EnvError)}


def make_copies(
    env: Env,
    base: Sequence[Path],
    copies: int,
    *,
    render: bool = False,
    seed: int = 0,
    told: Callable[[], None] = lambda: None,
) -> list[Any]:
    """`copies` of an env, the first of which can draw itself with `render`. Where they live apart, they are `Away`.
    `told` is called whenever another one is there. As long as they are, what is started here ends with this process."""
    reaper.begin()
    try:
        made = _made(env, base, copies, render, seed, told)
    except BaseException:
        reaper.end()
        raise
    weakref.finalize(made[0], reaper.end).atexit = False
    return made


def _made(env: Env, base: Sequence[Path], copies: int, render: bool, seed: int, told: Callable[[], None]) -> list[Any]:
    made: list[Any] = []
    if env.isolate == "none":
        for copy in range(copies):
            made.append(make_any(env, base, render and copy == 0))
            told()
        return made
    rooms: Sequence[Channel] = (
        [_Thread(n) for n in range(copies)] if env.isolate == "thread" else EnvProcessPool(copies).rooms
    )
    job = env.model_dump(mode="json"), [str(Path(place).absolute()) for place in base]
    try:
        for copy, room in enumerate(rooms):
            room.ask("make", *job, render and copy == 0, episode_seed(seed, "make", copy, 0))
        for room in rooms:
            made.append(_seen(room, env))
            told()
        return made
    except BaseException:
        for room in rooms:
            room.close()
        raise


def _seen(room: Channel, env: Env) -> EnvProxy | Parallel:
    try:
        away = EnvProxy(room, room.hear())
    except RaisedElsewhere as error:  # it took its process with it
        raise UseError(f"env {env.id} could not be made: it {error.message}", "run it by itself to see why") from error
    return away if away.possible_agents is None else Parallel(away, env.id)


# ---------------------------------------------------------------------------------------------- threads


class _Thread:
    """A room that is a thread of this process."""

    def __init__(self, number: int) -> None:
        self._asked: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._live, name=f"env-{number}", daemon=True)
        self._thread.start()

    def _live(self) -> None:
        resident = EnvServer()
        while (word := self._asked.get()) is not None:
            try:
                self._answers.put((getattr(resident, word[0])(*word[1]), None))
            except KeyboardInterrupt as error:  # no signal comes here: it is the env's own, and must not end the run
                self._answers.put((None, RaisedElsewhere(raised(error), user_traceback(error))))
            except BaseException as error:  # noqa: BLE001 - raised again where it is asked for
                self._answers.put((None, error))

    def ask(self, do: str, *given: Any) -> None:
        self._asked.put((do, given))

    def hear(self) -> Any:
        value, error = self._answers.get()
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """A thread that does not come back cannot be ended; it holds up nothing when the process ends."""
        self.ask("close")
        self._asked.put(None)
        self._thread.join(_CLOSING)


# ---------------------------------------------------------------------------------------------- processes


class EnvProcessPool:
    """Processes for so many envs, and the landlord that started them."""

    def __init__(self, count: int) -> None:
        pairs = [socket.socketpair() for _ in range(count)]
        self._news, control = socket.socketpair()
        theirs = [pair[1].fileno() for pair in pairs]
        root = str(Path(__file__).resolve().parents[3])
        start = _START.format(root=root, owner=os.getpid(), news=control.fileno(), fds=theirs)
        self._landlord = subprocess.Popen(
            [sys.executable, "-P", "-c", start],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            pass_fds=[control.fileno(), *theirs],
            start_new_session=True,
        )
        control.close()
        for _, end in pairs:
            end.close()
        self._text, self._ends = b"", dict[int, int]()
        self._open = set(range(count))
        self.rooms = [_Process(self, place, pair[0]) for place, pair in enumerate(pairs)]

    def end_of(self, place: int) -> str:
        """How a process ended, which has."""
        while place not in self._ends:
            got = self._news.recv(1 << 16)
            if not got:
                code = self._landlord.wait()
                return f"its process ended with the one that had started it ({_status(code)})"
            *lines, self._text = (self._text + got).split(b"\n")
            for line in lines:
                word = json.loads(line)
                self._ends[word["place"]] = word["status"]
        return f"its process {_status(self._ends[place])}"

    def left(self, place: int) -> None:
        """An env is closed; with the last one all that is left ends."""
        self._open.discard(place)
        if not self._open:
            self._news.close()
            self._landlord.wait()


def _status(code: int) -> str:
    return killed_by(-code, explained=True) if code < 0 else f"ended with exit code {code}"


class _Process:
    """A room that is a process."""

    def __init__(self, lodgings: EnvProcessPool, place: int, end: socket.socket) -> None:
        self._lodgings, self._place = lodgings, place
        self._socket, self._line = end, Line(end)
        self._busy = False

    def ask(self, do: str, *given: Any) -> None:
        self._busy = True
        with suppress(BrokenPipeError, ConnectionResetError):  # that it is gone is told by `hear`
            self._line.send((do, given))

    def hear(self) -> Any:
        try:
            word = self._line.receive()
        except EOFError:
            raise RaisedElsewhere(f"did not come back: {self._lodgings.end_of(self._place)}", "") from None
        self._busy = False
        match word:
            case "did", value:
                return value
            case "refused", problems, source:
                raise ConfigError([Problem(**problem) for problem in problems], source)
            case "failed", kind, message, hint, details:
                raise _KINDS.get(kind, TiltyardError)(message, hint, details)
            case _:
                raise RaisedElsewhere(*word[1:])

    def close(self) -> None:
        """Let the env finish what it does and close itself; one that is stuck is ended with its process."""
        if self._socket.fileno() < 0:
            return
        self._socket.settimeout(_CLOSING)
        with suppress(Exception):
            if self._busy:
                self._line.receive()
            self._line.send(("close", ()))
            self._line.receive()
        self._line.close()
        self._lodgings.left(self._place)
