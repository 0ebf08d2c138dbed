"""An env with several agents put to the test by the probe's child: the rules of examination.py, for each agent."""

from __future__ import annotations

import hashlib
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from tiltyard.config.experiment import Env
from tiltyard.envs.checks import mask_in
from tiltyard.envs.env_check import EnvCheck
from tiltyard.envs.pettingzoo import Parallel
from tiltyard.types import ActionSpec

if TYPE_CHECKING:
    from tiltyard.types import Array


class MultiAgentCheck(EnvCheck):
    """Everybody who is there acts at random."""

    def __init__(self, env: Env, made: Parallel, action: ActionSpec) -> None:
        super().__init__(env, made, action)
        self._parallel = made
        self._over: set[int] = set()

    def _episode(self, steps: int, seed: int, actions: list[Array], record: bool) -> str:
        env, rng, digest = self._parallel, np.random.default_rng(seed), hashlib.sha256()
        masks = self._begin(seed, digest, record)
        for index in range(steps):
            if record:
                allowed = [masks.get(place) for place in range(len(env.names))]
                drawn = [self._codec.random_rows(rng, 1, None if mask is None else mask[None])[0] for mask in allowed]
                actions.append(np.stack(drawn))
            chosen = {place: self._codec.decode(actions[index][place]) for place in masks}
            began = perf_counter()
            answer = self.call(f"step() number {index + 1}", lambda chosen=chosen: env.step(chosen))
            self.step_times.append(perf_counter() - began)
            self._listen("step()")
            self._refuse(env.step_fault(answer, chosen), f"step {index + 1}")
            masks = self._look_around(answer, set(chosen), f"step {index + 1}", digest)
            if not masks:
                masks = self._begin(seed + index + 1, digest, first=False)
        return digest.hexdigest()

    def _begin(self, seed: int, digest: Any, first: bool) -> dict[int, Array | None]:
        """Reset; the action masks of those that are there."""
        env = self._parallel
        answer = self.call("reset()", lambda: env.reset(seed=seed))
        self._listen("reset()")
        self._refuse(env.reset_fault(answer), "reset")
        obs, infos = answer
        self._over, there = set(), env.present()
        if first:
            given = mask_in(env.of(obs, there[0]), env.of(infos, there[0]) or {})
            self.masked = given is not None and bool(self._options)
        return {place: self._see(obs, infos, place, "reset", digest) for place in there}

    def _look_around(self, answer: Any, acted: set[int], when: str, digest: Any) -> dict[int, Array | None]:
        """Check what everybody was given; the action masks of those that act next."""
        env, (obs, rewards, terminated, truncated, infos) = self._parallel, answer
        for place in sorted(acted):
            over = bool(env.of(terminated, place)), bool(env.of(truncated, place))
            digest.update(repr((place, float(env.of(rewards, place)), over)).encode())
            self._refuse(_not_finite(env, rewards, place), when)
            if any(over):
                self._over.add(place)
        there = [place for place in env.present() if place not in self._over]
        for place in sorted(acted - set(there)):
            if env.of(obs, place) is not None:
                self._see(obs, infos, place, when, digest, ended=True)
        return {place: self._see(obs, infos, place, when, digest) for place in there}

    def _see(self, obs: Any, infos: Any, place: int, when: str, digest: Any, ended: bool = False) -> Array | None:
        env = self._parallel
        return self._look(
            env.of(obs, place), env.of(infos, place) or {}, f"{when}, agent {env.names[place]!r}", digest, ended
        )


def _not_finite(env: Parallel, rewards: Any, place: int) -> str | None:
    reward = float(env.of(rewards, place))
    return None if np.isfinite(reward) else f"the reward of agent {env.names[place]!r} is {reward}, NaN or infinity"
