"""One env with several agents that act together, as PettingZoo's parallel envs do: names, spaces, answers, faults.

Owns what such an env must be and what is wrong with one that is not; its rows are parallel_rows.py. PettingZoo itself
is not needed for an env that has its methods. Agents are counted as in `possible_agents`: that is their place.

    reset(seed, options) -> (obs, infos)       step({agent: action}) -> (obs, rewards, terminated, truncated, infos)
    agents: who acts next        possible_agents: who ever may        observation_space(agent), action_space(agent)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import gymnasium
import numpy as np

from tiltyard.envs.checks import reward_fault, shown
from tiltyard.errors import UseError

_METHODS = ("reset", "step", "observation_space", "action_space")
_FIVE = ("obs", "rewards", "terminated", "truncated", "infos")
_PADDING = "pad them to one shape (supersuit's pad_observations_v0 and pad_action_space_v0 do), in the env or a wrapper"


def is_parallel(made: Any) -> bool:
    """Whether an object is an env whose agents act together. UseError for one whose agents take turns."""
    if isinstance(made, gymnasium.Env) or not all(callable(getattr(made, name, None)) for name in _METHODS):
        return False
    if callable(getattr(made, "agent_iter", None)):
        raise UseError(
            f"{type(made).__name__} is an env whose agents take turns (PettingZoo's AEC)",
            "name its parallel_env, or convert it with pettingzoo.utils.conversions.aec_to_parallel",
        )
    return hasattr(made, "possible_agents")


class Parallel:
    """A parallel env by the places of its agents. All agents have one observation and one action space."""

    def __init__(self, inner: Any, env_id: str) -> None:
        self.inner: Any = inner
        self.agents: list[Hashable] = list(inner.possible_agents)
        self.names = tuple(str(agent) for agent in self.agents)
        if not self.agents or len(set(self.names)) < len(self.names):
            raise UseError(
                f"env {env_id}: possible_agents is {shown(self.agents)}", "it names every agent that may ever act, once"
            )
        self._places = {agent: place for place, agent in enumerate(self.agents)}
        self.observation_space: gymnasium.Space[Any] = self._one_space("observation_space", env_id)
        self.action_space: gymnasium.Space[Any] = self._one_space("action_space", env_id)
        self.metadata: Mapping[str, Any] = getattr(inner, "metadata", None) or {}

    def _one_space(self, kind: str, env_id: str) -> Any:
        spaces = [getattr(self.inner, kind)(agent) for agent in self.agents]
        other = next((place for place, space in enumerate(spaces) if space != spaces[0]), None)
        if other is not None:
            raise UseError(
                f"env {env_id}: the {kind.replace('_', ' ')} of agent {self.names[0]!r} is {shown(spaces[0])} and that "
                f"of {self.names[other]!r} is {shown(spaces[other])}, and one policy acts for all",
                _PADDING,
            )
        return spaces[0]

    def reset(self, *, seed: int) -> Any:
        return self.inner.reset(seed=seed)

    def step(self, actions: Mapping[int, Any]) -> Any:
        """Act by place; the env's own answer, whose dicts are by name."""
        return self.inner.step({self.agents[place]: action for place, action in actions.items()})

    def ahead(self, actions: Mapping[int, Any], frames: int) -> None:
        """Have an env of its own process or thread do the next frames, see `Away`."""
        self.inner.ahead({self.agents[place]: action for place, action in actions.items()}, frames)

    def of(self, part: Mapping[Any, Any], place: int) -> Any:
        """What a dict of the env's says of an agent; None when it says nothing."""
        return part.get(self.agents[place])

    def present(self) -> list[int]:
        """Places of the agents that the env says are there."""
        return [self._places[agent] for agent in self.inner.agents]

    def render(self) -> Any:
        return self.inner.render()

    def close(self) -> None:
        self.inner.close()

    @property
    def unwrapped(self) -> Any:
        return getattr(self.inner, "unwrapped", self.inner)

    # ------------------------------------------------------------------------------------------ faults

    def reset_fault(self, answer: Any) -> str | None:
        """What is wrong with the form of reset's answer, or with who is there after it."""
        if not isinstance(answer, tuple) or len(answer) != 2 or not all(isinstance(part, Mapping) for part in answer):
            return f"reset() returned {_form(answer)} instead of two dicts (obs, infos)"
        fault = self._unknown()
        if fault is None and not self.inner.agents:
            return "reset() left `agents` empty: nobody is there to act"
        return fault or self._unseen("reset", self.present(), answer[0])

    def step_fault(self, answer: Any, acted: Iterable[int]) -> str | None:
        """What is wrong with step's answer to these agents, or with who is there after it."""
        if not isinstance(answer, tuple) or len(answer) != 5 or not all(isinstance(part, Mapping) for part in answer):
            return f"step() returned {_form(answer)} instead of five dicts ({', '.join(_FIVE)})"
        _, rewards, terminated, truncated, _ = answer
        for place in acted:
            agent = self.agents[place]
            for name, part in (("reward", rewards), ("terminated", terminated), ("truncated", truncated)):
                if agent not in part:
                    return f"step() gave agent {self.names[place]!r}, which acted, no {name}"
                if part is not rewards and not isinstance(part[agent], bool | np.bool_):
                    return f"agent {self.names[place]!r}: {name} is {shown(part[agent])} instead of a bool"
            fault = reward_fault(rewards[agent])
            if fault and "instead" in fault:
                return f"agent {self.names[place]!r}: {fault}"
        unseen = {place for place in acted if not terminated[self.agents[place]]}  # an end that is real needs no view
        return self._unknown() or self._unseen("step", sorted(unseen | set(self.present())), answer[0])

    def _unknown(self) -> str | None:
        agents = getattr(self.inner, "agents", None)
        if not isinstance(agents, list | tuple | set):
            return f"`agents` is {shown(agents)} instead of a list of those that act next"
        stranger = next((agent for agent in agents if agent not in self._places), None)
        return None if stranger is None else f"agent {stranger!r} is in `agents` and not in `possible_agents`"

    def _unseen(self, doing: str, places: list[int], obs: Mapping[Any, Any]) -> str | None:
        blind = next((place for place in places if self.agents[place] not in obs), None)
        return None if blind is None else f"{doing}() gave agent {self.names[blind]!r} no observation"


def _form(answer: Any) -> str:
    if isinstance(answer, tuple):
        return f"({', '.join(type(part).__name__ for part in answer)})"
    return f"one {type(answer).__name__}"
