"""A learner beside the driver's, in a process of its own: does the same updates, with its part of every minibatch.

    driver ── {"do": "update", "env_steps": 4096, ...} ──> colearner ── {"said": "updated"} ──> driver

Commands and answers are lines of JSON through two pipes; a pipe that closes ends it. It keeps nothing from one update
to the next: weights, moments and rollout are on the board, the rest is in the command. What its model draws from the
process-wide generators (dropout) comes from a stream of its own for each update, since its samples are others too.
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
    """The whole life of a colearner."""
    commands, answers = os.fdopen(fds[0], "r"), os.fdopen(fds[1], "w", buffering=1)
    try:
        _Colearner(task, fds[2], answers).obey(commands)
    except TiltyardError as error:
        lost = isinstance(error, PeerLostError)
        _write(answers, {"error": error.message, "hint": error.hint, "details": error.details, "lost": lost})
        sys.exit(1)


def _write(answers: TextIO, word: dict[str, Any]) -> None:
    answers.write(json.dumps(word) + "\n")


class _Colearner:
    def __init__(self, task: dict[str, Any], memory: int, answers: TextIO) -> None:
        self.rank, self.answers, self.rendezvous = task["number"], answers, Path(task["meeting"])
        experiment = Experiment.model_validate(task["experiment"])
        if experiment.engine.device != "cpu" and torch.cuda.is_available():
            torch.cuda.set_device(self.rank)  # what "cuda" means from here on
        spec, base = spec_from_json(task["spec"]), [Path(place) for place in task["base"]]
        self.learner = Learner(experiment, spec, base, task["policy"])
        self.size = experiment.engine.learners
        self.seed = stream_seed(experiment.seed, FOREIGN, LEARNER + self.learner.place)
        self.board = LearnerMemory(experiment, spec, self.learner.net, self.learner.algo, memory)
        _write(answers, {"said": "ready"})

    def obey(self, commands: TextIO) -> None:
        for line in commands:
            word = json.loads(line)
            if word["do"] == "join":
                self.learner.algo.group = ProcessGroup(self.rendezvous, self.rank, self.size, self.learner.device)
                _write(self.answers, {"said": "joined"})
            elif word["do"] == "update":
                self.update(word)
                _write(self.answers, {"said": "updated"})

    def update(self, word: dict[str, Any]) -> None:
        if torch.get_num_threads() != word["threads"]:
            torch.set_num_threads(word["threads"])
        learner = self.learner
        learner.net.load_arrays(self.board.weights)
        learner.algo.load(self.board.read(word["algo"]))
        with Generators(stream_seed(self.seed, self.rank, word["env_steps"])).active():
            learner.algo.update(self.board.rollout.rows(0, word["rows"]), word["env_steps"])
