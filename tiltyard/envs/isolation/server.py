"""The far end of an env in a thread or process of its own: makes it there and does what its group asks for.

    group's process                          landlord: python -c ... main(...)
      Lodgings ── one socket per env ─────────> forks a process per env, which serves its socket
               <── {"place": 2, "status": -9} ── tells of every death; ends them all when the group's process goes

The landlord imports what envs need before it forks, so that ten envs start nearly as fast as one.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import select
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from tiltyard.config.experiment import Env
from tiltyard.envs.actions import action_spec
from tiltyard.envs.episode_state import state_keeper
from tiltyard.envs.isolation.wire import Line, Loose, space_parts
from tiltyard.envs.make import frames_per_step, make_any
from tiltyard.envs.pettingzoo import Parallel
from tiltyard.envs.spaces import observation_leaves
from tiltyard.errors import ConfigError, TiltyardError, raised
from tiltyard.plugins.resolve import user_traceback
from tiltyard.processes.child import die_with, take_no_action_on
from tiltyard.processes.resources import rss_bytes

STACK = "tiltyard-stack"  # the nameless file that a process with an env writes to where it is, on SIGUSR1


class EnvServer:
    """One env and what can be asked of it. `alone` in its process: then the process's random numbers are its own."""

    def __init__(self, *, alone: bool = False) -> None:
        self._alone, self._several = alone, False
        self._before = rss_bytes()
        self._made: Any = None
        self._keeper: Any = None

    def make(self, env: dict[str, Any], base: list[str], render: bool, seed: int) -> dict[str, Any]:
        """Make the env; the facts about it."""
        self._seed(seed)
        settings = Env.model_validate(env)
        made: Any = make_any(settings, [Path(place) for place in base], render)
        self._several = isinstance(made, Parallel)
        self._made = made.inner if self._several else made
        self._keeper = state_keeper(made, anywhere=settings.restore_mode == "state")
        observes, acts = getattr(made, "observation_space", None), getattr(made, "action_space", None)
        if observes is not None and acts is not None:  # one of another kind is refused here, where it can be named
            observation_leaves(observes)
            action_spec(acts)
        return {
            "agents": made.agents if self._several else None,
            "observes": space_parts(observes),
            "acts": space_parts(acts),
            "metadata": self._sendable(made.metadata if isinstance(made.metadata, Mapping) else {}),
            "frames_per_step": frames_per_step(made),
            "keeps_state": self._keeper is not None,
        }

    def reset(self, seed: int) -> tuple[Any, Any]:
        self._seed(seed)
        return self._answer(self._made.reset(seed=seed)), self._agents()

    def step(self, action: Any, frames: int) -> list[tuple[Any, Any]]:
        """Answers of so many calls of step, fewer when the next one may not be wanted."""
        done: list[tuple[Any, Any]] = []
        there = self._agents()
        for _ in range(frames):
            answer = self._made.step(action)
            done.append((self._answer(answer), self._agents()))
            if _may_end(answer) or done[-1][1] != there:
                break
        return done

    def render(self) -> Any:
        return self._made.render()

    def get_state(self) -> Any:
        return self._keeper.get_state()

    def set_state(self, state: Any) -> None:
        self._keeper.set_state(state)

    def weight(self) -> int:
        return max(0, rss_bytes() - self._before)

    def close(self) -> None:
        if self._made is not None:
            self._made.close()

    def _agents(self) -> Any:
        """Who is there now, as the env says it; a copy, because the env may go on with the same list."""
        now = getattr(self._made, "agents", None) if self._several else None
        return type(now)(now) if isinstance(now, list | tuple | set) else now

    def _seed(self, seed: int) -> None:
        """An env that draws from the process's own random numbers draws the same for the same episode."""
        if self._alone:
            random.seed(seed)
            np.random.seed(seed)

    def _answer(self, answer: Any) -> Any:
        """The infos come last."""
        return (*answer[:-1], self._sendable(answer[-1])) if isinstance(answer, tuple) and answer else answer

    def _sendable(self, value: Any) -> Any:
        return Loose(value) if self._alone else value


def _may_end(answer: Any) -> bool:
    """Whether anything but an episode that goes on was answered."""
    if not isinstance(answer, tuple) or len(answer) != 5:
        return True
    flags = (each.values() if isinstance(each, Mapping) else (each,) for each in answer[2:4])
    return any(bool(flag) for each in flags for flag in each)


# ---------------------------------------------------------------------------------------------- in its own process


def main(owner: int, control: int, fds: list[int]) -> None:
    """The landlord: a process per socket, then news of their deaths until the group's process goes."""
    die_with(owner)
    take_no_action_on(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
    news = socket.socket(fileno=control)
    alive: dict[int, int] = {}
    for place, fd in enumerate(fds):
        pid = os.fork()
        if pid == 0:
            news.close()
            for other in fds[place + 1 :]:
                os.close(other)
            _live(fd)
        os.close(fd)
        alive[pid] = place
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    _reap(news, alive)  # one may have died before that
    while control not in (ready := select.select([control, reader], [], [])[0]):
        if reader in ready:
            os.read(reader, 4096)
            _reap(news, alive)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
        with suppress(ProcessLookupError):  # its own children, if it has come to lead a group
            os.killpg(pid, signal.SIGKILL)
    for pid in alive:
        os.waitpid(pid, 0)
    os._exit(0)


def _reap(news: socket.socket, alive: dict[int, int]) -> None:
    while alive:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        word = {"place": alive.pop(pid), "status": os.waitstatus_to_exitcode(status)}
        try:
            news.sendall(json.dumps(word).encode() + b"\n")
        except OSError:
            return  # nobody is left to be told, which the loop will see


def _live(fd: int) -> None:
    """A process with one env; it never returns into the landlord's loop."""
    try:
        parent = os.getppid()
        os.setsid()
        die_with(parent)
        if hasattr(os, "memfd_create"):
            faulthandler.register(signal.SIGUSR1, os.memfd_create(STACK, os.MFD_CLOEXEC), all_threads=True)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # what it prints is seen when it does
        _serve(Line(socket.socket(fileno=fd)), EnvServer(alone=True))
    except (EOFError, BrokenPipeError):
        os._exit(0)  # the group has gone
    finally:
        os._exit(1)


def _serve(line: Line, resident: EnvServer) -> None:
    while True:
        do, given = line.receive()
        try:
            word = ("did", getattr(resident, do)(*given))
            line.send(word)
        except BrokenPipeError:
            raise
        except BaseException as error:  # noqa: BLE001 - all of it is told
            line.send(told(error))


def told(error: BaseException) -> tuple[Any, ...]:
    """What an env raised, as it is told to its group."""
    if isinstance(error, ConfigError):
        return "refused", [problem.__dict__ for problem in error.problems], error.message.partition(" in ")[2]
    if isinstance(error, TiltyardError):
        return "failed", type(error).__name__, error.message, error.hint, error.details
    return "raised", raised(error), user_traceback(error)
