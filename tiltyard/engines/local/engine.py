"""The local engine: workers that act, a driver that learns, one machine.

    sync     every worker fills one slot with the newest weights, then the driver learns from all of them
    async    every worker fills one slot after another; the driver learns from whichever are full, and says how old
             the policies were that acted (`lag`, in updates); what is older than engine.max_lag is thrown away

What a worker does is worker.py, how they talk and die is pool.py and nursery.py, what they share is slab.py. Where one
actor decides for all workers, actor.py is that, and remote.py is how they ask it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
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
from tiltyard.run.checkpoint import write_tree
from tiltyard.types import Arrays, EnvSpec, EpisodeEnd, PolicyState, Progress, Report


@dataclass(frozen=True)
class Filled:
    """A slot that is full: who filled it, with which weights, and what else it says."""

    worker: int
    slot: int
    version: int
    frames: int
    spent: dict[str, float]
    episodes: list[EpisodeEnd]


class LocalEngine:
    """Policies learned in this process from what `engine.workers` processes sample."""

    def __init__(self, experiment: Experiment, spec: EnvSpec, base: Sequence[Path], chosen: Topology) -> None:
        self.experiment, self.chosen = experiment, chosen
        workers = self.workers = chosen.workers
        self.apart = experiment.engine.mode == "async"
        self.policies = PolicySet(experiment, spec, base)
        self.learner = self.policies.first
        self.threads, self.why = learner_threads(experiment, spec, self.learner.net, chosen)
        torch.set_num_threads(self.threads)
        slots = workers * slots_per_worker(experiment.engine.mode)
        self.shared = SharedMemory(experiment, spec, self.learner.net, workers, slots, batched=chosen.batched)
        self.rollout = empty_rollout(experiment, spec, self.learner.net, experiment.engine.envs)
        self.progress = Progress()
        self.version = 0  # of what was published, with an update or a policy that was replaced
        self.replaced: list[int] = []  # versions of the latter kind, rising
        self.full: deque[Filled] = deque()
        self.discarded = 0  # env steps
        self.counts = np.zeros(2, np.int64)  # of the actor, when last looked at
        self.left = perf_counter()  # when the last step ended
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
        )
        self.idle = [(slot % workers, slot) for slot in range(slots)]  # (worker, slot) that nobody was asked to fill

    def describe(self) -> list[str]:
        mode = "asynchronous" if self.apart else "synchronous"
        workers = f"{self.workers} worker{'s' if self.workers > 1 else ''} with {self.shared.rows} envs each"
        if self.experiment.engine.affinity:
            workers += ", pinned to a core each"
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        actor = f", decisions made in one batch by an actor on {self.learner.device}" if self.chosen.batched else ""
        return [
            *self.policies.describe(),
            f"engine  local, {mode}: {workers} ({self.chosen.why}), a learner with {threads} ({self.why}), "
            f"{self.learner.device}, {self.shared.size / 2**20:.1f} MiB shared{actor}",
        ]

    # ------------------------------------------------------------------------------------------ one batch

    def step(self) -> Report:
        started = perf_counter()
        outside = started - self.left
        self._ask_one_each()
        taken = self._wait_for_batch()
        waited = perf_counter() - started

        mark = perf_counter()
        for filled in taken:
            self.shared.states[filled.slot] = LEARNING
        gather([self.shared.slots[filled.slot] for filled in taken], self.rollout)
        for filled in taken:
            self.shared.states[filled.slot] = FREE
        self.idle += [(filled.worker, filled.slot) for filled in taken]
        if self.apart:  # go on at once, with the weights as they are
            self._ask_one_each()
        moved = perf_counter() - mark

        mark = perf_counter()
        batch = int(self.rollout.valid.sum())
        metrics = self.policies.update(self.rollout, self.progress.env_steps, self.pool.check_processes)
        learned = perf_counter() - mark
        mark = perf_counter()
        metrics |= self._lags()
        self.version += 1
        self._publish()
        moved += perf_counter() - mark

        total = perf_counter() - started
        episodes = self.policies.own_returns(end for filled in taken for end in filled.episodes)
        self.progress = replace(
            self.progress,
            env_steps=self.progress.env_steps + batch,
            frames=self.progress.frames + sum(filled.frames for filled in taken),
            updates=self.progress.updates + 1,
            episodes=self.progress.episodes + len(episodes),
            seconds=self.progress.seconds + total,
        )
        spent = {"wait": waited, "transfer": moved, "learn": learned}
        spent["other"] = max(0.0, total - sum(spent.values()))
        events, self.pool.events = tuple(self.pool.events), []
        metrics |= self._workers_time(taken, outside) | self._batches()
        self.left = perf_counter()
        return Report(self.progress, metrics, episodes, spent, events)

    def _ask_one_each(self) -> None:
        """Have every worker that is doing nothing fill one slot. Not two: what waits to be learned from grows old."""
        for worker, slot in [*self.idle]:
            if not self.pool.is_busy(worker):
                self.pool.ask(worker, do="fill", slot=slot)
                self.idle.remove((worker, slot))

    def _wait_for_batch(self) -> list[Filled]:
        """One slot per worker in synchronous mode, the oldest that are full otherwise."""
        self._discard_old()
        while len(self.full) < self.workers:
            for worker, answer in self.pool.answers():
                self._note(worker, answer)
            self._discard_old()
            if self.apart and len(self.full) < self.workers:  # who is done goes on while others are not
                self._ask_one_each()
        taken = [self.full.popleft() for _ in range(self.workers)]
        return taken if self.apart else sorted(taken, key=lambda filled: filled.worker)

    def _note(self, worker: int, answer: dict[str, Any]) -> None:
        ends = [EpisodeEnd(**end) for end in answer["episodes"]]
        self.full.append(Filled(worker, answer["filled"], answer["version"], answer["frames"], answer["spent"], ends))

    def _publish(self) -> None:
        """Let workers have what policies are now."""
        self.shared.publish(self.policies.arrays(), self.version)
        for name, pool in self.policies.version_pools.items():
            self.shared.stock(name, pool)

    def _discard_old(self) -> None:
        """Samples of a policy that is too far back are not learned from; their slots are filled again."""
        most = self.experiment.engine.max_lag
        old = [filled for filled in self.full if self._age(filled.version) > most]
        for filled in old:
            self.full.remove(filled)
            self.discarded += int(self.shared.slots[filled.slot].valid.sum())
            self.pool.ask(filled.worker, do="fill", slot=filled.slot)

    def _age(self, version: Any) -> Any:
        """How many updates there were since a version, or since each of an array of them."""
        replaced = len(self.replaced) - np.searchsorted(self.replaced, version, side="right")
        return self.version - version - replaced

    def _lags(self) -> dict[str, float]:
        """How many updates ago the policies were made that acted in this batch."""
        if not self.apart:
            return {}
        lag = self._age(self.rollout.policy_version)
        ages, counts = np.unique(lag, return_counts=True)
        return {
            "lag/mean": float(lag.mean()),
            "lag/max": float(lag.max()),
            "lag/discarded": float(self.discarded),
            **{f"lag/{age}": float(count / lag.size) for age, count in zip(ages.tolist(), counts, strict=True)},
        }

    def _workers_time(self, taken: list[Filled], outside: float) -> dict[str, float]:
        """Shares of the workers' time, which is another than the driver's. While the driver was elsewhere (evaluating,
        saving) they waited for no fault of theirs."""
        for filled in taken:
            filled.spent["wait"] = max(0.0, filled.spent["wait"] - outside)
        total = sum(sum(filled.spent.values()) for filled in taken) or 1.0
        parts = {name for filled in taken for name in filled.spent}
        shares = {f"workers/{part}": sum(filled.spent[part] for filled in taken) / total for part in sorted(parts)}
        return {**shares, "workers/restarts": float(self.pool.restarts)}

    def _batches(self) -> dict[str, float]:
        """How much the actor decided at once since the last step."""
        if self.shared.inference is None:
            return {}
        now = self.shared.inference.counts.copy()
        (batches, rows), self.counts = now - self.counts, now
        return {"actor/rows": float(rows / batches)} if batches else {}

    # ------------------------------------------------------------------------------------------ disk

    def save(self, folder: Path, *, cut: bool = False) -> None:
        parts = {"groups": self.workers, "cut": cut, "threads": self.threads, "version": self.version}
        tree = {**parts, "progress": asdict(self.progress), "learner": self.policies.save(folder)}
        write_tree(folder / "engine", "state", tree)
        for refused in [] if cut else self._all("save", "saved", folder=str(folder / "engine")):
            if refused is not None:
                raise OSError(*refused)

    def load(self, folder: Path) -> list[str]:
        tree = read_state(folder)
        self.progress = Progress(**tree["progress"])
        said = self.policies.load(folder, tree)
        self.version, self.replaced = tree.get("version", self.progress.updates), []
        self._publish()
        self.pool.episodes_begun = [self.progress.episodes] * self.workers
        for worker, (number, sentences) in enumerate(self._all("load", "loaded", folder=str(folder))):
            self.pool.episodes_begun[worker] = max(number, self.progress.episodes)
            said += sentences
        return said + dropped_groups(tree, self.workers)

    def _all(self, command: str, answered: str, **more: Any) -> list[Any]:
        """Have every worker do something between two rollouts; slots that fill up meanwhile are kept for learning."""
        for worker in range(self.workers):
            self.pool.ask(worker, do=command, **more)
        found: dict[int, Any] = {}
        while len(found) < self.workers:
            for worker, answer in self.pool.answers():
                if answered in answer:
                    found[worker] = answer[answered]
                else:
                    self._note(worker, answer)
        return [found[worker] for worker in sorted(found)]

    # ------------------------------------------------------------------------------------------ between steps

    def snapshot(self, policy: str | None = None) -> PolicyState:
        return self.policies.snapshot(policy)

    def adopt(self, policy: str | None, state: PolicyState | None, settings: dict[str, float]) -> dict[str, float]:
        now = self.policies.adopt(policy, state, settings)
        if state is not None:
            self.version += 1
            self.replaced.append(self.version)
            self.policies.replaced(policy, self.version)
            self._publish()
        return now

    def past(self) -> dict[str, dict[int, Arrays]]:
        return self.policies.past()

    def close(self) -> None:
        self.policies.close()
        self.pool.close()
        self.shared.close()
