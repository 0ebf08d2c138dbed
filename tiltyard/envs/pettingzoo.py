"""An env with several agents that act together, as PettingZoo's parallel envs do: names, spaces, checks.

multi_agent_vector.py makes rows of it. PettingZoo itself is not needed for an env that has its methods. An agent's
place is its index in `possible_agents`.

    reset(seed, options) -> (obs, infos)       step({agent: action}) -> (obs, rewards, terminated, truncated, infos)
    agents: which act next       possible_agents: all agents          observation_space(agent), action_space(agent)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import gymnasium
import numpy as np

from tiltyard.envs.checks import reward_fault, shown
from tiltyard.envs.spaces import MASK
from tiltyard.errors import UseError

_METHODS = ("reset", "step", "observation_space", "action_space")
_FIVE = ("obs", "rewards", "terminated", "truncated", "infos")
_PADDING = "pad them to one shape (supersuit's pad_observations_v0 and pad_action_space_v0 do), in the env or a wrapper"


def is_parallel(made: Any) -> bool:
    """Whether an object is an env whose agents act together."""
    if isinstance(made, gymnasium.Env) or not all(callable(getattr(made, name, None)) for name in _METHODS):
        return False
    return hasattr(made, "possible_agents") and not _is_sequential(made)


def as_parallel(made: Any) -> Any:
    """An env whose agents take turns (PettingZoo's AEC), converted by PettingZoo; other envs as they are."""
    if not _is_sequential(made):
        return made
    try:
        from pettingzoo.utils import conversions
    except ModuleNotFoundError as error:
        hint = "pip install 'tiltyard[pettingzoo]'"
        message = f"{type(made).__name__}, whose agents act in turn, needs the package 'pettingzoo'"
        raise UseError(message, hint) from error
    if made.metadata.get("is_parallelizable"):
        return conversions.aec_to_parallel(made)
    return _Sequential(conversions.turn_based_aec_to_parallel(made))


def _is_sequential(made: Any) -> bool:
    methods = ("agent_iter", "last", "observe")
    return not isinstance(made, gymnasium.Env) and all(callable(getattr(made, name, None)) for name in methods)


class _Sequential:
    """A game in which one agent acts at a time, as an env in which all do: the actions of the others are ignored.

    PettingZoo allows those who wait no action at all. Here they may choose any, because a policy must choose one.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        obs, infos = self.inner.reset(seed=seed, options=options)
        return {agent: _allow_waiting(each) for agent, each in obs.items()}, infos

    def step(self, actions: Any) -> Any:
        obs, *others = self.inner.step(actions)
        return ({agent: _allow_waiting(each) for agent, each in obs.items()}, *others)


def _allow_waiting(obs: Any) -> Any:
    if isinstance(obs, Mapping) and MASK in obs and not np.any(obs[MASK]):
        return {**obs, MASK: np.ones_like(obs[MASK])}
    return obs


class Parallel:
    """A parallel env whose agents are numbered by place. All agents have the same observation and action space."""

    def __init__(self, inner: Any, env_id: str) -> None:
        self.inner: Any = inner
        self.agents: list[Hashable] = list(inner.possible_agents)
        self.names = tuple(str(agent) for agent in self.agents)
        if not self.agents or len(set(self.names)) < len(self.names):
            raise UseError(f"env {env_id}: possible_agents is {shown(self.agents)}", "list every agent exactly once")
        self._places = {agent: place for place, agent in enumerate(self.agents)}
        self.observation_space: gymnasium.Space[Any] = self._one_space("observation_space", env_id)
        self.action_space: gymnasium.Space[Any] = self._one_space("action_space", env_id)
        self.metadata: Mapping[str, Any] = getattr(inner, "metadata", None) or {}

    def _one_space(self, kind: str, env_id: str) -> Any:
        spaces = [getattr(self.inner, kind)(agent) for agent in self.agents]
        other = next((place for place, space in enumerate(spaces) if space != spaces[0]), None)
        if other is not None:
            raise UseError(
                f"env {env_id}: agents must have the same {kind.replace('_', ' ')}, but that of {self.names[0]!r} is "
                f"{shown(spaces[0])} and that of {self.names[other]!r} is {shown(spaces[other])}",
                _PADDING,
            )
        return spaces[0]

    def reset(self, *, seed: int) -> Any:
        return self.inner.reset(seed=seed)

    def step(self, actions: Mapping[int, Any]) -> Any:
        """Act by place; returns what the env does, dicts by agent."""
        return self.inner.step({self.agents[place]: action for place, action in actions.items()})

    def send_step(self, actions: Mapping[int, Any], frames: int) -> None:
        """Request the next frames of an isolated env, see `EnvProxy`."""
        self.inner.send_step({self.agents[place]: action for place, action in actions.items()}, frames)

    def of(self, part: Mapping[Any, Any], place: int) -> Any:
        """The agent's entry in a dict of the env; None if there is none."""
        return part.get(self.agents[place])

    def present(self) -> list[int]:
        """Places of the agents in the env's `agents`."""
        return [self._places[agent] for agent in self.inner.agents]

    def render(self) -> Any:
        return self.inner.render()

    def close(self) -> None:
        self.inner.close()

    @property
    def unwrapped(self) -> Any:
        return getattr(self.inner, "unwrapped", self.inner)

    # ------------------------------------------------------------------------------------------ checks

    def reset_fault(self, answer: Any) -> str | None:
        """Check what reset() returned and `agents` after it."""
        if not isinstance(answer, tuple) or len(answer) != 2 or not all(isinstance(part, Mapping) for part in answer):
            return f"reset() returned {_form(answer)} instead of two dicts (obs, infos)"
        fault = self._agents_fault()
        if fault is None and not self.inner.agents:
            return "reset() left `agents` empty"
        return fault or self._without_obs("reset", self.present(), answer[0])

    def step_fault(self, answer: Any, acted: Iterable[int]) -> str | None:
        """Check what step() returned for the agents that `acted`, and `agents` after it."""
        if not isinstance(answer, tuple) or len(answer) != 5 or not all(isinstance(part, Mapping) for part in answer):
            return f"step() returned {_form(answer)} instead of five dicts ({', '.join(_FIVE)})"
        _, rewards, terminated, truncated, _ = answer
        for place in acted:
            agent = self.agents[place]
            for name, part in (("reward", rewards), ("terminated", terminated), ("truncated", truncated)):
                if agent not in part:
                    return f"step() returned no {name} for agent {self.names[place]!r}, which acted"
                if part is not rewards and not isinstance(part[agent], bool | np.bool_):
                    return f"agent {self.names[place]!r}: {name} is {shown(part[agent])} instead of a bool"
            fault = reward_fault(rewards[agent])
            if fault and "instead" in fault:
                return f"agent {self.names[place]!r}: {fault}"
        needed = {place for place in acted if not terminated[self.agents[place]]}  # a terminal state needs none
        return self._agents_fault() or self._without_obs("step", sorted(needed | set(self.present())), answer[0])

    def _agents_fault(self) -> str | None:
        agents = getattr(self.inner, "agents", None)
        if not isinstance(agents, list | tuple | set):
            return f"`agents` is {shown(agents)} instead of a list of agents"
        unknown = next((agent for agent in agents if agent not in self._places), None)
        return None if unknown is None else f"agent {unknown!r} is in `agents` but not in `possible_agents`"

    def _without_obs(self, method: str, places: list[int], obs: Mapping[Any, Any]) -> str | None:
        missing = next((place for place in places if self.agents[place] not in obs), None)
        return None if missing is None else f"{method}() returned no observation for agent {self.names[missing]!r}"


def _form(answer: Any) -> str:
    if isinstance(answer, tuple):
        return f"({', '.join(type(part).__name__ for part in answer)})"
    return f"one {type(answer).__name__}"
