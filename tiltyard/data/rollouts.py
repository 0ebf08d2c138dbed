"""Rollouts of other programs as episodes: find arrays by the usual names, cut them at the ends, fit them to a spec.

    a dict with obs, action, reward and done; a list of such dicts; or a list of steps (dicts with single values)

    observations     obs, observation(s), frames, images, or obs.NAME; a dict of arrays has several observations
    actions          action(s)                        as the env takes them
    rewards          reward(s)
    ends             done(s), terminal(s), terminated, terminations; truncated, truncations, timeout(s)

An end that is only called `done` counts as terminated. An episode whose last step has no end is truncated there. If the
final observation was not recorded, the last one is repeated, and the episode's meta data say so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium import spaces

from tiltyard.data.env_actions import encode_actions
from tiltyard.envs.actions import ActionCodec, action_spec
from tiltyard.envs.spaces import BARE, observation_specs
from tiltyard.errors import UseError
from tiltyard.types import Array, Arrays, ArraySpec, EnvSpec, Episode

_NAMES = {
    "obs": ("obs", "observation", "observations", "frames", "images"),
    "next_obs": ("next_obs", "next_observation", "next_observations"),
    "action": ("action", "actions"),
    "reward": ("reward", "rewards"),
    "terminated": ("terminated", "terminal", "terminals", "terminations"),
    "truncated": ("truncated", "truncations", "timeout", "timeouts"),
    "done": ("done", "dones"),
    "seed": ("seed",),
}
_MEANING = {name: meaning for meaning, names in _NAMES.items() for name in names}
_PREFIX = f"{BARE}."
FINAL = "final_obs"  # in the meta data: "repeated"


@dataclass
class Rollout:
    """One episode before it is fitted to a spec. Actions are the env's own: an array, or a dict or tuple of arrays."""

    obs: Arrays
    action: Any
    reward: Array
    terminated: bool
    truncated: bool
    seed: int | None = None
    meta: dict[str, Any] = field(default_factory=dict)


# ---------------------------------------------------------------------------------------------- finding


def rollouts_in(value: Any, where: str) -> Iterator[Rollout]:
    """The episodes of a loaded file. UseError with what was found if there are none."""
    if isinstance(value, Mapping):
        yield from _cut(_by_meaning(value, where), where)
    elif isinstance(value, list | tuple) and value and all(isinstance(each, Mapping) for each in value):
        if _is_step(value[0]):
            yield from _cut(_joined(value, where), where)
        else:
            for index, each in enumerate(value):
                yield from rollouts_in(each, f"{where}[{index}]")
    elif isinstance(value, list | tuple) and value and all(isinstance(each, list | tuple) for each in value):
        for index, each in enumerate(value):
            yield from rollouts_in(each, f"{where}[{index}]")
    else:
        raise _unknown(value, where)


def _unknown(value: Any, where: str) -> UseError:
    if isinstance(value, Mapping):
        names = ", ".join(str(key) for key in list(value)[:12])
        what = f"a dict with {names}" if names else "an empty dict"
    elif isinstance(value, list | tuple):
        inner = type(value[0]).__name__ if value else "nothing"
        what = f"a {type(value).__name__} of {len(value)} with {inner}"
    else:
        what = f"a {type(value).__name__}"
    hint = "a rollout is a dict with observations, actions, rewards and dones, or a list of such dicts"
    return UseError(f"{where} holds {what}, which is not a rollout", hint)


