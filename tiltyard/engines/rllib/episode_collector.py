"""A group of envs that gives RLlib episodes: the collector of every engine, another way of writing down what it saw.

    gather(T): T times { act -> step }  ->  one piece for each row and episode, cut where the T steps end

A piece has one observation more than actions: the last of an ended episode, or what is acted on next. Steps in which an
agent had nothing to decide are left out; what they paid is added to the decision before them.
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
from tiltyard.engines.rllib.connectors import BEFORE
from tiltyard.engines.rllib.worker_spec import WorkerSpec, action_space, observation_space
from tiltyard.envs.spaces import MASK
from tiltyard.models.policy_net import PolicyNet
from tiltyard.types import Array, Arrays, EpisodeEnd

Decided = tuple[Array, Arrays, dict[str, torch.Tensor]]
"""actions [B, columns], other columns by name [B, ...], and the memory after them"""
Decide = Callable[[dict[str, torch.Tensor], torch.Tensor, Array | None], Decided]


class Rows(Collector):
    """`life` tells its episodes from those of an earlier life of the same rows."""

    def __init__(self, task: WorkerSpec, net: PolicyNet | MultiPolicyActor, envs: int, group: int, life: str) -> None:
        super().__init__(task.experiment, task.spec, task.base, net, envs, group)
        self.life = life
        self.scalar = family(task.experiment.algo) == "dqn"  # RLlib takes one choice as a number, not as a row of one
        self.obs_space, self.action_space = observation_space(task.spec), action_space(task)
        self.taken = np.zeros(self.rows, np.int64)  # decisions of the running episode that are in earlier pieces
        self.spent = {"env": 0.0, "inference": 0.0}

    def gather(self, steps: int, decide: Decide) -> tuple[list[SingleAgentEpisode], list[EpisodeEnd]]:
        """Pieces of all rows, and the episodes that ended meanwhile."""
        with self.generators.active():
            return self._gather(steps, decide)

    def _gather(self, steps: int, decide: Decide) -> tuple[list[SingleAgentEpisode], list[EpisodeEnd]]:
        now = self.envs.reset() if self.now is None else self.now
        log = _Log()
        ends: list[EpisodeEnd] = []
        for _ in range(steps):
            mark = perf_counter()
            seats = self.players.take_seats(self.envs.stats.seeds) if self.players is not None else None
            seen = {name: array.copy() for name, array in now.obs.items()}
            mask = None if now.mask is None else now.mask.copy()
            memory = {f"{BEFORE}.{name}": item.cpu().numpy().copy() for name, item in self._memory(now.first).items()}
            tensors = {name: torch.from_numpy(array) for name, array in seen.items()}
            action, columns, self.state = decide(tensors, torch.from_numpy(now.first.copy()), mask)
            if mask is not None:
                seen[MASK] = mask.astype(np.int8)
            numbers = self.envs.stats.number.copy()
            between = perf_counter()
            self.spent["inference"] += between - mark
            now = self.envs.step(action)
            ends += now.episodes if self.players is None else self._with_returns(now.episodes, self.players)
            log.add(seen, action, {**columns, **memory}, now, numbers, seats)
            self.spent["env"] += perf_counter() - between
        self.now = now
        return self._pieces(log, steps), ends

    def _memory(self, first: Array) -> dict[str, torch.Tensor]:
        """What each row remembers before it acts: at an episode's start nothing."""
        if not self.state:
            return {}
        fresh, starts = self.actor.initial_state(self.rows), torch.from_numpy(first.copy())
        return {
            name: torch.where(starts.view(-1, *[1] * (item.dim() - 1)), fresh[name], item)
            for name, item in self.state.items()
        }

    # ------------------------------------------------------------------------------------------ pieces

    def _pieces(self, log: _Log, steps: int) -> list[SingleAgentEpisode]:
        arrays = log.arrays()
        now = self.now
        assert now is not None
        after = {name: array.copy() for name, array in now.obs.items()}  # what rows act on next
        if now.mask is not None:
            after[MASK] = now.mask.astype(np.int8)
        pieces = []
        for row in range(self.rows):
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
        """Steps begin .. stop - 1 of a row, if it decided anything in them."""
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
        more = {name: array[chosen, row] for name, array in arrays.items() if name.startswith("column.")}
        started = int(self.taken[row])
        self.taken[row] += len(chosen)
        policy = None if log.seats is None else list(self.experiment.policy_settings)[int(arrays["seat"][begin, row])]
        if policy is not None and policy not in self.experiment.learning:
            return []
        return [
            SingleAgentEpisode(
                id_=f"{self.life}-{self.group}-{row}-{int(arrays['number'][begin, row])}",
                observations=_column(obs, self.obs_space),
                observation_space=self.obs_space,
                infos=[{}] * (len(chosen) + 1),
                actions=_column(action[:, 0].astype(np.int64) if self.scalar else action, self.action_space),
                action_space=self.action_space,
                rewards=_column(arrays["reward"][chosen, row] if rewards is None else rewards),
                terminated=bool(arrays["terminated"][stop - 1, row]),
                truncated=bool(arrays["truncated"][stop - 1, row]),
                extra_model_outputs={name.removeprefix("column."): _column(array) for name, array in more.items()},
                t_started=started,
                len_lookback_buffer=0,
                **({} if policy is None else {"agent_id": f"row_{row}", "module_id": policy}),
            )
        ]


def _column(data: Any, space: gymnasium.Space[Any] | None = None) -> InfiniteLookbackBuffer:
    return InfiniteLookbackBuffer(data=data, lookback=0, space=space)


class _Log:
    """What happened, step by step."""

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
            if MASK in seen:  # nothing is decided after the last observation: everything is allowed
                final[MASK] = np.ones_like(seen[MASK][row])
            self.finals[at, int(row)] = final

    def arrays(self) -> Arrays:
        """Everything as [T, B, ...]."""
        return {name: np.stack(each) for name, each in self.steps.items()}

    def ends_of(self, row: int) -> list[int]:
        return [step for step, ended in sorted(self.finals) if ended == row]
