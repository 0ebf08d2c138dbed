"""Child processes that perform one task: JSON lines both ways, nothing pickled, none outlives its parent.

    parent                                   child: python -m MODULE PARENT, which calls `serve`
      task as one line  -> stdin  ------------> performs it
      more messages     -> stdin  ------------> recv(); it exits at the end of stdin, because the parent is gone
                        <- stdout ------------- send(), and finally the result; what an env prints goes to stderr

On Linux the kernel kills a child whose parent dies, even one that is stuck in an env's native code.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from tiltyard.errors import EXIT_FAILED, TiltyardError, UseError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

Message = dict[str, Any]


class Child:
    """The parent's end. `name` and `hint` are for the error when the child dies."""

    def __init__(self, module: str, task: Message, name: str, hint: str) -> None:
        self._name, self._hint = name, hint
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
            start_new_session=True,  # no terminal: an env that reads a password there would stop the whole job
        )
        self.send(task)

    def send(self, message: Message) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # `recv` reports that it is dead
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def recv(self) -> Message:
        """The child's next message; raises the error that it failed with."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.endswith("\n"):  # the child is gone; the last line may be cut
            code = self.process.wait()
            how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            raise TiltyardError(f"{self._name} {how}", self._hint)
        message: Message = json.loads(line)
        if "error" in message:
            kind = UseError if message["wrong_use"] else TiltyardError
            raise kind(message["error"], message["hint"], message["details"])
        return message


@contextmanager
def children(module: str, tasks: Sequence[Message], name: str, hint: str) -> Iterator[list[Child]]:
    """Start one child per task, called `name` and its number; all of them are gone when the context is left."""
    started: list[Child] = []
    try:
        for number, task in enumerate(tasks):
            started.append(Child(module, task, f"{name} {number}", hint))
        yield started
    finally:
        for child in started:
            if child.process.poll() is None:
                child.process.kill()
            child.process.communicate()


# ---------------------------------------------------------------------------------------------- in the child


class Parent:
    """The child's end."""

    def __init__(self, answers: TextIO, messages: queue.SimpleQueue[Message]) -> None:
        self._answers, self._messages = answers, messages

    def send(self, message: Message) -> None:
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()

    def recv(self) -> Message:
        """Wait for the next message; the first one is the task."""
        return self._messages.get()


def serve(parent: int, perform: Callable[[Message, Parent], Message]) -> None:
    """Perform the task read from stdin; the result or the error of `perform` is the last line of stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C may reach all processes of a job; the parent ends this one
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    stdin = os.dup(0)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # an env that reads stdin would take our messages
    channel = Parent(answers, _read_messages(parent, stdin))
    task = channel.recv()
    try:
        result = perform(task, channel)
    except TiltyardError as error:
        wrong_use = isinstance(error, UseError)
        result = {"error": error.message, "hint": error.hint, "details": error.details, "wrong_use": wrong_use}
    channel.send(result)


def take_no_action_on(*numbers: int) -> None:
    """Handle signals by doing nothing; another process decides what follows. SIG_IGN would be inherited by simulators,
    which could then not be terminated."""
    for number in numbers:
        signal.signal(number, lambda number, frame: None)
        signal.siginterrupt(number, False)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies (Linux; elsewhere, closed pipes end it)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(EXIT_FAILED)


def _read_messages(parent: int, pipe: int) -> queue.SimpleQueue[Message]:
    """Read the parent's messages in a thread, and exit when the parent is gone."""
    die_with(parent)
    messages: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def read() -> None:
        text = b""
        while got := os.read(pipe, 1 << 16):  # no file object: Python would wait for its lock at exit
            *lines, text = (text + got).split(b"\n")
            for each in lines:
                messages.put(json.loads(each))
        os._exit(EXIT_FAILED)

    threading.Thread(target=read, daemon=True).start()
    return messages
