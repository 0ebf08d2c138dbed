"""A worker's side of a batched actor: the face of a policy whose numbers come from another process (actor.py).

    worker   obs, first, memory -> slab, "I ask" -> door        waits on its pipe        draws the action itself
    actor                               all that wait, in one batch -> slab -> a byte into each one's pipe

A worker makes the pipe itself and introduces itself with its end for the actor. So what was answered to a predecessor
went into a pipe that nobody reads, and a pipe that ends is an actor that has ended.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiltyard.engines.local.shared_memory import InferenceBuffers
from tiltyard.envs.watchdog import IDLE
from tiltyard.errors import TiltyardError
from tiltyard.models import distributions
from tiltyard.models.policy_net import ObsIn, PolicyNet, PolicyOutput, choose_action
from tiltyard.models.recurrent import State
from tiltyard.types import Array, Rollout

NUMBER = 4  # bytes of a worker's number in a message


class InferenceServerGone(TiltyardError):
    """Nobody answers any more; why is known to whoever started the actor."""


class InferenceClient:
    """The policy as worker `number` has it. Of the `net` only shapes are used, never its weights."""

    batched_values = False  # the actor has them at once, and a question has as many rows as the worker

    def __init__(self, net: PolicyNet, inference: InferenceBuffers, number: int, door: int, beat: Array) -> None:
        self._net, self._exchange, self._number, self._beat = net, inference, number, beat
        self.device = torch.device("cpu")
        self._versions: list[int] = []
        self._door = socket.socket(fileno=door)
        self._name = number.to_bytes(NUMBER, "little")
        self._bell, theirs = os.pipe2(os.O_CLOEXEC)
        try:
            socket.send_fds(self._door, [self._name], [theirs])
        except OSError as error:
            raise InferenceServerGone("the actor is gone") from error
        finally:
            os.close(theirs)

    def initial_state(self, rows: int) -> State:
        return self._net.initial_state(rows)

    def act(
        self,
        obs: ObsIn,
        state: State,
        first: Tensor | NDArray[Any],
        mask: Tensor | NDArray[Any] | None,
        *,
        greedy: bool,
        generator: torch.Generator | None = None,
        with_value: bool = True,
    ) -> PolicyOutput:
        """One decision for each row, always with its value; drawn here, from the numbers that the actor gives."""
        self._ask(obs, state, first)
        told, at = self._exchange, self._number
        self._versions.append(int(told.versions[at]))
        allowed = None if mask is None else np.asarray(mask)
        dist = distributions.ActionDist(self._net.spec.action, told.params[at], told.log_std[at], allowed)
        after = {key: torch.from_numpy(array[at].copy()) for key, array in told.after.items()}
        return choose_action(dist, told.value[at].copy(), after, greedy=greedy, generator=generator)

    def value(self, obs: ObsIn, state: State, first: Tensor | NDArray[Any]) -> NDArray[Any]:
        """[B] in units of reward."""
        self._ask(obs, state, first)
        found: NDArray[Any] = self._exchange.value[self._number].copy()
        return found

    def date(self, rollout: Rollout) -> int:
        """Write into a rollout that was just filled which weights decided each step; returns the oldest."""
        rollout.policy_version[...] = np.asarray(self._versions)[:, None]
        oldest = min(self._versions)
        self._versions.clear()
        return oldest

    def _ask(self, obs: ObsIn, state: State, first: Tensor | NDArray[Any]) -> None:
        """Lay out a question and wait for the answer. Meanwhile no env is to blame for the time that passes."""
        asked, at = self._exchange, self._number
        for key, array in asked.obs.items():
            array[at] = obs[key]
        asked.first[at] = first
        for key, array in asked.memory.items():
            array[at] = state[key]
        before, self._beat[1] = self._beat[1], IDLE
        try:
            self._door.send(self._name)
            rung = os.read(self._bell, 1)
        except ConnectionError:
            rung = b""
        if not rung:
            raise InferenceServerGone("the actor is gone")
        self._beat[1] = before
