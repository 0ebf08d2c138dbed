"""The driver's side of the other learner processes of a policy: all of them compute each update together.

    driver ── shared memory: rollout, weights, moments ──> learner 1, 2, ...
    driver ── {"do": "update", "env_steps": 4096, ...} ──> each learner ── {"done": "updated"} ──> driver
    at every gradient step the learners sum their gradients (algos/allreduce.py)

Before each update every learner gets the whole state: it has nothing to save, and sees everything that was loaded or
adopted since. A learner that ends, ends the training: its cause is raised here.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from tiltyard.algos.allreduce import TIMEOUT, PeerLostError, ProcessGroup
from tiltyard.algos.own_algorithm import OwnAlgorithm
from tiltyard.algos.ppo import Ppo
from tiltyard.config.experiment import Experiment
from tiltyard.engines.collector import empty_rollout
from tiltyard.engines.local import LEARNER, PRELOAD
from tiltyard.engines.local.shared_memory import Layout, gather, make_memory
from tiltyard.envs.spaces import spec_to_json
from tiltyard.errors import TiltyardError
from tiltyard.models.policy_net import PolicyNet
from tiltyard.processes.channel import error_from
from tiltyard.processes.fork_server import Forked, ForkServer
from tiltyard.types import Array, EnvSpec, Rollout, Tree

GRACE = 10.0  # seconds to wait for the cause when a learner is lost
HINT = "`tiltyard resume` continues; `tiltyard fork` with engine.learners=1 runs in one process"


class LearnerMemory:
    """Written by the driver before an update, read by the learners; both build the same layout."""

    def __init__(
        self, experiment: Experiment, spec: EnvSpec, net: PolicyNet, algo: Ppo | OwnAlgorithm, fd: int | None = None
    ) -> None:
        measure = Layout()
        self._lay_out(experiment, spec, net, algo, measure)
        self.fd = make_memory(measure.size) if fd is None else fd
        self._lay_out(experiment, spec, net, algo, Layout(mmap.mmap(self.fd, measure.size)))

    def _lay_out(
        self, experiment: Experiment, spec: EnvSpec, net: PolicyNet, algo: Ppo | OwnAlgorithm, layout: Layout
    ) -> None:
        def like(arrays: Mapping[str, Array]) -> dict[str, Array]:
            return {name: layout.array(name, array.shape, array.dtype) for name, array in arrays.items()}

        tree = algo.save()
        adam, self.loss = tree["adam"], like(tree.get("loss", {}))
        self.weights, self.first, self.second = like(net.arrays()), like(adam["first"]), like(adam["second"])
        self.rollout: Rollout = empty_rollout(experiment, spec, net, experiment.engine.envs, layout.array)

    def write(self, rollout: Rollout, weights: Mapping[str, Array], algo: Tree) -> Tree:
        """Write all arrays (the rollout may have fewer rows); returns the rest of the algorithm's state, as JSON."""
        gather([rollout], self.rollout)
        adam = algo["adam"]
        moments = ((self.first, adam["first"]), (self.second, adam["second"]))
        for ours, theirs in ((self.weights, weights), (self.loss, algo.get("loss", {})), *moments):
            for name, array in ours.items():
                array[...] = theirs[name]
        return {**algo, "adam": {"steps": adam["steps"]}, "loss": {}}

    def read(self, rest: Tree) -> Tree:
        """The algorithm's state: the arrays here and what `write` returned."""
        return {**rest, "adam": {**rest["adam"], "first": self.first, "second": self.second}, "loss": self.loss}


