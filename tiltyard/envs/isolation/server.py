"""The env's side of isolation: makes the env in its own thread or process and does what its group requests.

    group's process                          fork server: python -c ... main(...)
      EnvProcessPool ── one socket per env ───> forks a process per env, which serves its socket
                     <── {"env": 2, "status": -9} ── reports every exit; kills them all if the group's process ends

The fork server imports what envs need before it forks, so ten envs start nearly as fast as one.
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
from tiltyard.envs.isolation.wire import Connection, DropUnsendable, space_parts
from tiltyard.envs.make import frames_per_step, make_any
from tiltyard.envs.pettingzoo import Parallel
from tiltyard.envs.spaces import observation_leaves
from tiltyard.errors import ConfigError, TiltyardError, raised
from tiltyard.plugins.resolve import user_traceback
from tiltyard.processes.child import die_with, take_no_action_on
from tiltyard.processes.resources import rss_bytes

STACK = "tiltyard-stack"  # the anonymous file to which an env's process dumps its stack on SIGUSR1


class EnvServer:
    """One env and the methods its group may call. If `alone` in its process, it owns the global random generators."""

    def __init__(self, *, alone: bool = False) -> None:
        self._alone, self._several = alone, False
        self._memory_before = rss_bytes()
        self._made: Any = None
        self._keeper: Any = None

    def make(self, env: dict[str, Any], base: list[str], render: bool, seed: int) -> dict[str, Any]:
        """Make the env and return what the proxy must know about it."""
        self._seed(seed)
        settings = Env.model_validate(env)
        made: Any = make_any(settings, [Path(place) for place in base], render)
        self._several = isinstance(made, Parallel)
        self._made = made.inner if self._several else made
        self._keeper = state_keeper(made, anywhere=settings.restore_mode == "state")
        observation, action = getattr(made, "observation_space", None), getattr(made, "action_space", None)
        if observation is not None and action is not None:  # refuse unknown spaces here, where they can be named
            observation_leaves(observation)
            action_spec(action)
        return {
            "agents": made.agents if self._several else None,
            "observation_space": space_parts(observation),
            "action_space": space_parts(action),
            "metadata": self._sendable(made.metadata if isinstance(made.metadata, Mapping) else {}),
            "frames_per_step": frames_per_step(made),
            "keeps_state": self._keeper is not None,
        }

    def reset(self, seed: int) -> tuple[Any, Any]:
        self._seed(seed)
        return self._answer(self._made.reset(seed=seed)), self._agents()

    def step(self, action: Any, frames: int) -> list[tuple[Any, Any]]:
        """Call step up to `frames` times; stop when an episode may have ended or agents have changed."""
        done: list[tuple[Any, Any]] = []
        before = self._agents()
        for _ in range(frames):
            answer = self._made.step(action)
            done.append((self._answer(answer), self._agents()))
            if _may_end(answer) or done[-1][1] != before:
                break
        return done

    def render(self) -> Any:
        return self._made.render()

    def get_state(self) -> Any:
        return self._keeper.get_state()

    def set_state(self, state: Any) -> None:
        self._keeper.set_state(state)

    def memory(self) -> int:
        return max(0, rss_bytes() - self._memory_before)

    def close(self) -> None:
        if self._made is not None:
            self._made.close()

    def _agents(self) -> Any:
        """A copy of the env's `agents`: the env may change its list in place."""
        now = getattr(self._made, "agents", None) if self._several else None
        return type(now)(now) if isinstance(now, list | tuple | set) else now

    def _seed(self, seed: int) -> None:
        """Seed the global generators, so that an env that uses them repeats its episodes."""
        if self._alone:
            random.seed(seed)
            np.random.seed(seed)

    def _answer(self, answer: Any) -> Any:
        """Make the infos, which come last, sendable."""
        return (*answer[:-1], self._sendable(answer[-1])) if isinstance(answer, tuple) and answer else answer

    def _sendable(self, value: Any) -> Any:
        return DropUnsendable(value) if self._alone else value


def _may_end(answer: Any) -> bool:
    """Whether the answer is anything but that of a running episode."""
    if not isinstance(answer, tuple) or len(answer) != 5:
        return True
    flags = (each.values() if isinstance(each, Mapping) else (each,) for each in answer[2:4])
    return any(bool(flag) for each in flags for flag in each)


# ---------------------------------------------------------------------------------------------- in its own process


def main(owner: int, control: int, fds: list[int]) -> None:
    """The fork server: fork a process per socket, then report their exits until the group's process ends."""
    die_with(owner)
    take_no_action_on(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
    exits = socket.socket(fileno=control)
    alive: dict[int, int] = {}
    for index, fd in enumerate(fds):
        pid = os.fork()
        if pid == 0:
            exits.close()
            for other in fds[index + 1 :]:
                os.close(other)
            _run_env(fd)
        os.close(fd)
        alive[pid] = index
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    _reap(exits, alive)  # one may have exited before that
    while control not in (ready := select.select([control, reader], [], [])[0]):
        if reader in ready:
            os.read(reader, 4096)
            _reap(exits, alive)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
        with suppress(ProcessLookupError):  # its own children, if it leads a process group
            os.killpg(pid, signal.SIGKILL)
    for pid in alive:
        os.waitpid(pid, 0)
    os._exit(0)


def _reap(exits: socket.socket, alive: dict[int, int]) -> None:
    while alive:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        message = {"env": alive.pop(pid), "status": os.waitstatus_to_exitcode(status)}
        try:
            exits.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return  # the group's process is gone, which the loop will notice


def _run_env(fd: int) -> None:
    """The process of one env; never returns into the fork server's loop."""
    try:
        parent = os.getppid()
        os.setsid()
        die_with(parent)
        if hasattr(os, "memfd_create"):
            faulthandler.register(signal.SIGUSR1, os.memfd_create(STACK, os.MFD_CLOEXEC), all_threads=True)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # output appears at once
        _serve(Connection(socket.socket(fileno=fd)), EnvServer(alone=True))
    except (EOFError, BrokenPipeError):
        os._exit(0)  # the group is gone
    finally:
        os._exit(1)


def _serve(connection: Connection, server: EnvServer) -> None:
    while True:
        method, arguments = connection.recv()
        try:
            connection.send(("returned", getattr(server, method)(*arguments)))
        except BrokenPipeError:
            raise
        except BaseException as error:  # noqa: BLE001 - the group gets all of them
            connection.send(_error_message(error))


def _error_message(error: BaseException) -> tuple[Any, ...]:
    """What an env raised, in a form that can be sent."""
    if isinstance(error, ConfigError):
        return "config_error", [problem.__dict__ for problem in error.problems], error.message.partition(" in ")[2]
    if isinstance(error, TiltyardError):
        return "tiltyard_error", type(error).__name__, error.message, error.hint, error.details
    return "raised", raised(error), user_traceback(error)
