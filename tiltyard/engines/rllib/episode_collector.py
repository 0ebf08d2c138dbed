"""Collects episodes for RLlib: steps the group of envs of engines/collector.py and records RLlib's episodes.

    collect(T): T times { act -> step }  ->  one piece per row and episode, cut after T steps

A piece has one more observation than actions: the last one of an ended episode, or the next one to act on. Steps
without a decision of the row's agent are left out; their rewards are added to the decision before them.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import gymnasium
import numpy as np
import torch
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.env.utils.infinite_lookback_buffer import InfiniteLookbackBuffer

from tiltyard.config.algos import family
from tiltyard.engines.collector import Collector
from tiltyard.engines.policies.multi_policy import MultiPolicyActor
from tiltyard.engines.rllib.connectors import STATE_BEFORE
from tiltyard.engines.rllib.worker_spec import WorkerSpec, action_space, observation_space
from tiltyard.envs.spaces import MASK
from tiltyard.models.policy_net import PolicyNet
from tiltyard.types import Array, Arrays, EpisodeEnd, Step

Decision = tuple[Array, Arrays, dict[str, torch.Tensor]]
"""actions [B, columns], other columns by name [B, ...], and the recurrent state after them"""
Decide = Callable[[dict[str, torch.Tensor], torch.Tensor, Array | None], Decision]


class EpisodeCollector:
    """One group of envs. `instance` distinguishes its episodes from those of an earlier group in the same rows."""

    def __init__(
        self, worker_spec: WorkerSpec, net: PolicyNet | MultiPolicyActor, envs: int, group: int, instance: str
    ) -> None:
        experiment, spec = worker_spec.experiment, worker_spec.spec
        self.collector = Collector(experiment, spec, worker_spec.base, net, envs, group)
        self.experiment, self.group, self.instance = experiment, group, instance
        self.scalar = family(experiment.algo) == "dqn"  # RLlib needs a single choice as a number, not as a row
        self.obs_space, self.action_space = observation_space(spec), action_space(worker_spec)
        self.taken = np.zeros(self.collector.rows, np.int64)  # decisions of the running episode in earlier pieces
        self.spent = {"env": 0.0, "inference": 0.0}

    def collect(self, steps: int, decide: Decide) -> tuple[list[SingleAgentEpisode], list[EpisodeEnd]]:
        """Pieces of the episodes of all rows, and the episodes that ended meanwhile."""
        with self.collector.generators.active():
            return self._collect(steps, decide)

    def _collect(self, steps: int, decide: Decide) -> tuple[list[SingleAgentEpisode], list[EpisodeEnd]]:
        group, spent = self.collector, self.spent
        envs, players = group.envs, group.players
        now = envs.reset() if group.now is None else group.now
        log = _Log()
        ends: list[EpisodeEnd] = []
        for _ in range(steps):
            mark = perf_counter()
            seats = players.take_seats(envs.stats.seeds) if players is not None else None
            seen = {name: array.copy() for name, array in now.obs.items()}
            mask = None if now.mask is None else now.mask.copy()
            memory = {
                f"{STATE_BEFORE}.{name}": item.cpu().numpy().copy()
                for name, item in self._recurrent_state(now.first).items()
            }
            tensors = {name: torch.from_numpy(array) for name, array in seen.items()}
            action, columns, group.state = decide(tensors, torch.from_numpy(now.first.copy()), mask)
            if mask is not None:
                seen[MASK] = mask.astype(np.int8)
            numbers = envs.stats.number.copy()
            between = perf_counter()
            spent["inference"] += between - mark
            now = envs.step(action)
            ends += now.episodes if players is None else group.with_returns(now.episodes, players)
            log.add(seen, action, {**columns, **memory}, now, numbers, seats)
            spent["env"] += perf_counter() - between
        group.now = now
        return self._pieces(log, now, steps), ends

    def _recurrent_state(self, first: Array) -> dict[str, torch.Tensor]:
        """Each row's recurrent state before it acts; the initial one at an episode's start."""
        group = self.collector
        if not group.state:
            return {}
        fresh, starts = group.actor.initial_state(group.rows), torch.from_numpy(first.copy())
        return {
            name: torch.where(starts.view(-1, *[1] * (item.dim() - 1)), fresh[name], item)
            for name, item in group.state.items()
        }

    # ------------------------------------------------------------------------------------------ pieces

    def _pieces(self, log: _Log, now: Step, steps: int) -> list[SingleAgentEpisode]:
        arrays = log.arrays()
        after = {name: array.copy() for name, array in now.obs.items()}  # the observations to act on next
        if now.mask is not None:
            after[MASK] = now.mask.astype(np.int8)
        pieces = []
        for row in range(self.collector.rows):
            begin = 0
            for at in [*log.ends_of(row), steps]:
                ended = at < steps
                stop = at + 1 if ended else at
                if stop > begin:
                    last = log.finals[at, row] if ended else {name: array[row] for name, array in after.items()}
                    pieces += self._piece(arrays, log, row, begin, stop, last)
                    if ended:
                        self.taken[row] = 0
                begin = stop
        return pieces

    def _piece(
        self, arrays: Arrays, log: _Log, row: int, begin: int, stop: int, last: Arrays
    ) -> list[SingleAgentEpisode]:
        """Steps begin .. stop - 1 of a row as a list of one; empty if they hold no decision."""
        chosen = begin + np.flatnonzero(arrays["valid"][begin:stop, row])
        if not len(chosen):
            return []
        rewards = np.add.reduceat(arrays["reward"][:stop, row], chosen) if len(chosen) < stop - begin else None
        obs = {
            name.removeprefix("obs."): np.concatenate([array[chosen, row], last[name.removeprefix("obs.")][None]])
            for name, array in arrays.items()
            if name.startswith("obs.")
        }
        action = arrays["action"][chosen, row]
        columns = {name: array[chosen, row] for name, array in arrays.items() if name.startswith("column.")}
        started = int(self.taken[row])
        self.taken[row] += len(chosen)
        policy = None if log.seats is None else list(self.experiment.policy_settings)[int(arrays["seat"][begin, row])]
        if policy is not None and policy not in self.experiment.learning:
            return []
        return [
            SingleAgentEpisode(
                id_=f"{self.instance}-{self.group}-{row}-{int(arrays['number'][begin, row])}",
                observations=_column(obs, self.obs_space),
                observation_space=self.obs_space,
                infos=[{}] * (len(chosen) + 1),
                actions=_column(action[:, 0].astype(np.int64) if self.scalar else action, self.action_space),
                action_space=self.action_space,
                rewards=_column(arrays["reward"][chosen, row] if rewards is None else rewards),
                terminated=bool(arrays["terminated"][stop - 1, row]),
                truncated=bool(arrays["truncated"][stop - 1, row]),
                extra_model_outputs={name.removeprefix("column."): _column(array) for name, array in columns.items()},
                t_started=started,
                len_lookback_buffer=0,
                **({} if policy is None else {"agent_id": f"row_{row}", "module_id": policy}),
            )
        ]

    def close(self) -> None:
        self.collector.close()


def _column(data: Any, space: gymnasium.Space[Any] | None = None) -> InfiniteLookbackBuffer:
    return InfiniteLookbackBuffer(data=data, lookback=0, space=space)


class _Log:
    """Everything that happened, step by step."""

    def __init__(self) -> None:
        self.steps: dict[str, list[Array]] = {}
        self.finals: dict[tuple[int, int], Arrays] = {}  # (step, row) -> the last observation of the ended episode
        self.seats: Array | None = None

    def add(self, seen: Arrays, action: Array, columns: Arrays, now: Any, numbers: Array, seats: Array | None) -> None:
        at = len(self.steps.get("reward", []))
        found = {f"obs.{name}": array for name, array in seen.items()}
        found |= {f"column.{name}": array for name, array in columns.items()}
        found |= {"action": action, "number": numbers}
        for name in ("reward", "terminated", "truncated", "valid"):
            found[name] = getattr(now, name).copy()
        if seats is not None:
            self.seats = found["seat"] = seats.copy()
        for name, array in found.items():
            self.steps.setdefault(name, []).append(array)
        for row in np.flatnonzero(now.terminated | now.truncated):
            final = {name: array[row].copy() for name, array in now.final_obs.items()}
            if MASK in seen:  # no decision follows the last observation, so everything is allowed
                final[MASK] = np.ones_like(seen[MASK][row])
            self.finals[at, int(row)] = final

    def arrays(self) -> Arrays:
        """Everything as [T, B, ...]."""
        return {name: np.stack(each) for name, each in self.steps.items()}

    def ends_of(self, row: int) -> list[int]:
        return [step for step, ended in sorted(self.finals) if ended == row]
