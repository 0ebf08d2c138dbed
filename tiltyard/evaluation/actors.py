"""Who acts in an evaluation: the trained policy, or a policy written by hand, `random` being the built-in one.

A policy of the user's (`eval --policy file.py:Name`) is a class built as `Name(spec)` with two methods:

    reset(seed)              an episode begins; its seed (other agents of the same env get seeds made from it)
    act(obs, mask) -> action what the env's own `step` takes; obs is the array, or {name: array} if there are several;
                             mask tells the allowed options of categorical actions, None where the env has none
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
Begin = Callable[[EnvGroup], Choose]


class ScriptedPolicy(Protocol):
    def reset(self, seed: int) -> None: ...
    def act(self, obs: Any, mask: Array | None) -> Any: ...


class RandomPolicy:
    """The baseline: every allowed action is equally likely. The same draws for the same episode, whoever plays it."""

    def __init__(self, spec: EnvSpec) -> None:
        self._action, self._codec = spec.action, ActionCodec(spec.action)

    def reset(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def act(self, obs: Any, mask: Array | None) -> Any:
        return self._codec.decode(random_action(self._action, self._rng, mask))


def trained_actor(net: PolicyNet | MultiPolicyActor, greedy: bool, seed: int) -> Begin:
    """Acts as the policy does, or as several do; the memory of all slots is kept between calls."""
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


def scripted_actor(text: str, spec: EnvSpec, base: Sequence[Path]) -> Begin:
    """Acts as the class named by `text` does, one object per slot."""
    maker = resolve.load(resolve.parse(text, BUILTIN_POLICIES, resolve.CONVENTIONAL["policy"], base))

    def begin(group: EnvGroup) -> Choose:
        hands: list[ScriptedPolicy] = [_blaming(text, lambda: maker(spec)) for _ in range(group.rows)]

        def choose(obs: Arrays, first: Array, mask: Array | None) -> Array:
            rows = []
            for row, hand in enumerate(hands):
                if not group.acting[row]:  # an agent that is not there
                    rows.append(np.zeros(spec.action.columns, np.float32))
                    continue
                if first[row]:
                    _blaming(text, lambda: hand.reset(_seed(group, row)))  # noqa: B023 - called at once
                seen = {name: array[row].copy() for name, array in obs.items()}
                allowed = None if mask is None else mask[row].copy()
                view = seen["obs"] if list(seen) == ["obs"] else seen
                rows.append(_blaming(text, lambda: group.codec.encode(hand.act(view, allowed))))  # noqa: B023
            return np.stack(rows)

        return choose

    return begin


def _seed(group: EnvGroup, row: int) -> int:
    """What a row's policy may draw from: the episode's seed, and for a second agent of the same env another."""
    place = row % group.agents
    seed = group.stats.seeds[row]
    return episode_seed(seed, "agent", place, 0) if place else seed


def _blaming(text: str, action: Callable[[], Any]) -> Any:
    """Whatever a policy of the user's raises is told as its own."""
    try:
        return action()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise TiltyardError(
            f"policy {text} {raised(error)}",
            "it is built with the env's spec and needs reset(seed) and act(obs, mask)",
            resolve.user_traceback(error),
        ) from error
