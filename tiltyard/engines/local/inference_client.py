"""A worker's side of batched inference: looks like a policy, computes in another process (inference_server.py).

    worker   obs, first, state -> shared memory, number -> socket     waits on its pipe       draws the action itself
    server                       all waiting workers in one batch -> shared memory -> a byte into each one's pipe

Each worker makes its own pipe and sends one end to the server first. So an answer to a dead predecessor reaches no
other worker, and a closed pipe means that the server has ended.
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

NUMBER_BYTES = 4  # of a worker's number in a message


class InferenceServerGone(TiltyardError):
    """The inference server has ended; the driver reports why."""


class InferenceClient:
    """The policy of worker `number`. Only shapes of the `net` are used, never its weights."""

    batched_values = False  # answers contain values, and a request has all rows of the worker

    def __init__(self, net: PolicyNet, inference: InferenceBuffers, number: int, requests: int, beat: Array) -> None:
        self._net, self._exchange, self._number, self._beat = net, inference, number, beat
        self.device = torch.device("cpu")
        self._versions: list[int] = []
        self._requests = socket.socket(fileno=requests)
        self._name = number.to_bytes(NUMBER_BYTES, "little")
        self._wakeup, theirs = os.pipe2(os.O_CLOEXEC)
        try:
            socket.send_fds(self._requests, [self._name], [theirs])
        except OSError as error:
            raise InferenceServerGone("the inference server is gone") from error
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
        """One action for each row, always with its value; drawn here from the server's outputs."""
        self._request(obs, state, first)
        answer, at = self._exchange, self._number
        self._versions.append(int(answer.versions[at]))
        allowed = None if mask is None else np.asarray(mask)
        dist = distributions.ActionDist(self._net.spec.action, answer.params[at], answer.log_std[at], allowed)
        after = {key: torch.from_numpy(array[at].copy()) for key, array in answer.after.items()}
        return choose_action(dist, answer.value[at].copy(), after, greedy=greedy, generator=generator)

    def value(self, obs: ObsIn, state: State, first: Tensor | NDArray[Any]) -> NDArray[Any]:
        """[B] in units of reward."""
        self._request(obs, state, first)
        found: NDArray[Any] = self._exchange.value[self._number].copy()
        return found

    def stamp_versions(self, rollout: Rollout) -> int:
        """Write the version of the weights of each step into a filled rollout; returns the oldest."""
        rollout.policy_version[...] = np.asarray(self._versions)[:, None]
        oldest = min(self._versions)
        self._versions.clear()
        return oldest

    def _request(self, obs: ObsIn, state: State, first: Tensor | NDArray[Any]) -> None:
        """Send a request and wait for the answer. The heartbeat is idle meanwhile: no env is running."""
        request, at = self._exchange, self._number
        for key, array in request.obs.items():
            array[at] = obs[key]
        request.first[at] = first
        for key, array in request.memory.items():
            array[at] = state[key]
        before, self._beat[1] = self._beat[1], IDLE
        try:
            self._requests.send(self._name)
            woken = os.read(self._wakeup, 1)
        except ConnectionError:
            woken = b""
        if not woken:
            raise InferenceServerGone("the inference server is gone")
        self._beat[1] = before
