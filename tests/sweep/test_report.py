"""Reports of a sweep, from its folders alone."""

import csv
import io
import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cli.test_light import HEAVY, SPY
from tests.conftest import Command
from tests.sweep.fake import SPACE, fake_sweep, status
from tiltyard.config.sweep_plan import load_plan
from tiltyard.run import atomic, metrics
from tiltyard.run.folder import Run
from tiltyard.run.lock import Lock
from tiltyard.sweep import results
from tiltyard.sweep.folder import FACTS
from tiltyard.sweep.plots import bands
from tiltyard.sweep.report import bootstrap, explained, importance, summarize
from tiltyard.sweep.results import interquartile_mean
from tiltyard.sweep.space import fixed_points


def test_interquartile_mean_is_the_mean_of_the_middle_half() -> None:
    assert interquartile_mean([3.0]) == 3.0
    assert interquartile_mean([1.0, 3.0]) == 2.0
    assert interquartile_mean([-1000.0, 1.0, 3.0, 1000.0]) == 2.0
    assert interquartile_mean([0.0, 10.0, 20.0, 30.0, 1000.0]) == pytest.approx((0.75 * 10 + 20 + 0.75 * 30) / 2.5)


def test_bootstrap_interval_covers_the_true_mean() -> None:
    rng = random.Random(1)
    hits = 0
    for _ in range(60):
        low, high = bootstrap([rng.gauss(7.0, 2.0) for _ in range(20)]) or (0.0, 0.0)
        hits += low <= 7.0 <= high
    assert hits >= 50
    assert bootstrap([1.0]) is None
    assert bootstrap([2.0, 2.0]) == (2.0, 2.0)


def test_explained_fraction_of_variance() -> None:
    rng = random.Random(0)
    labels = ["a", "b", "c"] * 40
    assert explained(labels, [float(ord(label)) for label in labels]) == pytest.approx(1.0, abs=0.01)
    assert explained(labels, [rng.gauss(0, 1) for _ in labels]) < 0.05
    half = [ord(label) + rng.gauss(0, 0.82) for label in labels]
    assert 0.3 < explained(labels, half) < 0.7
    assert explained(["a"] * 5, [1.0] * 5) == 0.0
    assert explained(["a", "b", "c", "d"], [1.0, 2.0, 3.0, 4.0]) is None  # nothing to compare with


def test_importance_groups_numbers_of_listed_points_into_quarters() -> None:
    rng = random.Random(0)
    points: list[dict[str, Any]] = [{"lr": rng.random(), "word": rng.choice("ab")} for _ in range(40)]
    plan = load_plan({"experiment": {"env": {"id": "CartPole-v1"}}, "points": points})
    groups = [SimpleNamespace(settings=point, value=point["lr"]) for point in points]
    report: Any = SimpleNamespace(plan=plan, groups=groups, keys=["lr", "word"])
    shares = dict(importance(report))
    assert shares["lr"] > 0.8 and shares["word"] < 0.3


def test_curve_of_a_restarted_program_has_only_its_newest_attempt(tmp_path: Path) -> None:
    lives = [[(0, 1.0), (10, 99.0), (20, 98.0)], [(0, 2.0), (10, 3.0)]]
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step, value in [pair for life in lives for pair in life]:
            file.write(json.dumps({"env_steps": step, "metrics": {"score": value}}) + "\n")
    assert metrics.curve(tmp_path, "score").points() == [(0, 2.0), (10, 3.0)]


def test_bands_end_with_the_shortest_curve() -> None:
    steps, middle, low, high = bands([[(10, 0.0), (20, 2.0), (30, 9.0)], [(10, 2.0), (20, 4.0)]])
    assert steps == [10, 20]
    assert middle == [1.0, 3.0]
    assert low == [0.0, 2.0]
    assert high == [2.0, 4.0]
    assert bands([[(5, 1.0)]])[1] == [1.0]


def test_status_and_best_report_the_same_data_in_all_formats(tiltyard: Command, runs: Path) -> None:
    sweep = fake_sweep(runs, 6, 3)
    atomic.write_json(sweep.place(4) / "status.json", status(4, state="failed", reason="out of luck\x1b[2J"))
    for attempt in (1, 2, 3):  # no retries are left
        sweep.decide("failed", trial=4, attempt=attempt, reason="out of luck")
    atomic.write_json(sweep.place(5) / "status.json", status(5, state="running"))  # and no process holds its lock
    (sweep.place(6) / "status.json").unlink()
    out = tiltyard("sweep", "status", "fake").stdout
    assert "18: 15 finished, 1 lost, 1 failed, 1 waiting" in out
    assert "trial 4 failed: out of luck [2J" in out
    values = [float(line.split()[4]) for line in out.splitlines() if "of 3" in line]
    assert values == sorted(values, reverse=True)
    assert len(values) == 6

    data = json.loads(tiltyard("sweep", "status", "--json").stdout)
    assert (data["sweep"], data["state"], data["trials"]) == ("fake/sweep-0001", "stopped", 18)
    assert len(data["rows"]) == 18
    lines = list(csv.DictReader(io.StringIO(tiltyard("sweep", "status", "--csv").stdout)))
    assert [line["trial"] for line in lines] == [str(number) for number in range(1, 19)]
    for line, row in zip(lines, data["rows"], strict=True):
        assert float(line["algo.lr"]) == row["settings"]["algo.lr"]
        assert line["state"] == row["state"]
        assert line["value"] == ("" if row["value"] is None else str(row["value"]))

    best = json.loads(tiltyard("sweep", "best", "--json").stdout)
    assert best["settings"] == data["points"][0]["settings"]
    assert best["interval"][0] <= best["value"] <= best["interval"][1]
    assert best["best"]["value"] == max(best["values"])
    assert "algo.lr=" in tiltyard("sweep", "best").stdout


