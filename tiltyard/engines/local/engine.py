"""The local engine: workers sample, the driver learns, all on one machine.

    sync     every worker fills one slot with the newest weights, then the driver learns from all slots
    async    workers fill slot after slot; the driver learns from those that are full and measures their `lag` (updates
             since their policy); what is older than engine.max_lag is discarded

worker.py samples, worker_pool.py starts and replaces workers, shared_memory.py has the slots. With batched inference,
a server computes the actions of all workers (inference.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from tiltyard.config.experiment import Experiment
from tiltyard.engines.collector import empty_rollout
from tiltyard.engines.engine_state import dropped_groups, read_state
from tiltyard.engines.local.shared_memory import FREE, LEARNING, SharedMemory, gather
from tiltyard.engines.local.worker_pool import WorkerPool
from tiltyard.engines.policies.policy_set import PolicySet
from tiltyard.engines.topology import Topology, learner_threads, slots_per_worker
from tiltyard.envs.spaces import spec_to_json
from tiltyard.models.policy_net import PolicyNet
from tiltyard.processes.fork_server import ForkServer
from tiltyard.types import Array, Arrays, EnvSpec, EpisodeEnd, PolicyState, Progress, Report, Tree


@dataclass(frozen=True)
class Filled:
    """A full slot: its worker, the version of its weights, and what the worker reported."""

    worker: int
    slot: int
    version: int
    frames: int
    spent: dict[str, float]
    episodes: list[EpisodeEnd]


class _Versions:
    """The version of the published weights: it grows with each update and with each replaced policy."""

    def __init__(self, current: int = 0) -> None:
        self.current = current
        self._replaced: list[int] = []  # versions that were not updates, rising

    def replace(self) -> int:
        self.current += 1
        self._replaced.append(self.current)
        return self.current

    def age(self, version: Any) -> Any:
        """Updates since a version, or since each of an array of versions."""
        replaced = len(self._replaced) - np.searchsorted(self._replaced, version, side="right")
        return self.current - version - replaced


class LocalEngine:
    """Learns in this process from what `engine.workers` processes sample."""

    def __init__(
        self,
        experiment: Experiment,
        spec: EnvSpec,
        base: Sequence[Path],
        chosen: Topology,
        server: ForkServer | None = None,
        net: PolicyNet | None = None,
    ) -> None:
        self.experiment, self.chosen = experiment, chosen
        workers = self.workers = chosen.workers
        self.is_async = experiment.engine.mode == "async"
        self.policies = PolicySet(experiment, spec, base, net)
        self.learner = self.policies.first
        self.threads, self.why = learner_threads(experiment, spec, self.learner.net, chosen)
        torch.set_num_threads(self.threads)
        slots = workers * slots_per_worker(experiment.engine.mode)
        self.shared = SharedMemory(experiment, spec, self.learner.net, workers, slots, batched=chosen.batched)
        self.rollout = empty_rollout(experiment, spec, self.learner.net, experiment.engine.envs)
        self.progress = Progress()
        self.versions = _Versions()
        self.full: deque[Filled] = deque()
        self.taken: list[Filled] = []  # what the last step learned from
        self.discarded = 0  # env steps
        self.inference_counts = np.zeros(2, np.int64)  # batches and rows at the last step
        self.last_step = perf_counter()  # when it ended
        self._publish()
        task = {
            "experiment": experiment.model_dump(mode="json", by_alias=True),
            "spec": spec_to_json(spec),
            "base": [str(Path(place).absolute()) for place in base],
            "workers": workers,
            "slots": slots,
        }
        self.pool = WorkerPool(
            workers,
            task,
            self.shared,
            step_timeout=experiment.env.step_timeout,
            reset_timeout=experiment.env.reset_timeout,
            restarts=experiment.engine.restarts,
            server=server,
        )
        self.idle = [(slot % workers, slot) for slot in range(slots)]  # (worker, slot) pairs to be filled

    def describe(self) -> list[str]:
        mode = "asynchronous" if self.is_async else "synchronous"
        workers = f"{self.workers} worker{'s' if self.workers > 1 else ''} with {self.shared.rows} envs each"
        if self.experiment.engine.affinity:
            workers += ", pinned to a core each"
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        server = f", batched inference on {self.learner.device}" if self.chosen.batched else ""
        return [
            *self.policies.describe(),
            f"engine  local, {mode}: {workers} ({self.chosen.why}), a learner with {threads} ({self.why}), "
            f"{self.learner.device}, {self.shared.size / 2**20:.1f} MiB shared{server}",
        ]

    # ------------------------------------------------------------------------------------------ one batch

    def step(self) -> Report:
        started = perf_counter()
        outside = started - self.last_step
        self._request_slots()
        taken = self.taken = self._wait_for_batch()
        waited = perf_counter() - started

        mark = perf_counter()
        for filled in taken:
            self.shared.states[filled.slot] = LEARNING
        gather([self.shared.slots[filled.slot] for filled in taken], self.rollout)
        for filled in taken:
            self.shared.states[filled.slot] = FREE
        self.idle += [(filled.worker, filled.slot) for filled in taken]
        if self.is_async:  # continue at once with the present weights
            self._request_slots()
        moved = perf_counter() - mark

        mark = perf_counter()
        batch = int(self.rollout.valid.sum())
        metrics = self.policies.update(self.rollout, self.progress.env_steps, self.pool.check_processes)
        learned = perf_counter() - mark
        mark = perf_counter()
        if self.is_async:
            metrics |= _lag_metrics(self.versions.age(self.rollout.policy_version), self.discarded)
        self.versions.current += 1
        self._publish()
        moved += perf_counter() - mark

        total = perf_counter() - started
        episodes = self.policies.own_returns(end for filled in taken for end in filled.episodes)
        frames = sum(filled.frames for filled in taken)
        self.progress = self.progress.plus(batch, frames, 1, len(episodes), total)
        spent = {"wait": waited, "transfer": moved, "learn": learned}
        spent["other"] = max(0.0, total - sum(spent.values()))
        events, self.pool.events = tuple(self.pool.events), []
        metrics |= {
            **_worker_shares(taken, outside),
            "workers/restarts": float(self.pool.restarts),
        } | self._batch_size()
        self.last_step = perf_counter()
        return Report(self.progress, metrics, episodes, spent, events)

    def _request_slots(self) -> None:
        """Have every idle worker fill one slot. Not two: rollouts that wait grow old."""
        for worker, slot in [*self.idle]:
            if not self.pool.is_busy(worker):
                self.pool.send(worker, {"do": "fill", "slot": slot})
                self.idle.remove((worker, slot))

    def _wait_for_batch(self) -> list[Filled]:
        """One slot per worker in synchronous mode, the oldest that are full otherwise."""
        self._discard_old()
        while len(self.full) < self.workers:
            for worker, answer in self.pool.answers():
                self.full.append(_filled(worker, answer))
            self._discard_old()
            if self.is_async and len(self.full) < self.workers:  # workers do not wait for each other
                self._request_slots()
        taken = [self.full.popleft() for _ in range(self.workers)]
        return taken if self.is_async else sorted(taken, key=lambda filled: filled.worker)

    def _publish(self) -> None:
        """Publish the present weights to workers."""
        self.shared.publish(self.policies.arrays(), self.versions.current)
        for name, pool in self.policies.version_pools.items():
            self.shared.publish_versions(name, pool)

    def _discard_old(self) -> None:
        """Discard rollouts that exceed engine.max_lag and have their slots filled again."""
        most = self.experiment.engine.max_lag
        old = [filled for filled in self.full if self.versions.age(filled.version) > most]
        for filled in old:
            self.full.remove(filled)
            self.discarded += int(self.shared.slots[filled.slot].valid.sum())
            self.pool.send(filled.worker, {"do": "fill", "slot": filled.slot})

    def _batch_size(self) -> dict[str, float]:
        """Mean rows per batch of the inference server since the last step."""
        if self.shared.inference is None:
            return {}
        now = self.shared.inference.counts.copy()
        (batches, rows), self.inference_counts = now - self.inference_counts, now
        return {"actor/rows": float(rows / batches)} if batches else {}

    # ------------------------------------------------------------------------------------------ disk

    def save(self, folder: Path, *, cut: bool = False) -> dict[str, Tree]:
        trees, learner = self.policies.save()
        parts = {"groups": self.workers, "cut": cut, "threads": self.threads, "version": self.versions.current}
        trees["engine/state"] = {**parts, "progress": asdict(self.progress), "learner": learner}
        command = {"do": "save", "folder": str(folder / "engine")}
        for error in [] if cut else self._run_in_all(command, "saved"):
            if error is not None:
                raise OSError(*error)
        return trees

    def load(self, folder: Path) -> list[str]:
        tree = read_state(folder)
        self.progress = Progress(**tree["progress"])
        notes = self.policies.load(folder, tree)
        self.versions = _Versions(tree.get("version", self.progress.updates))
        self._publish()
        self.pool.episodes_begun = [self.progress.episodes] * self.workers
        answers = self._run_in_all({"do": "load", "folder": str(folder)}, "loaded")
        for worker, (number, notes_there) in enumerate(answers):
            self.pool.episodes_begun[worker] = max(number, self.progress.episodes)
            notes += notes_there
        return notes + dropped_groups(tree, self.workers)

    def _run_in_all(self, command: dict[str, Any], key: str) -> list[Any]:
        """Run a command in every worker; returns their answers under `key`. Slots filled in between are kept."""
        for worker in range(self.workers):
            self.pool.send(worker, command)
        found: dict[int, Any] = {}
        while len(found) < self.workers:
            for worker, answer in self.pool.answers():
                if key in answer:
                    found[worker] = answer[key]
                else:
                    self.full.append(_filled(worker, answer))
        return [found[worker] for worker in sorted(found)]

    # ------------------------------------------------------------------------------------------ between steps

    def snapshot(self, policy: str | None = None) -> PolicyState:
        return self.policies.snapshot(policy)

    def adopt(self, policy: str | None, state: PolicyState | None, settings: dict[str, float]) -> dict[str, float]:
        now = self.policies.adopt(policy, state, settings)
        if state is not None:
            self.policies.replaced(policy, self.versions.replace())
            self._publish()
        return now

    def set_env_options(self, options: Mapping[str, Any]) -> None:
        self.pool.task["experiment"]["env"]["options"] = dict(options)  # for workers that replace others
        self._run_in_all({"do": "set_options", "options": dict(options)}, "set")

    def past(self) -> dict[str, dict[int, Arrays]]:
        return self.policies.past()

    def close(self) -> None:
        self.policies.close()
        self.pool.close()
        self.shared.close()


def _filled(worker: int, answer: dict[str, Any]) -> Filled:
    episodes = [EpisodeEnd(**end) for end in answer["episodes"]]
    return Filled(worker, answer["filled"], answer["version"], answer["frames"], answer["spent"], episodes)


def _lag_metrics(lag: Array, discarded: int) -> dict[str, float]:
    """Lag of each row of a batch: updates since the policy that acted."""
    ages, counts = np.unique(lag, return_counts=True)
    return {
        "lag/mean": float(lag.mean()),
        "lag/max": float(lag.max()),
        "lag/discarded": float(discarded),
        **{f"lag/{age}": float(count / lag.size) for age, count in zip(ages.tolist(), counts, strict=True)},
    }


def _worker_shares(taken: list[Filled], outside: float) -> dict[str, float]:
    """Shares of the workers' time. The driver's `outside` seconds (evaluating, saving) do not count as waiting."""
    for filled in taken:
        filled.spent["wait"] = max(0.0, filled.spent["wait"] - outside)
    total = sum(sum(filled.spent.values()) for filled in taken) or 1.0
    parts = {name for filled in taken for name in filled.spent}
    return {f"workers/{part}": sum(filled.spent[part] for filled in taken) / total for part in sorted(parts)}
