"""Action spaces as flat float32 rows: the only place that converts between rows and an env's own actions.

A row has the columns of all leaves, in the order of the space. Decoding works on many rows at once.

    Discrete -> 1 categorical column     MultiDiscrete -> 1 categorical column per element
    MultiBinary -> n binary columns      Box -> n continuous columns: [-1, 1] means [low, high] where both are finite
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces as gym_spaces

from tiltyard.errors import UseError
from tiltyard.types import ActionPart, ActionSpec, Array


def action_spec(space: gym_spaces.Space[Any]) -> ActionSpec:
    """The flat form of an action space."""
    parts: list[ActionPart] = []
    tree = _action_tree(space, parts)
    if not parts:
        raise UseError(f"the action space {space} is empty", "give it at least one Discrete or Box")
    return ActionSpec(tuple(parts), tree)


def _action_tree(space: gym_spaces.Space[Any], parts: list[ActionPart]) -> dict[str, Any]:
    """A JSON tree from which an action is rebuilt; appends the parts of the leaves in order."""
    if isinstance(space, gym_spaces.Discrete):
        parts.append(ActionPart("categorical", 1, int(space.n)))
        return {"kind": "discrete", "start": int(space.start)}
    if isinstance(space, gym_spaces.MultiDiscrete):
        options = np.asarray(space.nvec).reshape(-1)
        parts.extend(ActionPart("categorical", 1, int(n)) for n in options)
        start = [int(n) for n in np.asarray(space.start).reshape(-1)]
        return {
            "kind": "multi_discrete",
            "shape": list(space.shape),
            "start": start,
            "dtype": np.dtype(space.dtype).name,
        }
    if isinstance(space, gym_spaces.MultiBinary):
        parts.append(ActionPart("binary", int(np.prod(space.shape))))
        return {"kind": "multi_binary", "shape": list(space.shape), "dtype": np.dtype(space.dtype).name}
    if isinstance(space, gym_spaces.Box):
        low = tuple(float(x) for x in space.low.reshape(-1))
        high = tuple(float(x) for x in space.high.reshape(-1))
        parts.append(ActionPart("continuous", len(low), low=low, high=high))
        return {"kind": "box", "shape": list(space.shape), "dtype": np.dtype(space.dtype).name}
    if isinstance(space, gym_spaces.Tuple):
        return {"kind": "tuple", "items": [_action_tree(inner, parts) for inner in space.spaces]}
    if isinstance(space, gym_spaces.Dict):
        # Pairs, not an object: the order of keys is the order of columns and survives any JSON writer.
        return {"kind": "dict", "items": [[key, _action_tree(inner, parts)] for key, inner in space.spaces.items()]}
    hint = "use Discrete, MultiDiscrete, MultiBinary, Box, or Tuple and Dict of them; a wrapper can convert it"
    raise UseError(f"the action space has a part that Tiltyard cannot act in: {type(space).__name__}", hint)


class ActionCodec:
    """Flat rows <-> an env's own actions. Converts the bounds to arrays once."""

    def __init__(self, spec: ActionSpec) -> None:
        self.spec = spec
        self._boxes: dict[int, _Bounds] = {}
        column = 0
        for part in spec.parts:
            if part.kind == "continuous":
                self._boxes[column] = _Bounds(part)
            column += part.columns

    def decode(self, row: Array) -> Any:
        """float32 [columns] -> one action of the env."""
        return self.decode_rows(row[None])[0]

    def decode_rows(self, rows: Array) -> list[Any]:
        """float32 [N, columns] -> N actions of the env."""
        tree = self.spec.tree
        if tree["kind"] == "discrete":  # the common case, kept short: this runs once per env step
            actions: list[Any] = rows[:, 0].astype(np.int64).tolist()
            start = tree["start"]
            return [action + start for action in actions] if start else actions
        return self._decode(tree, rows, 0)[0]

    def _decode(self, node: Mapping[str, Any], rows: Array, column: int) -> tuple[list[Any], int]:
        """N values of one node, and the first column after it."""
        kind = node["kind"]
        if kind == "discrete":
            return (rows[:, column].astype(np.int64) + node["start"]).tolist(), column + 1
        if kind in ("tuple", "dict"):
            values = []
            for child in node["items"] if kind == "tuple" else [child for _, child in node["items"]]:
                decoded, column = self._decode(child, rows, column)
                values.append(decoded)
            if kind == "tuple":
                return list(zip(*values, strict=True)), column
            keys = [key for key, _ in node["items"]]
            return [dict(zip(keys, row, strict=True)) for row in zip(*values, strict=True)], column
        end = column + (len(node["start"]) if kind == "multi_discrete" else math.prod(node["shape"]))
        flat = rows[:, column:end]
        if kind == "box":
            flat = self._boxes[column].to_env(flat, np.dtype(node["dtype"]))
        elif kind == "multi_discrete":
            flat = flat.astype(np.int64) + np.asarray(node["start"], np.int64)
        return list(flat.astype(node["dtype"], copy=False).reshape(len(rows), *node["shape"])), end

    def inside(self, rows: Array) -> Array:
        """A copy with bounded continuous columns clipped to [-1, 1], as `decode_rows` does."""
        clipped = rows.copy()
        for column, box in self._boxes.items():
            columns = clipped[:, column : column + len(box.finite)]
            columns[:, box.finite] = np.clip(columns[:, box.finite], -1.0, 1.0)
        return clipped

    def encode(self, action: Any) -> Array:
        """One action of the env -> float32 [columns]."""
        columns: list[Array] = []
        self._encode(self.spec.tree, action, columns, 0)
        return np.concatenate(columns).astype(np.float32)

    def _encode(self, node: Mapping[str, Any], action: Any, columns: list[Array], column: int) -> int:
        kind = node["kind"]
        if kind == "tuple":
            for child, value in zip(node["items"], action, strict=True):
                column = self._encode(child, value, columns, column)
            return column
        if kind == "dict":
            for key, child in node["items"]:
                column = self._encode(child, action[key], columns, column)
            return column
        flat = np.asarray(action, np.float64).reshape(-1)
        if kind == "box":
            flat = self._boxes[column].from_env(flat)
        elif kind in ("discrete", "multi_discrete"):
            flat = flat - np.asarray(node["start"])
        columns.append(flat)
        return column + len(flat)

    def random_rows(self, rng: np.random.Generator, rows: int, mask: Array | None = None) -> Array:
        """float32 [rows, columns]: uniform over (allowed) options and bounds, standard normal where unbounded."""
        columns: list[Array] = []
        column = offset = 0
        for part in self.spec.parts:
            if part.kind == "categorical":
                keys = rng.random((rows, part.options))
                if mask is not None:
                    keys = np.where(mask[:, offset : offset + part.options], keys, -1.0)
                columns.append(keys.argmax(axis=1)[:, None])
                offset += part.options
            elif part.kind == "binary":
                columns.append(rng.integers(0, 2, (rows, part.columns)))
            else:
                uniform, normal = rng.uniform(-1, 1, (rows, part.columns)), rng.normal(size=(rows, part.columns))
                columns.append(np.where(self._boxes[column].finite, uniform, normal))
            column += part.columns
        return np.concatenate(columns, axis=1, dtype=np.float32)


