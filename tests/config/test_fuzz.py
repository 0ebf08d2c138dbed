"""Mutate the settings of the full example file: the result is always an experiment or an error of Tiltyard."""

import copy
import math
import random
from pathlib import Path

import pytest

from tests.config.test_validation import assert_own_words
from tests.counts import count
from tiltyard.config.fields import flat
from tiltyard.config.load import Loaded, from_resolved, load, resolved_yaml
from tiltyard.config.reference import describe
from tiltyard.config.yaml import dump_yaml, read_yaml
from tiltyard.errors import UseError

FULL = Path(__file__).parents[2] / "examples" / "full.yaml"

VALUES = [
    None, True, False, 0, 1, -1, 2, 2**31, 2**63, 2**64, 10**40, -(10**40), 0.0, 0.5, -0.0, 1e-300, 1e300, 3.7, math.nan, math.inf, -math.inf,
    "", " ", "off", "null", "1e3", "lstm", "a2c", "linear", "../x", "/", "x.py", "x.py:Y", "a:b", "\n", "é😀", "\x00", "x" * 5000, "${HOME}", "$(ls)",
    "{}", "[", [], [[]], [0], [1, "a", None], [[0, 1]], [[1, 1], [0, 1]], {}, {"id": 3}, {"id": "a2c"}, {"kind": "linear"}, {"kind": "piecewise", "points": []},
    {"kind": "kl_adaptive", "start": 1}, {"": 1}, {"a": {"b": {"c": []}}}, {"options": 3}, {"kind": []}, {"mode": {}}, [{}], [{"id": {}}],
]  # fmt: skip


def paths_of(values, path=()):
    """Yield every path in nested mappings and lists."""
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from paths_of(value, (*path, key))


def mutate(rng: random.Random, values: dict, path: tuple) -> None:
    place = values
    for key in path[:-1]:
        place = place[key]
    key = path[-1]
    kind = rng.randrange(6)
    if kind == 0 and isinstance(place, dict):
        place[rng.choice([f"{key}x", str(key)[:-1], str(key).upper(), "framework", "a.b", "algo.lr"])] = place.pop(key)
    elif kind == 1:
        del place[key]
    elif kind == 2 and isinstance(place[key], int | float) and place[key] is not None:
        place[key] = place[key] * rng.choice([-1, 0, 10**6, 1.5, 1e18])
    else:
        place[key] = copy.deepcopy(rng.choice(VALUES))


def test_full_file_has_every_setting_and_loads():
    loaded = load(FULL)
    assert loaded.warnings == ()
    written = {".".join(path) for path, _ in flat(read_yaml(FULL))}
    named = {name for name, kind, _, _ in describe() if not kind.startswith("mapping") and "(" not in name}
    named -= {name for name in named if ".NAME." in name}  # only with several policies
    named -= {name for name in named if name.startswith("population.")}  # only with several policies
    named -= {"algo.loss.id", "algo.loss.options"}  # of a plug-in; the file has null
    assert {name for name in named if not any(other.startswith(f"{name}.") for other in written)} <= written


@pytest.mark.parametrize("part", range(8))
def test_mutated_settings_give_an_experiment_or_a_use_error(part, tmp_path):
    original = read_yaml(FULL)
    places = list(paths_of(original))
    path = tmp_path / "x.yaml"
    fine = 0
    for number in range(part, count(long=2000), 8):
        rng = random.Random(number)
        values = copy.deepcopy(original)
        # the first mutation visits all settings in order; others are random
        mutate(rng, values, places[number % len(places)])
        for _ in range(rng.choice([0, 0, 0, 1, 5])):
            mutate(rng, values, rng.choice(list(paths_of(values))))
            if not values:
                break
        # a file takes ten times as long as a mapping, so that only every third case uses one
        whole = number % 3 == 0
        if whole:
            path.write_text(dump_yaml(values), encoding="utf-8")
        try:
            loaded = load(path if whole else values)
        except UseError as error:
            assert_own_words(error)
            continue
        assert isinstance(loaded, Loaded)
        fine += 1
        if whole:
            path.write_text(resolved_yaml(loaded.experiment), encoding="utf-8")
            assert resolved_yaml(from_resolved(path)) == resolved_yaml(loaded.experiment)
    assert fine > 0


def test_mutated_overrides_give_an_experiment_or_a_use_error():
    names = [name for name, _, _, _ in describe() if "(" not in name]
    rng = random.Random(3)
    for _ in range(count(long=1000)):
        name = rng.choice(names)
        name = rng.choice([name, name, name + ".x", name.replace("e", "", 1), name + ".", name.upper()])
        value = (
            dump_yaml({"x": rng.choice(VALUES)})[2:].strip()
            if rng.random() < 0.8
            else rng.choice(["[", "*a", "!!x y", "'", "a: b: c"])
        )
        try:
            assert isinstance(load("CartPole-v1", [f"{name}={value}"]), Loaded)
        except UseError as error:
            assert_own_words(error)
