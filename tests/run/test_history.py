"""The reader of metrics.jsonl: with an index, without one and with a wrong one, it agrees with reading every line."""

import json
import math
import os
import random
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.counts import count
from tests.second_user import STRANGER, as_stranger, give, needs_root, open_folder
from tiltyard.run import metrics_index
from tiltyard.run.curve import increasing
from tiltyard.run.history import History, update_index

NAMES = ("train/return", "eval/return", "rare", "loss/a", "loss/b")


def plain(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The definition: every line in memory, one after the other."""
    special = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
    kept: list[dict[str, Any]] = []
    broken, since = [], 0.0
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        try:
            record = json.loads(line) if line else {}
        except ValueError:
            broken.append(number)
            continue
        if not isinstance(record, dict):
            broken.append(number)
        elif "rewind_to" in record:
            kept = [each for each in kept if each["env_steps"] <= record["rewind_to"]]
            since = float(record["rewind_to"])
        elif "metrics" in record and "env_steps" in record:
            found = {name: special.get(value, value) for name, value in record["metrics"].items()}
            record["metrics"] = {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
            kept.append({**record, "since": since})
            since = float(record["env_steps"])
    return kept, broken


def write_lines(path: Path, rng: random.Random, number: int, *, padding: int = 0, wild: bool = False) -> None:
    """Append records as training and programs do: rewinds, restarts, evaluations, broken lines, odd values."""
    steps = attempt = 1
    with path.open("ab") as file:
        for _ in range(number):
            chance = rng.random()
            if chance < 0.004:
                steps = rng.randrange(max(1, steps)) if wild else max(0, steps - rng.randrange(300))
                attempt += 1
                file.write(json.dumps({"rewind_to": steps, "attempt": attempt}).encode() + b"\n")
            elif chance < 0.006:
                file.write(
                    rng.choice([b'{"env_steps": 7, "metr', b"[1, 2]", b"", b"\xff\xfe", b'{"env_steps": 1}']) + b"\n"
                )
            elif wild and chance < 0.01:
                steps = rng.randrange(max(1, steps))  # a program that starts over without a rewind
            else:
                steps += rng.choice([0, 10, 10, 10])
                found: dict[str, Any] = {"train/return": rng.choice([rng.gauss(0, 100), 1.0, 3])}
                found |= (
                    {"loss/a": rng.random()} if rng.random() < 0.9 else {"loss/b": rng.choice(["nan", "text", None, 2])}
                )
                found |= {"eval/return": rng.choice([rng.random(), "inf"])} if rng.random() < 0.05 else {}
                found |= {"rare": rng.random()} if rng.random() < 0.001 else {}
                line = {"env_steps": steps, "attempt": attempt, "metrics": found, "padding": "x" * padding}
                file.write(json.dumps(line).encode() + b"\n")


def differences(found: list[Any], expected: list[Any]) -> list[Any]:
    """The first pair that differs. By repr, because nan is not equal to nan."""
    pairs = zip_longest(found, expected)
    return [pair for pair in pairs if repr(pair[0]) != repr(pair[1])][:1]


def check(path: Path, rng: random.Random, history: History | None = None) -> None:
    """Every answer of the reader, a new one unless given, is the plain one."""
    records, broken = plain(path)
    history = history or History(path)
    assert history.broken == broken[:1000] and history.broken_count == len(broken)
    assert not differences(list(history.records()), records)
    for some in (1, 100):
        assert not differences(history.recent(some), records[-some:])
    newest = {name: value for record in records for name, value in record["metrics"].items()}
    assert not differences(sorted(history.newest().items()), sorted(newest.items()))
    assert history.env_steps == max((record["env_steps"] for record in records), default=None)
    for name in NAMES:
        check_curve(history, records, name, rng)


def check_curve(history: History, records: list[dict[str, Any]], name: str, rng: random.Random) -> None:
    pairs = [(each["env_steps"], each["metrics"][name]) for each in records if name in each["metrics"]]
    points, curve = increasing(pairs), history.curve(name)
    assert bool(curve) == bool(points) and repr(curve.newest) == repr(pairs[-1] if pairs else None)
    for attempts in ((-math.inf, 3), (3, 8), (0, math.inf)):
        some = [each for each in records if name in each["metrics"] and attempts[0] < each["attempt"] <= attempts[1]]
        last = (some[-1]["env_steps"], some[-1]["metrics"][name]) if some else None
        assert repr(history.curve(name, *attempts).newest) == repr(last)
    if not points:
        return
    values = [value for _, value in points]
    assert (curve.first_step, curve.last_step, curve.last) == (points[0][0], *points[-1])
    assert (curve.best(1), curve.best(-1)) == (max(values), min(values))
    for step in [points[0][0], points[-1][0], *(rng.choice(points)[0] + rng.choice([0, 1, 5]) for _ in range(5))]:
        assert curve.mean_until(step) == fmean(value for at, value in points if at <= step)
        if step <= points[-1][0]:
            end = next(i for i, (at, _) in enumerate(points) if at >= step)
            part = curve.until(step)
            assert (part.last_step, part.last, part.best(1)) == (*points[end], max(values[: end + 1]))
    drawn = curve.points()
    assert drawn == sorted(drawn) and set(drawn) <= set(points) and {points[0], points[-1]} <= set(drawn)
    assert {min(values), max(values)} <= {value for _, value in drawn}


def folder_of(parent: Path, seed: int) -> Path:
    (parent / str(seed)).mkdir()
    return parent / str(seed) / "metrics.jsonl"


def index_of(path: Path) -> Path:
    return path.with_name(metrics_index.NAME)


@pytest.mark.parametrize("wild", [False, True])
def test_every_answer_is_that_of_reading_all_lines(tmp_path: Path, wild: bool) -> None:
    """With and without an index, and as the file grows: in normal runs, and with env steps that go back at random."""
    indexed = 0
    for seed in range(count(40)):
        rng, path = random.Random(seed), folder_of(tmp_path, seed)
        growing = History(path)
        for _ in range(3):
            write_lines(path, rng, rng.randrange(1500), wild=wild)
            if rng.random() < 0.5:  # killed while writing a line; the next one starts on a new line
                os.truncate(path, path.stat().st_size - min(path.stat().st_size, rng.randrange(60)))
            check(path, rng)
            growing.refresh()
            check(path, rng, growing)
            with path.open("ab") as file:
                file.write(b"\n")
        indexed += index_of(path).exists()
    assert indexed, "some of the files are large enough for an index"


def test_a_damaged_or_wrong_index_is_not_used(tmp_path: Path) -> None:
    rng, path, other = random.Random(1), folder_of(tmp_path, 1), folder_of(tmp_path, 2)
    for each in (path, other):
        write_lines(each, rng, 1000, padding=300)
        History(each)
    whole = index_of(path).read_bytes()
    assert len(whole) > 1000
    for _ in range(count(60)):
        cut, at, bit = rng.random() < 0.3, rng.randrange(len(whole)), 1 << rng.randrange(8)
        index_of(path).write_bytes(whole[:at] if cut else whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
        update_index(path)
        check(path, rng)
    index_of(path).write_bytes(index_of(other).read_bytes())  # of another run
    check(path, rng)
    index_of(path).unlink()
    os.mkfifo(index_of(path))  # `open` would wait for a writer
    check(path, rng)


def test_an_index_is_not_used_after_the_file_was_replaced_edited_or_cut(tmp_path: Path) -> None:
    rng, path = random.Random(2), folder_of(tmp_path, 2)
    write_lines(path, rng, 1000, padding=300)
    History(path)
    whole = path.read_bytes()
    copy = path.with_name("copy")
    copy.write_bytes(whole.replace(b'"train/return": 1.0', b'"train/return": 9.0'))  # as an editor does
    copy.replace(path)
    check(path, rng)
    with path.open("r+b") as file:  # the same size in the same inode
        file.write(whole)
    os.utime(path, ns=(1, 1))
    check(path, rng)
    os.truncate(path, len(whole) // 2)
    check(path, rng)
    path.write_bytes(whole[::-1].replace(b"\n", b"x"))  # one broken line
    check(path, rng)
    path.unlink()
    assert list(History(path).records()) == [] and History(path).newest() == {}


def test_blocks_are_merged_and_lines_beyond_them_are_still_exact(tmp_path: Path) -> None:
    """A long text in each record, so that few records fill many blocks."""
    rng, path = random.Random(3), folder_of(tmp_path, 3)
    for _ in range(3):
        write_lines(path, rng, 700, padding=metrics_index.BLOCK_SIZE)
        update_index(path)  # in pieces, as training does
        History(path)
    check(path, rng)
    assert index_of(path).stat().st_size < 2 * 10**6, "of a file of 34 MB"
    assert 50 < len(History(path).curve("train/return").points(100)) <= 102


@needs_root
def test_nothing_is_written_into_another_users_folder_and_its_index_is_not_believed() -> None:
    rng = random.Random(5)
    with open_folder() as place:
        path = folder_of(place, 5)
        write_lines(path, rng, 1000, padding=300)
        give(path.parent)
        check(path, rng)
        assert [each.name for each in path.parent.iterdir()] == ["metrics.jsonl"], "root, but not the owner"
        as_stranger(lambda: check(path, rng))
        assert index_of(path).stat().st_uid == STRANGER
        check(path, rng)
        for item in (path, path.parent):
            os.chown(item, 0, 0)
        os.utime(path, ns=(1, 1))
        check(path, rng)
        assert index_of(path).stat().st_uid == 0, "replaced by the owner's"
