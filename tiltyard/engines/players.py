"""Several policies acting in one group of envs, with the face of a single one: each acts in the rows that it plays now.

    take_seats(seeds of the episodes)  ->  act(obs [B], ...) = policy 0 on its rows, policy 1 on its rows, ...

Owns the seats and whose memory is whose. Policies that learn have the same model and so one memory, in which a row is
that of whoever plays it; a frozen one has its own, under NAME/KEY. What is drawn for a row is match.py's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiltyard.config.experiment import Experiment
from tiltyard.engines.match import Match
from tiltyard.models.memory import State
from tiltyard.models.net import Acted, ObsIn, PolicyNet
from tiltyard.types import Array, EnvSpec, EpisodeEnd

Rows = NDArray[Any]


def acting(
    experiment: Experiment,
    spec: EnvSpec,
    learning: Mapping[str, PolicyNet],
    frozen: Mapping[str, PolicyNet],
    *,
    measured: bool = False,
) -> PolicyNet | Players:
    """Who acts in a group of envs: the one policy itself, or several with seats. `measured` is what Match says."""
    nets = {**learning, **frozen}
    if len(experiment.cast) == 1:
        return nets[experiment.learning[0]]
    match = Match(experiment, spec.agents, measured=measured)
    return Players({name: nets[name] for name in experiment.cast}, list(frozen), match)


class Players:
    """All policies of a run, in order. `frozen` are the names of those with a model and a memory of their own."""

    values_apart = False  # rows change players within a rollout: who plays one now is asked now

    def __init__(self, nets: Mapping[str, PolicyNet], frozen: Sequence[str], match: Match) -> None:
        self.nets, self.match = list(nets.values()), match
        self.device = self.nets[0].device
        fronts = [f"{name}/" if name in frozen else "" for name in nets]
        self._keys = [  # of each policy's memory: its own name for it -> the one in the state of all
            {key: front + key for key in net.initial_state(1)} for front, net in zip(fronts, self.nets, strict=True)
        ]
        self._seeds: list[int] = []
        self.seats = np.zeros(0, np.int64)  # [B]: who plays each row, by place
        self._parts: list[tuple[int, Rows]] = []

    def take_seats(self, seeds: Sequence[int]) -> Array:
        """Seat the rows for the episodes with these seeds, one per row; a row changes only where the seed does."""
        if self._seeds != seeds:
            agents = len(self.match.agents)
            if len(self.seats) != len(seeds):
                self._seeds, self.seats = [-1] * len(seeds), np.zeros(len(seeds), np.int64)
            for at in range(0, len(seeds), agents):
                if seeds[at] != self._seeds[at]:
                    self.seats[at : at + agents] = self.match.draw(seeds[at])
            self._seeds = list(seeds)
            places = np.unique(self.seats).tolist()
            self._parts = [(place, np.flatnonzero(self.seats == place)) for place in places]
        return self.seats

    def returns(self, end: EpisodeEnd, first_row: int) -> dict[str, float]:
        """Mean return of each policy in an episode that has just ended, before the seats of the next are taken."""
        at = end.row - first_row
        own = {agent: end.metrics[f"{agent}_return"] for agent in self.match.agents if f"{agent}_return" in end.metrics}
        return self.match.returns(self.seats[at : at + len(self.match.agents)], own, end.total)

    # ------------------------------------------------------------------------------------------ as one policy

    def initial_state(self, rows: int) -> State:
        both = zip(self._keys, self.nets, strict=True)
        return {keys[key]: item for keys, net in both for key, item in net.initial_state(rows).items()}

    def act(
        self,
        obs: ObsIn,
        state: State,
        first: Tensor | Rows,
        mask: Tensor | Rows | None,
        *,
        greedy: bool,
        generator: torch.Generator | None = None,
        valued: bool = True,
    ) -> Acted:
        """One decision for each row by whoever plays it, always with its value. The memory is changed in place."""
        count = len(self.seats)
        action = np.zeros((count, self.nets[0].spec.action.columns), np.float32)
        log_prob, value = np.zeros(count, np.float32), np.zeros(count, np.float32)
        for place, rows in self._parts:
            part = self._part(place, rows, obs, state)
            allowed = None if mask is None else mask[rows]
            acted = self.nets[place].act(*part, first[rows], allowed, greedy=greedy, generator=generator)
            for key, item in acted.state.items():
                state[self._keys[place][key]][rows] = item
            action[rows], log_prob[rows], value[rows] = acted.action, acted.log_prob, acted.value
        return Acted(action, log_prob, value, state)

    def value(self, obs: ObsIn, state: State, first: Tensor | Rows) -> Rows:
        """[B] in units of reward, each by the policy that plays the row."""
        worth = np.zeros(len(self.seats), np.float32)
        for place, rows in self._parts:
            worth[rows] = self.nets[place].value(*self._part(place, rows, obs, state), first[rows])
        return worth

    def _part(self, place: int, rows: Rows, obs: ObsIn, state: State) -> tuple[dict[str, Any], State]:
        """What a policy sees and remembers of the rows that it plays."""
        memory = {key: state[name][rows] for key, name in self._keys[place].items()}
        return {key: x[rows] for key, x in obs.items()}, memory
