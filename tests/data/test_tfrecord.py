"""TFRecord files: read by TensorBoard's own reader, every damage found, Examples parsed by protobuf."""

import random
import struct
from pathlib import Path

import numpy as np
import pytest
from tensorboard.compat.proto import event_pb2
from tensorboard.compat.tensorflow_stub import errors
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

from tests.counts import count
from tiltyard.data.tfrecord import (
    damages,
    decode_example,
    encode_example,
    masked_crc,
    records,
    shard_name,
    write_record,
)
from tiltyard.errors import TiltyardError


def write(path: Path, contents: list[bytes]) -> Path:
    with path.open("wb") as file:
        for data in contents:
            write_record(file, data)
    return path


def tensorboard_records(path: Path) -> list[bytes]:
    """The records as TensorBoard reads them, which checks both checksums of each."""
    reader, found = PyRecordReader_New(str(path)), []
    while True:
        try:
            reader.GetNext()
        except errors.OutOfRangeError:
            return found
        found.append(reader.record())


def test_names_have_five_digits():
    assert shard_name("data", 3, 74) == "data.tfrecord-00003-of-00074"


def test_checksum_is_that_of_the_format():
    # CRC-32C of "123456789" is 0xE3069283 (RFC 3720)
    crc = 0xE3069283
    assert masked_crc(b"123456789") == (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def test_another_reader_reads_the_records(tmp_path: Path):
    contents = [b"", b"a", bytes(range(256)) * 20]
    path = write(tmp_path / "x", contents)
    assert tensorboard_records(path) == contents == list(records(path))
    assert damages(path) == []


def test_every_flipped_bit_is_found_here_and_by_another_reader(tmp_path: Path):
    path = write(tmp_path / "x", [b"first record", b"second", b"third"])
    sound = path.read_bytes()
    chosen = random.Random(0).sample(range(len(sound) * 8), count(len(sound) * 8))
    for bit in chosen:
        data = bytearray(sound)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        assert len(damages(path)) == 1
        with pytest.raises(TiltyardError, match="damaged: record"):
            list(records(path))
        with pytest.raises(errors.DataLossError):
            tensorboard_records(path)


def test_damage_names_its_record_and_later_ones_are_checked(tmp_path: Path):
    path = write(tmp_path / "x", [b"aaaa", b"bbbb", b"cccc"])
    data = bytearray(path.read_bytes())
    data[12] ^= 1  # data of record 0
    data[2 * 20 + 13] ^= 1  # data of record 2
    path.write_bytes(data)
    assert [number for number, _ in damages(path)] == [0, 2]
    data[20] ^= 1  # length of record 1
    path.write_bytes(data)
    assert [number for number, _ in damages(path)] == [0, 1]
    assert "40 bytes from here on" in damages(path)[1][1]


def test_truncation_is_found_at_every_byte(tmp_path: Path):
    path = write(tmp_path / "x", [b"aaaa", b"bbbb"])
    sound = path.read_bytes()
    for size in range(len(sound)):
        path.write_bytes(sound[:size])
        expected = [] if size % 20 == 0 else [size // 20]
        assert [number for number, _ in damages(path)] == expected, size
    assert "ends" in damages(path)[0][1]


def test_a_length_beyond_the_file_needs_no_memory(tmp_path: Path):
    length = struct.pack("<Q", 2**62)
    (tmp_path / "x").write_bytes(length + struct.pack("<I", masked_crc(length)) + b"abc")
    ((number, wrong),) = damages(tmp_path / "x")
    assert number == 0 and "ends within the record" in wrong


def test_compressed_and_missing_files_are_named(tmp_path: Path):
    (tmp_path / "x").write_bytes(b"\x1f\x8b" + bytes(50))
    assert "gzip" in damages(tmp_path / "x")[0][1]
    with pytest.raises(TiltyardError, match="cannot read"):
        damages(tmp_path / "missing")


def test_files_of_tensorboard_are_sound(tmp_path: Path):
    from tensorboardX import SummaryWriter

    with SummaryWriter(str(tmp_path)) as summary:
        for step in range(20):
            summary.add_scalar("x", step, step)
    (path,) = tmp_path.iterdir()
    assert damages(path) == []
    found = [event_pb2.Event.FromString(data) for data in records(path)]
    assert [event.step for event in found if event.HasField("summary")] == list(range(20))


def example_class() -> type:
    """tf.train.Example, built from its published fields by protobuf."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="test_example.proto", package="test_example", syntax="proto3")
    field = descriptor_pb2.FieldDescriptorProto

    def message(name: str, fields: list[tuple[str, int, int, int, str]]) -> descriptor_pb2.DescriptorProto:
        made = file.message_type.add(name=name)
        for label, number, kind, repeated, other in fields:
            made.field.add(name=label, number=number, type=kind, label=repeated, type_name=other or None)
        return made

    one, many = field.LABEL_OPTIONAL, field.LABEL_REPEATED
    message("BytesList", [("value", 1, field.TYPE_BYTES, many, "")])
    message("FloatList", [("value", 1, field.TYPE_FLOAT, many, "")])
    message("Int64List", [("value", 1, field.TYPE_INT64, many, "")])
    lists = [("bytes_list", 1, "BytesList"), ("float_list", 2, "FloatList"), ("int64_list", 3, "Int64List")]
    feature = message("Feature", [(n, i, field.TYPE_MESSAGE, one, f".test_example.{t}") for n, i, t in lists])
    feature.oneof_decl.add(name="kind")
    for each in feature.field:
        each.oneof_index = 0
    features = message("Features", [("feature", 1, field.TYPE_MESSAGE, many, ".test_example.Features.Entry")])
    entry = features.nested_type.add(name="Entry")
    entry.field.add(name="key", number=1, type=field.TYPE_STRING, label=one)
    entry.field.add(name="value", number=2, type=field.TYPE_MESSAGE, label=one, type_name=".test_example.Feature")
    message("Example", [("features", 1, field.TYPE_MESSAGE, one, ".test_example.Features")])
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("test_example.Example"))


def test_examples_are_those_of_protobuf():
    features = {
        "floats": np.asarray([1.5, -0.0, 3e-45, np.inf], np.float32),
        "numbers": [0, -1, 2**63 - 1, -(2**63), 300],
        "bytes": b"\x00\xff" * 1000,
        "none": b"",
        "ümlaut": [7],
    }
    data = encode_example(features)
    parsed = {entry.key: entry.value for entry in example_class().FromString(data).features.feature}
    assert sorted(parsed) == sorted(features)
    assert list(parsed["floats"].float_list.value) == features["floats"].tolist()
    assert list(parsed["numbers"].int64_list.value) == features["numbers"]
    assert list(parsed["bytes"].bytes_list.value) == [features["bytes"]]
    found = decode_example(data)
    assert found["floats"].tobytes() == features["floats"].tobytes()
    assert {name: found[name] for name in found if name != "floats"} == {n: features[n] for n in found if n != "floats"}


@pytest.mark.parametrize("seed", range(count(100)))
def test_no_bytes_break_the_parser(seed: int):
    rng = random.Random(seed)
    data = bytearray(encode_example({"a": [1, 2, 3], "b": b"xyz", "c": np.ones(3, np.float32)}))
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    try:
        found = decode_example(bytes(data))
    except (ValueError, UnicodeDecodeError):
        return
    assert all(isinstance(name, str) for name in found)
