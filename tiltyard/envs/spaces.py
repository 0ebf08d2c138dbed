"""Observation spaces as named arrays: how each space is stored, and how an observation is encoded.

Owns names, shapes and dtypes. The arrays are in row_data.py, action spaces in actions.py.

    Box float64, float16 -> float32   bool -> uint8      Discrete      -> int64 [], counted from 0
    Box integers         -> the same, unsigned widened   MultiDiscrete -> int64 [n], counted from 0
    Box uint8 [H, W]     -> uint8 [1, H, W], an image    MultiBinary   -> uint8 [n]
    Dict, Tuple          -> their leaves, "arm.0.angle"  Text          -> int32 [32] hashed words, 0 is padding
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from gymnasium import spaces as gym_spaces

from tiltyard.errors import UseError
from tiltyard.run.atomic import plain
from tiltyard.types import ActionPart, ActionSpec, Array, Arrays, ArraySpec, EnvSpec

MASK = "action_mask"
BARE = "obs"
PREVIOUS_ACTION = "previous.action"
PREVIOUS_REWARD = "previous.reward"
TEXT_WORDS = 32
TEXT_HASHES = 4095
SMALLEST_GREY = 16  # pixels; a smaller uint8 matrix is a table, not an image

_STORED = {
    "bool": "uint8", "uint8": "uint8", "int8": "int8", "int16": "int16", "int32": "int32", "int64": "int64",
    "uint16": "int32", "uint32": "int64", "uint64": "int64",
}  # fmt: skip


@dataclass(frozen=True)
class Leaf:
    """One array of an observation: its name, path and space, and how a frame of it is stored."""

    name: str
    path: tuple[str | int, ...]
    space: gym_spaces.Space[Any]
    spec: ArraySpec


def observation_leaves(space: gym_spaces.Space[Any]) -> list[Leaf]:
    """All leaves in order; the action mask of a Dict space is not among them."""
    found: list[Leaf] = []
    _add_leaves(space, (), found)
    if not found:
        hint = "give it at least one Box or Discrete"
        raise UseError(f"the observation space {space} contains no observations", hint)
    names = [leaf.name for leaf in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UseError(f"two observations are both named {twice[0]!r}", "rename one; nested keys are joined by dots")
    return found


def _add_leaves(space: gym_spaces.Space[Any], path: tuple[str | int, ...], found: list[Leaf]) -> None:
    if isinstance(space, gym_spaces.Dict):
        for key, inner in space.spaces.items():
            if path or key != MASK:
                _add_leaves(inner, (*path, key), found)
    elif isinstance(space, gym_spaces.Tuple):
        for index, inner in enumerate(space.spaces):
            _add_leaves(inner, (*path, index), found)
    else:
        name = ".".join(str(part) for part in path) or BARE
        found.append(Leaf(name, path, space, _frame_spec(space, name)))


def _frame_spec(space: gym_spaces.Space[Any], name: str) -> ArraySpec:
    """How one frame of a leaf is stored."""
    if isinstance(space, gym_spaces.Box):
        declared = np.dtype(space.dtype).name
        dtype = _STORED.get(declared, "float32")
        shape = tuple(int(n) for n in space.shape)
        if declared == "bool":
            return ArraySpec("multi_binary", shape, "uint8")
        if declared == "uint8" and int(np.max(space.high, initial=0)) < 255:
            dtype = "float32"  # counts or flags: only bytes up to 255 are brightness, scaled to 0..1
        if declared == "uint8" and len(shape) == 2 and min(shape) >= SMALLEST_GREY:
            shape = (1, *shape)
        return ArraySpec("box", shape, dtype, image=len(shape) == 3)
    if isinstance(space, gym_spaces.Discrete):
        return ArraySpec("discrete", (), "int64", (int(space.n),))
    if isinstance(space, gym_spaces.MultiDiscrete):
        options = tuple(int(n) for n in np.asarray(space.nvec).reshape(-1))
        return ArraySpec("multi_discrete", (len(options),), "int64", options)
    if isinstance(space, gym_spaces.MultiBinary):
        return ArraySpec("multi_binary", (int(np.prod(space.shape)),), "uint8")
    if is_text(space):
        return ArraySpec("text", (TEXT_WORDS,), "int32", (TEXT_HASHES + 1,))
    hint = "use Box, Discrete, MultiDiscrete, MultiBinary, Text, or Dict and Tuple of them; a wrapper can convert it"
    raise UseError(f"observation {name!r} has a space that Tiltyard cannot store: {type(space).__name__}", hint)


def is_text(space: gym_spaces.Space[Any]) -> bool:
    """Whether it is a space of strings: Text, or another class with that dtype (MiniGrid's MissionSpace)."""
    return isinstance(space, gym_spaces.Text) or (space.dtype is not None and np.dtype(space.dtype).kind == "U")


def stack_axis(spec: ArraySpec) -> int:
    """The axis along which frames are stacked: channels of an image (the smaller of first and last), else the first."""
    return 2 if spec.image and spec.shape[2] < spec.shape[0] else 0


def stacked(spec: ArraySpec, frames: int) -> ArraySpec:
    """The spec of `frames` stacked observations, oldest first."""
    if frames == 1:
        return spec
    if not spec.shape:  # one category becomes several
        kind = "multi_discrete" if spec.kind == "discrete" else spec.kind
        return ArraySpec(kind, (frames,), spec.dtype, spec.options * frames)
    axis = stack_axis(spec)
    shape = tuple(n * frames if i == axis else n for i, n in enumerate(spec.shape))
    options = spec.options * frames if spec.kind == "multi_discrete" else spec.options
    # With so many channels that they are not the smallest side, it is no longer an image to a conv net.
    still = spec.image and stack_axis(ArraySpec(spec.kind, shape, spec.dtype, image=True)) == axis
    return ArraySpec(spec.kind, shape, spec.dtype, options, image=still)


def observation_specs(space: gym_spaces.Space[Any], frame_stack: int = 1) -> dict[str, ArraySpec]:
    """Name -> spec of each array of an observation."""
    return {leaf.name: stacked(leaf.spec, frame_stack) for leaf in observation_leaves(space)}


def previous_specs(action: ActionSpec) -> dict[str, ArraySpec]:
    """The two observations that `model.previous` adds."""
    return {
        PREVIOUS_ACTION: ArraySpec("box", (action.columns,), "float32"),
        PREVIOUS_REWARD: ArraySpec("box", (1,), "float32"),
    }


# ---------------------------------------------------------------------------------------------- encoding


def hash_words(text: str) -> Array:
    """int32 [32]: the first words and punctuation marks as numbers from 1 to 4095, then zeros."""
    ids = np.zeros(TEXT_WORDS, np.int32)
    for i, word in enumerate(re.findall(r"\w+|[^\w\s]", text.lower())[:TEXT_WORDS]):
        ids[i] = zlib.crc32(word.encode()) % TEXT_HASHES + 1
    return ids


def encode_leaf(leaf: Leaf, value: Any) -> Array:
    """One frame of a leaf as it is stored. The value has been checked (checks.py)."""
    if leaf.spec.kind == "text":
        return hash_words(value)
    return encode_leaves(leaf, np.asarray(value)[None]).reshape(leaf.spec.shape)


def encode_leaves(leaf: Leaf, array: Array) -> Array:
    """The frames [B, ...] of a leaf as they are stored; not for Text."""
    spec, space = leaf.spec, leaf.space
    if isinstance(space, gym_spaces.Discrete):
        array = array - int(space.start)
    elif isinstance(space, gym_spaces.MultiDiscrete):
        array = array - np.asarray(space.start)
    return array.astype(spec.dtype, copy=False).reshape(len(array), *spec.shape)


def pick(obs: Any, path: tuple[str | int, ...]) -> Any:
    """The value at a leaf's path."""
    for part in path:
        obs = obs[part]
    return obs


def encode(leaves: list[Leaf], obs: Any) -> Arrays:
    """A single observation as named arrays, without stacking."""
    return {leaf.name: encode_leaf(leaf, pick(obs, leaf.path)) for leaf in leaves}


def fill_stack(frame: Array, shape: tuple[int, ...]) -> Array:
    """A frame repeated along the one axis in which the stacked shape is larger."""
    if frame.shape == shape:
        return frame
    if not frame.shape:
        return np.full(shape, frame)
    repeats = [wide // max(1, narrow) for wide, narrow in zip(shape, frame.shape, strict=True)]
    return np.tile(frame, repeats)


# ---------------------------------------------------------------------------------------------- as JSON


def spec_to_json(spec: EnvSpec) -> dict[str, Any]:
    """An EnvSpec as JSON values; infinite bounds as the strings "inf" and "-inf"."""
    data: dict[str, Any] = plain(asdict(spec))
    return data


def spec_from_json(data: Mapping[str, Any]) -> EnvSpec:
    """The inverse of spec_to_json; older data may lack the newer fields."""
    known = {item.name: data[item.name] for item in fields(EnvSpec) if item.name in data}
    known |= {"agents": tuple(data["agents"]), "notes": tuple(data["notes"]), "restore_mode": restore_mode_in(data)}
    known["obs"] = {
        name: ArraySpec(**{**item, "shape": tuple(item["shape"]), "options": tuple(item["options"])})
        for name, item in data["obs"].items()
    }
    parts = [
        ActionPart(**{**part, "low": tuple(map(float, part["low"])), "high": tuple(map(float, part["high"]))})
        for part in data["action"]["parts"]
    ]
    return EnvSpec(**{**known, "action": ActionSpec(tuple(parts), data["action"]["tree"])})


def restore_mode_in(data: Mapping[str, Any]) -> Any:
    """How saved episodes are restored. Checkpoints of version 0.1 call this `comes_back`, and `rerun` `replay`."""
    mode = data["restore_mode"] if "restore_mode" in data else data["comes_back"]
    return "rerun" if mode == "replay" else mode
