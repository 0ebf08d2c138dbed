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
from typing import TYPE_CHECKING, Any, Protocol

import gymnasium
import numpy as np

from tiltyard.config.experiment import Env
from tiltyard.envs.actions import ActionCodec, flat_mask
from tiltyard.envs.checks import mask_fault, mask_in, obs_fault, reset_fault, step_fault, structure_fault
from tiltyard.envs.env_errors import fault_hint
from tiltyard.envs.pettingzoo import Parallel
from tiltyard.envs.spaces import encode_leaf, observation_leaves, pick
from tiltyard.errors import UseError, raised
from tiltyard.plugins import resolve
from tiltyard.types import ActionSpec

if TYPE_CHECKING:
    from tiltyard.types import Array

Masks = dict[int, "Array | None"]
"""index of each agent that acts next -> its action mask; empty at the end of an episode"""


class _Agents(Protocol):
    """Calls the env for its agents and checks what each of them gets."""

    count: int

    def reset(self, seed: int, first: bool) -> Masks: ...

    def step(self, actions: dict[int, Any], number: int) -> Masks: ...


class EnvCheck:
    """The test of one env. `masked` and `step_times` are known after `run`."""

    def __init__(self, env: Env, made: gymnasium.Env[Any, Any] | Parallel, action: ActionSpec) -> None:
        self._env, self._action = env, action
        self._leaves = observation_leaves(made.observation_space)
        self._codec = ActionCodec(action)
        self._agents: _Agents = _ManyAgents(self, made) if isinstance(made, Parallel) else _OneAgent(self, made)
        self.options = [part.options for part in action.parts if part.kind == "categorical"]
        self.masked = False
        self.step_times: list[float] = []  # seconds
        self.digest = hashlib.sha256()  # of everything the env has returned
        self._stdout_size = 0  # before reset() and step() were called
        self.conversions: dict[str, str] = {}  # with env.strict off: a note per observation of another dtype

    def run(self, steps: int, seed: int) -> bool:
        """Act twice from the same seed; whether both times gave the same."""
        self._stdout_size = _stdout_size()  # importing and constructing the env may print
        actions: list[Array] = []
        first = self._rollout(steps, seed, actions, record=True)
        return first == self._rollout(steps, seed, actions, record=False)

    def _rollout(self, steps: int, seed: int, actions: list[Array], record: bool) -> str:
        """Act `steps` times, reset at episode ends, and return the digest of everything observed."""
        rng = np.random.default_rng(seed)
        self.digest = hashlib.sha256()
        masks = self._agents.reset(seed, first=record)
        for index in range(steps):
            if record:
                allowed = [masks.get(agent) for agent in range(self._agents.count)]
                drawn = [self._codec.random_rows(rng, 1, None if mask is None else mask[None])[0] for mask in allowed]
                actions.append(np.stack(drawn))
            chosen = {agent: self._codec.decode(actions[index][agent]) for agent in masks}
            masks = self._agents.step(chosen, index + 1)
            if not masks:
                masks = self._agents.reset(seed + index + 1, first=False)
        return self.digest.hexdigest()

    def call_reset(self, reset: Callable[[], Any]) -> Any:
        answer = self.call("reset()", reset)
        self._require_silence("reset()")
        return answer

    def call_step(self, number: int, step: Callable[[], Any]) -> Any:
        began = perf_counter()
        answer = self.call(f"step() number {number}", step)
        self.step_times.append(perf_counter() - began)
        self._require_silence("step()")
        return answer

    def call(self, what: str, call: Callable[[], Any]) -> Any:
        """Call a method of the env; a UseError reports whatever it raises, even SystemExit."""
        try:
            return call()
        except BaseException as error:
            text = f"env {self._env.id}: {what} {raised(error)}"
            raise UseError(text, "the traceback is the env's own", resolve.user_traceback(error)) from error

    def check_obs(self, obs: Any, info: Any, when: str, *, ended: bool) -> Array | None:
        """Check one observation and return its action mask, which is not checked at an episode's end."""
        self.refuse(structure_fault(self._leaves, obs), when)
        for leaf in self._leaves:
            value = pick(obs, leaf.path)
            self.refuse(obs_fault(leaf, value, self._env.strict), when)
            converted = None if self._env.strict else obs_fault(leaf, value, strict=True)
            if converted and leaf.name not in self.conversions:
                note = f"env {self._env.id}: {converted}; it is converted because env.strict is off"
                self.conversions[leaf.name] = note
            self.digest.update(encode_leaf(leaf, value).tobytes())
        if not self.masked or ended:
            return None
        given = mask_in(obs, info)
        if given is None:
            self.refuse("the action mask, which reset() gave, is missing", when)
        try:
            mask = flat_mask(self._action, given)
        except ValueError as error:
            raise UseError(f"env {self._env.id}, {when}: {error}", "give one bool per option") from None
        self.refuse(mask_fault(mask, self.options), when)
        return mask

    def _require_silence(self, what: str) -> None:
        """Refuse an env that prints in reset() or step(): it would print all through training."""
        if not self._env.strict or _stdout_size() == self._stdout_size:
            return
        lines = os.pread(1, 200, self._stdout_size).decode(errors="replace").strip().splitlines()
        raise UseError(
            f"env {self._env.id}: {what} prints to stdout, which is for data: {(lines or [''])[0][:80]!r}",
            "print to stderr, or set env.strict=false to redirect it there",
        )

    def refuse(self, fault: str | None, when: str) -> None:
        """Raise a UseError if there is a fault."""
        if fault:
            raise UseError(f"env {self._env.id}, {when}: {fault}", fault_hint(fault))


