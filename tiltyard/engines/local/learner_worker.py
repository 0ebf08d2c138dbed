"""A learner process beside the driver's: computes the same updates, each with its own part of every minibatch.

    driver ── {"do": "update", "env_steps": 4096, ...} ──> learner ── {"done": "updated"} ──> driver

Commands and answers go through a channel; its end ends it. It keeps nothing between updates:
weights, moments and rollout are in shared memory, the rest is in the command. Random draws of the model (dropout) come
from a separate stream per learner and update.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from tiltyard.algos.allreduce import ProcessGroup
from tiltyard.algos.rng import Generators
from tiltyard.config.experiment import Experiment
from tiltyard.engines.collector import FOREIGN, stream_seed
from tiltyard.engines.learner import LEARNER, Learner
from tiltyard.engines.local.learner_group import LearnerMemory
from tiltyard.envs.spaces import spec_from_json
from tiltyard.errors import TiltyardError
from tiltyard.processes.channel import Channel, error_message


def work(task: dict[str, Any], channel: Channel, fds: list[int]) -> None:
    """Run a learner process until its channel closes."""
    try:
        learner = _LearnerWorker(task, fds[0])
        channel.send({"done": "ready"})
        for command in channel:
            channel.send({"done": learner.run(command)})
    except TiltyardError as error:
        channel.send(error_message(error))
        sys.exit(1)


class _LearnerWorker:
    def __init__(self, task: dict[str, Any], memory: int) -> None:
        self.rank, self.rendezvous = task["number"], Path(task["meeting"])
        experiment = Experiment.model_validate(task["experiment"])
        if experiment.engine.device != "cpu" and torch.cuda.is_available():
            torch.cuda.set_device(self.rank)  # "cuda" means this GPU from here on
        spec, base = spec_from_json(task["spec"]), [Path(place) for place in task["base"]]
        self.learner = Learner(experiment, spec, base, task["policy"])
        self.size = experiment.engine.learners
        self.seed = stream_seed(experiment.seed, FOREIGN, LEARNER + self.learner.place)
        self.memory = LearnerMemory(experiment, spec, self.learner.net, self.learner.algo, memory)

    def run(self, command: dict[str, Any]) -> str:
        """Execute a command; returns what has been done."""
        if command["do"] == "join":
            self.learner.algo.group = ProcessGroup(self.rendezvous, self.rank, self.size, self.learner.device)
            return "joined"
        self.update(command)
        return "updated"

    def update(self, message: dict[str, Any]) -> None:
        if torch.get_num_threads() != message["threads"]:
            torch.set_num_threads(message["threads"])
        learner = self.learner
        learner.net.load_arrays(self.memory.weights)
        learner.forget_loss()
        learner.algo.load(self.memory.read(message["algo"]))
        with Generators(stream_seed(self.seed, self.rank, message["env_steps"])).active():
            learner.algo.update(self.memory.rollout.rows(0, message["rows"]), message["env_steps"])
