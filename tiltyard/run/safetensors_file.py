"""Files in the safetensors format, written and read array by array, in pieces.

    8 bytes    length of the header, little-endian
    header     {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}, padded with blanks
    data       the arrays, little-endian, one after another; widest dtypes first, so that each is aligned

The library's own functions build the whole file in memory, or return copies of what they have read.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiltyard.run.regular_files import open_regular

if TYPE_CHECKING:
    from tiltyard.types import Array, Arrays

# Names of the dtypes that both safetensors and numpy have.
# fmt: off
DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "float32": "F32", "float64": "F64",
}
# fmt: on
_NAMES = {there: here for here, there in DTYPES.items()}
ALIGNMENT = 8
MAX_HEADER = 100_000_000  # bytes; the library's own limit
PIECE = 1 << 20  # elements, at most 8 MiB


def pieces(arrays: Arrays) -> Iterator[bytes | memoryview]:
    """The content of the file, in pieces that may be parts of the arrays themselves."""
    import numpy as np

    order = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    header, at = {}, 0
    for name in order:
        array = arrays[name]
        place = [at, at := at + array.nbytes]
        header[name] = {"dtype": DTYPES[array.dtype.name], "shape": array.shape, "data_offsets": place}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        little = arrays[name].dtype.newbyteorder("<")
        # Copies only what is not contiguous, or in another byte order.
        parts = np.nditer(  # type: ignore[call-overload]  # numpy's types spell "contig" as "config"
            arrays[name],
            ["external_loop", "buffered", "zerosize_ok"],
            [["readonly", "contig"]],
            order="C",
            op_dtypes=[little],
            casting="equiv",
            buffersize=PIECE,
        )
        yield from (part.data for part in parts)


@dataclass(frozen=True)
class StoredArray:
    """An array in a file."""

    file: Path
    at: int
    """of its first byte"""
    shape: tuple[int, ...]
    dtype: str

    def __len__(self) -> int:
        return self.shape[0]

    def read(self) -> Array:
        import numpy as np

        array = np.empty(self.shape, self.dtype)
        self.read_into(array)
        return array

    def read_into(self, target: Array, start: int = 0) -> None:
        """Fill a contiguous `target` with the rows from `start` on, straight from the file."""
        import numpy as np

        row = math.prod(self.shape[1:]) * target.itemsize
        left = target.reshape(-1).view(np.uint8).data
        with open_regular(self.file, follow=True) as file:
            file.seek(self.at + start * row)
            while left:
                count = file.readinto(left)
                if not count:
                    raise ValueError("the file is too short")
                left = left[count:]
        if sys.byteorder == "big":
            target.byteswap(inplace=True)


def stored_arrays(path: Path) -> dict[str, StoredArray]:
    """What is in a file, by name. ValueError unless the header is valid and describes every byte, in order."""
    with open_regular(path, follow=True) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        start = 8 + length
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise ValueError("the length of its header is invalid")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is not an object")
    header.pop("__metadata__", None)
    found = {str(name): _stored(path, start, entry) for name, entry in header.items()}
    ends = start
    for array, end in sorted(found.values(), key=lambda pair: (pair[0].at, pair[1])):
        if array.at != ends:
            raise ValueError("its arrays overlap or leave a gap")
        ends = end
    if ends != size:
        raise ValueError(f"it has {size} bytes, but its header describes {ends}")
    return {name: array for name, (array, _) in found.items()}


def _stored(path: Path, start: int, entry: Any) -> tuple[StoredArray, int]:
    """An array described in the header, and where it ends."""
    import numpy as np

    try:
        dtype, shape, (first, end) = _NAMES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        numbers = [*shape, first, end]
    except (KeyError, TypeError) as error:
        raise ValueError(f"its header is invalid: {error!r}") from error
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("a shape or an offset in its header is invalid")
    if end - first != math.prod(shape) * np.dtype(dtype).itemsize:
        raise ValueError("an array has not as many bytes as its shape says")
    return StoredArray(path, start + first, shape, dtype), start + end
