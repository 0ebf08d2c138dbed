"""The driver's side of the learners beside its own: it lays out what is to be learned from, and all learn at once.

    driver ── board: rollout, weights, moments ──> colearner 1, 2, ...
    driver ── {"do": "update", "env_steps": 4096, ...} ──> each of them ── {"said": "updated"} ──> driver
    meanwhile, at every gradient step: the sum of the team's gradients (algos.team)

Before each update everybody is given everything: a colearner has nothing that would have to be saved, and what was
loaded or adopted since reaches all of them. One that ends, however, ends the training: its cause is raised here.
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
from tiltyard.processes.child import killed_by
from tiltyard.processes.fork_server import ForkServer
from tiltyard.types import Array, EnvSpec, Rollout, Tree

GRACE = 10.0  # seconds from the end of a process until its cause is told
HINT = "`tiltyard resume` continues; `tiltyard fork` with engine.learners=1 continues without it"


class LearnerMemory:
    """Shared memory that the driver writes before an update and colearners read; both build the same layout."""

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
        """Take over all arrays, a rollout of fewer rows too; returns the rest of the algorithm's state, as JSON."""
        gather([rollout], self.rollout)
        adam = algo["adam"]
        for ours, theirs in ((self.weights, weights), (self.first, adam["first"]), (self.second, adam["second"])):
            for name, array in ours.items():
                array[...] = theirs[name]
        return {**algo, "adam": {"steps": adam["steps"]}}

    def read(self, rest: Tree) -> Tree:
        """The algorithm's state from its arrays here and what `write` returned."""
        return {**rest, "adam": {**rest["adam"], "first": self.first, "second": self.second}}


@dataclass
class _Member:
    """One colearner: its process and its pipes."""

    rank: int
    commands: int
    answers: TextIO
    pid: int | None = None
    error_report: dict[str, Any] | None = None


class LearnerProcesses:
    """Learners 1 .. engine.learners - 1 of a policy; the driver's own, `rank` 0 of the `team`, is given to it."""

    def __init__(
        self, experiment: Experiment, spec: EnvSpec, base: Sequence[Path], policy: str, net: PolicyNet, algo: Ppo
    ) -> None:
        size = experiment.engine.learners
        self._board = LearnerMemory(experiment, spec, net, algo)
        self._fork_server = ForkServer(PRELOAD, "engine.learners=1 needs no learner processes")
        self._members: list[_Member] = []
        self._deaths: dict[int, int] = {}  # pid -> exit code, negative for a signal
        rendezvous = Path(tempfile.mkdtemp(prefix="tiltyard-meeting-"))  # for this user only
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
            self._hear("ready")  # before anybody waits for them in the meeting
            self._tell({"do": "join"})
            self.group = ProcessGroup(rendezvous, 0, size, net.log_std.device, self._look)
            self._hear("joined")
        except BaseException:
            self.close()
            raise
        finally:
            shutil.rmtree(rendezvous, ignore_errors=True)

    def _start(self, task: dict[str, Any]) -> None:
        heard, commands = os.pipe2(os.O_CLOEXEC)
        answers, told = os.pipe2(os.O_CLOEXEC)
        self._members.append(_Member(task["number"], commands, os.fdopen(answers)))
        self._fork_server.fork(task, [heard, told, self._board.fd])
        os.close(heard)
        os.close(told)

    @contextlib.contextmanager
    def at_work(self, rollout: Rollout, weights: Mapping[str, Array], algo: Tree, env_steps: int) -> Iterator[None]:
        """Inside, all of them do the update that the driver does there; afterwards they have finished it too."""
        rest = self._board.write(rollout, weights, algo)
        place = {"rows": rollout.reward.shape[1], "env_steps": env_steps}
        self._tell({"do": "update", **place, "algo": rest, "threads": torch.get_num_threads()})
        try:
            yield
        except PeerLostError as error:
            raise self._cause() from error
        self._hear("updated")

    # ------------------------------------------------------------------------------------------ talking

    def _tell(self, word: dict[str, Any]) -> None:
        for member in self._members:
            with contextlib.suppress(BrokenPipeError):  # that it died is told when it is waited for
                os.write(member.commands, json.dumps(word).encode() + b"\n")

    def _hear(self, wanted: str) -> None:
        """Wait until all of them have said this."""
        silent = list(self._members)
        until = time.monotonic() + TIMEOUT.total_seconds()
        while silent:
            pipes = [member.answers.fileno() for member in silent]
            left = max(0.0, until - time.monotonic())
            ready = select.select([self._fork_server.fileno(), *pipes], [], [], left)[0]
            self._handle_events()
            if not ready or self._deaths:
                raise self._cause()
            for member in [member for member in silent if member.answers.fileno() in ready]:
                if self._take(member, member.answers.readline()) == wanted:
                    silent.remove(member)

    def _take(self, member: _Member, line: str) -> str:
        """What a colearner says with a line; it has none left when it is gone, or the beginning of one."""
        word = json.loads(line) if line.endswith("\n") else {}
        if "error" in word:
            member.error_report = word
        return str(word.get("said", ""))

    def _handle_events(self) -> None:
        while (word := self._fork_server.poll_events()) is not None:
            if "started" in word:
                self._members[word["number"] - 1].pid = word["started"]
            else:
                self._deaths[word["exited"]] = word["status"]

    def _look(self) -> None:
        self._handle_events()
        if self._deaths:
            raise PeerLostError("a learner is gone")

    # ------------------------------------------------------------------------------------------ faults

    def _cause(self) -> TiltyardError:
        """Why a colearner is gone; those that only lost the others are no cause."""
        until = time.monotonic() + GRACE
        while True:
            self._handle_events()
            for member in self._members:
                if member.pid in self._deaths and (found := self._reported_error(member, self._deaths[member.pid])):
                    return found
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._fork_server.fileno()], [], [], left)[0]:
                minutes = TIMEOUT.total_seconds() / 60
                return TiltyardError(f"the learners have not heard from each other for {minutes:g} minutes", HINT)

    def _reported_error(self, member: _Member, status: int) -> TiltyardError | None:
        """What one that has ended says, or its exit code."""
        for line in member.answers:
            self._take(member, line)
        told = member.error_report
        if told is not None:
            return None if told["lost"] else TiltyardError(told["error"], told["hint"], told["details"])
        how = killed_by(-status) if status < 0 else f"ended with exit code {status}"
        return TiltyardError(f"learner {member.rank} (process {member.pid}) {how}", HINT)

    def close(self) -> None:
        """End every process and give back what was taken."""
        self._fork_server.close()
        for member in self._members:
            os.close(member.commands)
            member.answers.close()
        os.close(self._board.fd)
