"""A learner process beside the driver's: computes the same updates, each with its own part of every minibatch.

    driver ── {"do": "update", "env_steps": 4096, ...} ──> learner ── {"done": "updated"} ──> driver

Commands and answers are lines of JSON through two pipes; a closed pipe ends it. It keeps nothing between updates:
weights, moments and rollout are in shared memory, the rest is in the command. Random draws of the model (dropout) come
from a separate stream per learner and update.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

import torch

from tiltyard.algos.allreduce import PeerLostError, ProcessGroup
from tiltyard.algos.rng import Generators
from tiltyard.config.experiment import Experiment
from tiltyard.engines.collector import FOREIGN, stream_seed
from tiltyard.engines.learner import LEARNER, Learner
from tiltyard.engines.local.learner_group import LearnerMemory
from tiltyard.envs.spaces import spec_from_json
from tiltyard.errors import TiltyardError


def work(task: dict[str, Any], fds: list[int]) -> None:
    """Run a learner process until its pipes close."""
    commands, answers = os.fdopen(fds[0], "r"), os.fdopen(fds[1], "w", buffering=1)
    try:
        _LearnerWorker(task, fds[2], answers).run(commands)
    except TiltyardError as error:
        lost = isinstance(error, PeerLostError)
        _write(answers, {"error": error.message, "hint": error.hint, "details": error.details, "lost": lost})
        sys.exit(1)


def _write(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")


class _LearnerWorker:
    def __init__(self, task: dict[str, Any], memory: int, answers: TextIO) -> None:
        self.rank, self.answers, self.rendezvous = task["number"], answers, Path(task["meeting"])
        experiment = Experiment.model_validate(task["experiment"])
        if experiment.engine.device != "cpu" and torch.cuda.is_available():
            torch.cuda.set_device(self.rank)  # "cuda" means this GPU from here on
        spec, base = spec_from_json(task["spec"]), [Path(place) for place in task["base"]]
        self.learner = Learner(experiment, spec, base, task["policy"])
        self.size = experiment.engine.learners
        self.seed = stream_seed(experiment.seed, FOREIGN, LEARNER + self.learner.place)
        self.memory = LearnerMemory(experiment, spec, self.learner.net, self.learner.algo, memory)
        _write(answers, {"done": "ready"})

    def run(self, commands: TextIO) -> None:
        for line in commands:
            command = json.loads(line)
            if command["do"] == "join":
                self.learner.algo.group = ProcessGroup(self.rendezvous, self.rank, self.size, self.learner.device)
                _write(self.answers, {"done": "joined"})
            elif command["do"] == "update":
                self.update(command)
                _write(self.answers, {"done": "updated"})

    def update(self, message: dict[str, Any]) -> None:
        if torch.get_num_threads() != message["threads"]:
            torch.set_num_threads(message["threads"])
        learner = self.learner
        learner.net.load_arrays(self.memory.weights)
        learner.algo.load(self.memory.read(message["algo"]))
        with Generators(stream_seed(self.seed, self.rank, message["env_steps"])).active():
            learner.algo.update(self.memory.rollout.rows(0, message["rows"]), message["env_steps"])
