"""The batched actor: one process with a copy of the policy on the engine's device that decides for all workers.

    wait for somebody -> take all that wait -> newer weights, if there are any -> one forward -> answer each of them

It draws no actions and keeps nothing: questions and answers, memory included, are in the slab. How it is asked is
remote.py; how it is started and what follows from its end is pool.py.
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
from tiltyard.engines.local.inference_client import NUMBER
from tiltyard.engines.local.shared_memory import SharedMemory
from tiltyard.envs.spaces import spec_from_json
from tiltyard.errors import TiltyardError, raised
from tiltyard.models.policy_net import PolicyNet

ROOM = socket.CMSG_LEN(4)  # bytes that a file descriptor takes beside a message; socket.recv_fds would always wait
ACTOR = LEARNER - 1  # its place among the groups in the seed tree


def work(task: dict[str, Any], fds: list[int]) -> None:
    """The whole life of an actor. Its last words are JSON, in memory that it shares with the driver."""
    torch.set_num_threads(1)
    try:
        _Actor(task, fds[0], socket.socket(fileno=fds[1])).serve()
    except TiltyardError as error:
        _report_error(fds[2], error)
    except Exception as error:  # noqa: BLE001 - whatever it was, the driver tells it
        _report_error(fds[2], TiltyardError(f"the actor {raised(error)}", "", traceback.format_exc().rstrip()))


def _report_error(words: int, error: TiltyardError) -> NoReturn:
    word = {"error": error.message, "hint": error.hint, "details": error.details}
    os.pwrite(words, json.dumps(word).encode(), 0)
    sys.exit(1)


class _Actor:
    def __init__(self, task: dict[str, Any], memory: int, door: socket.socket) -> None:
        self.door = door
        experiment = Experiment.model_validate(task["experiment"])
        spec, base = spec_from_json(task["spec"]), [Path(place) for place in task["base"]]
        net = PolicyNet(spec, experiment.model, base, seed=0)
        self.shared = SharedMemory(experiment, spec, net, task["workers"], task["slots"], memory, batched=True)
        assert self.shared.inference is not None
        self.inference = self.shared.inference
        self.net = net.to(device_named(experiment.engine.device))
        self.weights = net.arrays()
        self.version = -1
        self.seed = stream_seed(experiment.seed, FOREIGN, ACTOR)
        self.bells: dict[int, int] = {}  # of each worker: where a byte wakes it

    def serve(self) -> None:
        """Answer until the nursery ends this process. What a model draws depends on its weights' version alone, so that
        a resume draws the same."""
        asking = self.hear()
        while True:
            self.version = self.shared.fetch(self.weights)
            self.net.load_arrays(self.weights)
            with Generators(stream_seed(self.seed, FOREIGN, self.version)).active():
                while int(self.shared.versions[1]) == self.version:
                    self.answer(asking)
                    asking = self.hear()

    def hear(self) -> list[int]:
        """Who waits for an answer: at least one."""
        asking: set[int] = set()
        while True:
            try:
                word, more, _, _ = self.door.recvmsg(NUMBER, ROOM, socket.MSG_DONTWAIT if asking else 0)
            except BlockingIOError:
                return sorted(asking)
            if not word:
                sys.exit(0)
            number = int.from_bytes(word, "little")
            if more:  # a new worker: whoever asked under this number before is gone
                asking.discard(number)
                if number in self.bells:
                    os.close(self.bells[number])
                self.bells[number] = int.from_bytes(more[0][2], sys.byteorder)
            else:
                asking.add(number)

    def answer(self, asking: list[int]) -> None:
        """One forward for all of them."""
        net, inference = self.net, self.inference
        obs = {key: _together(array, asking) for key, array in inference.obs.items()}
        memory = {
            key: torch.as_tensor(_together(array, asking), device=net.device) for key, array in inference.memory.items()
        }
        params, value, after = net.infer(obs, memory, _together(inference.first, asking))
        answers = [(inference.params, params), (inference.value, net.normaliser.denormalise_value(value))]
        answers += [(array, after[key].cpu().numpy()) for key, array in inference.after.items()]
        for target, numbers in answers:
            target[asking] = numbers.reshape(len(asking), *target.shape[1:])
        inference.log_std[asking] = net.log_std.detach().cpu().numpy()
        inference.versions[asking] = self.version
        inference.counts[...] += (1, len(value))
        for number in asking:
            with contextlib.suppress(BrokenPipeError):  # it died while it waited
                os.write(self.bells[number], b"!")


def _together(array: np.ndarray[Any, Any], asking: list[int]) -> np.ndarray[Any, Any]:
    """The rows of some workers under each other, as a copy: a worker that was replaced may write meanwhile."""
    return array[asking].reshape(-1, *array.shape[2:])
