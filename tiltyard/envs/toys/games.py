"""Small envs with several agents whose right answers are known exactly. They have the methods of PettingZoo's parallel
envs and do not need it.

name       what it asks for                                       known
pennies    mixing heads and tails so that nobody can do better    even: heads 1/5, odd: heads 2/5, even loses 2/5
visitors   showing what is seen, by agents that come and go       who decides when, and the best return of each
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

Answer = tuple[dict[str, Any], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]


class Pennies:
    """Two players each show heads (0) or tails (1); what `even` wins, `odd` loses. A round is an episode.

                    odd: heads    odd: tails
        even: heads     2            -2
        even: tails    -1             0

    The only equilibrium: even shows heads with probability 1/5 and odd with 2/5; even wins -2/5 a round. Against it no
    choice of the other player is better than the other. Each sees which of the two it is.
    """

    metadata = {"render_modes": [], "name": "pennies"}
    WON = np.array([[2.0, -2.0], [-1.0, 0.0]])  # by even, [even's choice, odd's choice]
    HEADS = {"even": 1 / 5, "odd": 2 / 5}
    VALUE = -2 / 5

    def __init__(self) -> None:
        self.possible_agents = ["even", "odd"]
        self.agents: list[str] = []
        self._see = spaces.Box(0, 1, (2,), np.float32)
        self._do: spaces.Discrete[Any] = spaces.Discrete(2)

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self._see

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self._do

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, Any], Any]:
        self.agents = list(self.possible_agents)
        return self._views(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Answer:
        won = float(self.WON[actions["even"], actions["odd"]])
        played, self.agents = self.agents, []
        return (
            self._views(),
            {"even": won, "odd": -won},
            dict.fromkeys(played, True),
            dict.fromkeys(played, False),
            {agent: {f"{agent}_heads": float(actions[agent] == 0)} for agent in played},
        )

    def _views(self) -> dict[str, Any]:
        return dict(zip(self.possible_agents, np.eye(2, dtype=np.float32), strict=True))

    def render(self) -> None:
        """There is nothing to see."""

    def close(self) -> None:
        """There is nothing to close."""

    @property
    def unwrapped(self) -> Pennies:
        return self


class Visitors:
    """Each agent that is there sees 0 or 1 and is paid 1 for showing the same. An episode is six env steps:

        step      0  1  2  3  4  5      decisions = best return
        host      x  x  x  x  x  x      6, truncated
        late      .  .  x  x  x  .      3, terminated
        early     x  x  .  .  .  .      2, terminated
        guest     .  x  .  .  x  x      3, only with `pauses`: goes away without being done and comes back; truncated

    PettingZoo knows no agent that goes without being done, so its own test passes without `pauses` only.
    """

    metadata = {"render_modes": [], "name": "visitors"}
    LENGTH = 6

    def __init__(self, *, pauses: bool = False) -> None:
        times = {"host": range(6), "late": (2, 3, 4), "early": (0, 1)}
        self._times: dict[str, Any] = {**times, "guest": (1, 4, 5)} if pauses else times
        self.possible_agents = list(self._times)
        self.agents: list[str] = []
        self._spaces: list[spaces.Space[Any]] = [spaces.Box(0, 1, (2,), np.float32), spaces.Discrete(2)]
        self._random = np.random.default_rng(0)

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self._spaces[0]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self._spaces[1]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, Any], Any]:
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self._step = 0
        self._look()
        return self._views(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Answer:
        acted = list(self.agents)
        rewards = {agent: float(actions[agent] == self._shown[agent]) for agent in acted}
        self._step += 1
        self._look()
        over = self._step == self.LENGTH
        told = sorted({*acted, *self.agents})  # those that come now are told that nothing has happened to them
        terminated = {agent: agent not in ("host", "guest") and self._step > self._times[agent][-1] for agent in told}
        return (
            self._views(told),
            {agent: rewards.get(agent, 0.0) for agent in told},
            terminated,
            {agent: over and not terminated[agent] for agent in told},
            {agent: {"seen": float(self._shown[agent])} for agent in told},
        )

    def _look(self) -> None:
        self.agents = [agent for agent, times in self._times.items() if self._step in times]
        self._shown = {agent: int(self._random.integers(2)) for agent in self.possible_agents}

    def _views(self, agents: list[str]) -> dict[str, Any]:
        return {agent: np.eye(2, dtype=np.float32)[self._shown[agent]] for agent in agents}

    def render(self) -> None:
        """There is nothing to see."""

    def close(self) -> None:
        """There is nothing to close."""

    @property
    def unwrapped(self) -> Visitors:
        return self
