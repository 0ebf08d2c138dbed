"""The messages between an env's process and its group: values and spaces through a socket. Nothing is pickled.

A message is JSON that says how to rebuild the value, followed by the bytes of its arrays:

    12 bytes: lengths | ["t", [["a", "<f4", [4]], 1.0, false, false, ["d", []]]] | 16 bytes

Types survive (a list stays a list, a numpy number stays one), because the contract in checks.py is about types.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

if TYPE_CHECKING:
    from tiltyard.types import Array

_LENGTHS = struct.Struct("<IQ")  # of the JSON and of the arrays, in bytes
_FIRST_READ = 4096  # bytes: most messages are shorter, and then one call is enough
_PLAIN = (bool, int, float, str)
_AS_THEY_ARE = frozenset((*_PLAIN, type(None)))
_SEQUENCES: dict[str, Any] = {"t": tuple, "l": list, "s": set}
_write, _read = json.JSONEncoder(check_circular=False).encode, json.JSONDecoder().decode


class Unsendable(TypeError):
    """A value that is not a number, string, array or a container of them."""


class DropUnsendable:
    """A dict that is sent without the entries that cannot be: infos may hold anything."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Connection:
    """One end of a socket."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, value: Any) -> None:
        """Send a value; raises Unsendable before anything is sent."""
        arrays: list[Array] = []
        text = _write(_to_parts(value, arrays, drop=False)).encode()
        parts = [array.tobytes() for array in arrays]
        lengths = _LENGTHS.pack(len(text), sum(map(len, parts)))
        self._end.sendall(b"".join((lengths, text, *parts)))

    def recv(self) -> Any:
        """Wait for the next value; EOFError if the other end is gone. At most one message may be on its way."""
        got = bytearray(_FIRST_READ)
        at = self._into(memoryview(got))
        while at < _LENGTHS.size:
            at += self._into(memoryview(got)[at:])
        text, parts = _LENGTHS.unpack_from(got)
        begin = _LENGTHS.size + text
        if at < begin + parts:
            got += bytes(max(0, begin + parts - len(got)))
            view = memoryview(got)
            while at < begin + parts:
                at += self._into(view[at : begin + parts])
        built = _read(got[_LENGTHS.size : begin].decode())
        return _from_parts(built, _Bytes(got, begin))

    def _into(self, view: memoryview) -> int:
        try:
            more = self._end.recv_into(view)
        except ConnectionError:
            more = 0
        if not more:
            raise EOFError
        return more

    def close(self) -> None:
        self._end.close()


# ---------------------------------------------------------------------------------------------- values


def _to_parts(value: Any, arrays: list[Array], drop: bool) -> Any:
    """A value as JSON; its arrays are appended to `arrays`, in order."""
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is tuple:  # the most frequent; other sequences follow below
        return ["t", [_to_parts(each, arrays, drop) for each in value]]
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.hasobject or value.dtype.names:
            raise Unsendable(f"an array of {value.dtype} cannot be sent from one process to another")
        arrays.append(np.asarray(value))
        return ["a", value.dtype.str, list(value.shape)] if isinstance(value, np.ndarray) else ["n", value.dtype.str]
    if isinstance(value, Mapping):
        return ["d", list(_entries(value, arrays, drop))]
    for mark, sequence in _SEQUENCES.items():
        if isinstance(value, sequence):
            return [mark, [_to_parts(each, arrays, drop) for each in value]]
    if isinstance(value, DropUnsendable):
        return _to_parts(value.value, arrays, drop=True)
    if isinstance(value, bytes):
        arrays.append(np.frombuffer(value, np.uint8))
        return ["b", len(value)]
    if isinstance(value, _PLAIN):  # a subclass of a number or string
        return next(plain(value) for plain in _PLAIN[1:] if isinstance(value, plain))
    raise Unsendable(f"a {type(value).__name__} cannot be sent from one process to another")


def _entries(value: Mapping[Any, Any], arrays: list[Array], drop: bool) -> Iterator[list[Any]]:
    for key, each in value.items():
        before = len(arrays)
        try:
            entry = [_to_parts(key, arrays, drop), _to_parts(each, arrays, drop)]
        except Unsendable:
            if not drop:
                raise
            del arrays[before:]
            continue
        yield entry


class _Bytes:
    """The bytes behind the JSON of a message, taken array by array."""

    def __init__(self, data: bytearray, at: int) -> None:
        self._data, self._at = memoryview(data), at

    def take(self, size: int) -> memoryview:
        self._at += size
        return self._data[self._at - size : self._at]

    def array(self, dtype: str, shape: list[int]) -> Array:
        kind = np.dtype(dtype)
        return np.frombuffer(self.take(kind.itemsize * math.prod(shape)), kind).reshape(shape)


def _from_parts(built: Any, data: _Bytes) -> Any:
    if type(built) is not list:
        return built
    mark = built[0]
    if mark in _SEQUENCES:
        return _SEQUENCES[mark]([_from_parts(each, data) for each in built[1]])
    if mark == "a":
        return data.array(built[1], built[2])
    if mark == "d":
        return {_from_parts(key, data): _from_parts(value, data) for key, value in built[1]}
    return data.array(built[1], [])[()] if mark == "n" else bytes(data.take(built[1]))


# ---------------------------------------------------------------------------------------------- spaces


def space_parts(space: spaces.Space[Any] | None) -> Any:
    """A space as a value that can be sent; None for a kind that spaces.py and actions.py do not know."""
    match space:
        case spaces.Box():
            return "box", space.low, space.high, np.dtype(space.dtype).str
        case spaces.Discrete():
            return "discrete", int(space.n), int(space.start)
        case spaces.MultiDiscrete():
            return "multi_discrete", space.nvec, space.start
        case spaces.MultiBinary():
            return "multi_binary", space.n if isinstance(space.n, int) else list(space.shape)
        case spaces.Text():
            return "text", space.max_length, space.min_length, "".join(sorted(space.character_set))
        case spaces.Dict():
            return "dict", [(key, space_parts(inner)) for key, inner in space.spaces.items()]
        case spaces.Tuple():
            return "tuple", [space_parts(inner) for inner in space.spaces]
    return None


def space_from_parts(parts: Any) -> Any:
    """The inverse of space_parts; None for None."""
    match parts:
        case "box", low, high, dtype:
            return spaces.Box(low, high, low.shape, np.dtype(dtype).type)
        case "discrete", options, start:
            return spaces.Discrete(options, start=start)
        case "multi_discrete", options, start:
            return spaces.MultiDiscrete(options, start=start)
        case "multi_binary", size:
            return spaces.MultiBinary(size)
        case "text", longest, shortest, letters:
            return spaces.Text(longest, min_length=shortest, charset=letters)
        case "dict", inner:
            return spaces.Dict(OrderedDict((key, space_from_parts(each)) for key, each in inner))
        case "tuple", inner:
            return spaces.Tuple([space_from_parts(each) for each in inner])
    return None
