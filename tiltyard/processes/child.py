"""Child processes that perform a task for this one: JSON lines both ways, nothing pickled, none outlives its parent.

    parent                                   child: python -m MODULE PARENT, which calls `serve`
      task as one line  -> stdin  ------------> performs it
      more words        -> stdin  ------------> hear(); the end of stdin: the parent is gone, so it ends
                        <- stdout ------------- tell(), and at last the answer; what an env prints goes to stderr

On Linux the kernel ends a child whose parent dies, even one that is stuck in an env's native code.
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

Word = dict[str, Any]


class Child:
    """The parent's end. `name` and `hint` are for the sentence about one that dies."""

    def __init__(self, module: str, task: Word, name: str, hint: str) -> None:
        self._name, self._hint = name, hint
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
            start_new_session=True,  # no terminal: an env that reads passwords there would stop the whole job
        )
        self.send(task)

    def send(self, word: Word) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # that it is dead is told by `hear`
            self.process.stdin.write(json.dumps(word) + "\n")
            self.process.stdin.flush()

    def recv(self) -> Word:
        """The next line of the child; what it failed with is raised here."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.endswith("\n"):  # nothing more, or the beginning of something
            code = self.process.wait()
            how = f"was killed by signal {-code}" if code < 0 else f"ended by itself with exit code {code}"
            raise TiltyardError(f"{self._name} {how}", self._hint)
        told: Word = json.loads(line)
        if "error" in told:
            kind = UseError if told["wrong_use"] else TiltyardError
            raise kind(told["error"], told["hint"], told["details"])
        return told


@contextmanager
def children(module: str, tasks: Sequence[Word], name: str, hint: str) -> Iterator[list[Child]]:
    """One child per task, called `name` and its number. However this is left, all of them have ended."""
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

    def __init__(self, answers: TextIO, words: queue.SimpleQueue[Word]) -> None:
        self._answers, self._words = answers, words

    def send(self, word: Word) -> None:
        self._answers.write(json.dumps(word) + "\n")
        self._answers.flush()

    def recv(self) -> Word:
        """The next word, the task being the first; waits for it."""
        return self._words.get()


def serve(parent: int, perform: Callable[[Word, Parent], Word]) -> None:
    """Perform the task that comes from stdin; what `perform` returns or fails with is the last line of stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # some send ^C to all processes of a job; the parent ends this one
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    told = os.dup(0)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # an env that reads stdin would take what is meant for us
    line = Parent(answers, _listen_to(parent, told))
    task = line.recv()
    try:
        said = perform(task, line)
    except TiltyardError as error:
        wrong_use = isinstance(error, UseError)
        said = {"error": error.message, "hint": error.hint, "details": error.details, "wrong_use": wrong_use}
    line.send(said)


def take_no_action_on(*numbers: int) -> None:
    """Do nothing about signals that are for another process, which tells what follows from them. Ignoring them would be
    inherited: a simulator that an env starts would be deaf to its terminate(), too."""
    for number in numbers:
        signal.signal(number, lambda number, frame: None)
        signal.siginterrupt(number, False)


def die_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends (Linux; elsewhere closed pipes have to do)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was asked
        os._exit(EXIT_FAILED)


def killed_by(number: int, *, explained: bool = False) -> str:
    """What a signal did to a process; `explained` says who sent the one that cannot be refused, as far as is known."""
    more = f" ({_memory.explain()})" if explained and number == signal.SIGKILL else ""
    with suppress(ValueError):  # real-time signals have no name
        return f"was killed by {signal.Signals(number).name}{more}"
    return f"was killed by signal {number}"


class OutOfMemory:
    """How often the kernel has killed because memory ran out: in our control group, else on the whole machine."""

    def __init__(self, places: Sequence[Path]) -> None:
        self._places = places
        self._seen = self._kills()

    def explain(self) -> str:
        """Of one process that was killed: whether the kernel has killed more than were asked about before."""
        now = self._kills()
        if self._seen is None or now is None:
            return "the kernel does that when memory runs out"
        if now <= self._seen:
            return "from outside: the kernel had memory left"
        self._seen += 1
        return "memory ran out"

    def _kills(self) -> int | None:
        for place in self._places:
            with suppress(OSError, ValueError, KeyError):
                return int(dict(line.split(maxsplit=1) for line in place.read_text().splitlines())["oom_kill"])
        return None


def _counters() -> Iterator[Path]:
    groups = Path("/sys/fs/cgroup")
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, kind, group = line.split(":", 2)
            if number == "0":
                yield groups / group.lstrip("/") / "memory.events"
            elif kind == "memory":
                yield groups / "memory" / group.lstrip("/") / "memory.oom_control"
    yield Path("/proc/vmstat")


_memory = OutOfMemory(list(_counters()))


def _listen_to(parent: int, pipe: int) -> queue.SimpleQueue[Word]:
    """Let this process end when its parent does, however that comes about; until then, what the parent says."""
    die_with(parent)
    words: queue.SimpleQueue[Word] = queue.SimpleQueue()

    def listen() -> None:
        text = b""
        while got := os.read(pipe, 1 << 16):  # no file object: its lock would be waited for when Python ends
            *lines, text = (text + got).split(b"\n")
            for each in lines:
                words.put(json.loads(each))
        os._exit(EXIT_FAILED)

    threading.Thread(target=listen, daemon=True).start()
    return words
