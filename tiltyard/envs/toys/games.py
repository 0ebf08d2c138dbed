"""Small envs with several agents whose solutions are known exactly. They have the methods of PettingZoo's parallel
envs but do not need that package.

name       task                                                  known
pennies    mix heads and tails at the equilibrium                even: heads 1/5, odd: heads 2/5, even loses 2/5
visitors   repeat the observation; agents join and leave         when each agent acts, and its best return
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

Answer = tuple[dict[str, Any], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]


class Pennies:
    """Two players each show heads (0) or tails (1); `even` wins what `odd` loses. A round is an episode.

                    odd: heads    odd: tails
        even: heads     2            -2
        even: tails    -1             0

    The only equilibrium: even shows heads with probability 1/5 and odd with 2/5; even wins -2/5 a round. Against it,
    both choices of the other player are equally good. Each observes which of the two players it is.
    """

    metadata = {"render_modes": [], "name": "pennies"}
    PAYOFF = np.array([[2.0, -2.0], [-1.0, 0.0]])  # of even, [even's choice, odd's choice]
    HEADS = {"even": 1 / 5, "odd": 2 / 5}
    VALUE = -2 / 5

    def __init__(self) -> None:
        self.possible_agents = ["even", "odd"]
        self.agents: list[str] = []
        self._observation_space = spaces.Box(0, 1, (2,), np.float32)
        self._action_space: spaces.Discrete[Any] = spaces.Discrete(2)

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self._observation_space

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self._action_space

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, Any], Any]:
        self.agents = list(self.possible_agents)
        return self._views(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Answer:
        won = float(self.PAYOFF[actions["even"], actions["odd"]])
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
        """Nothing to draw."""

    def close(self) -> None:
        """Nothing to close."""

    @property
    def unwrapped(self) -> Pennies:
        return self


class Visitors:
    """Each agent present observes 0 or 1 and gets reward 1 for the same action. An episode is six env steps:

        step      0  1  2  3  4  5      decisions = best return
        host      x  x  x  x  x  x      6, truncated
        late      .  .  x  x  x  .      3, terminated
        early     x  x  .  .  .  .      2, terminated
        guest     .  x  .  .  x  x      3, only with `pauses`: leaves without being done and returns; truncated

    In PettingZoo no agent leaves without being done, so its own test passes only without `pauses`.
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
        self._update()
        return self._views(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Answer:
        acted = list(self.agents)
        rewards = {agent: float(actions[agent] == self._shown[agent]) for agent in acted}
        self._step += 1
        self._update()
        over = self._step == self.LENGTH
        reported = sorted({*acted, *self.agents})  # agents that join now get reward 0
        terminated = {
            agent: agent not in ("host", "guest") and self._step > self._times[agent][-1] for agent in reported
        }
        return (
            self._views(reported),
            {agent: rewards.get(agent, 0.0) for agent in reported},
            terminated,
            {agent: over and not terminated[agent] for agent in reported},
            {agent: {"seen": float(self._shown[agent])} for agent in reported},
        )

    def _update(self) -> None:
        self.agents = [agent for agent, times in self._times.items() if self._step in times]
        self._shown = {agent: int(self._random.integers(2)) for agent in self.possible_agents}

    def _views(self, agents: list[str]) -> dict[str, Any]:
        return {agent: np.eye(2, dtype=np.float32)[self._shown[agent]] for agent in agents}

    def render(self) -> None:
        """Nothing to draw."""

    def close(self) -> None:
        """Nothing to close."""

    @property
    def unwrapped(self) -> Visitors:
        return self
