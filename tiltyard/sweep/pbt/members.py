"""The members of a plan's population: the dials that change their settings, and what each member begins with.

    algo.lr: {log: [1e-5, 1e-2]}            a line of the space is a dial; members begin spread over all of them
    env.options.rewards: {weights: true}    the numbers of that mapping: the first member begins with the experiment's,
                                            the others with each of them multiplied or divided

Only settings that may change in a run are varied: numbers of `algo`, and settings of `env` that keep its spaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tiltyard.algos.pbt import Settings, rules_of
from tiltyard.algos.tunables import Number, Tunable, latin_hypercube, perturb, reward_weights, tunables_of
from tiltyard.config.experiment import Experiment
from tiltyard.config.sweep_plan import Plan
from tiltyard.errors import ConfigError, Problem, UseError
from tiltyard.run.settings_schedule import may_change
from tiltyard.sweep.space import WEIGHTS, dimensions

ON_RLLIB = ("lr", "clip", "entropy", "kl")  # of ppo: those whose value in effect the updates report
_FIRST = 0  # in place of a member's number: the draws of the first settings


def draws(plan: Plan, member: int, period: int) -> np.random.Generator:
    """Random numbers of one decision: the same whenever it is made."""
    return np.random.default_rng([plan.seed, member, period])


def tunables(plan: Plan) -> list[Tunable]:
    """The settings that are varied. The plan's experiment must be a mapping."""
    return [*tunables_of(dimensions(plan)), *(Number(key) for key in _weights(plan))]


def first_settings(plan: Plan, count: int) -> list[Settings]:
    """The first settings of each member: the plan's points, or spread over its space."""
    bounded, held = tunables_of(dimensions(plan)), _weights(plan)
    if plan.points:
        return [{**held, **point} for point in plan.points]
    rng = draws(plan, _FIRST, 0)
    made = latin_hypercube(bounded, count, rng)
    always = replace(rules_of(plan.population, plan.better > 0), rate=1.0, resample=0.0)
    loose = [Number(key) for key in held]
    return [{**each, **(perturb(loose, held, always, rng) if i else held)} for i, each in enumerate(made)]


def _weights(plan: Plan) -> Settings:
    """The experiment's numbers in each mapping that the space names."""
    found: Settings = {}
    for key, value in plan.space.items():
        if value != WEIGHTS:
            continue
        tree: Any = plan.experiment
        for name in key.split("."):
            tree = tree.get(name) if isinstance(tree, dict) else None
        numbers = reward_weights(tree, key) if isinstance(tree, dict) else {}
        if not numbers:
            hint = "name a mapping of numbers"
            raise UseError(f"space.{key} = {{weights: true}}: the experiment has no numbers there", hint)
        odd = next((name for name in numbers if "=" in name or "," in name), None)
        if odd is not None:
            raise UseError(f"{odd} has a '=' or a ',' in its name", "rename it")
        found |= numbers
    return found


# ------------------------------------------------------------------------------------------------ checks


def check(plan: Plan, built: Sequence[Experiment]) -> None:
    """ConfigError with everything that is wrong with a population's plan."""
    keys = [part.strip() for line in plan.space for part in line.split(",")]
    problems = [problem for key in keys if (problem := _movable(key, built[0])) is not None]
    for key, value in plan.space.items():
        if isinstance(value, dict) and {"step", "points"} & set(value):
            message = "has steps, but a population multiplies numbers by factors"
            problems.append(Problem(f"space.{key}", "", message, "remove step and points, or give a list of choices"))
    loose = [tunable.keys[0] for tunable in tunables(plan) if not tunable.bounded]
    if loose and plan.population.explore == "pb2":
        message = f"needs bounds, but {loose[0]} has none"
        problems.append(Problem("population.explore", "pb2", message, "give it a range, or set explore: perturb"))
    moved = [key for tunable in tunables_of(dimensions(plan)) for key in tunable.keys]
    missing = next((key for point in plan.points for key in moved if key not in point), None)
    if missing is not None:
        problems.append(
            Problem("points", "", f"{missing} is in the space but not in every point", "add it to each point")
        )
    for experiment in built:
        problems += _timing(plan, experiment)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)), "the plan's population")


def _movable(key: str, experiment: Experiment) -> Problem | None:
    section, _, name = key.partition(".")
    if key == "seed" or not may_change(key):
        hint = "a population varies settings of algo and env; vary others in a grid or random search"
        return Problem(f"space.{key}", "", "cannot change during a run", hint)
    if section == "env":
        return None
    algo = experiment.algo.id
    if experiment.engine.kind == "rllib" and not (algo == "ppo" and name in ON_RLLIB):
        message = f"cannot be varied with engine.kind = rllib and algo.id = {algo}: RLlib does not report its value"
        hint = "on rllib a population varies env settings and, for ppo, lr, clip, entropy and kl"
        return Problem(f"space.{key}", "", message, hint)
    return None


def _timing(plan: Plan, experiment: Experiment) -> list[Problem]:
    found, first = [], max(plan.population.start, plan.population.period)
    total, every, period = experiment.stop.env_steps, experiment.eval.every, plan.population.period
    if total is not None and total <= first:
        message = f"the first decision would be at env step {first:,}, but stop.env_steps = {total:,}"
        found.append(Problem("population.start", f"{plan.population.start:,}", message, "set start and period lower"))
    if plan.metric.name.startswith("eval/") and not 0 < every <= period:
        message = f"needs an evaluation in each period of {period:,} env steps, but eval.every = {every:,}"
        found.append(Problem("metric", plan.metric.name, message, "set eval.every lower, or metric: train/return"))
    return found
