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
import tree  # type: ignore[import-untyped]
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.env.utils.infinite_lookback_buffer import InfiniteLookbackBuffer

from tiltyard.config.experiment import family
from tiltyard.engines.collector import Collector
from tiltyard.engines.policies.multi_policy import MultiPolicyActor
from tiltyard.engines.rllib.connectors import STATE_BEFORE
from tiltyard.engines.rllib.worker_spec import WorkerSpec
from tiltyard.envs.spaces import MASK
from tiltyard.models.policy_net import PolicyNet
from tiltyard.types import Array, Arrays, EpisodeEnd, Step

Decision = tuple[Array, Arrays, dict[str, torch.Tensor]]
"""actions [B, columns], other columns by name [B, ...], and the recurrent state after them"""
Finals = dict[tuple[int, int], Arrays]
"""(step, row) -> the last observation of an ended episode"""
OUTCOME = ("reward", "terminated", "truncated", "valid")
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
        self.spaces = worker_spec.spaces()
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
        log: list[dict[str, Any]] = []
        finals: Finals = {}
        ends: list[EpisodeEnd] = []
        for at in range(steps):
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
            done = {"obs": seen, "action": action, "columns": {**columns, **memory}, "number": envs.stats.number.copy()}
            if seats is not None:
                done["seat"] = seats.copy()
            between = perf_counter()
            spent["inference"] += between - mark
            now = envs.step(action)
            ends += now.episodes if players is None else group.with_returns(now.episodes, players)
            log.append(done | {name: getattr(now, name).copy() for name in OUTCOME})
            for row in np.flatnonzero(now.terminated | now.truncated).tolist():
                finals[at, row] = {name: array[row].copy() for name, array in now.final_obs.items()}
                if mask is not None:  # no decision follows the last observation, so everything is allowed
                    finals[at, row][MASK] = np.ones_like(seen[MASK][row])
            spent["env"] += perf_counter() - between
        group.now = now
        return self._pieces(log, finals, now), ends

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

    def _pieces(self, log: list[dict[str, Any]], finals: Finals, now: Step) -> list[SingleAgentEpisode]:
        arrays = tree.map_structure(lambda *each: np.stack(each), *log)  # [T, B, ...]
        after = {name: array.copy() for name, array in now.obs.items()}  # the observations to act on next
        if now.mask is not None:
            after[MASK] = now.mask.astype(np.int8)
        pieces = []
        for row in range(self.collector.rows):
            begin = 0
            for stop in sorted({*(at + 1 for at, ended in finals if ended == row), len(log)}):
                last = finals.get((stop - 1, row))
                unended = {name: array[row] for name, array in after.items()}
                pieces += self._piece(arrays, row, begin, stop, last or unended)
                if last is not None:
                    self.taken[row] = 0
                begin = stop
        return pieces

    def _piece(self, arrays: dict[str, Any], row: int, begin: int, stop: int, last: Arrays) -> list[SingleAgentEpisode]:
        """Steps begin .. stop - 1 of a row as a list of one; empty if they hold no decision."""
        chosen = begin + np.flatnonzero(arrays["valid"][begin:stop, row])
        if not len(chosen):
            return []
        rewards = arrays["reward"][chosen, row]
        if len(chosen) < stop - begin:
            rewards = np.add.reduceat(arrays["reward"][:stop, row], chosen)
        obs = {name: np.concatenate([array[chosen, row], last[name][None]]) for name, array in arrays["obs"].items()}
        action = arrays["action"][chosen, row]
        started = int(self.taken[row])
        self.taken[row] += len(chosen)
        who: dict[str, str] = {}
        if "seat" in arrays:
            policy = list(self.experiment.policy_settings)[int(arrays["seat"][begin, row])]
            if policy not in self.experiment.learning:
                return []
            who = {"agent_id": f"row_{row}", "module_id": policy}
        return [
            SingleAgentEpisode(
                id_=f"{self.instance}-{self.group}-{row}-{int(arrays['number'][begin, row])}",
                observations=_column(obs, self.spaces["observation_space"]),
                infos=[{}] * (len(chosen) + 1),
                actions=_column(action[:, 0].astype(np.int64) if self.scalar else action, self.spaces["action_space"]),
                **self.spaces,
                rewards=_column(rewards),
                terminated=bool(arrays["terminated"][stop - 1, row]),
                truncated=bool(arrays["truncated"][stop - 1, row]),
                extra_model_outputs={name: _column(array[chosen, row]) for name, array in arrays["columns"].items()},
                t_started=started,
                len_lookback_buffer=0,
                **who,
            )
        ]

    def close(self) -> None:
        self.collector.close()


def _column(data: Any, space: gymnasium.Space[Any] | None = None) -> InfiniteLookbackBuffer:
    return InfiniteLookbackBuffer(data=data, lookback=0, space=space)
