"""Several policies that act in one group of envs, behind the interface of a single policy.

    take_seats(seeds of the episodes)  ->  act(obs [B], ...) = policy 0 on its rows, policy 1 on its rows, ...

Owns the seats (which policy plays which row) and the recurrent state. Learning policies and their past versions have
the same model and share one state array; a frozen policy has its own, under NAME/KEY. matchmaking.py draws the policy
of a row and its version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tiltyard.engines.policies.matchmaking import Match, VersionPool, draw_version
from tiltyard.models.policy_net import ObsIn, PolicyNet, PolicyOutput
from tiltyard.models.recurrent import State
from tiltyard.types import Array, EpisodeEnd, Tree


class MultiPolicyActor:
    """All policies of a run. `frozen` names those with their own model and state; the pools of `past` versions may
    change between two actions."""

    def __init__(
        self, nets: Mapping[str, PolicyNet], frozen: Sequence[str], match: Match, past: Mapping[str, VersionPool]
    ) -> None:
        self.match, self._past = match, past
        self._nets = [nets.get(name) for name in match.policies]
        first = next(net for net in self._nets if net is not None)
        self.device, self._columns = first.device, first.spec.action.columns
        self._keys = [  # per policy: key of its recurrent state -> key in the joint state
            {key: (f"{name}/" if name in frozen else "") + key for key in (net or first).initial_state(1)}
            for name, net in zip(match.policies, self._nets, strict=True)
        ]
        # Only learning policies need values; all have the same model.
        self._learning = {
            place: net for place, net in enumerate(self._nets) if net and match.policies[place] not in frozen
        }
        self._seeds: list[int] = []
        self.seats = np.zeros(0, np.int64)  # [B]: index of the policy that plays each row
        self.versions = np.zeros(0, np.int64)  # [B]: env step of the past version; -1: not one
        self._parts: list[tuple[int, PolicyNet, Array]] = []
        self._known: list[dict[int, int]] = []

    def take_seats(self, seeds: Sequence[int]) -> Array:
        """Assign policies to the episodes with these seeds, one per row. A row changes only when its seed does, or when
        its version is no longer kept."""
        known = [pool.marks for pool in self._past.values()]
        if self._seeds != seeds or known != self._known:
            agents = len(self.match.agents)
            if len(self.seats) != len(seeds):
                self._seeds, self.seats = [-1] * len(seeds), np.zeros(len(seeds), np.int64)
                self.versions = np.full(len(seeds), -1, np.int64)
            for at in range(0, len(seeds), agents):
                if seeds[at] != self._seeds[at]:
                    self.seats[at : at + agents] = self.match.draw(seeds[at])
                    self.versions[at : at + agents] = -1
            self._seeds, self._known = list(seeds), [dict(marks) for marks in known]
            self._draw_versions()
            self._group_rows()
        return self.seats

    def save(self) -> Tree:
        """The seeds of the episodes and the versions that play them."""
        return {"seeds": list(self._seeds), "versions": self.versions}

    def load(self, seeds: Sequence[int], tree: Tree) -> None:
        """Assign policies to the episodes with these seeds; episodes running at `save` keep their versions."""
        self.take_seats(seeds)
        for row, (now, then, version) in enumerate(zip(seeds, tree["seeds"], tree["versions"].tolist(), strict=False)):
            if now == then and self.versions[row] >= 0:
                self.versions[row] = version
        self._draw_versions()
        self._group_rows()

    def _draw_versions(self) -> None:
        """Draw a version for each row of a pool whose version is missing or no longer kept."""
        for place, name in enumerate(self.match.policies):
            if (pool := self._past.get(name)) is not None:
                known = list(pool.versions)
                for row in np.flatnonzero((self.seats == place) & ~np.isin(self.versions, known)).tolist():
                    agent = row % len(self.match.agents)
                    self.versions[row] = draw_version(pool.past, known, self._seeds[row], agent)

    def _group_rows(self) -> None:
        """Collect the rows of each net."""
        self._parts = []
        for place, version in sorted({*zip(self.seats.tolist(), self.versions.tolist(), strict=True)}):
            rows = np.flatnonzero((self.seats == place) & (self.versions == version))
            own = self._nets[place]
            net = own if own is not None else self._past[self.match.policies[place]].versions[version]
            self._parts.append((place, net, rows))

    def returns(self, end: EpisodeEnd, first_row: int) -> dict[str, float]:
        """Mean return of each policy in an episode that has just ended; call before the next `take_seats`."""
        at = end.row - first_row
        own = {agent: end.metrics[f"{agent}_return"] for agent in self.match.agents if f"{agent}_return" in end.metrics}
        return self.match.returns(self.seats[at : at + len(self.match.agents)], own, end.total)

    # ------------------------------------------------------------------------------------------ as one policy

    def initial_state(self, rows: int) -> State:
        both = [(keys, net) for keys, net in zip(self._keys, self._nets, strict=True) if net is not None]
        return {keys[key]: item for keys, net in both for key, item in net.initial_state(rows).items()}

    def act(
        self,
        obs: ObsIn,
        state: State,
        first: Tensor | Array,
        mask: Tensor | Array | None,
        *,
        greedy: bool,
        generator: torch.Generator | None = None,
        with_value: bool = True,
    ) -> PolicyOutput:
        """One action for each row by its policy. Changes `state` in place."""
        count = len(self.seats)
        action = np.zeros((count, self._columns), np.float32)
        log_prob, value = np.zeros(count, np.float32), np.zeros(count, np.float32)
        if self.device.type == "cpu":  # indexing rows of arrays takes a tenth of the time of tensors
            obs, first = {key: np.asarray(x) for key, x in obs.items()}, np.asarray(first)
        for place, net, rows in self._parts:
            part = self._part(place, rows, obs, state)
            allowed = None if mask is None else mask[rows]
            acted = net.act(*part, first[rows], allowed, greedy=greedy, generator=generator, with_value=with_value)
            for key, item in acted.state.items():
                state[self._keys[place][key]][rows] = item
            action[rows], log_prob[rows] = acted.action, acted.log_prob
            if with_value:
                value[rows] = acted.value
        return PolicyOutput(action, log_prob, value, state)

    def value(self, obs: ObsIn, state: State, first: Tensor | Array) -> Array:
        """[B] in units of reward, each by the policy of the row."""
        worth = np.zeros(len(self.seats), np.float32)
        for place, net, rows in self._parts:
            worth[rows] = net.value(*self._part(place, rows, obs, state), first[rows])
        return worth

    @property
    def batched_values(self) -> bool:
        """Whether values are cheaper for a rollout at a time, by `values_of`."""
        return all(net.batched_values for net in self._learning.values())

    def values_of(self, obs: Mapping[str, Array], policy: Array) -> Array:
        """[N] values of observations by the policies with these indices; 0 for policies that do not learn."""
        worth = np.zeros(len(policy), np.float32)
        for place, net in self._learning.items():
            chosen = np.flatnonzero(policy == place)
            if len(chosen):
                seen = {key: array[chosen] for key, array in obs.items()}
                worth[chosen] = net.value(seen, {}, np.zeros(len(chosen), bool))
        return worth

    def _part(self, place: int, rows: Array, obs: ObsIn, state: State) -> tuple[dict[str, Any], State]:
        """Observations and recurrent state of the rows of a policy."""
        memory = {key: state[name][rows] for key, name in self._keys[place].items()}
        return {key: x[rows] for key, x in obs.items()}, memory
