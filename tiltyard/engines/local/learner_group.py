"""The driver's side of the other learner processes of a policy: all of them compute each update together.

    driver ── shared memory: rollout, weights, moments ──> learner 1, 2, ...
    driver ── {"do": "update", "env_steps": 4096, ...} ──> each learner ── {"done": "updated"} ──> driver
    at every gradient step the learners sum their gradients (algos/allreduce.py)

Before each update every learner gets the whole state: it has nothing to save, and sees everything that was loaded or
adopted since. A learner that ends, ends the training: its cause is raised here.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from tiltyard.algos.allreduce import TIMEOUT, PeerLostError, ProcessGroup
from tiltyard.algos.ppo import Ppo
from tiltyard.config.experiment import Experiment
from tiltyard.engines.collector import empty_rollout
from tiltyard.engines.local import LEARNER, PRELOAD
from tiltyard.engines.local.shared_memory import Layout, gather, make_memory
from tiltyard.envs.spaces import spec_to_json
from tiltyard.errors import TiltyardError
from tiltyard.models.policy_net import PolicyNet
from tiltyard.processes.exit_reason import killed_by
from tiltyard.processes.fork_server import ForkServer
from tiltyard.types import Array, EnvSpec, Rollout, Tree

GRACE = 10.0  # seconds to wait for the cause when a learner is lost
HINT = "`tiltyard resume` continues; `tiltyard fork` with engine.learners=1 runs in one process"


class LearnerMemory:
    """Written by the driver before an update, read by the learners; both build the same layout."""

    def __init__(self, experiment: Experiment, spec: EnvSpec, net: PolicyNet, algo: Ppo, fd: int | None = None) -> None:
        measure = Layout()
        self._lay_out(experiment, spec, net, algo, measure)
        self.fd = make_memory(measure.size) if fd is None else fd
        self._lay_out(experiment, spec, net, algo, Layout(mmap.mmap(self.fd, measure.size)))

    def _lay_out(self, experiment: Experiment, spec: EnvSpec, net: PolicyNet, algo: Ppo, layout: Layout) -> None:
        def like(arrays: Mapping[str, Array]) -> dict[str, Array]:
            return {name: layout.array(name, array.shape, array.dtype) for name, array in arrays.items()}

        adam = algo.save()["adam"]
        self.weights, self.first, self.second = like(net.arrays()), like(adam["first"]), like(adam["second"])
        self.rollout: Rollout = empty_rollout(experiment, spec, net, experiment.engine.envs, layout.array)

    def write(self, rollout: Rollout, weights: Mapping[str, Array], algo: Tree) -> Tree:
        """Write all arrays (the rollout may have fewer rows); returns the rest of the algorithm's state, as JSON."""
        gather([rollout], self.rollout)
        adam = algo["adam"]
        for ours, theirs in ((self.weights, weights), (self.first, adam["first"]), (self.second, adam["second"])):
            for name, array in ours.items():
                array[...] = theirs[name]
        return {**algo, "adam": {"steps": adam["steps"]}}

    def read(self, rest: Tree) -> Tree:
        """The algorithm's state: the arrays here and what `write` returned."""
        return {**rest, "adam": {**rest["adam"], "first": self.first, "second": self.second}}


@dataclass
class _LearnerProcess:
    """One learner: its process and its pipes."""

    rank: int
    commands: int
    answers: TextIO
    pid: int | None = None
    error_report: dict[str, Any] | None = None


