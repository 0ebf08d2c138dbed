"""Child processes that share an evaluation. They speak JSON, nothing is pickled, and none outlives its parent.

    parent                                   child: python -m tiltyard.evaluation.workers PARENT
      task as one line  -> stdin  ------------> performs it (measure.answer)
      keeps stdin open  -> stdin  ------------> a thread waits for its end: the parent is gone, so it ends
                        <- stdout ------------- the answer; what an env prints goes to stderr

On Linux the kernel ends a child whose parent dies, even one that is stuck in an env's native code.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from tiltyard.errors import EXIT_FAILED, TiltyardError, UseError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def share_out(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One child per task, answers in order. A child that fails speaks for all: its sentence is raised, the rest end."""
    children: list[subprocess.Popen[str]] = []
    try:
        for task in tasks:
            child = subprocess.Popen(
                [sys.executable, "-m", "tiltyard.evaluation.workers", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                text=True,
            )
            children.append(child)
            assert child.stdin is not None
            with suppress(BrokenPipeError):  # one that is dead already is told below
                child.stdin.write(json.dumps(task) + "\n")
                child.stdin.flush()
        return [_answer_of(number, child) for number, child in enumerate(children)]
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.communicate()


def _answer_of(number: int, child: subprocess.Popen[str]) -> dict[str, Any]:
    assert child.stdout is not None
    text = child.stdout.read()
    code = child.wait()
    told: dict[str, Any] = json.loads(text) if text.strip() else {}
    if "error" in told:
        kind = UseError if told["wrong_use"] else TiltyardError
        raise kind(told["error"], told["hint"], told["details"])
    if code != 0:
        raise TiltyardError(f"evaluation worker {number} died with exit code {code}", "try --workers 1")
    return told


# ---------------------------------------------------------------------------------------------- in the child


def _child(parent: int) -> None:
    """The task from stdin, the answer to the real stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C goes to all of a terminal's processes; the parent ends this one
    answer_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    told = os.fdopen(os.dup(0), "r")  # the task; its end is the parent's
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # an env that reads stdin would take what is meant for us
    task = json.loads(told.readline() or "null")
    _die_with(parent, told.fileno())
    if task is None:
        return
    from tiltyard.evaluation.measure import answer  # torch takes seconds to import: the parent is watched by now

    try:
        said = answer(task)
    except TiltyardError as error:
        wrong_use = isinstance(error, UseError)
        said = {"error": error.message, "hint": error.hint, "details": error.details, "wrong_use": wrong_use}
    answer_to.write(json.dumps(said))
    answer_to.close()


def _die_with(parent: int, pipe: int) -> None:
    """Let this process end when its parent does, however that comes about."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was asked
        os._exit(EXIT_FAILED)

    def wait() -> None:
        os.read(pipe, 1)
        os._exit(EXIT_FAILED)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    _child(int(sys.argv[1]))
