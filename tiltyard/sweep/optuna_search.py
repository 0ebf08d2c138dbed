"""Adaptive searches: Optuna's samplers over the results in the trial folders. Imports Optuna when needed.

No study is stored: each call builds one in memory from the finished, running and failed points, and asks it once. The
sampler's seed follows from the plan and the number of the point, so the same state gives the same point.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from tiltyard.config.search_space import Choices, Dimension, Point, fingerprint
from tiltyard.config.sweep_plan import Plan
from tiltyard.errors import UseError
from tiltyard.sweep.results import Group
from tiltyard.sweep.space import dimensions, draws

STARTUP = 10  # random points before the model is used
_TRIES = {"gp": 1, "tpe": 20}  # attempts to get a new point; gp repeats its best one


def require_optuna(plan: Plan) -> None:
    """UseError if the search needs Optuna and it is not installed."""
    if plan.adaptive and importlib.util.find_spec("optuna") is None:
        hint = "pip install 'tiltyard[sweep]', or use search: random"
        raise UseError(f"search: {plan.search} needs the package optuna, which is not installed", hint)


def ask(plan: Plan, found: Sequence[Group], number: int) -> Point:
    """The settings of point `number`, given those before it."""
    import optuna

    space = dimensions(plan)
    seen = {fingerprint(group.settings) for group in found}
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about experimental parts of Optuna
        distributions = {",".join(each.keys): _distribution(each) for each in space}
        for search in dict.fromkeys((plan.search, "tpe")):  # tpe explores where gp insists on one point
            study = optuna.create_study(
                direction="maximize" if plan.better > 0 else "minimize", sampler=_sampler(search, plan.seed, number)
            )
            for group in found:
                with contextlib.suppress(ValueError):  # a value that is no longer among the choices
                    study.add_trial(_optuna_trial(group, space, distributions))
            for _ in range(_TRIES[search]):
                point = _point(space, study.ask(distributions).params)
                if fingerprint(point) not in seen:
                    return point
    # No new point: a small space may be used up.
    some = itertools.islice(draws(space, plan.seed), 10 * (len(seen) + 1))
    return next((each for each in some if fingerprint(each) not in seen), point)


def _sampler(search: str, root: int, number: int) -> Any:
    from optuna.samplers import GPSampler, TPESampler

    seed = int.from_bytes(hashlib.sha256(f"{root}/{number}".encode()).digest()[:4], "big")
    if search == "gp":
        return GPSampler(seed=seed, n_startup_trials=STARTUP)
    return TPESampler(seed=seed, n_startup_trials=STARTUP, multivariate=True, constant_liar=True)


def _optuna_trial(group: Group, space: Sequence[Dimension], distributions: Mapping[str, Any]) -> Any:
    """A point as an Optuna trial: complete with its value, running, or failed."""
    from optuna.trial import TrialState, create_trial

    over = all(row.over for row in group.rows)
    state = TrialState.RUNNING if not over else TrialState.FAIL if group.value is None else TrialState.COMPLETE
    value = group.value if state == TrialState.COMPLETE else None
    params = {name: _param(each, group.settings) for name, each in zip(distributions, space, strict=True)}
    return create_trial(params=params, distributions=dict(distributions), value=value, state=state)


def _distribution(each: Dimension) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(each, Choices):
        return CategoricalDistribution(list(range(len(each.values))))
    if each.points is not None:
        return CategoricalDistribution(each.spread())
    if each.whole:
        return IntDistribution(int(each.low), int(each.high), log=each.log, step=int(each.step or 1))
    if each.step is not None:
        return FloatDistribution(each.low, each.after(each.count() - 1), step=each.step)
    return FloatDistribution(each.low, each.high, log=each.log)


def _param(each: Dimension, settings: Point) -> Any:
    if isinstance(each, Choices):
        marks = [fingerprint(list(value)) for value in each.values]
        return marks.index(fingerprint([settings[key] for key in each.keys]))
    return settings[each.key]


def _point(space: Sequence[Dimension], params: Mapping[str, Any]) -> Point:
    made: Point = {}
    for each in space:
        value = params[",".join(each.keys)]
        if isinstance(each, Choices):
            made |= dict(zip(each.keys, each.values[value], strict=True))
        else:
            made[each.key] = value if each.whole else float(f"{value:.10g}")
    return made
