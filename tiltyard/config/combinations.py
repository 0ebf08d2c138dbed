"""Settings that are each fine and impossible together. Pure: asks no file system and no machine.

Every sentence names all settings it is about by their dotted names; `load` relies on that to keep quiet about settings
that are already known to be wrong by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

from tiltyard.config.experiment import Experiment, KlAdaptive, Linear, Model, Piecewise, Ppo, Stop
from tiltyard.errors import Problem
from tiltyard.refs import kind_of, short


def cross_check(experiment: Experiment) -> list[Problem]:
    """Problems that only two settings together show."""
    return [*_batches(experiment), *_schedules(experiment), *_ends(experiment)]


def ignored_settings(experiment: Experiment) -> Iterator[Problem]:
    """A model of the user's own makes its own layers: settings of the built-in one would be ignored in silence."""
    model, plain = experiment.model, Model()
    if kind_of(model.id, ("actor_critic",)) in (None, "builtin"):
        return
    for name in ("hidden", "activation", "encoder", "encoders", "critic"):
        if getattr(model, name) != getattr(plain, name):
            yield _ignored(f"model.{name}", getattr(model, name), model.id)
    for name in ("kind", "size"):
        if getattr(model.memory, name) != getattr(plain.memory, name):
            yield _ignored(f"model.memory.{name}", getattr(model.memory, name), model.id)


def _ignored(setting: str, value: object, model: str) -> Problem:
    hint = "give it to your own model as one of model.options, or leave it out"
    return Problem(setting, short(value), f"is for the built-in model and model.id = {model} is another", hint)


def _batches(experiment: Experiment) -> Iterator[Problem]:
    algo, memory, envs = experiment.algo, experiment.model.memory, experiment.engine.envs
    recurrent = memory.kind != "none"
    if recurrent and algo.rollout % memory.bptt:
        near = max(1, round(algo.rollout / memory.bptt)) * memory.bptt
        message = f"is no multiple of model.memory.bptt = {memory.bptt}"
        yield Problem(
            "algo.rollout", str(algo.rollout), message, f"set algo.rollout={near}, or change model.memory.bptt"
        )
    if not isinstance(algo, Ppo):
        return
    if algo.minibatch > experiment.batch:
        batch = f"{experiment.batch} (algo.rollout {algo.rollout} x engine.envs {envs})"
        hint = f"set algo.minibatch={experiment.batch} or less"
        yield Problem("algo.minibatch", str(algo.minibatch), f"is more than the batch of {batch}", hint)
    if recurrent and algo.minibatch < memory.bptt:
        message = f"is less than model.memory.bptt = {memory.bptt}"
        yield Problem("algo.minibatch", str(algo.minibatch), message, f"set algo.minibatch={memory.bptt} or more")


def _schedules(experiment: Experiment) -> Iterator[Problem]:
    for name in ("lr", "clip", "entropy", "kl"):
        schedule, setting = getattr(experiment.algo, name, None), f"algo.{name}"
        if isinstance(schedule, Piecewise):
            steps = [point[0] for point in schedule.points]
            if steps != sorted(set(steps)):
                hint = "write [[0, 3e-4], [1000000, 0]]"
                yield Problem(
                    f"{setting}.points", short(schedule.points), "env steps must grow from point to point", hint
                )
        elif isinstance(schedule, Linear) and schedule.over is None and experiment.stop.env_steps is None:
            yield Problem(f"{setting}.over", "", "is needed when there is no stop.env_steps", f"set {setting}.over")
        elif isinstance(schedule, KlAdaptive) and not schedule.lowest <= schedule.start <= schedule.highest:
            hint = f"change {setting}.min or {setting}.max"
            message = f"lies outside [{schedule.lowest:g}, {schedule.highest:g}]"
            yield Problem(f"{setting}.start", str(schedule.start), message, hint)


def _ends(experiment: Experiment) -> Iterator[Problem]:
    stop, save = experiment.stop, experiment.save
    if all(getattr(stop, field) is None for field in Stop.model_fields):
        hint = "set stop.env_steps or stop.seconds"
        yield Problem("stop", "", "has no condition: the run would never end", hint)
    if stop.return_ is not None and experiment.eval.every == 0:
        message = "needs evaluations, and eval.every is 0"
        yield Problem("stop.return", str(stop.return_), message, "set eval.every=10000")
    if save.env_steps is None and save.seconds is None and save.updates is None:
        hint = "set save.seconds or save.env_steps"
        yield Problem("save", "", "has no interval: a killed run would start over", hint)
