"""The contract of an env: each check returns what is wrong with a value in one sentence, or None.

The probe (env_check.py) and groups of envs (vector.py) use them. `strict` refuses dtypes other than the declared ones.

    reset() -> (obs, info)     step(action) -> (obs, reward, terminated, truncated, info)
    obs: declared shape and dtype, finite      reward: one finite number      terminated, truncated: bool
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces as gym_spaces

from tiltyard.envs.spaces import MASK, Leaf
from tiltyard.types import Array

_SHOWN = 200  # characters of a value in a message


def shown(value: Any) -> str:
    """A value in a message: its repr on one line, shortened."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def reset_fault(answer: Any) -> str | None:
    """Check the form of what reset() returned."""
    if not isinstance(answer, tuple) or len(answer) != 2:
        return f"reset() returned {_form(answer)} instead of (obs, info)"
    if not isinstance(answer[1], Mapping):
        return f"reset() returned an info of type {type(answer[1]).__name__} instead of a dict"
    return None


def step_fault(answer: Any) -> str | None:
    """Check the form of what step() returned, and the reward."""
    if not isinstance(answer, tuple) or len(answer) != 5:
        return f"step() returned {_form(answer)} instead of (obs, reward, terminated, truncated, info)"
    for name, value in (("terminated", answer[2]), ("truncated", answer[3])):
        if not isinstance(value, (bool, np.bool_)):
            return f"step() returned {name} = {shown(value)} of type {type(value).__name__} instead of a bool"
    if not isinstance(answer[4], Mapping):
        return f"step() returned an info of type {type(answer[4]).__name__} instead of a dict"
    return reward_fault(answer[1])


def _form(answer: Any) -> str:
    if isinstance(answer, tuple):
        return f"a tuple of {len(answer)}"
    return f"one {type(answer).__name__}"


def reward_fault(reward: Any) -> str | None:
    """Check that a reward is one finite number: Python's or numpy's, also as an array without dimensions."""
    if isinstance(reward, np.ndarray) and reward.shape == () and reward.dtype.kind in "fiub":
        reward = reward.item()
    if not isinstance(reward, (int, float, np.integer, np.floating, np.bool_)):
        return f"the reward is {shown(reward)} of type {type(reward).__name__} instead of a number"
    return None if math.isfinite(reward) else f"the reward is {float(reward)}"


def structure_fault(leaves: list[Leaf], obs: Any) -> str | None:
    """Check that the observation has every declared leaf."""
    for leaf in leaves:
        value = obs
        for part in leaf.path:
            if isinstance(part, str) and (not isinstance(value, Mapping) or part not in value):
                keys = sorted(map(str, value)) if isinstance(value, Mapping) else f"a {type(value).__name__}"
                return f"observation {leaf.name!r} is declared but missing: found {keys}"
            if isinstance(part, int) and (not isinstance(value, (tuple, list)) or part >= len(value)):
                return f"observation {leaf.name!r} is declared but missing: found {shown(value)}"
            value = value[part]
    return None


def obs_fault(leaf: Leaf, value: Any, strict: bool) -> str | None:
    """Check one leaf: its type, shape and dtype, then whether its numbers are finite and in range."""
    space, name = leaf.space, f"observation {leaf.name!r}"
    if leaf.spec.kind == "text":
        return None if isinstance(value, str) else f"{name} is a {type(value).__name__} instead of a str"
    if isinstance(space, gym_spaces.Discrete):
        return _category_fault(space, value, name)
    if strict and not isinstance(value, (np.ndarray, np.generic)):
        return f"{name} is a {type(value).__name__} instead of a numpy array of {space.dtype}"
    try:
        array = np.asarray(value)
    except ValueError as error:
        return f"{name} is not an array: {error}"
    if array.dtype.kind not in "fiub":
        return f"{name} is an array of {array.dtype} instead of {space.dtype}"
    if array.shape != space.shape:
        return f"{name} has shape {list(array.shape)} but its space declares {list(space.shape or ())}"
    if strict and array.dtype != space.dtype:
        return f"{name} has dtype {array.dtype} but its space declares {space.dtype}"
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return f"{name} holds {'NaN' if np.isnan(array).any() else 'infinity'}"
    if isinstance(space, gym_spaces.MultiDiscrete):
        below = array - np.asarray(space.start)
        if (below < 0).any() or (below >= space.nvec).any():
            return f"{name} is {shown(array)}, outside {space}"
    return None


def _category_fault(space: gym_spaces.Discrete[Any], value: Any, name: str) -> str | None:
    if isinstance(value, np.ndarray) and value.shape == () and value.dtype.kind in "iu":
        value = value.item()
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        return f"{name} is {shown(value)} of type {type(value).__name__} instead of an integer"
    if not 0 <= int(value) - int(space.start) < int(space.n):
        return f"{name} is {value}, outside {space}"
    return None


def mask_in(obs: Any, info: Mapping[str, Any]) -> Any:
    """The action mask, a key of the observation or of info; None if there is none."""
    if isinstance(obs, Mapping) and MASK in obs:
        return obs[MASK]
    return info.get(MASK)


def mask_fault(mask: Array, options: list[int]) -> str | None:
    """Check that every categorical part has an allowed option. `mask` is bool [sum of options]."""
    offset = 0
    for index, n in enumerate(options):
        if not mask[offset : offset + n].any():
            return f"the action mask allows none of the {n} options of categorical action {index}"
        offset += n
    return None


def info_scalars(info: Mapping[str, Any]) -> dict[str, float]:
    """The finite scalars of an episode's last info and of its `episode_extra_stats`: metrics by name."""
    found: dict[str, float] = {}
    nested = info.get("episode_extra_stats")
    for source in (info, nested if isinstance(nested, Mapping) else {}):
        for key, value in source.items():
            if isinstance(value, np.ndarray) and value.shape == () and value.dtype.kind in "fiub":
                value = value.item()
            if isinstance(value, (int, float, np.integer, np.floating, np.bool_)) and math.isfinite(value):
                found[str(key)] = float(value)
    return found
