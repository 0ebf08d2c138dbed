"""Valid and invalid envs with several agents, used as plug-ins by the tests. They do not need PettingZoo."""

from typing import Any

import numpy as np
from gymnasium import spaces

from tiltyard.envs.toys.games import Visitors


class Masked(Visitors):
    """An env that allows only the right action, by masks in the infos of the present agents."""

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        obs, _ = super().reset(seed, options)
        return obs, self._allowed(obs)

    def step(self, actions: Any) -> Any:
        obs, rewards, terminated, truncated, _ = super().step(actions)
        return obs, rewards, terminated, truncated, self._allowed(obs)

    def _allowed(self, obs: Any) -> Any:
        return {agent: {"action_mask": np.asarray(seen, np.int8)} for agent, seen in obs.items()}


class Keeps(Visitors):
    """An env with get_state and set_state that cannot be re-run."""

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(None, options)

    def get_state(self) -> Any:
        return {"random": self._random.bit_generator.state, "step": self._step, "shown": dict(self._shown)}

    def set_state(self, state: Any) -> None:
        self._random.bit_generator.state = state["random"]
        self._step = state["step"]
        self.agents = [agent for agent, times in self._times.items() if self._step in times]
        self._shown = dict(state["shown"])


class OtherView(Visitors):
    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0, 1, (3,), np.float32) if agent == "late" else super().observation_space(agent)


class Alike:
    """A wrapper that pads all observations to one width with zeros."""

    def __init__(self, env: Any, *, width: int) -> None:
        self.env, self._space = env, spaces.Box(0, 1, (width,), np.float32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def observation_space(self, agent: str) -> Any:
        return self._space

    def action_space(self, agent: str) -> Any:
        return self.env.action_space(agent)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        obs, infos = self.env.reset(seed, options)
        return self._padded(obs), infos

    def step(self, actions: Any) -> Any:
        obs, *rest = self.env.step(actions)
        return self._padded(obs), *rest

    def _padded(self, obs: Any) -> Any:
        return {agent: np.pad(seen, (0, self._space.shape[0] - len(seen))) for agent, seen in obs.items()}


class NoAgents(Visitors):
    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed, options)
        self.agents = []
        return {}, {}


class UnknownAgent(Visitors):
    def step(self, actions: Any) -> Any:
        answer = super().step(actions)
        self.agents = [*self.agents, "spy"]
        return answer


class NoReward(Visitors):
    def step(self, actions: Any) -> Any:
        obs, rewards, *rest = super().step(actions)
        return obs, {agent: reward for agent, reward in rewards.items() if agent != "early"}, *rest


class NoObservation(Visitors):
    def step(self, actions: Any) -> Any:
        obs, *rest = super().step(actions)
        return {agent: seen for agent, seen in obs.items() if agent != "host"}, *rest


class GymnasiumStep(Visitors):
    def step(self, actions: Any) -> Any:
        return super().step(actions)[0], 0.0, False, False, {}


class NotANumber(Visitors):
    def step(self, actions: Any) -> Any:
        obs, rewards, *rest = super().step(actions)
        return obs, {**rewards, **({"late": float("nan")} if "late" in rewards else {})}, *rest


class Raises(Visitors):
    def step(self, actions: Any) -> Any:
        raise ValueError("the host is ill")
