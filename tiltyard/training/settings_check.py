"""Checks that the settings a run was changed to are those in effect: in the restored engine, and in its first update.

A checkpoint made with other settings brings its own along, so both are compared with the experiment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tiltyard.config.experiment import Experiment
from tiltyard.config.fields import is_number
from tiltyard.errors import TiltyardError
from tiltyard.types import Engine


def check_restored(experiment: Experiment, names: Iterable[str], engine: Engine) -> None:
    """TiltyardError if the restored engine has another value than the experiment for one of the settings `names`."""
    for policy in experiment.learning if _numbers(experiment, names) else ():
        _compare(experiment, names, policy, engine.snapshot(policy).settings, "the restored engine has")


def check_learned(experiment: Experiment, names: Iterable[str], engine: Engine, metrics: Mapping[str, float]) -> None:
    """TiltyardError if the first update used another value, by the engine's record of it and by its metrics (RLlib's
    learners report only these)."""
    for policy in experiment.learning if _numbers(experiment, names) else ():
        front = f"policy/{policy}/setting/" if experiment.several_policies else "setting/"
        used = {name.removeprefix(front): value for name, value in metrics.items() if name.startswith(front)}
        _compare(experiment, names, policy, used | engine.snapshot(policy).used, "the first update used")


def _compare(experiment: Experiment, names: Iterable[str], policy: str, found: Mapping[str, float], where: str) -> None:
    algo = experiment.algo_of(policy)
    for name in _numbers(experiment, names):
        wanted = getattr(algo, name)
        if name in found and is_number(wanted) and found[name] != wanted:
            whose = f" of policy {policy}" if experiment.several_policies else ""
            message = f"algo.{name}{whose} is {wanted!r} in the run's settings, but {where} {found[name]!r}"
            hint = "nothing was learned with it; internal error, please report it"
            raise TiltyardError(message, hint)


def _numbers(experiment: Experiment, names: Iterable[str]) -> list[str]:
    """Those of `names` that are plain numbers below `algo`, without the prefix."""
    below = [name.removeprefix("algo.") for name in names if name.startswith("algo.")]
    return [name for name in below if is_number(getattr(experiment.algo, name, None))]
