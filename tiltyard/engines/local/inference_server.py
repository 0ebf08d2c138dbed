"""The inference server: one process with a copy of the policy on the engine's device, which serves all workers.

    wait for a request -> take all that wait -> newer weights, if any -> one forward pass -> answer each worker

It draws no actions and keeps no state: requests and answers, recurrent state included, are in the shared memory.
inference_client.py sends the requests; worker_pool.py starts the server and reports its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from tiltyard.algos.rng import Generators
from tiltyard.config.experiment import Experiment
from tiltyard.engines.collector import FOREIGN, stream_seed
from tiltyard.engines.learner import LEARNER, device_named
from tiltyard.engines.local.inference_client import NUMBER_BYTES
from tiltyard.engines.local.shared_memory import SharedMemory
from tiltyard.envs.spaces import spec_from_json
from tiltyard.errors import TiltyardError, raised
from tiltyard.models.policy_net import PolicyNet

FD_BYTES = socket.CMSG_LEN(4)  # ancillary bytes of one file descriptor; socket.recv_fds would always block
SERVER = LEARNER - 1  # its index among the groups in the seed tree


def work(task: dict[str, Any], fds: list[int]) -> None:
    """Run the inference server. It reports an error as JSON, in memory that it shares with the driver."""
    torch.set_num_threads(1)
    try:
        _Server(task, fds[0], socket.socket(fileno=fds[1])).serve()
    except TiltyardError as error:
        _report_error(fds[2], error)
    except Exception as error:  # noqa: BLE001 - the driver reports it, whatever it is
        _report_error(
            fds[2], TiltyardError(f"the inference server {raised(error)}", "", traceback.format_exc().rstrip())
        )


def _report_error(report_fd: int, error: TiltyardError) -> NoReturn:
    report = {"error": error.message, "hint": error.hint, "details": error.details}
    os.pwrite(report_fd, json.dumps(report).encode(), 0)
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
