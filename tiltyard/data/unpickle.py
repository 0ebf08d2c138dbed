"""Read pickled rollouts without running what is in them. The only place that unpickles.

A pickle is a program: it may name any function and call it. This reader knows a few names, which numpy arrays and bytes
need, and refuses all others before anything is called. It does not call numpy either: arrays come as shape, dtype
and bytes, and are built afterwards, from numbers and booleans only.

    admitted    dict, list, tuple, int, float, bool, str, bytes, None; arrays and scalars of bool, int, uint, float
    refused     every other class or function, object arrays, arrays of records, strings and dates
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tiltyard.errors import TiltyardError, UseError
from tiltyard.types import Array

SUFFIXES = (".pickle", ".pkl", ".p")
_BROKEN = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError,
    OverflowError, MemoryError, RecursionError, UnicodeDecodeError, ImportError,
)  # fmt: skip


class _Refused(Exception):
    """The pickle asks for something that is not admitted; the message says for what."""


def read(path: Path) -> Any:
    """The records of a pickle: nested dicts, lists and tuples of arrays, numbers, strings, bytes and None.

    UseError if it asks for anything else, TiltyardError if it is damaged.
    """
    try:
        with path.open("rb") as file:
            # latin1: arrays that Python 2 wrote come as strings
            loaded = _Reader(file, encoding="latin1").load()
        return _built(loaded, {})
    except _Refused as error:
        hint = (
            "only arrays and plain records are read; in the program that wrote it, "
            "write a dict: {'observations': ..., 'actions': ..., 'rewards': ..., 'dones': ...}"
        )
        raise UseError(f"{path} is refused: it contains {error}", hint) from None
    except OSError as error:
        raise UseError(f"cannot read {path}: {error.strerror}", "check the path") from error
    except _BROKEN as error:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise TiltyardError(f"{path} is not a readable pickle: {text}", "restore it from a copy") from None


class _Reader(pickle.Unpickler):
    """Admits no names but those below."""

    def find_class(self, module: str, name: str) -> Any:
        # numpy 1 has its modules in numpy.core, numpy 2 in numpy._core
        known = _ADMITTED.get((module.replace("numpy._core", "numpy.core").replace("__builtin__", "builtins"), name))
        if known is None:
            raise _Refused(f"{module}.{name}")
        return known

    def persistent_load(self, pid: Any) -> Any:
        raise _Refused("a reference to something outside of the file")


@dataclass(frozen=True)
class _Name:
    """An admitted name. The pickle can call it, but not change it."""

    make: Any

    def __call__(self, *args: Any) -> Any:
        return self.make(*args)

    def __setstate__(self, state: Any) -> None:
        raise _Refused("a changed function")


class _Dtype:
    """numpy.dtype(code) and its later state, which holds the byte order."""

    __slots__ = ("code", "order")

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = code
        self.order: Any = "="

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) < 5 or state[1] not in ("<", ">", "|", "="):
            raise _Refused("an unknown dtype")
        if any(each is not None for each in state[2:5]):
            raise _Refused("an array of records")
        self.order = state[1]

    def real(self) -> np.dtype[Any]:
        try:
            dtype = np.dtype(self.code) if isinstance(self.code, str) else np.dtype(object)
        except TypeError:
            dtype = np.dtype(object)
        if dtype.kind not in "biuf":
            raise _Refused(f"an array of dtype {self.code}")
        return dtype.newbyteorder(self.order) if self.order != "|" else dtype


class _Stored:
    """An array or scalar as the pickle describes it."""

    __slots__ = ("axes", "data", "dtype", "order", "shape")

    def __init__(self, shape: Any, dtype: Any, data: Any, order: Any, axes: Any = None) -> None:
        self.shape, self.dtype, self.data, self.order, self.axes = shape, dtype, data, order, axes

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise _Refused("an unknown kind of array")
        _, self.shape, self.dtype, fortran, self.data = state
        self.order = "F" if fortran else "C"

    def real(self) -> Array:
        if not isinstance(self.dtype, _Dtype):
            raise _Refused("an array without a dtype")
        dtype = self.dtype.real()
        data = self.data.encode("latin1") if isinstance(self.data, str) else self.data
        if not isinstance(data, bytes | bytearray):
            raise _Refused(f"an array whose data is a {type(self.data).__name__}")
        # frombuffer and reshape check the size
        flat = np.frombuffer(data, dtype) if len(data) else np.zeros(0, dtype)
        if self.order == "K" and self.axes is not None:
            array = flat.reshape(self.shape).transpose(self.axes)
        else:
            array = flat.reshape(self.shape, order=self.order)
        return array.astype(dtype.newbyteorder("="))


class _Scalar(_Stored):
    __slots__ = ()


def _empty(kind: Any, shape: Any, code: Any) -> _Stored:
    return _Stored(shape, None, b"", "C")


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> _Stored:
    return _Stored(shape, dtype, data, order, axes)


def _scalar(dtype: Any, data: Any = b"") -> _Scalar:
    return _Scalar((), dtype, data, "C")


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """How protocols before 3 write bytes."""
    if not isinstance(text, str) or encoding != "latin1":
        raise _Refused("an unknown encoding of bytes")
    return text.encode("latin1")


def _bytes(*args: Any) -> bytes:
    """Empty bytes in protocol 2, and bytearrays: as bytes, or as text with its encoding."""
    if not args:
        return b""
    if isinstance(args[0], bytes | bytearray):
        return bytes(args[0])
    return _encode(*args)


def _no_call(*_: Any) -> Any:
    raise _Refused("a call of numpy.ndarray")


_ADMITTED = {
    ("numpy", "dtype"): _Name(_Dtype),
    ("numpy", "ndarray"): _Name(_no_call),  # an argument of _reconstruct
    ("numpy.core.multiarray", "_reconstruct"): _Name(_empty),
    ("numpy.core.multiarray", "scalar"): _Name(_scalar),
    ("numpy.core.numeric", "_frombuffer"): _Name(_from_buffer),
    ("_codecs", "encode"): _Name(_encode),
    ("builtins", "bytes"): _Name(_bytes),
    ("builtins", "bytearray"): _Name(_bytes),
}


def _built(value: Any, done: dict[int, Any]) -> Any:
    """Plain records with real arrays. `done` has what occurs twice; a record that contains itself is refused."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, bytearray):
        return bytes(value)
    if id(value) in done:
        if done[id(value)] is _Refused:
            raise _Refused("a record that contains itself")
        return done[id(value)]
    done[id(value)] = _Refused
    if isinstance(value, _Scalar):
        built: Any = value.real()[()]
    elif isinstance(value, _Stored):
        built = value.real()
    elif type(value) in (list, tuple):
        built = type(value)(_built(each, done) for each in value)
    elif type(value) is dict:
        built = {_built(key, done): _built(inner, done) for key, inner in value.items()}
    else:
        raise _Refused(f"a {type(value).__name__.lstrip('_').lower()}")
    done[id(value)] = built
    return built
