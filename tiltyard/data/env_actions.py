"""Actions of an env for whole episodes: from the rows of a dataset to arrays and a Gymnasium space, and back.

An episode's actions are an array [T, ...] for a leaf of the action space, and a tuple or dict of those for a Tuple or
Dict. Rows are float32, so that not every float64 action has a row; `encode_actions` counts those.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from tiltyard.envs.actions import ActionCodec
from tiltyard.errors import UseError
from tiltyard.types import ActionPart, ActionSpec, Array


def action_space(spec: ActionSpec) -> spaces.Space[Any]:
    """The Gymnasium space with this spec."""
    return _space(spec.tree, iter(spec.parts))


def _space(node: Mapping[str, Any], parts: Iterator[ActionPart]) -> spaces.Space[Any]:
    kind = node["kind"]
    if kind == "tuple":
        return spaces.Tuple([_space(child, parts) for child in node["items"]])
    if kind == "dict":
        return spaces.Dict({key: _space(child, parts) for key, child in node["items"]})
    if kind == "multi_discrete":
        options = [next(parts).options for _ in node["start"]]
        start = np.asarray(node["start"], node["dtype"]).reshape(node["shape"])
        return spaces.MultiDiscrete(np.asarray(options).reshape(node["shape"]), node["dtype"], start=start)
    part = next(parts)
    if kind == "discrete":
        return spaces.Discrete(part.options, start=node["start"])
    if kind == "multi_binary":
        return spaces.MultiBinary(node["shape"] if len(node["shape"]) > 1 else node["shape"][0])
    low, high = (np.asarray(end, node["dtype"]).reshape(node["shape"]) for end in (part.low, part.high))
    return spaces.Box(low, high, tuple(node["shape"]), np.dtype(node["dtype"]).type)


def decode_actions(codec: ActionCodec, rows: Array) -> Any:
    """The env's own actions of an episode."""
    return _stacked(codec.spec.tree, codec.decode_rows(rows))


def _stacked(node: Mapping[str, Any], actions: Sequence[Any]) -> Any:
    if node["kind"] == "tuple":
        return tuple(_stacked(child, [each[i] for each in actions]) for i, child in enumerate(node["items"]))
    if node["kind"] == "dict":
        return {key: _stacked(child, [each[key] for each in actions]) for key, child in node["items"]}
    return np.asarray(actions, np.int64) if node["kind"] == "discrete" else np.stack(actions)


def encode_actions(codec: ActionCodec, actions: Any, steps: int, where: str) -> tuple[Array, int]:
    """Rows for an episode's actions, float32 [T, columns], and how many of them decode to something else.

    UseError if the actions do not fit to the space. An action that a row was decoded to always gets such a row again:
    if rounding misses it, it is one of the neighbours.
    """
    tree = codec.spec.tree
    wanted = _flat(tree, actions, steps, where)
    rows = np.stack([codec.encode(_row(tree, actions, step)) for step in range(steps)])
    _require_options(codec.spec, rows, where)
    wrong = _differs(codec, rows, wanted)
    for direction in (-np.inf, np.inf):
        near = rows
        for _ in range(2):
            if wrong.any():
                near = np.nextafter(near, np.float32(direction))
                better = wrong & ~_differs(codec, near, wanted)
                rows = np.where(better, near, rows)
                wrong &= ~better
    return rows, int(wrong.any(1).sum())


def _differs(codec: ActionCodec, rows: Array, wanted: Array) -> Array:
    found = _flat(codec.spec.tree, decode_actions(codec, rows), len(rows), "")
    return np.asarray(~((found == wanted) | (np.isnan(found) & np.isnan(wanted))))


def _flat(node: Mapping[str, Any], actions: Any, steps: int, where: str) -> Array:
    """float64 [T, columns]: the env's own numbers, in the order of the columns."""
    try:
        if node["kind"] == "tuple":
            inner = list(zip(node["items"], actions, strict=True))
            return np.concatenate([_flat(child, each, steps, where) for child, each in inner], 1)
        if node["kind"] == "dict":
            return np.concatenate([_flat(child, actions[key], steps, where) for key, child in node["items"]], 1)
        size = 1 if node["kind"] == "discrete" else math.prod(node["shape"])
        array = np.asarray(actions)
        if array.dtype.kind not in "biuf" or array.shape[:1] != (steps,) or array.size != steps * size:
            raise ValueError(f"{array.dtype} {list(array.shape)}")
        return array.astype(np.float64).reshape(steps, size)
    except (TypeError, KeyError, ValueError, IndexError) as error:
        message = f"the actions of {where} do not fit to the action space ({node['kind']}): {error}"
        raise UseError(message, "give the env that was recorded with --env") from None


def _row(node: Mapping[str, Any], actions: Any, step: int) -> Any:
    if node["kind"] == "tuple":
        return tuple(_row(child, each, step) for child, each in zip(node["items"], actions, strict=True))
    if node["kind"] == "dict":
        return {key: _row(child, actions[key], step) for key, child in node["items"]}
    return actions[step]


def _require_options(spec: ActionSpec, rows: Array, where: str) -> None:
    column = 0
    for part in spec.parts:
        if part.kind == "categorical":
            values = rows[:, column]
            bad = values[~((values >= 0) & (values < part.options) & (values == np.rint(values)))]
            if len(bad):
                message = f"an action of {where} is option {bad[0]:g}; the env has 0 to {part.options - 1}"
                raise UseError(message, "give the env that was recorded with --env")
        column += part.columns