class _OneAgent:
    count = 1

    def __init__(self, check: EnvCheck, made: gymnasium.Env[Any, Any]) -> None:
        self._check, self._made = check, made

    def reset(self, seed: int, first: bool) -> Masks:
        check = self._check
        answer = check.call_reset(lambda: self._made.reset(seed=seed))
        check.refuse(reset_fault(answer), "reset")
        obs, info = answer
        if first:
            check.masked = mask_in(obs, info) is not None and bool(check.options)
        return {0: check.check_obs(obs, info, "reset", ended=False)}

    def step(self, actions: dict[int, Any], number: int) -> Masks:
        check, when = self._check, f"step {number}"
        answer = check.call_step(number, lambda: self._made.step(actions[0]))
        check.refuse(step_fault(answer), when)
        obs, reward, terminated, truncated, info = answer
        check.digest.update(repr((float(reward), bool(terminated), bool(truncated))).encode())
        ended = bool(terminated or truncated)
        mask = check.check_obs(obs, info, when, ended=ended)
        return {} if ended else {0: mask}


class _ManyAgents:
    def __init__(self, check: EnvCheck, made: Parallel) -> None:
        self._check, self._made, self.count = check, made, len(made.names)
        self._done: set[int] = set()

    def reset(self, seed: int, first: bool) -> Masks:
        check, env = self._check, self._made
        answer = check.call_reset(lambda: env.reset(seed=seed))
        check.refuse(env.reset_fault(answer), "reset")
        obs, infos = answer
        self._done, present = set(), env.present()
        if first:
            given = mask_in(env.of(obs, present[0]), env.of(infos, present[0]) or {})
            check.masked = given is not None and bool(check.options)
        return {agent: self._check_agent(agent, obs, infos, "reset") for agent in present}

    def step(self, actions: dict[int, Any], number: int) -> Masks:
        check, env, when = self._check, self._made, f"step {number}"
        answer = check.call_step(number, lambda: env.step(actions))
        check.refuse(env.step_fault(answer, actions), when)
        obs, rewards, terminated, truncated, infos = answer
        for agent in sorted(actions):
            over = bool(env.of(terminated, agent)), bool(env.of(truncated, agent))
            reward = float(env.of(rewards, agent))
            check.digest.update(repr((agent, reward, over)).encode())
            if not np.isfinite(reward):
                check.refuse(f"the reward of agent {env.names[agent]!r} is {reward}, NaN or infinity", when)
            if any(over):
                self._done.add(agent)
        present = [agent for agent in env.present() if agent not in self._done]
        for agent in sorted(set(actions) - set(present)):
            if env.of(obs, agent) is not None:
                self._check_agent(agent, obs, infos, when, ended=True)
        return {agent: self._check_agent(agent, obs, infos, when) for agent in present}

    def _check_agent(self, agent: int, obs: Any, infos: Any, when: str, ended: bool = False) -> Array | None:
        env, place = self._made, f"{when}, agent {self._made.names[agent]!r}"
        return self._check.check_obs(env.of(obs, agent), env.of(infos, agent) or {}, place, ended=ended)


def _stdout_size() -> int:
    """Bytes written to stdout so far; always 0 if stdout is not a file."""
    sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)  # C libraries buffer their output to files
    return os.fstat(1).st_size
