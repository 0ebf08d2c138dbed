"""The probe's test of an env: reset, act at random, and repeat both with the same seed.

Raises a UseError at the first violation of checks.py, naming when it happened, and finds out whether the repetition
equals the first time bit for bit, which restoring episodes by re-running them needs. Output of reset() and step() is
found by the size of the file that is the child's stdout, which includes that of C libraries and child processes.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import gymnasium
import numpy as np

from tiltyard.config.sections import Env
from tiltyard.envs.actions import ActionCodec, flat_mask
from tiltyard.envs.checks import mask_fault, mask_in, obs_fault, reset_fault, step_fault, structure_fault
from tiltyard.envs.env_errors import fault_hint
from tiltyard.envs.pettingzoo import Parallel
from tiltyard.envs.spaces import encode_leaf, observation_leaves, pick
from tiltyard.errors import UseError, raised
from tiltyard.plugins import resolve
from tiltyard.types import ActionSpec, Array

Masks = dict[int, Array | None]
"""index of each agent that acts next -> its action mask; empty at the end of an episode"""


class _OneAgent:
    """An env with one agent, with the methods of Parallel that the check calls."""

    names = ("agent",)
    reset_fault = staticmethod(reset_fault)

    def __init__(self, made: gymnasium.Env[Any, Any]) -> None:
        self.reset = made.reset
        self._step = made.step

    def step(self, actions: dict[int, Any]) -> Any:
        return self._step(actions[0])

    def of(self, part: Any, place: int) -> Any:
        return part

    def present(self) -> list[int]:
        return [0]

    def step_fault(self, answer: Any, acted: Any) -> str | None:
        return step_fault(answer)


class EnvCheck:
    """The test of one env. `masked` and `step_times` are known after `run`."""

    def __init__(self, env: Env, made: gymnasium.Env[Any, Any] | Parallel, action: ActionSpec) -> None:
        self._env, self._action, self._several = env, action, isinstance(made, Parallel)
        self._made = made if isinstance(made, Parallel) else _OneAgent(made)
        self._leaves = observation_leaves(made.observation_space)
        self._codec = ActionCodec(action)
        self._options = [part.options for part in action.parts if part.kind == "categorical"]
        self._done: set[int] = set()  # agents that are done for the running episode
        self._digest = hashlib.sha256()  # of everything the env has returned
        self._stdout_size = 0  # before reset() and step() were called
        self.masked = False
        self.step_times: list[float] = []  # seconds
        self.conversions: dict[str, str] = {}  # with env.strict off: a note per observation of another dtype

    def run(self, steps: int, seed: int) -> bool:
        """Act twice from the same seed; whether both times gave the same."""
        self._stdout_size = _stdout_size()  # importing and constructing the env may print
        actions: list[Array] = []
        first = self.rollout(steps, seed, actions, record=True)
        return first == self.rollout(steps, seed, actions, record=False)

    def rollout(self, steps: int, seed: int, actions: list[Array], record: bool) -> str:
        """Act `steps` times, reset at episode ends, and return the digest of everything observed.

        With `record` the actions are random and appended to `actions`, otherwise those are repeated.
        """
        rng = np.random.default_rng(seed)
        self._digest = hashlib.sha256()
        masks = self._reset(seed, first=record)
        for index in range(steps):
            if record:
                allowed = [masks.get(agent) for agent in range(len(self._made.names))]
                drawn = [self._codec.random_rows(rng, 1, None if mask is None else mask[None])[0] for mask in allowed]
                actions.append(np.stack(drawn))
            chosen = {agent: self._codec.decode(actions[index][agent]) for agent in masks}
            masks = self._step(chosen, index + 1) or self._reset(seed + index + 1, first=False)
        return self._digest.hexdigest()

    def random_actions(self) -> dict[int, Any]:
        """A random action of every agent that acts after a reset."""
        rng, masks = np.random.default_rng(0), self._reset(0, first=False)
        allowed = {agent: None if mask is None else mask[None] for agent, mask in masks.items()}
        return {agent: self._codec.decode(self._codec.random_rows(rng, 1, mask)[0]) for agent, mask in allowed.items()}

    def _reset(self, seed: int, *, first: bool) -> Masks:
        made = self._made
        answer = self.call("reset()", lambda: made.reset(seed=seed))
        self._require_silence("reset()")
        self._refuse(made.reset_fault(answer), "reset")
        obs, infos = answer
        self._done, present = set(), made.present()
        if first:
            given = mask_in(made.of(obs, present[0]), made.of(infos, present[0]) or {})
            self.masked = given is not None and bool(self._options)
        return {agent: self._check_obs(agent, obs, infos, "reset") for agent in present}

    def _step(self, actions: dict[int, Any], number: int) -> Masks:
        made, when, began = self._made, f"step {number}", perf_counter()
        answer = self.call(f"step() number {number}", lambda: made.step(actions))
        self.step_times.append(perf_counter() - began)
        self._require_silence("step()")
        self._refuse(made.step_fault(answer, actions), when)
        obs, rewards, terminated, truncated, infos = answer
        for agent in sorted(actions):
            over = bool(made.of(terminated, agent)), bool(made.of(truncated, agent))
            reward = float(made.of(rewards, agent))
            self._digest.update(repr((agent, reward, over)).encode())
            if not np.isfinite(reward):
                self._refuse(f"the reward of agent {made.names[agent]!r} is {reward}, NaN or infinity", when)
            if any(over):
                self._done.add(agent)
        present = [agent for agent in made.present() if agent not in self._done]
        for agent in sorted(set(actions) - set(present)):
            if not self._several or made.of(obs, agent) is not None:  # a terminal state of several agents needs none
                self._check_obs(agent, obs, infos, when, ended=True)
        return {agent: self._check_obs(agent, obs, infos, when) for agent in present}

    def call(self, what: str, call: Callable[[], Any]) -> Any:
        """Call a method of the env; a UseError reports whatever it raises, even SystemExit."""
        try:
            return call()
        except BaseException as error:
            text = f"env {self._env.id}: {what} {raised(error)}"
            raise UseError(text, "the traceback is the env's own", resolve.user_traceback(error)) from error

    def _check_obs(self, agent: int, obs: Any, infos: Any, when: str, *, ended: bool = False) -> Array | None:
        """Check an agent's observation and return its action mask, which is not checked at an episode's end."""
        obs, info = self._made.of(obs, agent), self._made.of(infos, agent) or {}
        when = f"{when}, agent {self._made.names[agent]!r}" if self._several else when
        self._refuse(structure_fault(self._leaves, obs), when)
        for leaf in self._leaves:
            value = pick(obs, leaf.path)
            self._refuse(obs_fault(leaf, value, self._env.strict), when)
            converted = None if self._env.strict else obs_fault(leaf, value, strict=True)
            if converted and leaf.name not in self.conversions:
                note = f"env {self._env.id}: {converted}; it is converted because env.strict is off"
                self.conversions[leaf.name] = note
            self._digest.update(encode_leaf(leaf, value).tobytes())
        if not self.masked or ended:
            return None
        given = mask_in(obs, info)
        if given is None:
            self._refuse("the action mask, which reset() gave, is missing", when)
        try:
            mask = flat_mask(self._action, given)
        except ValueError as error:
            raise UseError(f"env {self._env.id}, {when}: {error}", "give one bool per option") from None
        self._refuse(mask_fault(mask, self._options), when)
        return mask

    def _require_silence(self, what: str) -> None:
        """Refuse an env that prints in reset() or step(): it would print all through training."""
        if not self._env.strict or _stdout_size() == self._stdout_size:
            return
        lines = os.pread(1, 200, self._stdout_size).decode(errors="replace").strip().splitlines()
        message = f"env {self._env.id}: {what} prints to stdout, which is for data: {(lines or [''])[0][:80]!r}"
        hint = "print to stderr, or set env.strict=false to redirect it there"
        raise UseError(message, hint)

    def _refuse(self, fault: str | None, when: str) -> None:
        """Raise a UseError if there is a fault."""
        if fault:
            raise UseError(f"env {self._env.id}, {when}: {fault}", fault_hint(fault))


def _stdout_size() -> int:
    """Bytes written to stdout so far; always 0 if stdout is not a file."""
    sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)  # C libraries buffer their output to files
    return os.fstat(1).st_size
