"""Checks of `policies`, `match` and `population`; called by cross_checks.py, whose rule for messages holds here too."""

from __future__ import annotations

from collections.abc import Iterator

from tiltyard.config.experiment import NAME, Experiment
from tiltyard.config.policies import Changes
from tiltyard.config.search_space import Choices, Dimension, dimension
from tiltyard.config.validation import validate
from tiltyard.errors import Problem, did_you_mean
from tiltyard.plugins.resolve import short


def check_policies(experiment: Experiment) -> list[Problem]:
    """Problems of an experiment with several policies."""
    return [*_policies(experiment), *_past(experiment), *_population(experiment)]


def _policies(experiment: Experiment) -> Iterator[Problem]:
    """Check names only; whether the env has such agents is known after it was probed."""
    names = list(experiment.policy_settings)
    for index, (name, policy) in enumerate(experiment.policies.items()):
        setting, algo = f"policies.{name}", experiment.algo
        if not NAME.fullmatch(name) or ".." in name:
            rule = "a policy's name must be 1 to 80 letters, digits and . _ + -, starting with a letter or digit"
            yield Problem(setting, "", rule, "give it another name")
        why = "past" if policy.past is not None else "from"
        if name not in experiment.learning and index == 0:
            hint, given = f"name one that learns before {name}", "" if policy.from_ is None else short(policy.from_)
            yield Problem(f"{setting}.{why}", given, "the first policy must learn", hint)
        for number, value in policy.algo.model_dump(exclude_none=True).items():
            if name not in experiment.learning:
                message = f"{name} does not learn, because {setting}.{why} is set"
                yield Problem(f"{setting}.algo.{number}", short(value), message, "leave one of them out")
            elif number not in type(algo).model_fields:
                yield Problem(f"{setting}.algo.{number}", short(value), f"algo.id = {algo.id} has no {number}", "")
    for pattern, pool in experiment.match.items():
        if not pool:
            hint = f"name a policy: {names[0]}"
            yield Problem(f"match.{pattern}", "{}", "the pool is empty", hint)
        for name in [name for name in pool if name not in names]:
            hint = did_you_mean(name, names)
            yield Problem(f"match.{pattern}", short(name), "unknown policy", hint)


def _past(experiment: Experiment) -> Iterator[Problem]:
    """Past versions must be of a policy that learns in this run."""
    for name, past in experiment.past.items():
        setting = f"policies.{name}.past"
        if past.of not in experiment.learning:
            message = f"must be a policy that learns, for {setting}"
            yield Problem(f"{setting}.of", short(past.of), message, did_you_mean(past.of, experiment.learning))
        if experiment.policy_settings[name].from_ is not None:
            yield Problem(f"policies.{name}.from", "", f"cannot be combined with {setting}", "leave one of them out")


_PER_POLICY = ("return", "episode/", "loss/", "learn/")


def _population(experiment: Experiment) -> Iterator[Problem]:
    population, learning = experiment.population, experiment.learning
    if population is None:
        return
    if len(learning) < 2:
        message = f"needs at least two policies that learn, but policies has {len(learning)}"
        yield Problem("population", "", message, "set policies={a: {}, b: {}, c: {}, d: {}}")
    if not population.metric.startswith(_PER_POLICY):
        message = "must be a metric that each policy has"
        hint = "return, episode/NAME, loss/... , learn/..."
        yield Problem("population.metric", short(population.metric), message, hint)
    if not population.space:
        yield Problem("population.space", "", "is empty", "list the settings to vary: algo.lr: {log: [1e-5, 1e-2]}")
    known = [name for name in Changes.model_fields if name in type(experiment.algo).model_fields]
    for line, value in population.space.items():
        keys = tuple(part.strip() for part in line.split(","))
        unknown = [key for key in keys if key.removeprefix("algo.") not in known or "." not in key]
        for key in unknown:
            hint = did_you_mean(key, [f"algo.{name}" for name in known])
            yield Problem(f"population.space.{line}", "", f"{key} cannot change during training", hint)
        try:
            found = dimension(keys, value)
            if not unknown:
                _try_values(found)
        except ValueError as error:
            message, hint = error.args if len(error.args) == 2 else (str(error), "")
            yield Problem(f"population.space.{line}", short(value), message, hint)


def _try_values(found: Dimension) -> None:
    """ValueError if a value of the space is not valid for a policy."""
    ends = found.values if isinstance(found, Choices) else ((found.low,), (found.high,))
    for values in ends:
        for key, value in zip(found.keys, values, strict=True):
            name = key.removeprefix("algo.")
            problems = validate(Changes, {name: value})[1]
            for _, problem in problems:
                raise ValueError(f"reaches {value}: {name} {problem.message}", problem.hint)