class LearnerProcesses:
    """Learners 1 .. engine.learners - 1 of a policy; the driver's own is rank 0 of the `group`."""

    def __init__(
        self,
        experiment: Experiment,
        spec: EnvSpec,
        base: Sequence[Path],
        policy: str,
        net: PolicyNet,
        algo: Ppo | OwnAlgorithm,
    ) -> None:
        size = experiment.engine.learners
        self._memory = LearnerMemory(experiment, spec, net, algo)
        self._fork_server = ForkServer(PRELOAD, "engine.learners=1 needs no learner processes")
        self._learners: list[Forked] = []  # by rank, without the driver's
        self._errors: dict[Forked, dict[str, Any]] = {}
        rendezvous = Path(tempfile.mkdtemp(prefix="tiltyard-rendezvous-"))  # for this user only
        task = {
            "experiment": experiment.model_dump(mode="json", by_alias=True),
            "spec": spec_to_json(spec),
            "base": [str(Path(place).absolute()) for place in base],
            "policy": policy,
            "meeting": str(rendezvous),
        }
        try:
            for rank in range(1, size):
                started = self._fork_server.fork(
                    LEARNER, {**task, "number": rank}, [self._memory.fd], name=f"tiltyard-l{rank}"
                )
                self._learners.append(started)
            self._wait_for("ready")  # before anybody waits for them in the meeting
            self._send({"do": "join"})
            self.group = ProcessGroup(rendezvous, 0, size, net.log_std.device, self._check_exits)
            self._wait_for("joined")
        except BaseException:
            self.close()
            raise
        finally:
            shutil.rmtree(rendezvous, ignore_errors=True)

    @contextlib.contextmanager
    def updating(self, rollout: Rollout, weights: Mapping[str, Array], algo: Tree, env_steps: int) -> Iterator[None]:
        """Within this, all learners compute the update that the driver computes here."""
        rest = self._memory.write(rollout, weights, algo)
        place = {"rows": rollout.reward.shape[1], "env_steps": env_steps}
        self._send({"do": "update", **place, "algo": rest, "threads": torch.get_num_threads()})
        try:
            yield
        except PeerLostError as error:
            raise self._cause() from error
        self._wait_for("updated")

    # ------------------------------------------------------------------------------------------ messages

    def _send(self, command: dict[str, Any]) -> None:
        for learner in self._learners:
            learner.send(command)

    def _wait_for(self, wanted: str) -> None:
        """Wait until all learners have reported this."""
        waiting = list(self._learners)
        until = time.monotonic() + TIMEOUT.total_seconds()
        while waiting:
            left = max(0.0, until - time.monotonic())
            ends = [self._fork_server.fileno(), *(each.channel.fileno() for each in waiting)]
            ready = wait(ends, left)
            if not ready or self._lost():
                raise self._cause()
            for learner in [each for each in waiting if each.channel.fileno() in ready]:
                if self._recv(learner) == wanted:
                    waiting.remove(learner)

    def _recv(self, learner: Forked) -> str:
        """What a learner has done; empty if it has failed or is gone."""
        with contextlib.suppress(EOFError):
            message = learner.channel.recv()
            if "error" in message:
                self._errors[learner] = message
            return str(message.get("done", ""))
        return ""

    def _lost(self) -> list[Forked]:
        """The learners that are gone."""
        self._fork_server.exits()
        return [learner for learner in self._learners if learner.status is not None]

    def _check_exits(self) -> None:
        if self._lost():
            raise PeerLostError("a learner is gone")

    # ------------------------------------------------------------------------------------------ faults

    def _cause(self) -> TiltyardError:
        """Why a learner is gone; learners that merely lost the others are not the cause."""
        until = time.monotonic() + GRACE
        while True:
            for learner in self._lost():
                if found := self._reported_error(learner):
                    return found
            left = until - time.monotonic()
            if left <= 0 or not wait([self._fork_server.fileno()], left):
                minutes = TIMEOUT.total_seconds() / 60
                return TiltyardError(f"the learners have not answered each other for {minutes:g} minutes", HINT)

    def _reported_error(self, learner: Forked) -> TiltyardError | None:
        """The error of a learner that has ended: its report, or its exit code."""
        while learner not in self._errors and learner.channel.is_ready() and self._recv(learner):
            pass
        if learner in self._errors:
            report = self._errors[learner]
            return None if report["kind"] == PeerLostError.__name__ else error_from(report)
        rank = 1 + self._learners.index(learner)
        return TiltyardError(f"learner {rank} (process {learner.pid}) {learner.how()}", HINT)

    def close(self) -> None:
        """End all processes and close their files."""
        self._fork_server.close()
        for learner in self._learners:
            learner.channel.close()
        os.close(self._memory.fd)
