"""RLlib's state as a tree that checkpoints can hold, and back: what it has beside arrays, numbers and text.

    tuple, set, deque, numpy number    {"$": "tuple", "items": [...]}
    mapping with keys that are no text {"$": "pairs", "items": [[key, value], ...]}

Anything else is refused by its name: nothing is pickled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tiltyard.errors import TiltyardError
from tiltyard.types import Tree

MARK = "$"


def plain(value: Any, path: str = "") -> Tree:
    """`value` as nested dicts and lists of arrays, numbers, text, booleans and None."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        return {MARK: "tensor", "items": value.detach().cpu().numpy().copy()}
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value
    if isinstance(value, np.generic):
        return {MARK: "number", "dtype": value.dtype.str, "items": value.item()}
    if isinstance(value, list):
        return [plain(each, f"{path}[]") for each in value]
    if isinstance(value, tuple | set | frozenset):
        kind = "tuple" if isinstance(value, tuple) else "set"
        return {MARK: kind, "items": [plain(each, path) for each in value]}
    if isinstance(value, deque):
        return {MARK: "deque", "length": value.maxlen, "items": [plain(each, path) for each in value]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key != MARK for key in value):
            return {key: plain(each, f"{path}.{key}") for key, each in value.items()}
        return {
            MARK: "pairs",
            "items": [[plain(key, path), plain(each, f"{path}.{key}")] for key, each in value.items()],
        }
    raise TiltyardError(
        f"RLlib's state has a {type(value).__module__}.{type(value).__name__} at {path or 'its top'}, "
        "which a checkpoint cannot hold",
        "leave out what keeps it there, or train with another engine",
    )


def lively(tree: Tree) -> Any:
    """The inverse of `plain`."""
    if isinstance(tree, list):
        return [lively(each) for each in tree]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get(MARK)
    if kind is None:
        return {key: lively(each) for key, each in tree.items()}
    items = tree["items"]
    if kind == "tensor":
        return torch.from_numpy(np.array(items))
    if kind == "number":
        return np.dtype(tree["dtype"]).type(items)
    if kind == "pairs":
        return {lively(key): lively(each) for key, each in items}
    made = [lively(each) for each in items]
    if kind == "deque":
        return deque(made, maxlen=tree["length"])
    return tuple(made) if kind == "tuple" else set(made)