@pytest.mark.parametrize(("launcher", "state"), [("local", "running"), ("template", "failed")])
def test_finished_sweep_of_jobs_is_not_running_during_its_last_tick(
    tiltyard: Command, runs: Path, launcher: str, state: str
) -> None:
    sweep = fake_sweep(runs, 2, 1, retries=0)
    atomic.write_json(sweep.place(1) / "status.json", status(1, state="failed", reason="out of luck"))
    sweep.decide("failed", trial=1, attempt=1, reason="out of luck")
    atomic.write_json(sweep.folder / FACTS, {**sweep.facts(), "launcher": launcher, "profile": "ngc"})
    with Lock.acquire(Run(sweep.folder)):
        found = tiltyard("sweep", "status", "--json", expect=int(state == "failed"))
        assert json.loads(found.stdout)["state"] == state
    assert json.loads(tiltyard("sweep", "status", "--json", expect=1).stdout)["state"] == "failed"


def test_last_best_and_minimise_select_different_values(runs: Path) -> None:
    best = summarize(fake_sweep(runs, 4, 1))
    last = summarize(fake_sweep(runs, 4, 1, metric={"name": "eval/return", "of": "last"}))
    least = summarize(fake_sweep(runs, 4, 1, goal="minimise"))
    pairs = zip(best.rows, last.rows, least.rows, strict=True)
    assert all((c.value or 0) <= (b.value or 0) <= (a.value or 0) for a, b, c in pairs)
    assert [g.value for g in least.groups] == sorted(g.value or 0 for g in least.groups)


def test_cached_value_is_used_until_the_trial_changes(runs: Path) -> None:
    sweep = fake_sweep(runs, 2, 1)
    rows = summarize(sweep).rows
    for row in rows:
        results.keep(sweep, row)
    for row in rows:
        (sweep.place(row.trial.number) / "metrics.jsonl").write_text(
            atomic.to_json({"env_steps": 1, "metrics": {"eval/return": 12345.0}}) + "\n"
        )
    atomic.write_json(sweep.place(2) / "status.json", status(2, updated="later: somebody trained it on"))
    assert [row.value for row in summarize(sweep).rows] == [rows[0].value, 12345.0]


def test_importance_of_a_grid_groups_by_its_values() -> None:
    """Only one of five values scores: quarters of the sorted values would mix it with its neighbours."""
    space = {"algo.lr": {"log": [1e-5, 1e-1], "points": 5}, "algo.epochs": [1, 2, 3, 4]}
    plan = load_plan({"experiment": {"env": {"id": "CartPole-v1"}}, "space": space})
    points = fixed_points(plan, 20)
    best = sorted({point["algo.lr"] for point in points})[2]
    groups = [SimpleNamespace(settings=point, value=100.0 * (point["algo.lr"] == best)) for point in points]
    report: Any = SimpleNamespace(plan=plan, groups=groups, keys=[*space])
    found = dict(importance(report))
    assert found["algo.lr"] > 0.95 and found["algo.epochs"] < 0.05


def test_importance_ranks_the_deciding_setting_first(runs: Path) -> None:
    found = importance(summarize(fake_sweep(runs, 60, 1)))
    assert found[0][0] == "algo.lr"
    assert found[0][1] > 0.5
    shares = dict(found)
    assert shares["algo.epochs"] < 0.15
    assert shares["model.activation"] < 0.15
    assert importance(summarize(fake_sweep(runs, 3, 1))) == []


def test_plot_writes_its_image_files(tiltyard: Command, runs: Path, tmp_path: Path) -> None:
    fake_sweep(runs, 8, 2)
    out = tiltyard("sweep", "plot", "--out", str(tmp_path / "shown")).stdout.split()
    assert [Path(each).name for each in out] == ["curves.png", "importance.png", "parallel.png"]
    assert all(Path(each).read_bytes().startswith(b"\x89PNG") for each in out)
    sweep = fake_sweep(runs, 1, 1, records=0)
    assert "yet" in tiltyard("sweep", "plot", str(sweep.folder), expect=2).stderr
    assert "no trial has recorded any metric" in tiltyard("sweep", "best", str(sweep.folder), expect=2).stderr


def test_dollar_signs_are_plotted_literally(tiltyard: Command, runs: Path) -> None:
    """matplotlib would parse the string between two of them as a formula, and fail."""
    values = ["it's $x_{$", "$", "plain"]
    sweep = fake_sweep(runs, 8, 2, space={**SPACE, "$text_{$": values}, metric="eval/$_{$return")
    for number in range(1, 17):
        records = sweep.place(number) / "metrics.jsonl"
        records.write_text(records.read_text().replace("eval/return", "eval/$_{$return"))
    assert len(tiltyard("sweep", "plot").stdout.split()) == 3


@pytest.mark.parametrize("action", ["status", "watch", "best"])
def test_read_only_commands_import_no_heavy_package(action: str, runs: Path) -> None:
    fake_sweep(runs, 3, 2)
    code = SPY.format(words=["sweep", action], heavy=(*HEAVY, "optuna"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "IMPORTED:"


def test_sweeps_are_found_by_their_names(tiltyard: Command, runs: Path) -> None:
    first = fake_sweep(runs, 1, 1)
    assert first.id in tiltyard("sweep", "status", "1").stdout
    second = fake_sweep(runs, 1, 1)
    for name in ("last", "fake", "2", "sweep-0002", "fake/sweep-0002", str(second.folder), str(second.place(1))):
        assert second.id in tiltyard("sweep", "status", name).stdout
    assert "no sweep 'fale'" in tiltyard("sweep", "status", "fale", expect=2).stderr
