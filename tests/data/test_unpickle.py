"""Pickled rollouts: arrays and plain records are read, everything else is refused before anything is called."""

import collections
import io
import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.counts import count
from tiltyard.data import unpickle
from tiltyard.errors import TiltyardError, UseError


def saved(folder: Path, value: Any, protocol: int = pickle.HIGHEST_PROTOCOL) -> Path:
    path = folder / "x.pickle"
    path.write_bytes(pickle.dumps(value, protocol))
    return path


def assert_same(one: Any, two: Any) -> None:
    assert type(one) is type(two)
    if isinstance(one, np.ndarray):
        assert one.dtype == two.dtype and one.shape == two.shape and np.array_equal(one, two)
    elif isinstance(one, dict):
        assert one.keys() == two.keys()
        for key in one:
            assert_same(one[key], two[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(two)
        for left, right in zip(one, two, strict=True):
            assert_same(left, right)
    else:
        assert one == two


SHARED = np.arange(3)
RECORD = {
    "obs": np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "turned": np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1),
    "every second": np.arange(10)[::2],
    "bool": np.asarray([True, False]),
    "half": np.asarray([1.5], np.float16),
    "empty": np.zeros((0, 3), np.float32),
    "single": np.asarray(3.0),
    "scalar": np.float32(2.5),
    "count": np.int64(-7),
    "flag": np.bool_(True),
    "nested": [1, 2.5, "ü", b"\x00\xff", b"", None, True, (1, (2, [3]))],
    "shared": [SHARED, SHARED],
    5: -(2**70),
}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_arrays_and_plain_records_are_read(tmp_path: Path, protocol: int):
    assert_same(unpickle.read(saved(tmp_path, RECORD, protocol)), RECORD)


def test_other_byte_orders_become_native(tmp_path: Path):
    (found,) = unpickle.read(saved(tmp_path, [np.asarray([1.0, 2.0], ">f4")]))
    assert found.dtype == np.float32 and found.tolist() == [1.0, 2.0]


def test_pickles_of_numpy_1_are_read(tmp_path: Path):
    path = saved(tmp_path, [np.arange(3)], 2)
    path.write_bytes(path.read_bytes().replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))
    assert unpickle.read(path)[0].tolist() == [0, 1, 2]


def test_pickles_of_python_2_are_read(tmp_path: Path):
    # As Python 2 wrote np.array([1, 300], '<i4') with protocol 2: its data is a string.
    content = (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01K\x02\x85"
        b"cnumpy\ndtype\nU\x02i4K\x00K\x01\x87R(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        b"U\x08\x01\x00\x00\x00\x2c\x01\x00\x00tb."
    )
    (tmp_path / "x.pickle").write_bytes(content)
    found = unpickle.read(tmp_path / "x.pickle")
    assert found.dtype == np.int32 and found.tolist() == [1, 300]


