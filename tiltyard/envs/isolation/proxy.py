"""An env that lives in a thread or process of its own, seen from the group it belongs to.

Owns the questions and their order; what carries them is a `Room` (isolate.py), what answers them is resident.py. Steps
can be asked for ahead, so that many envs do theirs at the same time:

    ahead(action, frames) -> the env does up to that many frames, fewer when an episode ends or agents come or go
    step(action)          -> the next of those frames; asks for it now when none is left
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from tiltyard.envs.isolation.wire import space_of


class Channel(Protocol):
    """Where one env lives. Every `ask` is followed by one `hear`."""

    def ask(self, do: str, *given: Any) -> None:
        """Have the env do something; comes back at once."""

    def hear(self) -> Any:
        """What came of it: the value, or what the env raised."""

    def close(self) -> None:
        """Close the env and end what it lived in."""


class EnvProxy:
    """The env, or what `Parallel` takes for one where it has several agents."""

    def __init__(self, room: Channel, facts: dict[str, Any]) -> None:
        self._room, self._asked = room, False
        self._done: deque[Any] = deque()  # frames that nobody has looked at yet
        observes, acts = space_of(facts["observes"]), space_of(facts["acts"])
        several = facts["agents"] is not None  # then spaces are asked for by agent, and are the same for all of them
        self.observation_space: Any = (lambda agent: observes) if several else observes
        self.action_space: Any = (lambda agent: acts) if several else acts
        self.possible_agents, self.agents = facts["agents"], facts["agents"]
        self.metadata, self.frames_per_step = facts["metadata"], facts["frames_per_step"]
        self.keeps_state: bool = facts["keeps_state"]

    def reset(self, *, seed: int) -> Any:
        answer, self.agents = self._call("reset", seed)
        return answer

    def ahead(self, action: Any, frames: int) -> None:
        """Have the next frames done; `step` gives them one by one."""
        self._done.clear()
        self._room.ask("step", action, frames)
        self._asked = True

    def step(self, action: Any) -> Any:
        if not self._done:
            if not self._asked:
                self._room.ask("step", action, 1)
            self._asked = False
            self._done.extend(self._room.hear())
        answer, self.agents = self._done.popleft()
        return answer

    def render(self) -> Any:
        return self._call("render")

    def get_state(self) -> Any:
        return self._call("get_state")

    def set_state(self, state: Any) -> None:
        self._call("set_state", state)

    def weight(self) -> int:
        """Bytes that it takes in a process of its own."""
        return int(self._call("weight"))

    def close(self) -> None:
        self._room.close()

    @property
    def unwrapped(self) -> EnvProxy:
        return self

    def _call(self, do: str, *given: Any) -> Any:
        self._room.ask(do, *given)
        return self._room.hear()
