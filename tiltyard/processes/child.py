"""Python processes of ours that perform one task and talk through a channel; none outlives its parent.

    parent: Child("module:function", task)        child: function(task, parent) in a session of its own
      task, then further messages  ────────────>    parent.recv(); it exits when the parent is gone
                                   <────────────    parent.send(), and finally the result, or the error it raised

On Linux the kernel kills a child whose parent dies, even one that is stuck in an env's native code.
"""

from __future__ import annotations

import importlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from tiltyard.errors import EXIT_FAILED, TiltyardError
from tiltyard.processes.channel import Channel, error_from, error_message
from tiltyard.processes.exit_reason import exit_text
from tiltyard.processes.lifetime import die_with, take_no_action_on

POLL_SECONDS = 0.05  # between two checks whether a silent child is alive: a fork of it may hold its channel
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

Message = dict[str, Any]


def start_python(
    function: str,
    *arguments: Any,
    fds: Sequence[int],
    environment: Mapping[str, str],
    stdout: int | IO[bytes] = 2,  # ours is for data
    stderr: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Call a "module:function" in a new Python process. It has no terminal: an env that reads a password there would
    stop the whole job."""
    root = str(Path(__file__).resolve().parents[2])
    module, _, name = function.partition(":")
    code = f"import sys; sys.path.append({root!r}); from {module} import {name}; {name}(*{list(arguments)!r})"
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=environment,
        pass_fds=fds,
        start_new_session=True,
    )


class ChildGone(TiltyardError):
    """A child that has exited, or was killed, without a result."""

    def __init__(self, name: str, status: int, hint: str) -> None:
        super().__init__(f"{name} {exit_text(status)}", hint)
        self.status = status


class Child:
    """The parent's end. `name` and `hint` are for the error when the child dies; `output` takes what it prints."""

    def __init__(
        self,
        function: str,
        task: Message,
        name: str,
        hint: str,
        *,
        environment: Mapping[str, str] | None = None,
        output: tuple[IO[bytes] | int, IO[bytes] | None] = (2, None),
    ) -> None:
        self._name, self._hint = name, hint
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        self.process = start_python(
            "tiltyard.processes.child:serve",
            *(os.getpid(), theirs.fileno(), function),
            fds=[theirs.fileno()],
            environment={**os.environ, **ONE_THREAD} if environment is None else environment,
            stdout=output[0],
            stderr=output[1],
        )
        theirs.close()
        self.send(task)

    def send(self, message: Message) -> None:
        with suppress(BrokenPipeError):  # `recv` reports that it is dead
            self._channel.send(message)

    def recv(self, timeout: float = float("inf")) -> Message:
        """The child's next message; raises the error that it failed with or died of, or TimeoutError."""
        until = time.monotonic() + timeout
        while not self._channel.is_ready(POLL_SECONDS) and self.process.poll() is None:
            if time.monotonic() > until:
                raise TimeoutError
        try:
            if not self._channel.is_ready():
                raise EOFError
            message: Message = self._channel.recv()
        except EOFError as error:
            raise ChildGone(self._name, self.process.wait(), self._hint) from error
        if "error" in message:
            raise error_from(message)
        return message

    def close(self) -> None:
        """End it if it runs, with its process group."""
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._channel.close()


@contextmanager
def children(function: str, tasks: Sequence[Message], name: str, hint: str) -> Iterator[list[Child]]:
    """Start one child per task, called `name` and its number; all of them are gone when the context is left."""
    started: list[Child] = []
    try:
        for number, task in enumerate(tasks):
            started.append(Child(function, task, f"{name} {number}", hint))
        yield started
    finally:
        for child in started:
            child.close()


# ---------------------------------------------------------------------------------------------- in the child


class Parent:
    """The child's end. A thread reads what the parent sends, and ends this process when the parent is gone."""

    def __init__(self, channel: Channel) -> None:
        self.send, self._channel = channel.send, channel
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with suppress(EOFError):
            while True:
                self._messages.put(self._channel.recv())
        os._exit(EXIT_FAILED)

    def recv(self) -> Message:
        """Wait for the next message."""
        return self._messages.get()


def serve(parent: int, fd: int, function: str) -> None:
    """Call the function with the task that the parent sends; its result or error is the last message."""
    die_with(parent)
    take_no_action_on(signal.SIGINT)  # ^C may reach all processes of a job; the parent ends this one
    channel = Parent(Channel(fd))
    task = channel.recv()
    module, _, name = function.partition(":")
    try:
        result = getattr(importlib.import_module(module), name)(task, channel)
    except TiltyardError as error:
        result = error_message(error)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    channel.send(result)
    os._exit(0)  # skip threads and exit handlers of simulators