class Calls:
    """Pickles as a call of a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


class Rollout:
    def __init__(self) -> None:
        self.obs_l = [np.zeros(3)]


def object_array(*values: Any) -> np.ndarray:
    array = np.empty(len(values), object)
    array[:] = values
    return array


def attacks(mark: str) -> dict[str, Any]:
    return {
        "os.system": Calls(os.system, f"touch {mark}"),
        "eval": Calls(eval, f"open({mark!r}, 'w')"),
        "exec": Calls(exec, f"open({mark!r}, 'w')"),
        "open": Calls(open, mark, "w"),
        "getattr": Calls(getattr, "text", "format"),
        "mkdir": Calls(os.mkdir, mark),
        "in a list": [1, {"obs": (Calls(os.mkdir, mark),)}],
        "in an object array": object_array(1, Calls(os.mkdir, mark)),
        "numpy.load": Calls(np.load, mark, None, True),
        "numpy.fromfile": Calls(np.fromfile, "/etc/hostname"),
        "our own class": Rollout(),
        "a set": {1, 2},
        "an OrderedDict": collections.OrderedDict(a=1),
        "a function": os.mkdir,
        "object array": object_array(1, "two"),
        "strings": np.asarray(["a"]),
        "records": np.zeros(2, [("a", "f4")]),
        "dates": np.asarray(["2020-01-01"], "datetime64[D]"),
        "complex": 1 + 2j,
        "a subclass": np.ma.masked_array([1, 2], [0, 1]),
    }


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize("name", attacks(""))
def test_everything_else_is_refused_and_nothing_is_called(tmp_path: Path, name: str, protocol: int):
    mark = tmp_path / "mark"
    path = saved(tmp_path, attacks(str(mark))[name], protocol)
    with pytest.raises(UseError, match="is refused: it contains") as caught:
        unpickle.read(path)
    assert "plain records" in caught.value.hint
    assert not mark.exists()


def test_the_attacks_work_with_the_usual_reader(tmp_path: Path):
    for name in ("os.system", "eval", "mkdir", "in a list", "in an object array"):
        (tmp_path / name).mkdir()
        mark = tmp_path / name / "mark"
        pickle.loads(saved(tmp_path, attacks(str(mark))[name]).read_bytes())  # noqa: S301
        assert mark.exists()


def test_refusal_names_what_the_file_asks_for(tmp_path: Path):
    with pytest.raises(UseError, match=r"it contains posix\.system"):
        unpickle.read(saved(tmp_path, Calls(os.system, "true")))
    with pytest.raises(UseError, match=r"it contains tests\.data\.test_unpickle\.Rollout"):
        unpickle.read(saved(tmp_path, [Rollout()]))


def stack_global(module: str, name: str) -> bytes:
    return b"".join(pickle.SHORT_BINUNICODE + bytes([len(each)]) + each.encode() for each in (module, name)) + b"\x93"


PROTO = b"\x80\x04"
BY_HAND = {
    "dotted name": PROTO + stack_global("numpy", "ndarray.__class__") + b".",
    "module with a dotted name": PROTO + stack_global("numpy", "dtype.__init__.__globals__") + b".",
    "attribute of a builtin": PROTO + stack_global("builtins", "bytes.__class__.__base__") + b".",
    "BUILD on a name": PROTO + stack_global("numpy", "dtype") + b"}\x8c\x04make" + b"N" + b"sb.",
    "BUILD of slots on a name": PROTO + stack_global("numpy", "dtype") + b"N}\x8c\x04makeNs\x86b.",
    "NEWOBJ of a name": PROTO + stack_global("numpy", "dtype") + b")\x81.",
    "call of ndarray": PROTO + stack_global("numpy", "ndarray") + b")R.",
    "only a name": PROTO + stack_global("numpy", "dtype") + b".",
    "array without state": PROTO + stack_global("numpy.core.multiarray", "_reconstruct") + b"NNN\x87R.",
    "scalar of an object": PROTO + stack_global("numpy.core.multiarray", "scalar") + b"N\x85R.",
    "persistent id": PROTO + b"\x8c\x01aQ.",
    "extension": PROTO + b"\x82\x01.",
    "other encoding": PROTO + stack_global("_codecs", "encode") + b"\x8c\x01a\x8c\x04utf7\x86R.",
    "out-of-band buffer": PROTO + b"\x97.",
    "list in itself": b"\x80\x02]q\x00h\x00a.",
    "append to a name": PROTO + stack_global("numpy", "dtype") + b"K\x01a.",
    "bytes of a length": PROTO + stack_global("builtins", "bytearray") + b"J\xff\xff\xff\x7f\x85R.",
}


@pytest.mark.parametrize("name", BY_HAND)
def test_pickles_made_by_hand_are_refused(tmp_path: Path, name: str):
    before = {key: vars(value) for key, value in unpickle._ADMITTED.items()}
    before = {key: dict(value) for key, value in before.items()}
    (tmp_path / "x.pickle").write_bytes(BY_HAND[name])
    with pytest.raises(TiltyardError, match=r"is refused|not a readable pickle"):
        unpickle.read(tmp_path / "x.pickle")
    assert {key: vars(value) for key, value in unpickle._ADMITTED.items()} == before


def test_missing_and_truncated_files_are_errors(tmp_path: Path):
    with pytest.raises(UseError, match="cannot read"):
        unpickle.read(tmp_path / "missing.pickle")
    data = pickle.dumps(RECORD)
    for size in random.Random(0).sample(range(len(data)), count(300)):
        (tmp_path / "x.pickle").write_bytes(data[:size])
        with pytest.raises(TiltyardError, match=r"not a readable pickle|is refused"):
            unpickle.read(tmp_path / "x.pickle")


def plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(plain, value))
    if isinstance(value, dict):
        return all(plain(key) and plain(inner) for key, inner in value.items())
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind in "biuf"
    return value is None or type(value) in (int, float, bool, str, bytes)


def test_damaged_pickles_give_plain_values_or_an_error(tmp_path: Path):
    sink = io.BytesIO()
    pickle.Pickler(sink, 4).dump([RECORD["obs"], RECORD["scalar"], RECORD["nested"]])
    data, rng, errors = sink.getvalue(), random.Random(1), 0
    # Opcodes with a length or an index of four or eight bytes could ask for all memory.
    large = b"BTr\x8d\x8e\x8b\x96jX\x8a"
    for _ in range(count(3000)):
        changed = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            byte = rng.randrange(256)
            changed[rng.randrange(len(changed))] = 0 if byte in large else byte
        (tmp_path / "x.pickle").write_bytes(changed)
        try:
            assert plain(unpickle.read(tmp_path / "x.pickle"))
        except TiltyardError:
            errors += 1
    assert errors
