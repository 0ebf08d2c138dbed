"""A worker: fills slots of the shared memory from one group of envs, on the driver's command. It acts with its own copy
of the policy, or through the inference server (inference.py).

    driver ── {"do": "fill", "slot": 2} ──> worker ── {"filled": 2, "version": 17, "episodes": [...], ...} ──> driver

Commands and answers go through a channel; its end ends the worker. It knows nothing of learning,
other workers or the run folder; `save` names the folder for its part of a checkpoint.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from tiltyard.config.experiment import Experiment
from tiltyard.engines.collector import Collector
from tiltyard.engines.local.inference import InferenceClient
from tiltyard.engines.local.shared_memory import ACTING, FULL, SharedMemory
from tiltyard.engines.policies.frozen import frozen_nets
from tiltyard.engines.policies.matchmaking import VersionPool
from tiltyard.engines.policies.policy_set import joined, make_actor
from tiltyard.envs.spaces import spec_from_json
from tiltyard.envs.watchdog import IDLE, RESETTING, STEPPING
from tiltyard.errors import TiltyardError
from tiltyard.models.policy_net import PolicyNet
from tiltyard.processes.channel import Channel, error_message
from tiltyard.processes.resources import usable_cores


def work(task: dict[str, Any], channel: Channel, fds: list[int]) -> None:
    """Run a worker until its channel closes."""
    faulthandler.register(signal.SIGUSR1, file=fds[1], all_threads=True)  # shows where a hung worker is
    torch.set_num_threads(1)
    if task["experiment"]["engine"]["affinity"]:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[task["number"] % len(cores)]})
    try:
        _Worker(task, fds[0], channel, *fds[2:]).run()
    except TiltyardError as error:
        channel.send(error_message(error))
        sys.exit(1)


class _Worker:
    """`requests` is the socket of the inference server, if there is one."""

    def __init__(self, task: dict[str, Any], memory: int, channel: Channel, requests: int | None = None) -> None:
        self.number, self.channel = task["number"], channel
        experiment = Experiment.model_validate(task["experiment"])
        spec, base = spec_from_json(task["spec"]), [Path(place) for place in task["base"]]
        nets = {name: PolicyNet(spec, experiment.model, base, seed=0) for name in experiment.learning}
        self.nets = list(nets.values())
        batched = requests is not None
        self.shared = SharedMemory(
            experiment, spec, self.nets[0], task["workers"], task["slots"], memory, batched=batched
        )
        views = [{name: item.numpy() for name, item in net.state_dict().items()} for net in self.nets]
        self.weights = joined(views)
        self.version = -1
        self.beat = self.shared.beats[self.number]
        self.beat[1] = RESETTING  # making envs may take as long as a reset
        self.client: InferenceClient | None = None
        if requests is not None and self.shared.inference is not None:
            self.client = InferenceClient(self.nets[0], self.shared.inference, self.number, requests, self.beat)
        self.version_pools = {name: VersionPool(past, experiment, spec, base) for name, past in experiment.past.items()}
        actor = self.client or make_actor(
            experiment, spec, nets, frozen_nets(experiment, spec, base), self.version_pools
        )
        share = max(1, usable_cores() // task["workers"])  # all workers step at the same time
        self.collector = Collector(experiment, spec, base, actor, self.shared.rows, self.number, self.beat, share)
        self.beat[1] = IDLE
        self.replaces = task["skip_episodes"] > 0
        if self.replaces:
            uncounted = int(experiment.env.decorrelate > 0)  # the first episode of each copy
            self.collector.envs.skip_episodes(task["skip_episodes"] + uncounted)
        self.answer(ready=True)

    def answer(self, **fields: Any) -> None:
        self.channel.send(fields)

    def run(self) -> None:
        mark = perf_counter()
        for command in self.channel:
            waited = perf_counter() - mark
            if command["do"] == "fill":
                self.fill(command["slot"], waited)
            elif command["do"] == "save":
                self.answer(saved=self.save(Path(command["folder"])))
            elif command["do"] == "set_options":
                self.collector.envs.set_options(command["options"])
                self.answer(set=True)
            elif command["do"] == "load":
                self.fetch_versions()  # those that running episodes need
                self.beat[1] = RESETTING  # re-running an episode takes as long as it did
                notes = self.collector.load(Path(command["folder"]))
                self.answer(loaded=(int(self.collector.envs.stats.number.max()), notes))
                self.beat[1] = IDLE
            mark = perf_counter()
        self.collector.close()

    def save(self, folder: Path) -> tuple[int, str] | None:
        """Write this group's part of a checkpoint; returns a system error for the driver to report."""
        self.beat[1] = RESETTING  # get_state() may take as long as a reset
        if self.replaces:  # else a resume would repeat its predecessor's episodes
            self.collector.begin()
        try:
            self.collector.save(folder)
        except OSError as error:
            return error.errno or 0, error.strerror or str(error)
        finally:
            self.beat[1] = IDLE
        return None

    def fetch_versions(self) -> None:
        """Copy the past versions from the shared memory."""
        for name, pool in self.version_pools.items():
            self.shared.fetch_versions(name, pool)

    def fill(self, slot: int, waited: float) -> None:
        mark = perf_counter()
        if self.client is None and int(self.shared.versions[1]) != self.version:
            self.version = self.shared.fetch(self.weights)
            for net in self.nets:
                net.normaliser.refresh()
            self.fetch_versions()
        spent = {"env": 0.0, "inference": 0.0, "wait": waited}
        frames = -self.collector.envs.stats.frames_taken
        self.shared.states[slot] = ACTING
        self.beat[1] = STEPPING
        episodes = self.collector.fill(self.shared.slots[slot], self.version, spent)
        if self.client is not None:
            self.version = self.client.stamp_versions(self.shared.slots[slot])
        self.beat[1] = IDLE
        self.shared.states[slot] = FULL
        frames += self.collector.envs.stats.frames_taken
        spent["other"] = max(0.0, perf_counter() - mark - spent["env"] - spent["inference"])
        self.answer(
            filled=slot, version=self.version, frames=frames, spent=spent, episodes=[asdict(end) for end in episodes]
        )