class _Bounds:
    """Low and high of a continuous part, and the map from [-1, 1] onto them where both are finite."""

    def __init__(self, part: ActionPart) -> None:
        self._low, self._high = np.asarray(part.low, np.float64), np.asarray(part.high, np.float64)
        self.finite = np.isfinite(self._low) & np.isfinite(self._high)
        low, high = np.where(self.finite, self._low, -1.0), np.where(self.finite, self._high, 1.0)
        # Halves first: no overflow at the largest floats.
        self._middle, self._half = low / 2 + high / 2, high / 2 - low / 2
        self._most = np.where(self.finite, 1.0, np.inf).astype(np.float32)
        self._ends: dict[np.dtype[Any], tuple[Array, Array]] = {}  # bounds in the env's dtype

    def to_env(self, flat: Array, dtype: np.dtype[Any]) -> Array:
        """float32 [N, columns] -> dtype [N, columns]. minimum and maximum take a third of the time of clip."""
        inside = np.minimum(np.maximum(flat, -self._most), self._most)
        scaled = inside * self._half + self._middle
        if dtype.kind != "f":
            scaled = np.rint(np.minimum(np.maximum(scaled, self._low), self._high))
        converted = scaled.astype(dtype)
        if dtype not in self._ends:
            self._ends[dtype] = (self._low.astype(dtype), self._high.astype(dtype))
        low, high = self._ends[dtype]
        # Rounding to the env's dtype must not cross a bound: 0.1 is less in float64 than in float32.
        np.minimum(np.maximum(converted, low, out=converted), high, out=converted)
        return converted

    def from_env(self, flat: Array) -> Array:
        half = np.where(self._half > 0, self._half, 1.0)
        return np.asarray((flat - self._middle) / half)


def random_action(spec: ActionSpec, rng: np.random.Generator, mask: Array | None = None) -> Array:
    """float32 [columns]; `mask` is bool [mask_size]."""
    row: Array = ActionCodec(spec).random_rows(rng, 1, None if mask is None else mask[None])[0]
    return row


def flat_mask(spec: ActionSpec, value: Any) -> Array:
    """An env's mask (one array, or one per categorical part) as bool [mask_size]."""
    if isinstance(value, (tuple, list)):
        value = np.concatenate([np.asarray(part).reshape(-1) for part in value])
    mask = np.asarray(value).reshape(-1).astype(bool)
    if mask.shape != (spec.mask_size,):
        raise ValueError(
            f"the action mask has {mask.size} entries but the categorical actions have {spec.mask_size} options"
        )
    return mask
