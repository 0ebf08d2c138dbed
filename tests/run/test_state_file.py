"""Trees of arrays and values: exact round trips, and error reports for types that cannot be saved."""

import json
import math
import random
import tracemalloc

import numpy as np
import pytest
import safetensors.numpy

from tests.counts import count
from tiltyard.errors import TiltyardError
from tiltyard.run.state_file import read_tree, write_tree

DTYPES = [
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
]


def same(a, b):
    """Return whether types, values, bits and the order of keys are equal. A tuple equals a list."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return isinstance(b, float) and (a.hex() == b.hex() or (math.isnan(a) and math.isnan(b)))
    return type(a) is type(b) and a == b


def round_trip(folder, tree):
    write_tree(folder, "state", tree)
    return read_tree(folder, "state")


def random_tree(rng, depth=0):
    kinds = ["none", "bool", "int", "big", "float", "odd", "str", "array"] + (["dict", "list"] * 3 if depth < 4 else [])
    match rng.choice(kinds):
        case "none":
            return None
        case "bool":
            return rng.random() < 0.5
        case "int":
            return rng.randint(-(10**6), 10**6)
        case "big":
            return rng.choice([-1, 1]) * rng.getrandbits(rng.choice([53, 54, 64, 128, 20_000]))
        case "float":
            return rng.choice([-1, 1]) * rng.random() * 10 ** rng.randint(-320, 300)
        case "odd":
            return rng.choice([math.nan, math.inf, -math.inf, 0.0, -0.0, 5e-324, 1.7976931348623157e308])
        case "str":
            return rng.choice(["", "plain", "ünïcode ☂", "line\nbreak", "\ud800", "$array", '"', "\0"])
        case "array":
            shape = tuple(rng.randint(0, 3) for _ in range(rng.randint(0, 3)))
            values = np.random.default_rng(rng.getrandbits(32)).integers(0, 2, shape)
            return np.asarray(values).astype(rng.choice(DTYPES))
        case "dict":
            keys = rng.sample(
                ["a", "b", "a/b", "$array", "$dict", "", ".", "weights", "__metadata__", "0"], rng.randint(0, 4)
            )
            return {key: random_tree(rng, depth + 1) for key in keys}
        case _:
            return [random_tree(rng, depth + 1) for _ in range(rng.randint(0, 4))]


def test_random_trees_round_trip_bit_for_bit(tmp_path):
    for seed in range(count(2000)):
        tree = random_tree(random.Random(seed))
        assert same(tree, round_trip(tmp_path, tree)), seed


def test_every_dtype_round_trips_with_its_extreme_values(tmp_path):
    tree = {}
    for name in DTYPES:
        dtype = np.dtype(name)
        if dtype.kind == "f":
            info = np.finfo(dtype)
            tree[name] = np.array(
                [info.max, info.min, info.tiny, info.smallest_subnormal, np.nan, np.inf, -np.inf, -0.0], dtype
            )
        elif dtype.kind in "iu":
            tree[name] = np.array([np.iinfo(dtype).min, np.iinfo(dtype).max], dtype)
        else:
            tree[name] = np.array([True, False])
    assert same(tree, round_trip(tmp_path, tree))


def test_unusual_memory_layouts_keep_their_values(tmp_path):
    square = np.arange(12, dtype=np.float32).reshape(3, 4)
    tree = {
        "transposed": square.T,
        "strided": square[:, ::2],
        "fortran": np.asfortranarray(square),
        "scalar": np.array(3.5),
    }
    back = round_trip(
        tmp_path, {**tree, "big_endian": square.astype(">f4"), "broadcast": np.broadcast_to(square[0], (5, 4))}
    )
    for name, array in tree.items():
        assert np.array_equal(back[name], array) and back[name].shape == array.shape, name
    assert np.array_equal(back["big_endian"], square) and back["big_endian"].dtype == np.float32
    assert np.array_equal(back["broadcast"], np.tile(square[0], (5, 1)))


def test_arrays_are_writable_after_reading(tmp_path):
    back = round_trip(tmp_path, {"a": np.zeros(3), "b": np.zeros(())})
    back["a"][0] = 1.0
    back["b"][...] = 2.0
    assert back["a"][0] == 1.0 and back["b"] == 2.0


def test_numpy_scalars_become_numbers_and_random_state_round_trips(tmp_path):
    back = round_trip(tmp_path, {"f": np.float32(0.1), "i": np.int64(-5), "b": np.bool_(True), "d": np.float64(0.1)})
    assert back == {"f": float(np.float32(0.1)), "i": -5, "b": True, "d": 0.1}
    assert [type(value) for value in back.values()] == [float, int, bool, float]
    stream = np.random.Generator(np.random.PCG64(7))
    stream.random(11)
    state = stream.bit_generator.state
    again = np.random.Generator(np.random.PCG64(0))
    again.bit_generator.state = round_trip(tmp_path, state)
    assert np.array_equal(stream.random(100), again.random(100))


@pytest.mark.parametrize(
    ("tree", "place", "kind"),
    [
        ({"a": [1, {"b": b"bytes"}]}, "/a/1/b", "bytes"),
        ({"a": {3: 1}}, "/a/3", "int"),
        ([object()], "/0", "object"),
        ({"s": {1, 2}}, "/s", "set"),
        ({"z": 1j}, "/z", "complex"),
        ({"text": np.array(["x"])}, "/text", "<U1"),
        ({"o": np.array([None], dtype=object)}, "/o", "object"),
        ({"c": np.zeros(2, np.complex64)}, "/c", "complex64"),
        ({"t": np.datetime64("2020-01-01")}, "/t", "datetime64"),
        ({"f": len}, "/f", "builtin_function"),
    ],
)
def test_type_that_cannot_be_saved_is_reported_with_its_path(tmp_path, tree, place, kind):
    with pytest.raises(TiltyardError) as caught:
        write_tree(tmp_path, "state", tree)
    assert place in caught.value.message and kind in caught.value.message
    assert list(tmp_path.iterdir()) == []


def test_torch_tensor_is_refused(tmp_path):
    torch = pytest.importorskip("torch")
    with pytest.raises(TiltyardError, match=r"torch\.Tensor at /weights"):
        write_tree(tmp_path, "state", {"weights": torch.zeros(2)})


def test_damaged_files_are_an_error(tmp_path):
    refused = []
    for seed in range(count(1000)):
        rng = random.Random(seed)
        write_tree(tmp_path, "state", {"a": np.arange(8), "big": 2**100, "x": [math.inf, "text", {"$y": None}]})
        victim = tmp_path / rng.choice(["state.json", "state.safetensors"])
        data = bytearray(victim.read_bytes())
        if rng.random() < 0.5:
            data = data[: rng.randrange(len(data))]
        else:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        victim.write_bytes(data)
        try:
            read_tree(tmp_path, "state")  # a flipped bit in a number is only found by the checksum of the checkpoint
        except TiltyardError as error:
            refused.append(error)
    assert len(refused) > count(1000) // 2 and all("state" in error.message and error.hint for error in refused)


def test_newer_schema_and_missing_array_are_reported(tmp_path):
    write_tree(tmp_path, "state", {"a": np.arange(3)})
    head = json.loads((tmp_path / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps({**head, "schema": 2}))
    with pytest.raises(TiltyardError, match="schema 2"):
        read_tree(tmp_path, "state")
    (tmp_path / "state.json").write_text(json.dumps({**head, "tree": {"a": {"$array": "gone"}}}))
    with pytest.raises(TiltyardError, match="gone"):
        read_tree(tmp_path, "state")
    with pytest.raises(TiltyardError, match=r"nothing\.json"):
        read_tree(tmp_path, "nothing")


def test_state_files_contain_no_pickle(tmp_path):
    write_tree(tmp_path, "state", {"a": np.arange(3), "b": 2**200, "c": math.nan})
    for path in tmp_path.iterdir():
        data = path.read_bytes()
        assert not data.startswith(b"\x80") and b"numpy" not in data and b"\x93NUMPY" not in data


# ---------------------------------------------------------------------------------------------- size


MIB = 2**20


def odd_arrays():
    """Arrays that are not simply little-endian and contiguous."""
    count = np.arange(3 * 10**6, dtype=np.uint8)
    return {
        "every second": count.reshape(-1, 4)[:, ::2],
        "backwards": count[::-1],
        "columns first": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        "big-endian": np.arange(5, dtype=">i4"),
        "broadcast": np.broadcast_to(np.float16(2), (3, 2)),
        "scalar": np.array(3, np.int16),
        "empty": np.zeros((0, 3)),
        "bool": np.arange(7) % 2 == 0,
    }


def test_files_are_what_the_library_reads_and_writes(tmp_path):
    arrays = odd_arrays()
    assert (
        write_tree(tmp_path, "state", arrays)["state.safetensors"]["bytes"]
        == (tmp_path / "state.safetensors").stat().st_size
    )
    found = safetensors.numpy.load_file(tmp_path / "state.safetensors")
    for name, array in arrays.items():
        assert same(found[name], np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(array.shape)), name
    assert found.keys() == arrays.keys()
    for name, array in read_tree(tmp_path, "state").items():
        assert same(array, found[name]) and array.flags.writeable
    plain = {name: np.array(array, array.dtype.newbyteorder("=")) for name, array in found.items()}
    safetensors.numpy.save_file(plain, tmp_path / "state.safetensors")
    again = read_tree(tmp_path, "state")
    assert all(same(again[name], array) for name, array in plain.items())


def peak(work):
    """Bytes that were allocated at once, beyond what there was before."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_for_writing_is_a_piece_and_for_reading_the_arrays(tmp_path):
    square = np.zeros((4096, 4096), np.float32)  # 64 MiB
    tree = {"plain": square, "transposed": square.T, "others": list(np.zeros((4, 2 * MIB)))}
    size = 3 * 64 * MIB
    assert peak(lambda: write_tree(tmp_path, "state", tree)) < 40 * MIB
    assert peak(lambda: read_tree(tmp_path, "state")) < size + 20 * MIB
    found = []
    assert peak(lambda: found.append(read_tree(tmp_path, "state", on_disk="others/"))) < 2 * 64 * MIB + 20 * MIB
    assert same(found[0]["transposed"], np.ascontiguousarray(square.T))
    part = np.ones(7)
    found[0]["others"][1].read_into(part, 10)
    assert same(part, np.zeros(7)) and found[0]["others"][1].shape == (2 * MIB,)


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"a": None},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}},
        {"a": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}},
        {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "b": {"dtype": "U8", "shape": [1], "data_offsets": [7, 8]}},
    ],
)  # fmt: skip
def test_invalid_headers_are_refused_before_memory_is_allocated(tmp_path, header):
    write_tree(tmp_path, "state", {"a": np.zeros(2, np.float32)})
    text = json.dumps(header).encode()
    (tmp_path / "state.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(TiltyardError, match=r"state.safetensors cannot be read"):
        read_tree(tmp_path, "state")


@pytest.mark.parametrize("length", [0, 1, 9, 2**40, 2**64 - 1])
def test_invalid_length_of_the_header_is_refused(tmp_path, length):
    write_tree(tmp_path, "state", {"a": np.zeros(0, np.float32)})
    (tmp_path / "state.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(TiltyardError, match=r"state.safetensors cannot be read"):
        read_tree(tmp_path, "state")
