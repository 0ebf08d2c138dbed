"""A tree of arrays and plain values as two files: NAME.safetensors for the arrays, NAME.json for everything else.

Nothing is pickled: a type that is not in this table is an error that names its path in the tree.

    None, bool, str, finite float, small int   themselves            array             {"$array": "optimiser/step"}
    dict (string keys), list (tuple -> list)   themselves            nan, inf          {"$float": "nan"}
    dict with a key that starts with $         {"$dict": [[k, v]]}   int over 53 bits  {"$int": "0x1f..."}

Arrays are written and read one by one, in pieces, because a replay buffer may be as large as half of the memory:
safetensors_file.py has that format.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiltyard.errors import TiltyardError
from tiltyard.run import atomic
from tiltyard.run.safetensors_file import DTYPES, StoredArray, pieces, stored_arrays

if TYPE_CHECKING:
    from tiltyard.types import Array, Arrays, Tree

# Other JSON readers are exact for integers up to here.
SAFE_BITS = 53

Files = dict[str, dict[str, Any]]
"""size ("bytes") and checksum ("sha256") of files, by their paths in a folder"""


@dataclass(frozen=True)
class EncodedTree:
    """A tree that is ready to be written: its JSON, and its arrays, which may share memory with what they describe."""

    name: str
    """of its files, without extension: engine/state"""
    body: bytes
    arrays: Arrays

    @property
    def size(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def copy(self) -> EncodedTree:
        """The same with arrays of its own, which nothing changes."""
        return replace(self, arrays={name: array.copy() for name, array in self.arrays.items()})

    def write(self, folder: Path) -> Files:
        """Write the two files; returns their sizes and checksums. Does not sync them. Needs memory for one piece."""
        (folder / self.name).parent.mkdir(parents=True, exist_ok=True)
        contents = {f"{self.name}.safetensors": pieces(self.arrays), f"{self.name}.json": [self.body]}
        return {name: _write(folder / name, content) for name, content in contents.items()}


def encode(name: str, tree: Tree) -> EncodedTree:
    """Encode a tree for the files NAME.json and NAME.safetensors. Copies no array."""
    arrays: Arrays = {}
    body = json.dumps({"schema": 1, "tree": _encode(tree, "", arrays)}, allow_nan=False).encode()
    return EncodedTree(name, body, arrays)


def write_trees(folder: Path, trees: Mapping[str, Tree]) -> Files:
    """Write trees by name; returns size and checksum of each file."""
    return {name: entry for at, tree in trees.items() for name, entry in encode(at, tree).write(folder).items()}


def write_tree(folder: Path, name: str, tree: Tree) -> Files:
    return write_trees(folder, {name: tree})


def read_tree(folder: Path, name: str, *, on_disk: str | None = None) -> Tree:
    """The tree that was written: equal values, arrays equal in bits, dtype and shape, and writable.

    Arrays whose path in the tree begins with `on_disk` are not read: they are StoredArrays. "" means all of them.
    """
    here = folder / f"{name}.json"
    try:
        head = atomic.read_json(here)
        here = folder / f"{name}.safetensors"
        stored = stored_arrays(here)
        arrays = {
            path: array if on_disk is not None and path.startswith(on_disk) else array.read()
            for path, array in stored.items()
        }
    except (OSError, ValueError) as error:
        raise TiltyardError(f"{here} cannot be read: {error}", "the checkpoint is damaged; use another one") from error
    if head.get("schema") != 1:
        hint = "update with: pip install -U tiltyard"
        raise TiltyardError(f"{folder / name}.json has schema {head.get('schema')}, this Tiltyard reads 1", hint)
    try:
        return _decode(head.get("tree"), arrays, folder / f"{name}.json")
    except (KeyError, TypeError, ValueError) as error:
        hint = "the checkpoint is damaged; use another one"
        raise TiltyardError(f"{folder / name}.json is invalid: {error!r}", hint) from error


def _write(path: Path, content: Iterable[bytes | memoryview]) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for piece in content:
            size += file.write(piece)
            digest.update(piece)
    return {"sha256": digest.hexdigest(), "bytes": size}


def _encode(value: Any, path: str, arrays: Arrays) -> Any:
    import numpy as np

    if isinstance(value, np.generic):
        value = value.item() if value.dtype.name in DTYPES else np.asarray(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value) if value.bit_length() <= SAFE_BITS else {"$int": hex(value)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": atomic.plain(value)}
    if isinstance(value, np.ndarray):
        return {"$array": _store(value, path, arrays)}
    if isinstance(value, list | tuple):
        return [_encode(inner, f"{path}/{index}", arrays) for index, inner in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise _unknown(f"{path}/{key!r}", "a key that is a", key)
        pairs = [(str(key), _encode(inner, f"{path}/{key}", arrays)) for key, inner in value.items()]
        return {"$dict": [list(pair) for pair in pairs]} if any(key.startswith("$") for key in value) else dict(pairs)
    raise _unknown(path, "a", value)


def _unknown(path: str, what: str, value: object) -> TiltyardError:
    kind = type(value)
    hint = "use arrays, numbers, strings, booleans, None, and lists and dictionaries of them"
    return TiltyardError(f"the state to save has {what} {kind.__module__}.{kind.__qualname__} at {path or '/'}", hint)


def _store(array: Array, path: str, arrays: Arrays) -> str:
    if array.dtype.name not in DTYPES:
        hint = "convert it to numbers"
        raise TiltyardError(f"the state to save has an array of dtype {array.dtype} at {path or '/'}", hint)
    name = path.strip("/") or "array"
    # Two paths can have the same name ({"a/b": x} and {"a": {"b": x}}), and safetensors reserves one name.
    while name in arrays or name == "__metadata__":
        name += "~"
    arrays[name] = array
    return name


def _decode(value: Any, arrays: Mapping[str, Array | StoredArray], file: Path) -> Tree:
    if isinstance(value, list):
        return [_decode(inner, arrays, file) for inner in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (mark, inner), *_ = value.items()
        if mark == "$array":
            if inner not in arrays:
                hint = "the checkpoint is damaged; use another one"
                raise TiltyardError(f"{file} names an array {inner!r} that is missing", hint)
            return arrays[inner]
        if mark == "$float":
            return atomic.NOT_FINITE[inner]
        if mark == "$int":
            return int(inner, 16)
        if mark == "$dict":
            return {key: _decode(element, arrays, file) for key, element in inner}
    return {key: _decode(inner, arrays, file) for key, inner in value.items()}
