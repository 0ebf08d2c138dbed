"""A tree of arrays and plain values as two files: NAME.safetensors for the arrays, NAME.json for everything else.

Nothing is pickled: a type that is not in this table is an error that names its path in the tree.

    None, bool, str, finite float, small int   themselves            array             {"$array": "optimiser/step"}
    dict (string keys), list (tuple -> list)   themselves            nan, inf          {"$float": "nan"}
    dict with a key that starts with $         {"$dict": [[k, v]]}   int over 53 bits  {"$int": "0x1f..."}
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiltyard.errors import TiltyardError
from tiltyard.run import atomic

if TYPE_CHECKING:
    from tiltyard.types import Array, Arrays, Tree

# dtypes that both safetensors and numpy support
# fmt: off
DTYPES = frozenset((
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32",
    "float64",
))
# fmt: on
# Other JSON readers are exact for integers up to here.
SAFE_BITS = 53


def write_tree(folder: Path, name: str, tree: Tree) -> None:
    """Write the two files and sync them to disk. Costs one copy of the arrays in memory."""
    from safetensors.numpy import save

    arrays: Arrays = {}
    body = _encode(tree, "", arrays)
    folder.mkdir(parents=True, exist_ok=True)
    # Not safetensors' own file writer, so that a full disk is an OSError like everywhere else.
    _write(folder / f"{name}.safetensors", save(arrays))
    _write(folder / f"{name}.json", json.dumps({"schema": 1, "tree": body}, allow_nan=False).encode())


def read_tree(folder: Path, name: str) -> Tree:
    """The tree that `write_tree` wrote: equal values, arrays equal in bits, dtype and shape, and writable."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    here = folder / f"{name}.json"
    try:
        head = atomic.read_json(here)
        here = folder / f"{name}.safetensors"
        arrays = load(here.read_bytes())
    except (OSError, ValueError, SafetensorError) as error:
        raise TiltyardError(f"{here} cannot be read: {error}", "the checkpoint is damaged; use another one") from error
    if head.get("schema") != 1:
        hint = "update with: pip install -U tiltyard"
        raise TiltyardError(f"{folder / name}.json has schema {head.get('schema')}, this Tiltyard reads 1", hint)
    try:
        return _decode(head.get("tree"), arrays, folder / f"{name}.json")
    except (KeyError, TypeError, ValueError) as error:
        hint = "the checkpoint is damaged; use another one"
        raise TiltyardError(f"{folder / name}.json is invalid: {error!r}", hint) from error


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


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
    import numpy as np

    if array.dtype.name not in DTYPES:
        hint = "convert it to numbers"
        raise TiltyardError(f"the state to save has an array of dtype {array.dtype} at {path or '/'}", hint)
    name = path.strip("/") or "array"
    # Two paths can have the same name ({"a/b": x} and {"a": {"b": x}}), and safetensors reserves one name.
    while name in arrays or name == "__metadata__":
        name += "~"
    arrays[name] = np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")
    return name


def _decode(value: Any, arrays: Arrays, file: Path) -> Tree:
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
            return arrays[inner] if arrays[inner].flags.writeable else arrays[inner].copy()
        if mark == "$float":
            return atomic.NOT_FINITE[inner]
        if mark == "$int":
            return int(inner, 16)
        if mark == "$dict":
            return {key: _decode(element, arrays, file) for key, element in inner}
    return {key: _decode(inner, arrays, file) for key, inner in value.items()}
