"""What goes between an env in a process of its own and the group it belongs to: values and spaces through a socket.

Nothing is pickled. A parcel is a line of JSON that says how the value is built, and behind it the bytes of its arrays:

    12 bytes: lengths | ["t", [["a", "<f4", [4]], 1.0, false, false, ["d", []]]] | 16 bytes

Types survive (a list stays a list, a numpy number one), because the rules of contract.py are about types.
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
_AT_ONCE = 4096  # bytes that are asked for first: most parcels are shorter, and then one call is enough
_PLAIN = (bool, int, float, str)
_AS_THEY_ARE = frozenset((*_PLAIN, type(None)))
_SERIES: dict[str, Any] = {"t": tuple, "l": list, "s": set}
_write, _read = json.JSONEncoder(check_circular=False).encode, json.JSONDecoder().decode


class Unsendable(TypeError):
    """A value that is neither a number, text, array nor made of those."""


class Loose:
    """A dict of which entries that cannot be sent are left out: infos may hold anything."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Line:
    """One end of a socket."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, value: Any) -> None:
        """Raises Unsendable before anything is sent."""
        arrays: list[Array] = []
        text = _write(_taken_apart(value, arrays, loose=False)).encode()
        parts = [array.tobytes() for array in arrays]
        lengths = _LENGTHS.pack(len(text), sum(map(len, parts)))
        self._end.sendall(b"".join((lengths, text, *parts)))

    def receive(self) -> Any:
        """The next value; EOFError when the other end is gone. Nothing may come behind it before it is answered."""
        got = bytearray(_AT_ONCE)
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
        return _put_together(built, _Bytes(got, begin))

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


def _taken_apart(value: Any, arrays: list[Array], loose: bool) -> Any:
    """A value as JSON; its arrays are added to the list, in the order in which they are met."""
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is tuple:  # answers are; the others are asked for below
        return ["t", [_taken_apart(each, arrays, loose) for each in value]]
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.hasobject or value.dtype.names:
            raise Unsendable(f"an array of {value.dtype} cannot be sent from one process to another")
        arrays.append(np.asarray(value))
        return ["a", value.dtype.str, list(value.shape)] if isinstance(value, np.ndarray) else ["n", value.dtype.str]
    if isinstance(value, Mapping):
        return ["d", list(_entries(value, arrays, loose))]
    for mark, series in _SERIES.items():
        if isinstance(value, series):
            return [mark, [_taken_apart(each, arrays, loose) for each in value]]
    if isinstance(value, Loose):
        return _taken_apart(value.value, arrays, loose=True)
    if isinstance(value, bytes):
        arrays.append(np.frombuffer(value, np.uint8))
        return ["b", len(value)]
    if isinstance(value, _PLAIN):  # a number or text of a class of its own
        return next(plain(value) for plain in _PLAIN[1:] if isinstance(value, plain))
    raise Unsendable(f"a {type(value).__name__} cannot be sent from one process to another")


def _entries(value: Mapping[Any, Any], arrays: list[Array], loose: bool) -> Iterator[list[Any]]:
    for key, each in value.items():
        before = len(arrays)
        try:
            entry = [_taken_apart(key, arrays, loose), _taken_apart(each, arrays, loose)]
        except Unsendable:
            if not loose:
                raise
            del arrays[before:]
            continue
        yield entry


class _Bytes:
    """The arrays of a parcel, taken from its end piece by piece."""

    def __init__(self, data: bytearray, at: int) -> None:
        self._data, self._at = memoryview(data), at

    def take(self, size: int) -> memoryview:
        self._at += size
        return self._data[self._at - size : self._at]

    def array(self, dtype: str, shape: list[int]) -> Array:
        kind = np.dtype(dtype)
        return np.frombuffer(self.take(kind.itemsize * math.prod(shape)), kind).reshape(shape)


def _put_together(built: Any, data: _Bytes) -> Any:
    if type(built) is not list:
        return built
    mark = built[0]
    if mark in _SERIES:
        return _SERIES[mark]([_put_together(each, data) for each in built[1]])
    if mark == "a":
        return data.array(built[1], built[2])
    if mark == "d":
        return {_put_together(key, data): _put_together(value, data) for key, value in built[1]}
    return data.array(built[1], [])[()] if mark == "n" else bytes(data.take(built[1]))


# ---------------------------------------------------------------------------------------------- spaces


def space_parts(space: spaces.Space[Any] | None) -> Any:
    """A space as a value that can be sent: of those kinds that spaces.py and actions.py know."""
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


def space_of(parts: Any) -> Any:
    """The space again; None where there was none."""
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
            return spaces.Dict(OrderedDict((key, space_of(each)) for key, each in inner))
        case "tuple", inner:
            return spaces.Tuple([space_of(each) for each in inner])
    return None
