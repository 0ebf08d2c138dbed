"""One piece of shared memory for driver and workers: slots with their states, heartbeats, and the published weights.

    slots     FREE -> ACTING -> FULL -> LEARNING -> FREE     a rollout [T, rows] each; a worker owns it while ACTING
    beats     one counter and one phase per worker           a counter that stands still is an env that hangs
    weights   two buffers and the version of each            the driver writes one while workers read the other
    shelves   past versions of policies, and their marks     written when there is a new one, in a place that is free
    exchange  what each worker asks an actor and is told     only where decisions are made in one batch

The memory has no name: it is a file descriptor that workers inherit, so that nothing is left behind when all of them
are gone, however they went. It is taken from RAM, not from /dev/shm; where that fails, a deleted file serves.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiltyard.config.experiment import Experiment
from tiltyard.engines.collector import empty_rollout
from tiltyard.engines.policies.opponent_pool import VersionPool
from tiltyard.engines.policies.policy_set import joined
from tiltyard.errors import TiltyardError
from tiltyard.models import distributions
from tiltyard.models.policy_net import PolicyNet
from tiltyard.processes.resources import CACHE_LINE
from tiltyard.types import Array, Arrays, EnvSpec, Rollout

FREE, ACTING, FULL, LEARNING = range(4)
STATES = ("free", "acting", "full", "learning")


@dataclass(frozen=True)
class InferenceBuffers:
    """Questions to the actor and its answers, [workers, rows, ...] unless said otherwise. A worker writes its questions
    and then says so; it reads the answers when it was told that they are there."""

    obs: Arrays
    first: Array
    memory: Arrays
    params: Array
    value: Array  # in units of reward
    log_std: Array  # [workers, columns]
    after: Arrays  # the memory
    versions: Array  # [workers] of the weights that it was answered with
    counts: Array  # batches, and rows in all of them


class SharedMemory:
    """Driver and workers build the same layout from the same experiment; only the driver makes the memory."""

    def __init__(
        self,
        experiment: Experiment,
        spec: EnvSpec,
        net: PolicyNet,
        workers: int,
        slots: int,
        fd: int | None = None,
        *,
        batched: bool = False,
    ) -> None:
        self.batched = batched
        self.rows = experiment.engine.envs // workers
        measure = Layout()
        self._array = measure.array
        self._lay_out(experiment, spec, net, workers, slots)  # without memory yet, to learn how much is needed
        self.size = measure.size
        self.fd = make_memory(self.size) if fd is None else fd
        self._array = Layout(mmap.mmap(self.fd, self.size)).array
        self._lay_out(experiment, spec, net, workers, slots)

    def _lay_out(self, experiment: Experiment, spec: EnvSpec, net: PolicyNet, workers: int, slots: int) -> None:
        self.states = self._array("states", (slots,), np.int64)
        self.beats = self._array("beats", (workers, 8), np.int64)  # a line each: [worker, 0] counter, [worker, 1] phase
        self.versions = self._array("versions", (8,), np.int64)  # begun, finished
        own = {name: (tuple(item.shape), item.cpu().numpy().dtype) for name, item in net.state_dict().items()}
        weights = joined([own] * len(experiment.learning))
        self.buffers = [
            {name: self._array(name, shape, dtype) for name, (shape, dtype) in weights.items()} for _ in range(2)
        ]
        self.version_pools = {name: self._shelf(own, past.keep) for name, past in experiment.past.items()}
        self.slots: list[Rollout] = [empty_rollout(experiment, spec, net, self.rows, self._array) for _ in range(slots)]
        self.inference = self._exchange(spec, net, workers) if self.batched else None

    def _shelf(self, own: Mapping[str, tuple[tuple[int, ...], Any]], keep: int) -> tuple[Array, list[Arrays]]:
        """Env step and mark of the version in each place, mark 0 where there is none, and the weights there. One place
        more than are kept: a new version is there before the oldest goes."""
        places = range(keep + 1)
        labels = self._array("labels", (len(places), 2), np.int64)
        return labels, [{name: self._array(name, *kind) for name, kind in own.items()} for _ in places]

    def _exchange(self, spec: EnvSpec, net: PolicyNet, workers: int) -> InferenceBuffers:
        rows = self.rows * len(spec.agents)
        memory = {key: (item.shape[1:], item.cpu().numpy().dtype) for key, item in net.initial_state(rows).items()}

        def each(name: str, shape: Sequence[int], dtype: Any) -> Array:
            return self._array(name, (workers, rows, *shape), dtype)

        return InferenceBuffers(
            obs={key: each(f"obs.{key}", item.shape, item.dtype) for key, item in spec.obs.items()},
            first=each("first", (), np.bool_),
            memory={key: each(f"memory.{key}", *kind) for key, kind in memory.items()},
            params=each("params", (distributions.outputs(spec.action),), np.float32),
            value=each("value", (), np.float32),
            log_std=self._array("log_std", (workers, distributions.continuous_columns(spec.action)), np.float32),
            after={key: each(f"after.{key}", *kind) for key, kind in memory.items()},
            versions=self._array("answered", (workers,), np.int64),
            counts=self._array("tally", (2,), np.int64),
        )

    # ------------------------------------------------------------------------------------------ weights

    def publish(self, arrays: Mapping[str, Array], version: int) -> None:
        """The driver: make these the newest weights."""
        self.versions[0] = version
        for name, target in self.buffers[version % 2].items():
            target[...] = arrays[name]
        self.versions[1] = version

    def fetch(self, into: Mapping[str, Array]) -> int:
        """A worker: copy the newest weights; returns their version. Repeated when they were overwritten meanwhile."""
        while True:
            version = int(self.versions[1])
            for name, source in self.buffers[version % 2].items():
                into[name][...] = source
            if int(self.versions[0]) <= version + 1:  # the writer was at most in the other buffer
                return version

    def stock(self, name: str, pool: VersionPool) -> None:
        """The driver: make these the past versions of a pool."""
        labels, places = self.version_pools[name]
        there = {tuple(label): place for place, label in enumerate(labels.tolist())}
        free = [place for place, (_, mark) in enumerate(labels.tolist()) if mark == 0]
        for env_steps, mark in pool.marks.items():
            if (env_steps, mark) not in there:
                place = free.pop() if free else self._emptied(labels, pool)
                for key, array in pool.versions[env_steps].arrays().items():
                    places[place][key][...] = array
                labels[place] = (env_steps, mark)
        for place, (env_steps, mark) in enumerate(labels.tolist()):
            if mark and pool.marks.get(env_steps) != mark:
                labels[place] = 0

    @staticmethod
    def _emptied(labels: Array, pool: VersionPool) -> int:
        """A place whose version is no longer kept."""
        place = next(place for place, (at, mark) in enumerate(labels.tolist()) if pool.marks.get(at) != mark)
        labels[place] = 0
        return place

    def restock(self, name: str, pool: VersionPool) -> None:
        """A worker: have the past versions of a pool as the driver has them. Repeated when overwritten meanwhile."""
        labels, places = self.version_pools[name]
        while True:
            now = {place: (at, mark) for place, (at, mark) in enumerate(labels.tolist()) if mark}
            for place, (env_steps, mark) in now.items():
                if pool.marks.get(env_steps) != mark:
                    pool.put(env_steps, places[place], mark)
            if now and all(tuple(labels[place].tolist()) == label for place, label in now.items()):
                pool.keep_only([env_steps for env_steps, _ in now.values()])
                return

    def close(self) -> None:
        os.close(self.fd)


class Layout:
    """Arrays one after another in a piece of memory; without memory they are only measured."""

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        self._memory = memory
        self.size = 0

    def array(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """The next piece of the memory; while it is not there yet, something of that shape that takes no room."""
        kind = np.dtype(dtype)
        begin = self.size
        count = int(np.prod(shape, dtype=np.int64))
        end = begin + count * kind.itemsize  # and on to a full cache line: two workers never write into the same one
        self.size = -(-end // CACHE_LINE) * CACHE_LINE
        if self._memory is None:
            return _Nothing()  # type: ignore[return-value]
        return np.frombuffer(self._memory, kind, count, begin).reshape(shape)


class _Nothing:
    """Takes any assignment and keeps none: stands for an array while the layout is only being measured."""

    def __setitem__(self, key: object, value: object) -> None:
        return


def make_memory(size: int) -> int:
    """A file descriptor of `size` zeroed bytes that no name leads to."""
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):  # no RAM to be had that way
            return _allocated(os.memfd_create("tiltyard", os.MFD_CLOEXEC), size)
    try:
        with tempfile.TemporaryFile(prefix="tiltyard-") as file:
            return _allocated(os.dup(file.fileno()), size)
    except OSError as error:
        raise TiltyardError(
            f"{size / 2**20:,.0f} MiB that workers share cannot be had: neither memory, nor a file in "
            f"{tempfile.gettempdir()} ({error.strerror})",
            "set TMPDIR to a folder with more room, or lower engine.envs or algo.rollout",
        ) from error


def _allocated(fd: int, size: int) -> int:
    try:
        os.posix_fallocate(fd, 0, size) if hasattr(os, "posix_fallocate") else os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd


def gather(parts: Sequence[Rollout], into: Rollout) -> None:
    """Copy rollouts [T, rows] side by side into one [T, rows x parts]."""
    for at, part in enumerate(parts):
        width = part.reward.shape[1]
        span = slice(at * width, (at + 1) * width)
        for key, array in into.obs.items():
            array[:, span] = part.obs[key]
        for key, array in into.state0.items():
            array[:, span] = part.state0[key]
        for key, array in into.columns().items():
            array[:, span] = getattr(part, key)
