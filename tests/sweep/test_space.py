"""Search spaces: grids, random samples and refused values."""

import math
import random
from itertools import islice
from typing import Any

import pytest

from tiltyard.config.search_space import fingerprint
from tiltyard.config.sweep_plan import Plan, load_plan
from tiltyard.errors import ConfigError
from tiltyard.sweep.space import dimensions, draws, fixed_points, grid, grid_size


def plan(space: dict[str, Any], **more: Any) -> Plan:
    return load_plan({"experiment": "CartPole-v1", "space": space, **more})


def test_grid_has_every_combination_once_and_keeps_coupled_settings() -> None:
    found = dimensions(
        plan(
            {
                "algo.gamma": [0.98, 0.99],
                "algo.rollout, algo.minibatch": [[64, 128], [128, 256]],
                "algo.epochs": {"int": [1, 3]},
                "algo.lr": {"log": [1e-4, 1e-2], "points": 3},
                "algo.entropy": {"range": [0.0, 0.2], "step": 0.1},
            }
        )
    )
    points = grid(found)
    assert len(points) == grid_size(found) == 2 * 2 * 3 * 3 * 3
    assert len({fingerprint(point) for point in points}) == len(points)
    assert {(p["algo.rollout"], p["algo.minibatch"]) for p in points} == {(64, 128), (128, 256)}
    assert {p["algo.lr"] for p in points} == {1e-4, 1e-3, 1e-2}
    assert {p["algo.entropy"] for p in points} == {0.0, 0.1, 0.2}
    assert {type(p["algo.epochs"]) for p in points} == {int}


@pytest.mark.parametrize("what", [{"space": {"a": list(range(9))}}, {"points": [{"a": i} for i in range(9)]}])
def test_random_order_is_deterministic_for_a_seed(what: dict[str, Any]) -> None:
    made = load_plan({"experiment": "x", "order": "random", **what})
    order = [point["a"] for point in fixed_points(made, 9)]
    assert sorted(order) == list(range(9)) != order
    assert order == [point["a"] for point in fixed_points(made, 9)]
    other = made.model_copy(update={"seed": 1})
    assert order != [point["a"] for point in fixed_points(other, 9)]


def test_samples_are_within_bounds_and_deterministic() -> None:
    found = dimensions(
        plan(
            {"a": {"log": [1e-5, 1e-1]}, "b": {"int": [2, 512], "log": True}, "c": {"range": [-1, 1]}, "d": ["x", "y"]},
            search="random",
            trials=1,
        )
    )
    points = list(islice(draws(found, 3), 2000))
    assert points[:5] == list(islice(draws(found, 3), 5))
    assert points[:5] != list(islice(draws(found, 4), 5))
    assert all(1e-5 <= p["a"] <= 1e-1 and 2 <= p["b"] <= 512 and -1 <= p["c"] <= 1 for p in points)
    assert {type(p["b"]) for p in points} == {int}
    below = sum(p["a"] < 1e-3 for p in points) / len(points)
    assert 0.45 < below < 0.55, "half of the logarithms lie below the middle one"
    assert 0.4 < sum(p["d"] == "x" for p in points) / len(points) < 0.6
    assert math.isclose(sum(p["c"] for p in points) / len(points), 0.0, abs_tol=0.05)


def test_samples_of_a_range_with_points_are_its_points() -> None:
    found = dimensions(plan({"a": {"log": [1e-4, 1e-2], "points": 3}}, search="random", trials=1))
    assert {point["a"] for point in islice(draws(found, 0), 50)} == {1e-4, 1e-3, 1e-2}


def test_huge_range_is_counted_and_sampled_without_a_list_of_its_values() -> None:
    """Ranges with a small step too: a list of the values would use up all memory."""
    space = {"a": {"int": [0, 10**15]}, "b": {"range": [0, 1], "step": 1e-12}}
    assert grid_size(dimensions(plan(space))) == (10**15 + 1) * (10**12 + 1)
    points = list(islice(draws(dimensions(plan(space, search="random", trials=1)), 0), 20))
    assert all(type(p["a"]) is int and 0 <= p["a"] <= 10**15 and 0 <= p["b"] <= 1 for p in points)


