"""The shared memory of driver and workers: slots with their states, heartbeats, and the published weights.

    slots     FREE -> ACTING -> FULL -> LEARNING -> FREE     a rollout [T, rows] each; a worker owns it while ACTING
    beats     one counter and one phase per worker           a counter that stands still means a hung env
    weights   two buffers and the version of each            the driver writes one while workers read the other
    version_pools   past versions and their marks            a new version is written into a free place
    inference       requests and answers of each worker      only with an inference server

The memory has no name: workers inherit its file descriptor, so that nothing is left behind however they end. It is a
memfd, not a file in /dev/shm; where that fails, a deleted temporary file serves.
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
from tiltyard.engines.policies.matchmaking import VersionPool
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
    """Requests to the inference server and its answers, [workers, rows, ...] unless noted. A worker writes its request,
    sends its number, and reads the answer when the server wakes it."""

    obs: Arrays
    first: Array
    memory: Arrays
    params: Array
    value: Array  # in units of reward
    log_std: Array  # [workers, columns]
    after: Arrays  # the recurrent state
    versions: Array  # [workers] of the weights that answered
    counts: Array  # batches, rows


class SharedMemory:
    """Driver and workers build the same layout from the same experiment; only the driver allocates it."""

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
        self._lay_out(experiment, spec, net, workers, slots)  # without memory, to measure its size
        self.size = measure.size
        self.fd = make_memory(self.size) if fd is None else fd
        self._array = Layout(mmap.mmap(self.fd, self.size)).array
        self._lay_out(experiment, spec, net, workers, slots)

    def _lay_out(self, experiment: Experiment, spec: EnvSpec, net: PolicyNet, workers: int, slots: int) -> None:
        self.states = self._array("states", (slots,), np.int64)
        # a cache line each: [worker, 0] counter, [worker, 1] phase
        self.beats = self._array("beats", (workers, 8), np.int64)
        self.versions = self._array("versions", (8,), np.int64)  # begun, finished
        own = {name: (tuple(item.shape), item.cpu().numpy().dtype) for name, item in net.state_dict().items()}
        weights = joined([own] * len(experiment.learning))
        self.buffers = [
            {name: self._array(name, shape, dtype) for name, (shape, dtype) in weights.items()} for _ in range(2)
        ]
        self.version_pools = {name: self._version_pool(own, past.keep) for name, past in experiment.past.items()}
        self.slots: list[Rollout] = [empty_rollout(experiment, spec, net, self.rows, self._array) for _ in range(slots)]
        self.inference = self._inference_buffers(spec, net, workers) if self.batched else None

    def _version_pool(self, own: Mapping[str, tuple[tuple[int, ...], Any]], keep: int) -> tuple[Array, list[Arrays]]:
        """Env step and mark of the version in each place (mark 0: free), and its weights. There is one more than
        `keep`: a new version is written before the oldest is dropped."""
        places = range(keep + 1)
        labels = self._array("labels", (len(places), 2), np.int64)
        return labels, [{name: self._array(name, *kind) for name, kind in own.items()} for _ in places]

    def _inference_buffers(self, spec: EnvSpec, net: PolicyNet, workers: int) -> InferenceBuffers:
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
        """Driver: publish the newest weights."""
        self.versions[0] = version
        for name, target in self.buffers[version % 2].items():
            target[...] = arrays[name]
        self.versions[1] = version

    def fetch(self, into: Mapping[str, Array]) -> int:
        """Worker: copy the newest weights; returns their version. Copies again if they were overwritten meanwhile."""
        while True:
            version = int(self.versions[1])
            for name, source in self.buffers[version % 2].items():
                into[name][...] = source
            if int(self.versions[0]) <= version + 1:  # the writer was at most in the other buffer
                return version

    def publish_versions(self, name: str, pool: VersionPool) -> None:
        """Driver: publish the past versions of a pool."""
        labels, places = self.version_pools[name]
        there = {tuple(label): place for place, label in enumerate(labels.tolist())}
        free = [place for place, (_, mark) in enumerate(labels.tolist()) if mark == 0]
        for env_steps, mark in pool.marks.items():
            if (env_steps, mark) not in there:
                place = free.pop() if free else self._free_place(labels, pool)
                for key, array in pool.versions[env_steps].arrays().items():
                    places[place][key][...] = array
                labels[place] = (env_steps, mark)
        for place, (env_steps, mark) in enumerate(labels.tolist()):
            if mark and pool.marks.get(env_steps) != mark:
                labels[place] = 0

    @staticmethod
    def _free_place(labels: Array, pool: VersionPool) -> int:
        """Free a place whose version is no longer kept."""
        place = next(place for place, (at, mark) in enumerate(labels.tolist()) if pool.marks.get(at) != mark)
        labels[place] = 0
        return place

    def fetch_versions(self, name: str, pool: VersionPool) -> None:
        """Worker: copy the past versions of a pool. Copies again if they were overwritten meanwhile."""
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
    """Places arrays one after another in a memory; without memory it only measures them."""

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        self._memory = memory
        self.size = 0

    def array(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """The next array of the memory, or a stand-in while measuring."""
        kind = np.dtype(dtype)
        begin = self.size
        count = int(np.prod(shape, dtype=np.int64))
        end = begin + count * kind.itemsize  # rounded up to a cache line: workers never share one
        self.size = -(-end // CACHE_LINE) * CACHE_LINE
        if self._memory is None:
            return _Nothing()  # type: ignore[return-value]
        return np.frombuffer(self._memory, kind, count, begin).reshape(shape)


class _Nothing:
    """Stands for an array while the layout is measured: accepts assignments and keeps nothing."""

    def __setitem__(self, key: object, value: object) -> None:
        return


def make_memory(size: int) -> int:
    """A file descriptor of `size` zeroed bytes without a name in the file system."""
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):  # fall back to a file
            return _allocated(os.memfd_create("tiltyard", os.MFD_CLOEXEC), size)
    try:
        with tempfile.TemporaryFile(prefix="tiltyard-") as file:
            return _allocated(os.dup(file.fileno()), size)
    except OSError as error:
        raise TiltyardError(
            f"cannot allocate {size / 2**20:,.0f} MiB of shared memory, neither in RAM nor in {tempfile.gettempdir()} "
            f"({error.strerror})",
            "set TMPDIR to a folder with more space, or lower engine.envs or algo.rollout",
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
