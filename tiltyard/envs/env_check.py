"""An env put to the test by the probe's child: reset, act at random, and the same again with the same seed.

Raises a UseError at the first broken rule of contract.py, naming when it happened; says whether the second time
equalled the first to the bit, which is what replaying episodes after a resume relies on. What reset() and step() print
is found by the size of the file that is the child's stdout, so that C libraries and processes of the env count too.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from time import perf_counter
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

from tiltyard.config.experiment import Env
from tiltyard.envs.actions import ActionCodec, flat_mask
from tiltyard.envs.checks import mask_fault, mask_in, obs_fault, reset_fault, step_fault, structure_fault
from tiltyard.envs.pettingzoo import Parallel
from tiltyard.envs.spaces import encode_leaf, observation_leaves, pick
from tiltyard.errors import UseError, raised
from tiltyard.plugins import resolve
from tiltyard.types import ActionSpec

if TYPE_CHECKING:
    from tiltyard.types import Array

_HINTS = (
    ("dtype", "return np.asarray(obs, dtype=space.dtype), or set env.strict=false to have it cast"),
    ("numpy array", "return np.asarray(obs, dtype=space.dtype), or set env.strict=false to have it cast"),
    ("shape", "every observation must have the shape that observation_space declares"),
    ("NaN", "find where the env divides by zero; observations and rewards must be finite"),
    ("infinity", "find where the env overflows; observations and rewards must be finite"),
    ("instead of (obs", "the env follows an older interface: see gymnasium.farama.org on migrating"),
    ("mask", "give a bool per option, at least one of them true, in every observation or every info"),
)


class EnvCheck:
    """One env being examined. `masked` is known after the first reset."""

    def __init__(self, env: Env, made: gymnasium.Env[Any, Any] | Parallel, action: ActionSpec) -> None:
        self._env, self._action = env, action
        self._made: Any = made
        self._leaves = observation_leaves(made.observation_space)
        self._codec = ActionCodec(action)
        self._options = [part.options for part in action.parts if part.kind == "categorical"]
        self.masked = False
        self.step_times: list[float] = []  # seconds
        self._heard = 0  # bytes of stdout that are not the fault of reset() and step()
        self.casts: dict[str, str] = {}  # with env.strict off: a sentence per observation of another dtype

    def run(self, steps: int, seed: int) -> bool:
        """Act twice from the same seed; whether both times gave the same."""
        self._heard = _printed()  # importing and constructing it may have greeted
        actions: list[Array] = []
        first = self._episode(steps, seed, actions, record=True)
        return first == self._episode(steps, seed, actions, record=False)

    def _episode(self, steps: int, seed: int, actions: list[Array], record: bool) -> str:
        """Act `steps` times, resetting at ends; the digest of everything seen."""
        rng = np.random.default_rng(seed)
        digest = hashlib.sha256()
        mask = self._reset(seed, digest, first=record)
        for index in range(steps):
            if record:
                actions.append(self._codec.random_rows(rng, 1, None if mask is None else mask[None])[0])
            action = self._codec.decode(actions[index])
            when = f"step {index + 1}"
            began = perf_counter()
            answer = self.call(f"step() number {index + 1}", lambda action=action: self._made.step(action))
            self.step_times.append(perf_counter() - began)
            self._listen("step()")
            self._refuse(step_fault(answer), when)
            obs, reward, terminated, truncated, info = answer
            digest.update(repr((float(reward), bool(terminated), bool(truncated))).encode())
            ended = bool(terminated or truncated)
            mask = self._look(obs, info, when, digest, ended)
            if ended:
                mask = self._reset(seed + index + 1, digest, first=False)
        return digest.hexdigest()

    def _reset(self, seed: int, digest: Any, first: bool) -> Array | None:
        answer = self.call("reset()", lambda: self._made.reset(seed=seed))
        self._listen("reset()")
        self._refuse(reset_fault(answer), "reset")
        if first:
            self.masked = mask_in(*answer) is not None and bool(self._options)
        obs, info = answer
        return self._look(obs, info, "reset", digest, ended=False)

    def _look(self, obs: Any, info: Any, when: str, digest: Any, ended: bool) -> Array | None:
        """Check one observation; the action mask that comes with it, which at an episode's end may be anything."""
        self._refuse(structure_fault(self._leaves, obs), when)
        for leaf in self._leaves:
            value = pick(obs, leaf.path)
            self._refuse(obs_fault(leaf, value, self._env.strict), when)
            cast = None if self._env.strict else obs_fault(leaf, value, strict=True)
            if cast and leaf.name not in self.casts:
                self.casts[leaf.name] = f"env {self._env.id}: {cast}; it is cast because env.strict is off"
            digest.update(encode_leaf(leaf, value).tobytes())
        if not self.masked or ended:
            return None
        given = mask_in(obs, info)
        if given is None:
            self._refuse("the action mask of reset() is missing here", when)
        try:
            mask = flat_mask(self._action, given)
        except ValueError as error:
            raise UseError(f"env {self._env.id}, {when}: {error}", "give one bool per option") from None
        self._refuse(mask_fault(mask, self._options), when)
        return mask

    def call(self, what: str, call: Any) -> Any:
        """What a method of the env gives; whatever it raises is told as the env's, also what would end the process."""
        try:
            return call()
        except BaseException as error:
            text = f"env {self._env.id}: {what} {raised(error)}"
            raise UseError(text, "the traceback is the env's own", resolve.user_traceback(error)) from error

    def _listen(self, what: str) -> None:
        """Refuse an env that prints while it is used: in training that is every step, and stdout is for data."""
        if not self._env.strict or _printed() == self._heard:
            return
        lines = os.pread(1, 200, self._heard).decode(errors="replace").strip().splitlines()
        raise UseError(
            f"env {self._env.id}: {what} prints to stdout, which is for data: {(lines or [''])[0][:80]!r}",
            "print to stderr, or set env.strict=false, which sends it there",
        )

    def _refuse(self, fault: str | None, when: str) -> None:
        if fault:
            hint = next((hint for word, hint in _HINTS if word in fault), "the env must keep to the spaces it declares")
            raise UseError(f"env {self._env.id}, {when}: {fault}", hint)


def _printed() -> int:
    """Bytes that have come to stdout so far; always 0 where that is no file."""
    sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)  # C libraries keep what goes to a file in memory
    return os.fstat(1).st_size
