"""Ways to damage a file, and the places that a storm of damages strikes: a run, a sweep, a population, episodes."""

import contextlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEEP = "[" * 100_000
STRANGE: list[Any] = [5, -1, "x", "", None, True, [], {}, [5], {"a": 1}, 10**400, 1e308, "nan"]


def flip(path: Path, rng: random.Random) -> str:
    data = bytearray(path.read_bytes())
    place, bit = rng.randrange(len(data)), rng.randrange(8)
    data[place] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {place}"


def truncate(path: Path, rng: random.Random) -> str:
    data = path.read_bytes()
    length = rng.choice([0, rng.randrange(len(data))])
    path.write_bytes(data[:length])
    return f"cut to {length} of {len(data)} bytes"


def wrong_type(path: Path, rng: random.Random) -> str:
    return _in_json(path, rng, _replace_leaf) or _in_yaml(path, rng) or _overwrite(path, rng)


def wrong_field(path: Path, rng: random.Random) -> str:
    return _in_json(path, rng, _move_field) or _in_yaml(path, rng) or _overwrite(path, rng)


def unsealed(path: Path, rng: random.Random) -> str:
    """A wrong type in a file without a checksum, as earlier versions wrote it."""
    return _in_json(path, rng, lambda value, rng: _replace_leaf(_without_checksum(value), rng)) or truncate(path, rng)


KINDS: list[Callable[[Path, random.Random], str]] = [flip, truncate, wrong_type, wrong_field, unsealed]


def _in_json(path: Path, rng: random.Random, change: Callable[[Any, random.Random], str]) -> str:
    """Change one value of a JSON file, or of one line of a file of lines; empty if it is neither."""
    if path.suffix not in (".json", ".jsonl"):
        return ""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    number = rng.randrange(len(lines))
    with contextlib.suppress(ValueError):
        value = json.loads(lines[number])
        done = change(value, rng)
        lines[number] = DEEP if rng.random() < 0.05 else json.dumps(value)
        path.write_text("\n".join(lines) + "\n")
        return f"line {number + 1}: {done}" if lines[number] != DEEP else "nested deeply"
    return ""


def _without_checksum(value: Any) -> Any:
    value.pop("sha256", None)
    value.pop("crc", None)
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [pair for key in keys for pair in [(value, key), *_places(value[key])]]


def _replace_leaf(value: Any, rng: random.Random) -> str:
    places = _places(value)
    if not places:
        return "nothing"
    holder, key = rng.choice(places)
    before, holder[key] = holder[key], rng.choice([each for each in STRANGE if each != holder[key]])
    return f"{key}: {str(before)[:40]!r} -> {str(holder[key])[:40]!r}"


def _move_field(value: Any, rng: random.Random) -> str:
    places = [(holder, key) for holder, key in _places(value) if isinstance(holder, dict)]
    if not places:
        return "nothing"
    holder, key = rng.choice(places)
    if rng.random() < 0.5:
        del holder[key]
        return f"{key} removed"
    holder[f"{key}_"] = holder.pop(key)
    return f"{key} renamed"


def _in_yaml(path: Path, rng: random.Random) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.suffix == ".yaml" else []
    places = [number for number, line in enumerate(lines) if ": " in line]
    if not places:
        return ""
    number = rng.choice(places)
    before = lines[number]
    lines[number] = rng.choice(["", f"{before.partition(': ')[0]}: {rng.choice(['5', 'x', '[1]', '{a: 1}', 'null'])}"])
    path.write_text("\n".join(lines) + "\n")
    return f"line {number + 1}: {before.strip()!r} -> {lines[number].strip()!r}"


def _overwrite(path: Path, rng: random.Random) -> str:
    data = bytearray(path.read_bytes())
    place = rng.randrange(len(data))
    data[place : place + 4] = rng.randbytes(4)
    path.write_bytes(data)
    return f"4 bytes from {place}"
