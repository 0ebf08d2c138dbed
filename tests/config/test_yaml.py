"""YAML: types of scalars, refused input, and values that round-trip."""

import contextlib
import math
import random
from pathlib import Path

import pytest

from tests.counts import count
from tiltyard.config import yaml
from tiltyard.config.yaml import MAX_BYTES, MAX_NODES, dump_yaml, parse_yaml, read_yaml
from tiltyard.errors import UseError

SCALARS = [
    ("3e-4", 3e-4), ("1_000_000", 1_000_000), ("1e6", 1e6), ("010", 10), ("0x1F", 31), ("0o17", 15), ("-.5", -0.5), (".5e5", 5e4), ("=", "="), ("<<", "<<"), ("+3", 3),
    ("off", "off"), ("yes", "yes"), ("on", "on"), ("true", True), ("False", False), ("~", None), ("", None), ("null", None),
    ("2024-01-01", "2024-01-01"), ("1:30", "1:30"), (".inf", math.inf), ("-.Inf", -math.inf), ("'3'", "3"), ('"true"', "true"),
    ("CartPole-v1", "CartPole-v1"), ("1.2.3", "1.2.3"), ("0x", "0x"), ("e5", "e5"), ("!!str 3", "3"), ("!!float 3", 3.0), ("!!int '3'", 3),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), SCALARS)
def test_scalars_follow_the_core_schema(text, value):
    found = parse_yaml(f"a: {text}", "x")["a"]
    assert found == value
    assert type(found) is type(value)


def test_yaml_version_line_has_no_effect():
    assert parse_yaml("%YAML 1.1\n---\na: off\nb: 0o7\n", "x") == {"a": "off", "b": 7}


def test_nan_is_read():
    assert math.isnan(parse_yaml("a: .nan", "x")["a"])


def test_aliases_and_merge_keys_are_resolved():
    text = "base: &b {a: 1, c: 2}\nx: {<<: *b, a: 3}\ny: {<<: [*b, {d: 4}]}\nz: *b\n"
    found = parse_yaml(text, "x")
    assert found["x"] == {"a": 3, "c": 2}
    assert found["y"] == {"a": 1, "c": 2, "d": 4}
    assert found["z"] == {"a": 1, "c": 2}


REFUSED = [
    ("a: 1\nb: 2\na: 3\n", "line 3: duplicate key 'a', first in line 1"),
    ("a: {b: 1, b: 2}", "duplicate key 'b'"),
    ("a: &x [1, *x]", "alias *x is inside the value it refers to"),
    ("a: *nothing", "unknown alias *nothing"),
    ("a: !!python/object/apply:os.system [ls]", "the tag '!!python/object/apply:os.system' is not allowed"),
    ("a: !mine 3", "the tag '!mine' is not allowed"),
    ("a: !!binary aGk=", "the tag '!!binary' is not allowed"),
    ("a: !!int x", "'x' is not a valid !!int"),
    ("a: !!bool x", "'x' is not a valid !!bool"),
    ("a: -_", "'-_' is not a valid !!int"),
    ("a: &b {c: 1}\nd: {<<: *b, e: 1, e: 2}", "line 2: duplicate key 'e'"),
    ("1: a", "the key 1 is not text"),
    ("? [1, 2]\n: a", "is not text"),
    ("a: 1\n--- \nb: 2", "a second document starts here"),
    ("[" * 60 + "]" * 60, "nested more than 50 levels"),
    ("a: " + "{b: " * 60 + "}" * 60, "nested more than 50 levels"),
    ("a: " + "9" * 5000, "a number of 5,000 digits is too long"),
    ("a: b: c", "line 1: a second ': ' in one line"),
    ("a: 1\n b: 2", "line 2: a line is indented too far"),
    ("a:\n\t- b", "a tab instead of spaces"),
    ("a: [1, 2", "line 1: a quote, bracket or brace is never closed"),
    ("b: 1\na: 'x\n\n", "never closed"),
    ("a: @x", "line 1"),
    ("a: {<<: 3}", "<< takes a mapping"),
]


@pytest.mark.parametrize(("text", "sentence"), REFUSED)
def test_errors_have_a_reason_and_a_hint(text, sentence):
    with pytest.raises(UseError) as caught:
        parse_yaml(text, "x.yaml")
    assert sentence in caught.value.message
    assert caught.value.message.startswith("x.yaml")
    assert caught.value.hint


@pytest.mark.parametrize("merge", [False, True])
def test_alias_bombs_are_refused_before_they_expand(merge):
    lines = ["a0: &a0 {" + ", ".join(f"k{i}: x" for i in range(9)) + "}"]
    for n in range(1, 40):
        items = ", ".join([f"*a{n - 1}"] * 9)
        lines.append(f"a{n}: &a{n} {{<<: [{items}], z{n}: [{items}]}}" if merge else f"a{n}: &a{n} [{items}]")
    with pytest.raises(UseError, match=f"more than {MAX_NODES:,} values"):
        parse_yaml("\n".join(lines), "bomb.yaml")


