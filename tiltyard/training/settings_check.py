"""Whether the numbers that a run was told to go on with are those that learn: in the optimiser, and in the loss.

A checkpoint of other settings brings its own along. Who goes on from one with changed numbers asks twice: what stands
in the engine after it was restored, and what its first update really used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tiltyard.config.experiment import Experiment
from tiltyard.config.search_space import is_number
from tiltyard.errors import TiltyardError
from tiltyard.types import Engine


def check_restored(experiment: Experiment, told: Iterable[str], engine: Engine) -> None:
    """TiltyardError when the engine holds another number than the experiment has for one of the settings `told`."""
    for policy in experiment.learning if _numbers(experiment, told) else ():
        _compare(experiment, told, policy, engine.snapshot(policy).settings, "the restored engine has")


def check_learned(experiment: Experiment, told: Iterable[str], engine: Engine, metrics: Mapping[str, float]) -> None:
    """TiltyardError when the newest update used another number than the experiment has: by what the engine remembers of
    it, and by its metrics, which are all that RLlib's learners tell."""
    for policy in experiment.learning if _numbers(experiment, told) else ():
        front = f"policy/{policy}/setting/" if len(experiment.policy_settings) > 1 else "setting/"
        used = {name.removeprefix(front): value for name, value in metrics.items() if name.startswith(front)}
        _compare(experiment, told, policy, used | engine.snapshot(policy).used, "the first update used")


def _compare(experiment: Experiment, told: Iterable[str], policy: str, found: Mapping[str, float], who: str) -> None:
    algo = experiment.algo_of(policy)
    for name in _numbers(experiment, told):
        wanted = getattr(algo, name)
        if name in found and is_number(wanted) and found[name] != wanted:
            whose = f" of policy {policy}" if len(experiment.policy_settings) > 1 else ""
            raise TiltyardError(
                f"algo.{name}{whose} is {wanted!r} in the run's settings, and {who} {found[name]!r}",
                "nothing was learned with it; this is a fault of the engine: please report it",
            )


def _numbers(experiment: Experiment, told: Iterable[str]) -> list[str]:
    """Names below `algo` that are plain numbers."""
    names = [name.removeprefix("algo.") for name in told if name.startswith("algo.")]
    return [name for name in names if is_number(getattr(experiment.algo, name, None))]
