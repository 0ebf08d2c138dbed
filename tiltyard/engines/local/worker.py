"""A worker: one group of envs and who acts in it, its own copy of the policy or an actor that it asks (remote.py). It
fills slots of the slab as the driver asks.

    driver ── {"do": "fill", "slot": 2} ──> worker ── {"filled": 2, "version": 17, "episodes": [...], ...} ──> driver

Commands and answers are lines of JSON through two pipes; a pipe that closes ends the worker. It knows nothing of
learning, other workers or the run folder, except where it is told to write its part of a checkpoint.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

import torch

from tiltyard.config.experiment import Experiment
from tiltyard.engines.collector import Collector, InWorker
from tiltyard.engines.local.inference_client import InferenceClient, InferenceServerGone
from tiltyard.engines.local.shared_memory import ACTING, FULL, SharedMemory
from tiltyard.engines.policies.frozen import frozen_nets
from tiltyard.engines.policies.opponent_pool import VersionPool
from tiltyard.engines.policies.policy_set import joined, make_actor
from tiltyard.envs.spaces import spec_from_json
from tiltyard.envs.watchdog import IDLE, RESETTING, STEPPING
from tiltyard.errors import DivergedError, TiltyardError
from tiltyard.models.policy_net import PolicyNet
from tiltyard.processes.resources import usable_cores
from tiltyard.run.checkpoint import write_tree


def work(task: dict[str, Any], fds: list[int]) -> None:
    """The whole life of a worker."""
    commands, answers = os.fdopen(fds[0], "r"), os.fdopen(fds[1], "w", buffering=1)
    faulthandler.register(signal.SIGUSR1, file=fds[3], all_threads=True)  # where a worker that hangs is hanging
    torch.set_num_threads(1)
    if task["experiment"]["engine"]["affinity"]:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[task["number"] % len(cores)]})
    try:
        _Worker(task, fds[2], answers, *fds[4:]).obey(commands)
    except TiltyardError as error:
        _report_error(answers, error)
        sys.exit(1)


class _Worker:
    """`door` is where an actor is asked, if there is one."""

    def __init__(self, task: dict[str, Any], memory: int, answers: TextIO, door: int | None = None) -> None:
        self.number, self.answers = task["number"], answers
        experiment = Experiment.model_validate(task["experiment"])
        spec, base = spec_from_json(task["spec"]), [Path(place) for place in task["base"]]
        nets = {name: PolicyNet(spec, experiment.model, base, seed=0) for name in experiment.learning}
        self.nets = list(nets.values())
        batched = door is not None
        self.shared = SharedMemory(
            experiment, spec, self.nets[0], task["workers"], task["slots"], memory, batched=batched
        )
        views = [{name: item.numpy() for name, item in net.state_dict().items()} for net in self.nets]
        self.weights = joined(views)
        self.version = -1
        self.beat = self.shared.beats[self.number]
        self.beat[1] = RESETTING  # making envs may take what their resets may
        self.remote: InferenceClient | None = None
        if door is not None and self.shared.inference is not None:
            self.remote = InferenceClient(self.nets[0], self.shared.inference, self.number, door, self.beat)
        self.version_pools = {name: VersionPool(past, experiment, spec, base) for name, past in experiment.past.items()}
        actor = self.remote or make_actor(
            experiment, spec, nets, frozen_nets(experiment, spec, base), self.version_pools
        )
        share = max(1, usable_cores() // task["workers"])  # all step their envs at the same time
        in_worker = InWorker(self.beat, share)
        self.collector = Collector(experiment, spec, base, actor, self.shared.rows, self.number, in_worker)
        self.beat[1] = IDLE
        self.replaces = task["skip_episodes"] > 0
        if self.replaces:
            untold = int(experiment.env.decorrelate > 0)  # the first of each copy, which was not counted
            self.collector.envs.skip_episodes(task["skip_episodes"] + untold)
        self.answer(ready=True)

    def answer(self, **word: Any) -> None:
        self.answers.write(json.dumps(word) + "\n")

    def obey(self, commands: TextIO) -> None:
        mark = perf_counter()
        for line in commands:
            waited = perf_counter() - mark
            word = json.loads(line)
            if word["do"] == "fill":
                self.fill(word["slot"], waited)
            elif word["do"] == "save":
                self.answer(saved=self.save(Path(word["folder"])))
            elif word["do"] == "load":
                self.restock()  # who plays on is among them
                self.beat[1] = RESETTING  # replaying an episode takes as long as it did
                said = self.collector.load(Path(word["folder"]))
                self.answer(loaded=(int(self.collector.envs.stats.number.max()), said))
                self.beat[1] = IDLE
            mark = perf_counter()
        self.collector.close()

    def save(self, folder: Path) -> tuple[int, str] | None:
        """Write this group's part of a checkpoint; what the system refuses is the driver's to tell."""
        self.beat[1] = RESETTING  # an env's get_state() may take what its reset may
        if self.replaces:  # else a resume would begin with the episodes that its predecessor had
            self.collector.begin()
        try:
            self.collector.save(folder)
        except OSError as error:
            return error.errno or 0, error.strerror or str(error)
        finally:
            self.beat[1] = IDLE
        return None

    def restock(self) -> None:
        """Have the past versions that there are now."""
        for name, pool in self.version_pools.items():
            self.shared.restock(name, pool)

    def fill(self, slot: int, waited: float) -> None:
        mark = perf_counter()
        if self.remote is None and int(self.shared.versions[1]) != self.version:
            self.version = self.shared.fetch(self.weights)
            for net in self.nets:
                net.normaliser.refresh()
            self.restock()
        spent = {"env": 0.0, "inference": 0.0, "wait": waited}
        frames = -self.collector.envs.frames_taken
        self.shared.states[slot] = ACTING
        self.beat[1] = STEPPING
        episodes = self.collector.fill(self.shared.slots[slot], self.version, spent)
        if self.remote is not None:
            self.version = self.remote.date(self.shared.slots[slot])
        self.beat[1] = IDLE
        self.shared.states[slot] = FULL
        frames += self.collector.envs.frames_taken
        spent["other"] = max(0.0, perf_counter() - mark - spent["env"] - spent["inference"])
        self.answer(
            filled=slot, version=self.version, frames=frames, spent=spent, episodes=[asdict(end) for end in episodes]
        )


def _report_error(answers: TextIO, error: TiltyardError) -> None:
    """Say what went wrong, with the arrays that did it where they are what matters."""
    lost = isinstance(error, InferenceServerGone)
    word = {"error": error.message, "hint": error.hint, "details": error.details, "lost": lost, "diverged": ""}
    if isinstance(error, DivergedError):
        word["diverged"] = folder = tempfile.mkdtemp(prefix="tiltyard-diverged-")
        write_tree(Path(folder), "batch", error.batch)
    answers.write(json.dumps(word) + "\n")
