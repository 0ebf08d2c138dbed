"""The one way in which our processes talk: values through a stream socket, framed. Nothing is pickled.

A message is JSON that says how to rebuild the value, followed by the bytes of its arrays:

    12 bytes: lengths | ["t", [["a", "<f4", [4]], 1.0, false, false, ["d", []]]] | 16 bytes

Types survive (a list stays a list, a numpy number stays one): the contract of envs is about types.
"""

from __future__ import annotations

import contextlib
import json
import math
import select
import socket
import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tiltyard.errors import ConfigError, DivergedError, EnvError, Problem, TiltyardError, UseError

if TYPE_CHECKING:
    from tiltyard.types import Array

_LENGTHS = struct.Struct("<IQ")  # of the JSON and of the arrays, in bytes
_FIRST_READ = 4096  # bytes: most messages are shorter, and then one call is enough
_PLAIN = (bool, int, float, str)
_AS_THEY_ARE = frozenset((*_PLAIN, type(None)))
_SEQUENCES: dict[str, Any] = {"t": tuple, "l": list, "s": set}
_ERRORS = {kind.__name__: kind for kind in (TiltyardError, UseError, EnvError)}
_write, _read = json.JSONEncoder(check_circular=False).encode, json.JSONDecoder().decode


class Unsendable(TypeError):
    """A value that is not a number, string, array or a container of them."""


class DropUnsendable:
    """A dict that is sent without the entries that cannot be: infos may hold anything."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Channel:
    """One end of a stream socket, given as an object or a file descriptor."""

    def __init__(self, end: socket.socket | int) -> None:
        self._end = socket.socket(fileno=end) if isinstance(end, int) else end
        self._end.set_inheritable(False)  # programs started here must not keep it open
        self._ahead = bytearray()  # received with the message before

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, value: Any) -> None:
        """Send a value; raises Unsendable before anything is sent."""
        arrays: list[Array] = []
        text = _write(_to_parts(value, arrays, drop=False)).encode()
        parts = [array.tobytes() for array in arrays]
        lengths = _LENGTHS.pack(len(text), sum(map(len, parts)))
        self._end.sendall(b"".join((lengths, text, *parts)))

    def recv(self, timeout: float | None = None) -> Any:
        """Wait for the next value; EOFError if the other end is gone, TimeoutError if nothing comes for so long."""
        if timeout != self._end.gettimeout():
            self._end.settimeout(timeout)
        got, self._ahead = self._ahead, bytearray()
        at = len(got)
        got += bytes(max(0, _FIRST_READ - at))
        while at < _LENGTHS.size:
            at += self._into(memoryview(got)[at:])
        text, parts = _LENGTHS.unpack_from(got)
        begin = _LENGTHS.size + text
        end = begin + parts
        if at < end:
            got += bytes(max(0, end - len(got)))
            view = memoryview(got)
            while at < end:
                at += self._into(view[at:end])
        elif at > end:
            self._ahead = got[end:at]
        built = _read(got[_LENGTHS.size : begin].decode())
        return _from_parts(built, _Bytes(got, begin))

    def __iter__(self) -> Iterator[Any]:
        """All values until the other end is gone."""
        with contextlib.suppress(EOFError):
            while True:
                yield self.recv()

    def is_ready(self, seconds: float = 0.0) -> bool:
        """Wait until `recv` has something to read or the other end is gone; False if neither happens."""
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        return bool(self._ahead or poll.poll(1000 * seconds))

    def finish(self) -> None:
        """Tell the other end that nothing more will be sent."""
        self._end.shutdown(socket.SHUT_WR)

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


# ---------------------------------------------------------------------------------------------- errors


def error_message(error: TiltyardError) -> dict[str, Any]:
    """An error as a message, for `error_from` at the other end."""
    message = {"kind": type(error).__name__, "error": error.message, "hint": error.hint, "details": error.details}
    if isinstance(error, ConfigError):
        source = error.message.partition(" in ")[2]
        return {**message, "problems": [problem.__dict__ for problem in error.problems], "source": source}
    return {**message, "batch": error.batch} if isinstance(error, DivergedError) else message


def error_from(message: Mapping[str, Any]) -> TiltyardError:
    """The error of an `error_message`."""
    if "problems" in message:
        return ConfigError([Problem(**problem) for problem in message["problems"]], message["source"])
    if "batch" in message:
        return DivergedError(message["error"], message["hint"], message["batch"])
    return _ERRORS.get(message["kind"], TiltyardError)(message["error"], message["hint"], message["details"])


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
        if not kind.itemsize:  # an empty string
            return np.zeros(shape, kind)
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