def test_too_many_values_are_refused(monkeypatch):
    monkeypatch.setattr(yaml, "MAX_NODES", 1000)
    assert len(parse_yaml("a: [" + "1," * 990 + "]", "x")["a"]) == 990
    with pytest.raises(UseError, match="more than 1,000 values"):
        parse_yaml("a: [" + "1," * 1001 + "]", "x")


def write(folder: Path, raw: bytes) -> Path:
    path = folder / "x.yaml"
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (b"", "is empty"),
        (b"# nothing but a comment\n", "is empty"),
        (b"- a\n- b\n", "but has a list"),
        (b"hello\n", "but has text"),
        (b"3\n", "but has a number"),
        (b"true\n", "but has a truth value"),
        (b"\x7fELF\x00\x01", "is a binary file"),
        (b"env: x\nnotes: \xe9t\xe9\n", "line 2: byte 0xe9 is not UTF-8"),
        (b"a: \x07\n", "line 1"),
        (b"x" * (MAX_BYTES + 1), "bytes, more than"),
    ],
)
def test_invalid_files_are_refused(tmp_path, raw, sentence):
    with pytest.raises(UseError, match=sentence):
        read_yaml(write(tmp_path, raw))


def test_byte_order_mark_is_accepted(tmp_path):
    assert read_yaml(write(tmp_path, b"\xef\xbb\xbfenv: x\n")) == {"env": "x"}


def test_folders_and_missing_files_are_reported(tmp_path):
    (tmp_path / "cartpole.yaml").write_text("env: x")
    with pytest.raises(UseError, match="is a folder, not a YAML file"):
        read_yaml(tmp_path)
    with pytest.raises(UseError, match="does not exist") as caught:
        read_yaml(tmp_path / "cartpol.yaml")
    assert caught.value.hint == "did you mean 'cartpole.yaml'?"
    with pytest.raises(UseError, match="cannot be read"):
        read_yaml(tmp_path / ("x" * 300 + ".yaml"))
    with pytest.raises(UseError, match="not a regular file"):
        read_yaml(Path("/dev/null"))


WORDS = [
    "",
    " ",
    "off",
    "null",
    "1e5",
    "1_0",
    ".5",
    "-",
    "- a",
    "a: b",
    "#",
    "x #y",
    "'",
    '"',
    "\n",
    "a\nb\n",
    " a\n  b",
    "\t",
    "é",
    "😀",
]
WORDS += [
    "\u2028",
    "\x85",
    "\x00",
    "\x1b",
    "%",
    "@",
    "&a",
    "*a",
    "!t",
    "<<",
    "=",
    "|",
    ">",
    "{",
    "[",
    "0x1",
    "1:30",
    "2024-01-01",
    "\ufeff",
    "\r\n",
    "~",
]


def some_value(rng: random.Random, depth: int = 0):
    kind = rng.randrange(8 if depth < 4 else 6)
    if kind == 6:
        return [some_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 7:
        return {some_text(rng): some_value(rng, depth + 1) for _ in range(rng.randrange(4))}
    plain = [
        None,
        rng.random() < 0.5,
        rng.randrange(-(10**18), 10**18),
        rng.uniform(-1, 1) * 10 ** rng.randrange(-300, 300),
    ]
    return [*plain, some_text(rng), some_text(rng)][kind]


def some_text(rng: random.Random) -> str:
    return "".join(rng.choice(WORDS) for _ in range(rng.randrange(4)))


def test_random_values_round_trip():
    rng = random.Random(5)
    for _ in range(count(long=1500)):
        value = {some_text(rng): some_value(rng) for _ in range(4)}
        text = dump_yaml(value)
        assert parse_yaml(text, "x") == value, text


def test_dump_keeps_the_order_and_writes_short_lists_on_one_line():
    text = dump_yaml(
        {"version": 1, "b": [64, 64], "a": {"mode": "off", "x": [[0, 1e-5], [1, 0.0]]}, "n": "two\nlines\n"}
    )
    assert text == "version: 1\nb: [64, 64]\na:\n  mode: off\n  x: [[0, 1e-05], [1, 0.0]]\nn: |\n  two\n  lines\n"


def test_corrupted_bytes_are_read_or_refused(tmp_path):
    rng = random.Random(7)
    source = (Path(__file__).parents[2] / "examples" / "full.yaml").read_bytes()[:3000]
    alphabet = b" \n\t:-[]{}&*!|>'\"%@`#?,\\\xff\x00a1"
    for _ in range(count(long=300)):
        raw = bytearray(source)
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(raw))
            raw[at : at + rng.randrange(3)] = bytes(rng.choice(alphabet) for _ in range(rng.randrange(4)))
        path = write(tmp_path, bytes(raw))
        with contextlib.suppress(UseError):  # any other exception fails the test
            assert isinstance(read_yaml(path), dict)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", ["[" * 10**6, "{a: " * 10**5, "- " * 10**5])
def test_deep_nesting_is_refused_while_parsing(text):
    with pytest.raises(UseError, match="nested more than 50 levels"):
        parse_yaml(text, "x")
