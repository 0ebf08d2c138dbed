"""metrics.jsonl: rewinds, partial lines, non-finite numbers, full disks, killed writers."""

import json
import math
import random
import signal
import time

import numpy as np
import pytest

from tests.counts import count
from tiltyard.errors import TiltyardError
from tiltyard.run import metric_names, metrics
from tiltyard.run.history import History


def record(steps, **values):
    return {
        "env_steps": steps,
        "frames": steps,
        "updates": 1,
        "episodes": 0,
        "seconds": 0.5,
        "attempt": 1,
        "metrics": values,
    }


def steps_of(records):
    return [one["env_steps"] for one in records]


def test_appended_records_are_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert metrics.read(path) == []
    metrics.append(path, record(10, **{"train/return": 1.5}))
    metrics.append(
        path, {**record(20), "metrics": {"train/return": np.float32(2.5), "n": np.int64(3), "eval/return": 9}}
    )
    records = metrics.read(path)
    assert steps_of(records) == [10, 20] and records[0]["time"] > 0
    assert metrics.series(records, "train/return") == ([10, 20], [1.5, 2.5])
    assert metrics.series(records, "eval/return") == ([20], [9.0]) and metrics.series(records, "nothing") == ([], [])
    assert metrics.curve(path, "n").newest == (20, 3.0) and metrics.curve(path, "nothing").newest is None
    assert len(path.read_text().splitlines()) == 2


def test_run_folder_and_file_refer_to_the_same_metrics(bare_run):
    metrics.append(bare_run, record(1))
    metrics.append(bare_run.folder, record(2))
    metrics.append(bare_run.metrics_file, record(3))
    assert steps_of(metrics.read(bare_run)) == steps_of(metrics.read(bare_run.folder)) == [1, 2, 3]


def test_non_finite_numbers_are_valid_json_and_round_trip(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics.append(path, record(1, a=math.nan, b=math.inf, c=-math.inf, d=np.float32("nan"), e=1e308))

    def refuse(constant):
        raise AssertionError(f"{constant} is not valid JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    found = metrics.read(path)[0]["metrics"]
    assert math.isnan(found["a"]) and found["b"] == math.inf and found["c"] == -math.inf and math.isnan(found["d"])


def timed(steps, speed, **shares):
    return record(steps, **{"speed/env_steps_per_second": speed, **{f"time/{part}": x for part, x in shares.items()}})


def test_time_shares_are_weighted_by_seconds(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics.rewind(path, 1000, 1)  # a fork: earlier steps took no time in this run
    metrics.append(path, timed(1010, 10.0, env=1.0))  # 1 s
    metrics.append(path, timed(1020, 10 / 9, learn=0.5, eval=0.5))  # 9 s
    metrics.append(path, record(1020, **{"eval/return": 1.0}))  # evaluation at the end, which has no time shares
    assert metrics.time_shares(metrics.read(path)) == pytest.approx({"env": 0.1, "learn": 0.45, "eval": 0.45})
    metrics.rewind(path, 1010, 2)
    metrics.append(path, timed(1013, 1.0, env=1.0))  # 3 s since env step 1010, the start of attempt 2
    assert metrics.time_shares(metrics.read(path)) == pytest.approx({"env": 1.0})
    metrics.append(path, timed(1017, 1.0, learn=1.0))  # 4 s
    assert metrics.time_shares(metrics.read(path)) == pytest.approx({"env": 0.5, "learn": 0.5})
    assert metrics.time_shares([]) == {}


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}, {"a": 34, "b": 33, "c": 33}),
        ({"a": 0.157, "b": 0.246, "c": 0.595, "d": 0.002}, {"a": 16, "b": 25, "c": 59, "d": 0}),
        ({"a": 0.166, "b": 0.266, "c": 0.563, "d": 0.005}, {"a": 17, "b": 27, "c": 56, "d": 0}),
        ({"a": 1.0}, {"a": 100}),
        ({}, {}),
    ],
)
def test_percents_add_up_to_100(shares, expected):
    assert metrics.percents(shares) == expected and sum(expected.values()) in (0, 100)


