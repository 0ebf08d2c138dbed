"""Settings that change while a run trains: which may, and what a change does to the engine, the envs and the folder.

algo.NAME          numbers that the algorithm can change between two updates (algos.ppo.CHANGEABLE)
env.options.NAME   options that the experiment names; each env gets them by set_options() before its next reset
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

from tiltyard.algos.ppo import CHANGEABLE
from tiltyard.config.experiment import Experiment
from tiltyard.config.fields import is_number
from tiltyard.config.load import load
from tiltyard.config.schedules import KlAdaptive
from tiltyard.errors import TiltyardError, UseError, did_you_mean
from tiltyard.run.folder import Run
from tiltyard.run.settings_file import write_settings
from tiltyard.training.attempt import Attempt
from tiltyard.types import Engine, PolicyState

OPTIONS = "env.options."
LIVE = [f"algo.{name}" for name in CHANGEABLE]


def differences(experiment: Experiment, settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of some settings, by dotted name, that differ from the experiment's; and its own values of them."""
    values = experiment.model_dump(mode="json", by_alias=True)
    own = {key: reduce(lambda part, name: part[name], key.split("."), values) for key in settings}
    new = {key: value for key, value in settings.items() if value != own[key]}
    return new, {key: own[key] for key in new}


def with_settings(run: Run, experiment: Experiment, overrides: Sequence[str]) -> Experiment:
    """The experiment with changed settings, validated."""
    if not overrides:
        return experiment
    return load(experiment.model_dump(mode="json", by_alias=True), overrides, base=run.base).experiment


def are_live(experiment: Experiment, names: Iterable[str]) -> bool:
    """Whether all of these settings can change between two updates: RLlib's are fixed when it starts."""
    return experiment.engine.kind != "rllib" and all(name in LIVE or name.startswith(OPTIONS) for name in names)


def require_live(attempt: Attempt, changes: Mapping[str, Any]) -> None:
    """UseError for a setting that cannot change while this run trains."""
    now, options = attempt.experiment, [OPTIONS + name for name in attempt.experiment.env.options]
    for key, value in changes.items():
        if key.startswith("algo.") and now.engine.kind == "rllib":
            raise UseError(f"engine.kind = rllib cannot change {key} while training", "use engine.kind=local")
        if key.startswith(OPTIONS):
            _require_options(attempt, key, options)
        elif key not in LIVE or not hasattr(now.algo, key.removeprefix("algo.")):
            raise UseError(f"{key} cannot change during training", did_you_mean(key, [*LIVE, *options]))
        elif now.population is not None:
            raise UseError(f"{key} cannot be set: the population decides it", "leave out population")
        elif not is_number(value):
            raise UseError(f"{key} = {value!r} must be a number", "a schedule can only be set in the experiment")
        elif isinstance(getattr(now.algo, key.removeprefix("algo.")), KlAdaptive):
            raise UseError(f"{key} adapts to the KL divergence by itself", f"set {key} to a number in the experiment")


def _require_options(attempt: Attempt, key: str, options: list[str]) -> None:
    env = attempt.experiment.env
    if key not in options:
        hint = did_you_mean(key, options) or f"give it a value in the experiment, too: {key}=..."
        raise UseError(f"{key} is not among the env.options of the experiment", hint)
    if attempt.experiment.engine.kind == "rllib":
        raise UseError(f"{key}: engine.kind = rllib cannot change options of running envs", "use engine.kind=local")
    if not attempt.spec.takes_options:
        hint = f"write `def set_options(self, *, {key.removeprefix(OPTIONS)})` in the env; it is called before a reset"
        raise UseError(f"{key}: env {env.id} has no method set_options()", hint)


def apply(attempt: Attempt, experiment: Experiment, changed: list[str]) -> None:
    """Put an experiment, in which these settings have changed, into effect and into experiment.yaml."""
    attempt.experiment = experiment
    names = [name for name in changed if name in LIVE]
    for policy in experiment.learning if names else ():
        own = experiment.algo_of(policy)  # a policy's own value stays
        adopt(attempt.engine, policy, None, {name: getattr(own, name.removeprefix("algo.")) for name in names})
    if len(names) < len(changed):
        attempt.engine.set_env_options(experiment.env.options)
    if attempt.evaluator is not None:
        attempt.evaluator.experiment = experiment
    write_settings(attempt.run.folder, experiment)


def adopt(engine: Engine, policy: str, source: PolicyState | None, settings: Mapping[str, Any]) -> None:
    """Copy a policy and change its settings; TiltyardError unless these are then in effect."""
    asked = {key.removeprefix("algo."): float(value) for key, value in settings.items()}
    got = engine.adopt(policy, source, asked)
    for name, value in asked.items():
        if got[name] != value:
            message = f"algo.{name} of policy {policy} should be {value!r}, but the engine uses {got[name]!r}"
            hint = "nothing was learned with it; internal error, please report it"
            raise TiltyardError(message, hint)
