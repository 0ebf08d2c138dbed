"""Optuna searches from recorded results: better than random, deterministic, without repeated points."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Command
from tiltyard.config.search_space import fingerprint
from tiltyard.config.sweep_plan import Plan, load_plan
from tiltyard.config.yaml import dump_yaml
from tiltyard.run import atomic, metrics
from tiltyard.sweep import optuna_search
from tiltyard.sweep.folder import Trial, find_sweep
from tiltyard.sweep.results import Group, Row
from tiltyard.sweep.space import dimensions, draws

SPACE = {
    "a": {"log": [1e-5, 1e-1]},
    "b": {"int": [1, 64]},
    "c": ["x", "y", "z"],
    "d, e": [[1, 2], [3, 4]],
}


def plan(kind: str, **more: Any) -> Plan:
    return load_plan({"experiment": "x", "space": SPACE, "search": kind, "trials": 30, **more})


def score(point: dict[str, Any]) -> float:
    """Score with maximum 0 at a = 1e-3, b = 40, c = y, (d, e) = (3, 4)."""
    return -(abs(math.log10(point["a"]) + 3) + abs(point["b"] - 40) / 20 + (point["c"] != "y") + (point["d"] != 3))


def group(number: int, point: dict[str, Any], value: float | None, state: str = "finished") -> Group:
    return Group(number, [Row(Trial(number, number, 0, point), state, value=value)])


def searched(made: Plan, count: int, sign: float = 1.0) -> list[dict[str, Any]]:
    found: list[Group] = []
    for number in range(1, count + 1):
        point = optuna_search.ask(made, found, number)
        found.append(group(number, point, sign * score(point)))
    return [each.settings for each in found]


@pytest.mark.parametrize("kind", ["tpe", pytest.param("gp", marks=pytest.mark.slow)])
def test_search_ends_nearer_the_optimum_than_random_points(kind: str) -> None:
    points = searched(plan(kind), 22)
    assert len({fingerprint(point) for point in points}) == 22
    assert all(1e-5 <= p["a"] <= 1e-1 and 1 <= p["b"] <= 64 and (p["d"], p["e"]) in ((1, 2), (3, 4)) for p in points)
    assert {type(p["b"]) for p in points} == {int}
    chance = [score(point) for point, _ in zip(draws(dimensions(plan(kind)), 1), range(300), strict=False)]
    later = sorted(score(point) for point in points[14:])
    assert later[len(later) // 2] > sorted(chance)[len(chance) * 3 // 4], "its median beats chance's upper quarter"


def test_minimise_mirrors_maximise() -> None:
    assert searched(plan("tpe", goal="minimise"), 14, -1.0) == searched(plan("tpe"), 14)


def test_ask_is_deterministic_and_depends_on_number_and_states() -> None:
    made = plan("tpe")
    points = searched(made, 12)
    before = [group(i, point, score(point)) for i, point in enumerate(points, start=1)]
    again = optuna_search.ask(made, before, 13)
    assert again == optuna_search.ask(made, before, 13)
    assert again != optuna_search.ask(made, before, 14)
    on_its_way = [*before, group(13, again, None, "running")]
    assert optuna_search.ask(made, on_its_way, 13) != again, "a point that is on its way is not asked for again"
    failed = [*before[:-1], group(12, points[-1], None, "failed")]
    assert optuna_search.ask(made, failed, 13) not in points


def test_small_space_is_exhausted_before_a_point_repeats() -> None:
    made = load_plan({"experiment": "x", "space": {"a": [1, 2, 3], "b": [1, 2]}, "search": "tpe", "trials": 7})
    found: list[Group] = []
    for number in range(1, 8):
        point = optuna_search.ask(made, found, number)
        found.append(group(number, point, float(point["a"])))
    assert len({fingerprint(each.settings) for each in found[:6]}) == 6


def test_range_may_have_fewer_points_than_trials() -> None:
    space = {"a": {"log": [1e-4, 1e-2], "points": 3}}
    made = load_plan({"experiment": "x", "space": space, "search": "tpe", "trials": 6})
    found = [group(1, {"a": 3.9e-4}, 0.0)]  # not one of the points: an earlier version sampled such values
    for number in range(2, 7):
        point = optuna_search.ask(made, found, number)
        assert point["a"] in (1e-4, 1e-3, 1e-2)
        found.append(group(number, point, float(point["a"])))


@pytest.mark.slow
def test_search_of_trainings_continues_from_its_folder(tiltyard: Command, runs: Path) -> None:
    """The next controller runs a point that was chosen before the kill, and chooses none twice."""
    experiment = {
        "env": "CartPole-v1",
        "name": "tiny",
        "engine": {"kind": "serial", "envs": 4},
        "algo": {"rollout": 16, "minibatch": 64, "epochs": 1},
        "stop": {"env_steps": 64},
        "eval": {"every": 0, "episodes": 1},
        "track": {"tensorboard": False},
    }
    values = {"experiment": experiment, "space": {"algo.lr": {"log": [1e-5, 1e-2]}}, "search": "tpe", "trials": 2}
    Path("plan.yaml").write_text(dump_yaml({**values, "max_parallel": 2}))
    assert "chooses 2" in tiltyard("sweep", "start", "plan.yaml", "--dry-run").stdout
    tiltyard("sweep", "start", "plan.yaml")
    sweep = find_sweep("tiny")
    first = sweep.trials()
    # As if the controller was killed after it chose a point and before it created the folder.
    sweep.decide("extend", points=1)
    asked = {"trial": 3, "point": 3, "seed": 0, "settings": {"algo.lr": 0.00123}}
    atomic.append_line(sweep.folder / "manifest.jsonl", atomic.to_json(asked))
    tiltyard("sweep", "start", "tiny")
    assert sweep.trials()[:2] == first
    assert [trial.settings for trial in sweep.trials()[2:]] == [{"algo.lr": 0.00123}]
    runs_made = sorted(each.name[:4] for each in sweep.folder.glob("0*"))
    assert runs_made == ["0001", "0002", "0003"]
    third = metrics.read(sweep.place(3))
    assert third[-1]["metrics"]["setting/lr"] == pytest.approx(0.00123)


def test_gp_keeps_searching_near_an_optimum_on_a_bound() -> None:
    """If gp proposes the same bound again, tpe chooses a point near it instead of a random one."""
    made = load_plan({"experiment": "x", "space": {"a": {"range": [3, 9]}}, "search": "gp", "trials": 30})
    found: list[Group] = []
    for number in range(1, 17):
        point = optuna_search.ask(made, found, number)
        found.append(group(number, point, -point["a"]))
    drawn = [point for point, _ in zip(draws(dimensions(made), made.seed), range(20), strict=False)]
    later = [each.settings["a"] for each in found[10:]]
    assert min(later) == pytest.approx(3.0, abs=0.01) and not [each for each in later if {"a": each} in drawn]
    assert sorted(later)[3] < 5