class LearnerProcesses:
    """Learners 1 .. engine.learners - 1 of a policy; the driver's own is rank 0 of the `group`."""

    def __init__(
        self, experiment: Experiment, spec: EnvSpec, base: Sequence[Path], policy: str, net: PolicyNet, algo: Ppo
    ) -> None:
        size = experiment.engine.learners
        self._memory = LearnerMemory(experiment, spec, net, algo)
        self._fork_server = ForkServer(PRELOAD, "engine.learners=1 needs no learner processes")
        self._learners: list[_LearnerProcess] = []
        self._deaths: dict[int, int] = {}  # pid -> exit code; negative: signal
        rendezvous = Path(tempfile.mkdtemp(prefix="tiltyard-rendezvous-"))  # for this user only
        task = {
            "run": LEARNER,
            "experiment": experiment.model_dump(mode="json", by_alias=True),
            "spec": spec_to_json(spec),
            "base": [str(Path(place).absolute()) for place in base],
            "policy": policy,
            "meeting": str(rendezvous),
        }
        try:
            for rank in range(1, size):
                self._start({**task, "name": f"tiltyard-l{rank}", "number": rank})
            self._wait_for("ready")  # before anybody waits for them in the meeting
            self._send({"do": "join"})
            self.group = ProcessGroup(rendezvous, 0, size, net.log_std.device, self._check_exits)
            self._wait_for("joined")
        except BaseException:
            self.close()
            raise
        finally:
            shutil.rmtree(rendezvous, ignore_errors=True)

    def _start(self, task: dict[str, Any]) -> None:
        commands_end, commands = os.pipe2(os.O_CLOEXEC)
        answers, answers_end = os.pipe2(os.O_CLOEXEC)
        self._learners.append(_LearnerProcess(task["number"], commands, os.fdopen(answers)))
        self._fork_server.fork(task, [commands_end, answers_end, self._memory.fd])
        os.close(commands_end)
        os.close(answers_end)

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
            with contextlib.suppress(BrokenPipeError):  # `_wait_for` reports that it died
                os.write(learner.commands, json.dumps(command).encode() + b"\n")

    def _wait_for(self, wanted: str) -> None:
        """Wait until all learners have reported this."""
        waiting = list(self._learners)
        until = time.monotonic() + TIMEOUT.total_seconds()
        while waiting:
            pipes = [learner.answers.fileno() for learner in waiting]
            left = max(0.0, until - time.monotonic())
            ready = select.select([self._fork_server.fileno(), *pipes], [], [], left)[0]
            self._handle_events()
            if not ready or self._deaths:
                raise self._cause()
            for learner in [learner for learner in waiting if learner.answers.fileno() in ready]:
                if self._handle(learner, learner.answers.readline()) == wanted:
                    waiting.remove(learner)

    def _handle(self, learner: _LearnerProcess, line: str) -> str:
        """Handle a line of a learner; returns what it has done. Empty if it is gone; the last line may be cut."""
        message = json.loads(line) if line.endswith("\n") else {}
        if "error" in message:
            learner.error_report = message
        return str(message.get("done", ""))

    def _handle_events(self) -> None:
        while (event := self._fork_server.poll_events()) is not None:
            if "started" in event:
                self._learners[event["number"] - 1].pid = event["started"]
            else:
                self._deaths[event["exited"]] = event["status"]

    def _check_exits(self) -> None:
        self._handle_events()
        if self._deaths:
            raise PeerLostError("a learner is gone")

    # ------------------------------------------------------------------------------------------ faults

    def _cause(self) -> TiltyardError:
        """Why a learner is gone; learners that merely lost the others are not the cause."""
        until = time.monotonic() + GRACE
        while True:
            self._handle_events()
            for learner in self._learners:
                if learner.pid in self._deaths and (found := self._reported_error(learner, self._deaths[learner.pid])):
                    return found
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._fork_server.fileno()], [], [], left)[0]:
                minutes = TIMEOUT.total_seconds() / 60
                return TiltyardError(f"the learners have not answered each other for {minutes:g} minutes", HINT)

    def _reported_error(self, learner: _LearnerProcess, status: int) -> TiltyardError | None:
        """The error of a learner that has ended: its report, or its exit code."""
        for line in learner.answers:
            self._handle(learner, line)
        report = learner.error_report
        if report is not None:
            return None if report["lost"] else TiltyardError(report["error"], report["hint"], report["details"])
        how = killed_by(-status) if status < 0 else f"exited with code {status}"
        return TiltyardError(f"learner {learner.rank} (process {learner.pid}) {how}", HINT)

    def close(self) -> None:
        """End all processes and close their files."""
        self._fork_server.close()
        for learner in self._learners:
            os.close(learner.commands)
            learner.answers.close()
        os.close(self._memory.fd)
