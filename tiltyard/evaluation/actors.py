"""Actors of an evaluation: the trained policy or a scripted one, such as the built-in `random`.

A scripted policy (`eval --policy file.py:Name`) is a class, built as `Name(spec)`, with two methods:

    reset(seed)              an episode starts; its seed (each further agent of the env has a seed derived from it)
    act(obs, mask) -> action for the env's `step`; obs is an array, or {name: array} if there are several;
                             mask has the allowed options of categorical actions, or is None
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from tiltyard.engines.policies.multi_policy import MultiPolicyActor
from tiltyard.envs.actions import ActionCodec, random_action
from tiltyard.envs.episode_stats import episode_seed
from tiltyard.envs.vector import EnvGroup
from tiltyard.errors import TiltyardError, raised
from tiltyard.models.policy_net import PolicyNet
from tiltyard.plugins import resolve
from tiltyard.types import Array, Arrays, EnvSpec

BUILTIN_POLICIES = {"random": "tiltyard.evaluation.actors:RandomPolicy"}

Choose = Callable[[Arrays, Array, Array | None], Array]
"""(obs, first, mask) -> action, for all rows"""
MakeActor = Callable[[EnvGroup], Choose]


class ScriptedPolicy(Protocol):
    """A policy written by a user."""

    def reset(self, seed: int) -> None: ...
    def act(self, obs: Any, mask: Array | None) -> Any: ...


class RandomPolicy:
    """The baseline: all allowed actions are equally likely. The same episode always gets the same actions."""

    def __init__(self, spec: EnvSpec) -> None:
        self._action, self._codec = spec.action, ActionCodec(spec.action)

    def reset(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def act(self, obs: Any, mask: Array | None) -> Any:
        return self._codec.decode(random_action(self._action, self._rng, mask))


def trained_actor(net: PolicyNet | MultiPolicyActor, greedy: bool, seed: int) -> MakeActor:
    """Act with a trained net or several; recurrent states are kept between calls."""
    generator = torch.Generator().manual_seed(seed)

    def begin(group: EnvGroup) -> Choose:
        state = net.initial_state(group.rows)

        def choose(obs: Arrays, first: Array, mask: Array | None) -> Array:
            nonlocal state
            if isinstance(net, MultiPolicyActor):
                net.take_seats(group.stats.seeds)
            acted = net.act(obs, state, first, mask, greedy=greedy, generator=generator, with_value=False)
            state = acted.state
            return acted.action

        return choose

    return begin


def scripted_actor(text: str, spec: EnvSpec, base: Sequence[Path]) -> MakeActor:
    """Act with the class named by `text`, one object per row."""
    maker = resolve.load(resolve.parse(text, BUILTIN_POLICIES, resolve.CONVENTIONAL["policy"], base))

    def begin(group: EnvGroup) -> Choose:
        scripted: list[ScriptedPolicy] = [_call(text, lambda: maker(spec)) for _ in range(group.rows)]

        def choose(obs: Arrays, first: Array, mask: Array | None) -> Array:
            rows = []
            for row, policy in enumerate(scripted):
                if not group.acting[row]:  # the agent is not in the env now
                    rows.append(np.zeros(spec.action.columns, np.float32))
                    continue
                if first[row]:
                    _call(text, lambda: policy.reset(_seed(group, row)))  # noqa: B023 - called at once
                seen = {name: array[row].copy() for name, array in obs.items()}
                allowed = None if mask is None else mask[row].copy()
                view = seen["obs"] if list(seen) == ["obs"] else seen
                rows.append(_call(text, lambda: group.codec.encode(policy.act(view, allowed))))  # noqa: B023
            return np.stack(rows)

        return choose

    return begin


def _seed(group: EnvGroup, row: int) -> int:
    """The episode's seed; for further agents of the same env a seed derived from it."""
    place = row % group.agents
    seed = group.stats.seeds[row]
    return episode_seed(seed, "agent", place, 0) if place else seed


def _call(text: str, action: Callable[[], Any]) -> Any:
    """Call a user's policy; its errors name it."""
    try:
        return action()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise TiltyardError(
            f"policy {text} {raised(error)}",
            "a policy is built with the env's spec and needs reset(seed) and act(obs, mask)",
            resolve.user_traceback(error),
        ) from error
