"""The group's side of an isolated env: an object that looks like the env and forwards its methods.

Owns the order of requests; an `EnvChannel` (pool.py) carries them and EnvServer (server.py) executes them. Steps can be
requested ahead, so that many envs step at the same time:

    send_step(action, frames) -> the env takes up to that many frames, fewer when an episode ends or agents change
    step(action)              -> the next of those frames; requests one if none is left
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from tiltyard.envs.isolation.space_parts import space_from_parts


class EnvChannel(Protocol):
    """The way to one isolated env. Every `send` is followed by one `recv`."""

    def send(self, method: str, *arguments: Any) -> None:
        """Call a method of the EnvServer; returns at once."""

    def recv(self) -> Any:
        """Wait for what the method returned, or raise what it raised."""

    def close(self) -> None:
        """Close the env and end its thread or process."""


class EnvProxy:
    """An isolated env; `Parallel` wraps it if it has several agents."""

    def __init__(self, channel: EnvChannel, about: dict[str, Any]) -> None:
        self._channel, self._requested = channel, False
        self._frames: deque[Any] = deque()  # received, not yet returned by `step`
        observation, action = space_from_parts(about["observation_space"]), space_from_parts(about["action_space"])
        several = about["agents"] is not None  # then spaces are methods of the agent, and equal for all of them
        self.observation_space: Any = (lambda agent: observation) if several else observation
        self.action_space: Any = (lambda agent: action) if several else action
        self.possible_agents, self.agents = about["agents"], about["agents"]
        self.metadata, self.frames_per_step = about["metadata"], about["frames_per_step"]
        self.keeps_state: bool = about["keeps_state"]
        self.takes_options: bool = about["takes_options"]

    def reset(self, *, seed: int) -> Any:
        answer, self.agents = self._call("reset", seed)
        return answer

    def send_step(self, action: Any, frames: int) -> None:
        """Request the next frames; `step` returns them one by one."""
        self._frames.clear()
        self._channel.send("step", action, frames)
        self._requested = True

    def step(self, action: Any) -> Any:
        if not self._frames:
            if not self._requested:
                self._channel.send("step", action, 1)
            self._requested = False
            self._frames.extend(self._channel.recv())
        answer, self.agents = self._frames.popleft()
        return answer

    def render(self) -> Any:
        return self._call("render")

    def get_state(self) -> Any:
        return self._call("get_state")

    def set_state(self, state: Any) -> None:
        self._call("set_state", state)

    def set_options(self, **options: Any) -> None:
        self._call("set_options", options)

    def memory(self) -> int:
        """Bytes that the env takes in a process of its own."""
        return int(self._call("memory"))

    def close(self) -> None:
        self._channel.close()

    @property
    def unwrapped(self) -> EnvProxy:
        return self

    def _call(self, method: str, *arguments: Any) -> Any:
        self._channel.send(method, *arguments)
        return self._channel.recv()
