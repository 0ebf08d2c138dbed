"""Batched inference: one process with a copy of the policy on the engine's device serves all workers.

    worker   obs, first, state -> shared memory, number -> socket     waits on its pipe       draws the action itself
    server   all waiting workers -> newer weights, if any -> one forward pass -> shared memory -> a byte into each pipe

The server draws no actions and keeps no state: requests and answers, recurrent state included, are in the shared
memory. Each worker makes its own pipe and sends one end to the server first. So an answer to a dead predecessor reaches
no other worker, and a closed pipe means that the server has ended. worker_pool.py starts it and reports its end.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiltyard.algos.rng import Generators
from tiltyard.config.experiment import Experiment
from tiltyard.engines.collector import FOREIGN, stream_seed
from tiltyard.engines.learner import LEARNER, device_named
from tiltyard.engines.local.shared_memory import InferenceBuffers, SharedMemory
from tiltyard.envs.spaces import spec_from_json
from tiltyard.envs.watchdog import IDLE
from tiltyard.errors import TiltyardError, raised
from tiltyard.models import distributions
from tiltyard.models.policy_net import ObsIn, PolicyNet, PolicyOutput, choose_action
from tiltyard.models.recurrent import State
from tiltyard.processes.channel import Channel, error_message
from tiltyard.types import Array, Rollout

NUMBER_BYTES = 4  # of a worker's number in a message
FD_BYTES = socket.CMSG_LEN(4)  # ancillary bytes of one file descriptor; socket.recv_fds would always block
SERVER = LEARNER - 1  # its index among the groups in the seed tree


def work(task: dict[str, Any], channel: Channel, fds: list[int]) -> None:
    """Run the inference server. All that it sends to the driver is the error that ends it."""
    torch.set_num_threads(1)
    try:
        _Server(task, fds[0], socket.socket(fileno=fds[1])).serve()
    except Exception as error:  # noqa: BLE001 - the driver reports it, whatever it is
        if not isinstance(error, TiltyardError):
            error = TiltyardError(f"the inference server {raised(error)}", "", traceback.format_exc().rstrip())
        channel.send(error_message(error))
        sys.exit(1)


class _Server:
    def __init__(self, task: dict[str, Any], memory: int, requests: socket.socket) -> None:
        self.requests = requests
        experiment = Experiment.model_validate(task["experiment"])
        spec, base = spec_from_json(task["spec"]), [Path(place) for place in task["base"]]
        net = PolicyNet(spec, experiment.model, base, seed=0)
        self.shared = SharedMemory(experiment, spec, net, task["workers"], task["slots"], memory, batched=True)
        assert self.shared.inference is not None
        self.inference = self.shared.inference
        self.net = net.to(device_named(experiment.engine.device))
        self.weights = net.arrays()
        self.version = -1
        self.seed = stream_seed(experiment.seed, FOREIGN, SERVER)
        self.wakeups: dict[int, int] = {}  # worker -> the pipe on which a byte wakes it

    def serve(self) -> None:
        """Answer until the fork server ends this process. The model's random draws depend only on the version of the
        weights, so that a resumed run draws the same."""
        waiting = self.recv()
        while True:
            self.version = self.shared.fetch(self.weights)
            self.net.load_arrays(self.weights)
            with Generators(stream_seed(self.seed, FOREIGN, self.version)).active():
                while int(self.shared.versions[1]) == self.version:
                    self.answer(waiting)
                    waiting = self.recv()

    def recv(self) -> list[int]:
        """The workers that wait for an answer, at least one."""
        waiting: set[int] = set()
        while True:
            try:
                message, fds, _, _ = self.requests.recvmsg(
                    NUMBER_BYTES, FD_BYTES, socket.MSG_DONTWAIT if waiting else 0
                )
            except BlockingIOError:
                return sorted(waiting)
            if not message:
                sys.exit(0)
            number = int.from_bytes(message, "little")
            if fds:  # a new worker; its predecessor is gone
                waiting.discard(number)
                if number in self.wakeups:
                    os.close(self.wakeups[number])
                self.wakeups[number] = int.from_bytes(fds[0][2], sys.byteorder)
            else:
                waiting.add(number)

    def answer(self, waiting: list[int]) -> None:
        """Run one forward pass for all of them."""
        net, inference = self.net, self.inference
        obs = {key: _rows_of(array, waiting) for key, array in inference.obs.items()}
        memory = {
            key: torch.as_tensor(_rows_of(array, waiting), device=net.device) for key, array in inference.memory.items()
        }
        params, value, after = net.infer(obs, memory, _rows_of(inference.first, waiting))
        answers = [(inference.params, params), (inference.value, net.normaliser.denormalise_value(value))]
        answers += [(array, after[key].cpu().numpy()) for key, array in inference.after.items()]
        for target, numbers in answers:
            target[waiting] = numbers.reshape(len(waiting), *target.shape[1:])
        inference.log_std[waiting] = net.log_std.detach().cpu().numpy()
        inference.versions[waiting] = self.version
        inference.counts[...] += (1, len(value))
        for number in waiting:
            with contextlib.suppress(BrokenPipeError):  # it died while it waited
                os.write(self.wakeups[number], b"!")


def _rows_of(array: np.ndarray[Any, Any], waiting: list[int]) -> np.ndarray[Any, Any]:
    """The rows of some workers, concatenated; a copy, because a replaced worker may still write."""
    return array[waiting].reshape(-1, *array.shape[2:])


# ---------------------------------------------------------------------------------------------- in a worker


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