def test_rewind_removes_only_later_records(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for steps in (10, 20, 30, 40):
        metrics.append(path, record(steps, x=1))
    metrics.rewind(path, 20, 2)
    for steps in (30, 50):
        metrics.append(path, record(steps, x=2))
    assert metrics.series(metrics.read(path), "x") == ([10, 20, 30, 50], [1, 1, 2, 2])
    metrics.rewind(path, 30, 3)
    assert steps_of(metrics.read(path)) == [10, 20, 30]
    metrics.rewind(path, 0, 4)
    assert metrics.read(path) == []
    assert len(path.read_text().splitlines()) == 9  # the file itself only grows


def test_partial_last_line_is_skipped_and_the_next_record_is_complete(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics.append(path, record(10, x=1))
    whole = path.read_bytes()
    metrics.append(path, record(20, x=2))
    second = path.read_bytes()[len(whole) :]
    for cut in range(len(second)):
        path.write_bytes(whole + second[:cut])
        # Only the line break is missing, so that the record is complete.
        expected = [10, 20] if cut == len(second) - 1 else [10]
        assert steps_of(metrics.read(path)) == expected, cut
        metrics.append(path, record(30, x=3))
        metrics.rewind(path, 100, 2)
        assert steps_of(metrics.read(path)) == [*expected, 30], cut
        assert History(path).broken_count == (0 if cut == 0 or len(expected) == 2 else 1)


def test_only_damaged_lines_are_lost(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for steps in range(1, 21):
        metrics.append(path, record(steps, x=steps))
    lines = path.read_bytes().splitlines(True)
    for seed in range(count(1000)):
        rng = random.Random(seed)
        victim = rng.randrange(len(lines))
        garbage = rng.choice([b"\0" * 80 + b"\n", b"\xff\xfe\n", b"[1]\n", b'"text"\n', b"12\n", b"{}\n", b'{"env_steps": "x"}\n',
                              b'{"rewind_to": "x"}\n', b"[" * 100_000 + b"\n", rng.randbytes(50).replace(b"\n", b"") + b"\n"])  # fmt: skip
        path.write_bytes(b"".join([*lines[:victim], garbage, *lines[victim + 1 :]]))
        assert steps_of(metrics.read(path)) == [steps for steps in range(1, 21) if steps != victim + 1], (
            seed,
            garbage[:40],
        )


def test_full_disk_is_reported_and_the_next_record_is_complete(small_disk):
    path = small_disk / "metrics.jsonl"
    metrics.append(path, record(1))
    (small_disk / "ballast").write_bytes(bytes(512 * 1024 - 8192))

    def fill_up():
        for steps in range(2, 2000):
            metrics.append(path, record(steps))

    with pytest.raises(TiltyardError, match=r"metrics\.jsonl could not be written: No space left on device"):
        fill_up()
    before = len(metrics.read(path))
    (small_disk / "ballast").unlink()
    metrics.append(path, record(5000))
    assert len(metrics.read(path)) == before + 1


def test_killed_writer_leaves_at_most_one_partial_line(tmp_path, child):
    code = """
import sys
from pathlib import Path
from tiltyard.run import metric_names, metrics
path, step = Path(sys.argv[1]), 0
print("ready", flush=True)
while True:
    step += 1
    metrics.append(path, {"env_steps": step, "metrics": {f"name/{i}": i / 7 for i in range(200)}})
"""
    path = tmp_path / "metrics.jsonl"
    for kill in range(count(50)):
        writer = child(code, path)
        writer.stdout.readline()
        time.sleep(random.Random(kill).uniform(0, 0.03))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        found = steps_of(metrics.read(path))
        assert found == list(range(1, len(found) + 1)) and History(path).broken_count <= 1
        path.unlink(missing_ok=True)


def test_every_metric_is_documented_once():
    names = [metric.name for metric in metric_names.METRICS]
    assert len(set(names)) == len(names) and all(metric.meaning.endswith(".") for metric in metric_names.METRICS)
    assert metric_names.describe("train/return").unit == "reward"
    assert metric_names.describe("episode/health").name == "episode/<name>"
    assert metric_names.describe("my/own") is None
    page = metric_names.reference_page()
    assert all(f"`{name}`" in page for name in names) and len(page.splitlines()) == len(names) + 2
