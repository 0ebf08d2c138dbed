"""The env's side of isolation: makes the env in its own thread or process and does what its group requests.

The processes are forked by a fork server that has imported this module, so ten envs start nearly as fast as one.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from tiltyard.config.sections import Env
from tiltyard.envs.actions import action_spec
from tiltyard.envs.env_options import options_layer
from tiltyard.envs.episodes import state_keeper
from tiltyard.envs.isolation.space_parts import space_parts
from tiltyard.envs.make import frames_per_step, make_any
from tiltyard.envs.pettingzoo import Parallel
from tiltyard.envs.spaces import observation_leaves
from tiltyard.errors import TiltyardError, raised
from tiltyard.plugins.resolve import user_traceback
from tiltyard.processes.channel import Channel, DropUnsendable, error_message
from tiltyard.processes.resources import rss_bytes

STACK = "tiltyard-stack"  # the anonymous file to which an env's process dumps its stack on SIGUSR1


class EnvServer:
    """One env and the methods its group may call. If `alone` in its process, it owns the global random generators."""

    def __init__(self, *, alone: bool = False) -> None:
        self._alone, self._several = alone, False
        self._memory_before = rss_bytes()
        self._made: Any = None
        self._keeper: Any = None
        self._options_layer: Any = None

    def make(self, env: dict[str, Any], base: list[str], render: bool, seed: int) -> dict[str, Any]:
        """Make the env and return what the proxy must know about it."""
        self._seed(seed)
        settings = Env.model_validate(env)
        made: Any = make_any(settings, [Path(place) for place in base], render)
        self._several = isinstance(made, Parallel)
        self._made = made.inner if self._several else made
        self._keeper = state_keeper(made, anywhere=settings.restore_mode == "state")
        self._options_layer = options_layer(made)
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
            "takes_options": self._options_layer is not None,
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

    def set_options(self, options: dict[str, Any]) -> None:
        self._options_layer.set_options(**options)

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


def work(task: dict[str, Any], channel: Channel, fds: list[int]) -> None:
    """Serve one env through the channel until the group is gone."""
    faulthandler.register(signal.SIGUSR1, os.memfd_create(STACK, os.MFD_CLOEXEC), all_threads=True)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # output appears at once
    server = EnvServer(alone=True)
    with suppress(EOFError, BrokenPipeError):
        while True:
            method, arguments = channel.recv()
            try:
                channel.send(("returned", getattr(server, method)(*arguments)))
            except BrokenPipeError:
                raise
            except TiltyardError as error:
                channel.send(("failed", error_message(error)))
            except BaseException as error:  # noqa: BLE001 - the group gets all of them
                channel.send(("raised", raised(error), user_traceback(error)))