def _by_meaning(record: Mapping[Any, Any], where: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    named = {str(key)[len(_PREFIX) :]: value for key, value in record.items() if str(key).startswith(_PREFIX)}
    for key, value in record.items():
        meaning = _MEANING.get(str(key).lower().removesuffix("_l"))
        if meaning in found:
            raise UseError(f"{where} has two arrays of the same meaning, one of them {key}", "remove or rename one")
        if meaning is not None and value is not None:
            found[meaning] = value
    if named:
        found["obs"] = named
    if not {"obs", "action", "reward"} <= found.keys():
        raise _unknown(record, where)
    return found


def _is_step(record: Mapping[Any, Any]) -> bool:
    """Whether a record is one step: its reward is a single number."""
    rewards = [value for key, value in record.items() if _MEANING.get(str(key).lower()) == "reward"]
    return len(rewards) == 1 and np.ndim(rewards[0]) == 0


def _joined(steps: Iterable[Mapping[Any, Any]], where: str) -> dict[str, Any]:
    found = [_by_meaning(step, where) for step in steps]
    if any(each.keys() != found[0].keys() for each in found):
        raise UseError(f"the steps of {where} do not all have the same entries", "each step needs the same names")
    return {meaning: [each[meaning] for each in found] for meaning in found[0] if meaning != "seed"}


def _array(value: Any, where: str) -> Array:
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.empty(0, object)
    if array.dtype.kind not in "biuf":
        raise UseError(f"{where} is not an array of numbers", "all its entries need the same shape")
    return array


def _observations(value: Any, where: str) -> Arrays:
    if isinstance(value, list | tuple) and value and all(isinstance(each, Mapping) for each in value):
        value = {name: [each.get(name) for each in value] for name in value[0]}
    if isinstance(value, Mapping):
        return {str(name): _array(inner, f"{where} {name!r}") for name, inner in value.items()}
    return {BARE: _array(value, where)}


# ---------------------------------------------------------------------------------------------- cutting


def _cut(found: Mapping[str, Any], where: str) -> Iterator[Rollout]:
    """Cut arrays of many steps into episodes."""
    reward = _array(found["reward"], f"the reward of {where}").reshape(-1)
    steps = len(reward)
    action = _array(found["action"], f"the action of {where}")
    obs = _observations(found["obs"], f"the observation of {where}")
    later = _observations(found["next_obs"], f"next_obs of {where}") if "next_obs" in found else {}
    lengths = {f"observation {name!r}": len(array) if array.ndim else 0 for name, array in obs.items()}
    if not steps or not action.ndim or len(action) != steps or not set(lengths.values()) <= {steps, steps + 1}:
        shown = ", ".join(f"{name} {length}" for name, length in {"action": np.size(action, 0), **lengths}.items())
        message = f"the lengths of {where} do not fit: reward {steps}, {shown}"
        raise UseError(message, "T steps need T actions and rewards, and T or T + 1 observations")
    terminated, truncated = _ends(found, steps, where)
    starts = [0, *(int(end) + 1 for end in np.flatnonzero(terminated | truncated) if end + 1 < steps)]
    for start, stop in zip(starts, [*starts[1:], steps], strict=True):
        meta: dict[str, Any] = {}
        whole = {}
        for name, array in obs.items():
            if name in later:
                final = later[name][stop - 1 : stop]
            elif stop == steps and len(array) == steps + 1:
                final = array[stop:]
            else:
                final, meta[FINAL] = array[stop - 1 : stop], "repeated"
            whole[name] = np.concatenate([array[start:stop], final])
        over, cut = bool(terminated[stop - 1]), bool(truncated[stop - 1])
        yield Rollout(
            whole,
            action[start:stop],
            reward[start:stop],
            over,
            cut or not over,
            _seed(found.get("seed")) if len(starts) == 1 else None,
            meta,
        )


def _seed(value: Any) -> int | None:
    array = np.asarray(value)
    return int(array) if array.shape == () and array.dtype.kind in "iu" else None


def _ends(found: Mapping[str, Any], steps: int, where: str) -> tuple[Array, Array]:
    """bool [steps] each: where episodes terminate and where they are truncated. One value is about the last step."""
    flags = {}
    for name in ("terminated", "truncated", "done"):
        array = _array(found.get(name, False), f"{name} of {where}").astype(bool).reshape(-1)
        if len(array) == 1:
            array = np.concatenate([np.zeros(steps - 1, bool), array])
        if len(array) != steps:
            raise UseError(f"{name} of {where} has {len(array)} entries for {steps} steps", "it needs one per step")
        flags[name] = array
    if "terminated" in found:
        return flags["terminated"], flags["truncated"] | (flags["done"] & ~flags["terminated"])
    return flags["done"] & ~flags["truncated"], flags["truncated"]


# ---------------------------------------------------------------------------------------------- spec


def spec_of(rollouts: Iterable[tuple[str, Rollout]]) -> EnvSpec:
    """A spec for the data: arrays of numbers are boxes, integer actions choices from 0 to the largest that occurs."""
    arrays: dict[str, tuple[str, tuple[tuple[int, ...], np.dtype[Any]]]] = {}
    lowest, most = 0, np.zeros(0, np.int64)
    for where, rollout in rollouts:
        for name, array in {
            "action": rollout.action,
            **{_PREFIX + key: each for key, each in rollout.obs.items()},
        }.items():
            first, known = arrays.setdefault(name, (where, (array.shape[1:], array.dtype)))
            if known != (array.shape[1:], array.dtype):
                message = f"{name} is {array.dtype} {list(array.shape[1:])} in {where}, but {known[1]} {list(known[0])}"
                raise UseError(f"{message} in {first}", "import files of one env at a time")
        if rollout.action.dtype.kind in "biu":
            flat = rollout.action.astype(np.int64).reshape(len(rollout.action), -1)
            lowest, high = min(lowest, int(flat.min())), flat.max(0)
            most = np.maximum(most, high) if len(most) else high
    if not arrays:
        raise UseError("there are no rollouts", "check the path")
    if lowest < 0:
        raise UseError(f"actions are integers down to {lowest}", "give the env that was recorded with --env")
    boxes: dict[str, spaces.Space[Any]] = {
        name[len(_PREFIX) :]: _box(*known) for name, (_, known) in arrays.items() if name != "action"
    }
    space = boxes[BARE] if list(boxes) == [BARE] else spaces.Dict(boxes)
    shape, dtype = arrays["action"][1]
    return EnvSpec(obs=observation_specs(space), action=action_spec(_action_space(shape, dtype, most)))


def _action_space(shape: tuple[int, ...], dtype: np.dtype[Any], most: Array) -> spaces.Space[Any]:
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, shape, np.float64 if dtype.itemsize > 4 else np.float32)
    return spaces.Discrete(int(most[0]) + 1) if shape in ((), (1,)) else spaces.MultiDiscrete((most + 1).reshape(shape))


