"""What a plan varies: each line of `space` as a dimension (config/search_space.py); grids and random points. Pure.

    algo.lr: {log: [1e-5, 1e-2]}                    a span; {range: ...}, {int: ...}
    algo.gamma: [0.98, 0.99]                        choices
    "algo.rollout, algo.minibatch": [[64, 128]]     choices of several settings that change together

A point is one value per setting, by dotted name. A random point depends only on the plan's seed and its own number, so
every process draws the same.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence

from tiltyard.config.search_space import Dimension, Point, dimension, fingerprint
from tiltyard.config.sweep_plan import Plan
from tiltyard.errors import ConfigError, Problem
from tiltyard.plugins.resolve import short

WEIGHTS = {"weights": True}  # in a population's space: perturb the numbers of that mapping
_TRIES = 100  # redraws before a repeated point is accepted
_RESERVED = {
    "seed": ("cannot be varied: results are averaged over seeds", "set seeds: 5 to run each combination five times"),
    "use": ("cannot be varied: presets are applied before all other settings", "vary the settings themselves"),
    "name": ("cannot be varied: all trials are in the sweep's folder", "set name: NAME in the plan"),
}


def dimensions(plan: Plan) -> list[Dimension]:
    """The dimensions of a plan's space; ConfigError with everything that is wrong with it."""
    found: list[Dimension] = []
    problems: list[Problem] = []
    taken: dict[str, str] = {}
    for line, value in plan.space.items():
        keys = tuple(part.strip() for part in line.split(","))
        for key in keys:
            if key in taken:
                problems.append(
                    Problem(f"space.{line}", "", f"{key} is also varied by {taken[key]!r}", "remove one of them")
                )
            taken[key] = line
        if plan.search == "population" and value == WEIGHTS:
            continue
        try:
            found.append(dimension(keys, value, plan.search == "grid"))
        except ValueError as error:
            message, hint = error.args
            problems.append(Problem(f"space.{line}", short(value), message, hint))
    if plan.program is None:
        used = {*taken, *(key for point in plan.points for key in point)}
        problems += [Problem(f"space.{key}", "", *answer) for key, answer in _RESERVED.items() if key in used]
    if problems:
        raise ConfigError(problems, "the plan's space")
    return found


# ------------------------------------------------------------------------------------------------ points


def grid_size(found: Sequence[Dimension]) -> int:
    return math.prod(each.count() for each in found)


def grid(found: Sequence[Dimension]) -> list[Point]:
    """Every combination, the last dimension fastest."""
    return [_joined(parts) for parts in itertools.product(*(each.grid() for each in found))]


def fixed_count(plan: Plan) -> int:
    """How many points the plan has without extensions."""
    return plan.trials if plan.trials is not None else len(plan.points) or grid_size(dimensions(plan))


def fixed_points(plan: Plan, count: int) -> list[Point]:
    """The first `count` points of a plan whose search is not adaptive."""
    if plan.search == "population":
        from tiltyard.sweep.pbt.members import first_settings

        return first_settings(plan, count)
    found = dimensions(plan)
    if plan.search == "random":
        return list(itertools.islice(draws(found, plan.seed), count))
    points = [dict(point) for point in plan.points] or grid(found)
    if plan.order == "random":
        random.Random(f"order/{plan.seed}").shuffle(points)
    return points


def draws(found: Sequence[Dimension], seed: int) -> Iterator[Point]:
    """Random points without end, none repeated as long as there are others."""
    seen: set[str] = set()
    for number in itertools.count():
        rng = random.Random(f"point/{seed}/{number}")
        for _ in range(_TRIES):
            point = _joined([each.draw(rng) for each in found])
            if fingerprint(point) not in seen:
                break
        seen.add(fingerprint(point))
        yield point


def _joined(parts: Sequence[Point]) -> Point:
    return {key: value for part in parts for key, value in part.items()}