def test_sample_of_a_stepped_range_equals_a_choice_from_its_grid() -> None:
    """A random search that an earlier version started continues with the same samples."""
    found = dimensions(plan({"a": {"int": [1, 300]}, "b": {"range": [0, 2], "step": 0.1}}, search="random", trials=1))
    for number in range(20):
        a, b = random.Random(number), random.Random(number)
        assert [each.draw(a) for each in found] == [b.choice(each.grid()) for each in found]


def test_samples_do_not_repeat_while_unused_points_remain() -> None:
    found = dimensions(plan({"a": [1, 2, 3], "b": {"int": [1, 4]}}, search="random", trials=12))
    assert len({fingerprint(point) for point in islice(draws(found, 0), 12)}) == 12


@pytest.mark.parametrize(
    ("space", "output"),
    [
        ({"algo.lr": {"log": [0.0, 1.0], "points": 3}}, "starts at or below 0"),
        ({"algo.lr": {"log": [1e-2, 1e-5], "points": 3}}, "the smaller first"),
        ({"algo.lr": {"log": [1e-5, 1e-2]}}, "infinitely many values for a grid"),
        ({"algo.lr": {"ramge": [0, 1]}}, "'ramge'"),
        ({"algo.lr": {"range": [0, 1], "log": [1, 2]}}, "one range"),
        ({"algo.lr": {"int": [0.5, 2]}}, "whole numbers"),
        ({"algo.lr": {"range": [0, 1], "step": 0}}, "step"),
        ({"algo.lr": {"int": [1, 8], "step": 0.5}}, "step must be a whole number with int"),
        ({"algo.lr": {"range": [0, 1], "points": 1}}, "points"),
        ({"algo.lr": []}, "at least one choice"),
        ({"algo.lr": 3e-4}, "must be choices"),
        ({"algo.lr": [1, 1]}, "twice"),
        ({"algo.lr, algo.clip": [[1]]}, "a value for each"),
        ({"algo.lr, algo.clip": {"range": [0, 1]}}, "need a list"),
        ({"algo.lr": [1], "algo.clip, algo.lr": [[1, 2]]}, "also varied by 'algo.lr'"),
        ({"seed": [1, 2]}, "seeds: 5"),
        ({"use": ["classic"]}, "presets"),
    ],
)
def test_invalid_spaces_are_refused(space: dict[str, Any], output: str) -> None:
    with pytest.raises(ConfigError) as error:
        dimensions(plan(space))
    assert output in error.value.details


def test_all_problems_of_a_space_are_reported_together() -> None:
    with pytest.raises(ConfigError) as error:
        dimensions(plan({"a": [], "b": 3, "c": {"x": 1}}))
    assert len(error.value.problems) == 3


@pytest.mark.parametrize(
    ("values", "output"),
    [
        ({"space": {}}, "experiment: is missing"),
        ({"experiment": "x", "program": "y"}, "keep one of them"),
        ({"experiment": "x", "search": "random", "space": {"a": [1]}}, "trials: is missing"),
        ({"experiment": "x", "trials": 3}, "does not apply to a grid"),
        ({"experiment": "x", "points": [{}], "space": {"a": [1]}}, "keep one of them"),
        ({"experiment": "x", "seeds": [1, 1]}, "twice"),
        ({"experiment": "x", "serch": "grid"}, "did you mean 'search'"),
        ({"experiment": "x", "goal": "most"}, "maximise, minimise"),
        ({"experiment": "x", "name": "a/b"}, "letters"),
        ({"experiment": "x", "stop": {"rule": "asha"}}, "stop.after: is missing"),
    ],
)
def test_invalid_plans_are_refused(values: dict[str, Any], output: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_plan(values)
    assert output in error.value.details


def test_short_forms_are_expanded() -> None:
    made = load_plan({"program": "python 'my train.py'", "seeds": 3, "metric": "train/return", "goal": "minimize"})
    assert made.program == ["python", "my train.py"]
    assert made.seeds == [0, 1, 2]
    assert (made.metric.name, made.metric.of) == ("train/return", "best")
    assert made.better == -1