def _box(shape: tuple[int, ...], dtype: np.dtype[Any]) -> spaces.Box:
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, shape, np.float32)
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return spaces.Box(low, high, shape, dtype.type)


# ---------------------------------------------------------------------------------------------- fitting


def to_episode(rollout: Rollout, spec: EnvSpec, number: int, where: str) -> tuple[Episode, int]:
    """The episode in the form of a dataset, and how many of its actions cannot be stored exactly.

    Without a seed it gets -1 - number: no env takes it, and it differs between episodes, which are split by seed.
    """
    rows, inexact = encode_actions(ActionCodec(spec.action), rollout.action, len(rollout.reward), where)
    reward = rollout.reward if rollout.reward.dtype.kind == "f" else rollout.reward.astype(np.float64)
    if reward.dtype.itemsize not in (4, 8):
        reward = reward.astype(np.float32)
    seed = -1 - number if rollout.seed is None else rollout.seed
    obs = fit(rollout.obs, spec.obs, where)
    return Episode(obs, rows, reward, rollout.terminated, rollout.truncated, seed, meta=rollout.meta), inexact


def fit(obs: Arrays, wanted: Mapping[str, ArraySpec], where: str) -> Arrays:
    """Observations with the names, shapes and dtypes of a spec. UseError if one does not fit."""
    if len(obs) == len(wanted) == 1:
        obs = {next(iter(wanted)): next(iter(obs.values()))}
    if obs.keys() != wanted.keys():
        message = f"{where} has the observations {', '.join(obs)}; the env has {', '.join(wanted)}"
        raise UseError(message, "rename them, or give another --env")
    return {name: _fitted(obs[name], item, f"observation {name!r} of {where}") for name, item in wanted.items()}


def _fitted(array: Array, item: ArraySpec, where: str) -> Array:
    shape, dtype = array.shape[1:], np.dtype(item.dtype)
    # grey images and single numbers may have one more dimension of size 1, or lack it
    if [n for n in shape if n != 1] != [n for n in item.shape if n != 1]:
        raise UseError(f"{where} has the shape {list(shape)}; the env has {list(item.shape)}", "give another --env")
    stored = array.astype(dtype)
    if (dtype.kind != "f" or array.dtype.kind != "f") and not np.array_equal(stored, array):
        raise UseError(f"{where} is {array.dtype} and does not fit into {dtype}", "give another --env")
    if item.kind in ("discrete", "multi_discrete"):
        flat = stored.reshape(len(stored), -1)
        if len(flat) and (flat.min() < 0 or np.any(flat.max(0) >= np.asarray(item.options))):
            raise UseError(f"{where} is not within 0 to {max(item.options) - 1}", "give another --env")
    return stored.reshape(len(stored), *item.shape)
