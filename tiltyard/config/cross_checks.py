"""Checks of settings that are each valid but impossible together. Pure: reads no files and asks nothing of the machine.

Every message names all settings it is about by their dotted names: `load` relies on that to leave out messages about
settings that are already known to be wrong. Checks of several policies are in policy_checks.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from tiltyard.config.algos import OwnAlgo, Ppo
from tiltyard.config.clone_algo import Clone
from tiltyard.config.experiment import Experiment, family
from tiltyard.config.policy_checks import check_policies
from tiltyard.config.rllib_algos import ONLY_RLLIB
from tiltyard.config.schedules import KlAdaptive, Linear, Piecewise
from tiltyard.config.sections import Engine, Model, Stop
from tiltyard.errors import Problem
from tiltyard.plugins.resolve import kind_of, short

MOST_THREADS = 1024


def cross_check(experiment: Experiment) -> list[Problem]:
    """Problems that involve two or more settings."""
    several = experiment.policies or experiment.match or experiment.population is not None
    return [
        *_batches(experiment),
        *(_own_algo(experiment, experiment.algo) if isinstance(experiment.algo, OwnAlgo) else ()),
        *(_clone(experiment) if isinstance(experiment.algo, Clone) else ()),
        *_schedules(experiment),
        *(check_policies(experiment) if several else ()),
        *_workers(experiment),
        *(_rllib(experiment) if experiment.engine.kind == "rllib" else _not_rllib(experiment)),
        *_stop_and_save(experiment),
    ]


# Settings of the built-in model's layers; a user's own model ignores them.
LAYERS = ("hidden", "activation", "encoder", "encoders", "critic", "memory.kind", "memory.size")


def makes_own_layers(model_id: str) -> bool:
    """Whether a model id names a user's own model."""
    return kind_of(model_id) is not None


def ignored_settings(experiment: Experiment) -> Iterator[Problem]:
    """Settings of the built-in model's layers that a user's own model would silently ignore."""
    model, plain = experiment.model, Model()
    message = f"applies to the built-in model only, and model.id = {model.id}"
    if makes_own_layers(model.id):
        for name in LAYERS:
            value = attrgetter(name)(model)
            if value != attrgetter(name)(plain):
                hint = "pass it to your own model in model.options, or leave it out"
                yield Problem(f"model.{name}", short(value), message, hint)


def _batches(experiment: Experiment) -> Iterator[Problem]:
    algo, memory, envs = experiment.algo, experiment.model.memory, experiment.engine.envs
    recurrent = memory.kind != "none"
    if recurrent and algo.rollout % memory.bptt and not isinstance(algo, Clone):
        near = max(1, round(algo.rollout / memory.bptt)) * memory.bptt
        message = f"must be a multiple of model.memory.bptt = {memory.bptt}"
        hint = f"set algo.rollout={near}, or change model.memory.bptt"
        yield Problem("algo.rollout", str(algo.rollout), message, hint)
    if not isinstance(algo, Ppo | Clone):
        return
    if algo.minibatch > experiment.batch:
        parts = "algo.batch" if isinstance(algo, Clone) else f"algo.rollout {algo.rollout} x engine.envs {envs}"
        batch = f"{experiment.batch} ({parts})"
        hint = f"set algo.minibatch={experiment.batch} or less"
        yield Problem("algo.minibatch", str(algo.minibatch), f"is more than the batch of {batch}", hint)
    if recurrent and algo.minibatch < memory.bptt:
        message = f"is less than model.memory.bptt = {memory.bptt}"
        yield Problem("algo.minibatch", str(algo.minibatch), message, f"set algo.minibatch={memory.bptt} or more")


def _own_algo(experiment: Experiment, algo: OwnAlgo) -> Iterator[Problem]:
    """What a user's own algorithm does not support."""
    engine, reason = experiment.engine, f"is not supported by your own algorithm, algo.id = {algo.id}"
    refused = (
        (engine.kind == "rllib", "engine.kind", "rllib", "set engine.kind=local"),
        (engine.learners > 1, "engine.learners", engine.learners, "set engine.learners=1"),
        (experiment.several_policies, "policies", len(experiment.policy_settings), "leave policies out"),
        (experiment.population is not None, "population", "", "leave population out"),
    )
    for wrong, setting, value, hint in refused:
        if wrong:
            yield Problem(setting, str(value), reason, hint)


def _clone(experiment: Experiment) -> Iterator[Problem]:
    """What learning from a dataset, in one process and without an env, does not support."""
    engine, stop, reason = experiment.engine, experiment.stop, "is not supported by algo.id = clone"
    workers = isinstance(engine.workers, int) and engine.workers > 0
    several = experiment.several_policies or experiment.match
    refused = (
        (engine.kind == "rllib", "engine.kind", "rllib", reason, "set engine.kind=local"),
        (workers, "engine.workers", engine.workers, f"{reason}, which steps no envs", "set engine.workers=auto"),
        (engine.mode == "async", "engine.mode", "async", f"{reason}, which steps no envs", "set engine.mode=sync"),
        (engine.inference == "batched", "engine.inference", "batched", reason, "set engine.inference=auto"),
        (engine.affinity, "engine.affinity", "true", reason, "leave engine.affinity out"),
        (engine.learners > 1, "engine.learners", engine.learners, reason, "set engine.learners=1"),
        (engine.tune, "engine.tune", "true", reason, "set engine.tune=false"),
        (several, "policies", len(experiment.policy_settings), reason, "leave policies and match out"),
        (experiment.population is not None, "population", "", reason, "leave population out"),
        (
            stop.train_return is not None,
            "stop.train_return",
            stop.train_return,
            f"{reason}, which plays no training episodes",
            "use stop.return, which evaluations measure",
        ),
    )
    for wrong, setting, value, message, hint in refused:
        if wrong:
            yield Problem(setting, str(value), message, hint)
    for name in ("lr", "entropy"):
        if isinstance(getattr(experiment.algo, name), KlAdaptive):
            hint = "use kind: linear or piecewise"
            yield Problem(f"algo.{name}.kind", "kl_adaptive", f"{reason}, which measures no KL divergence", hint)


def _schedules(experiment: Experiment) -> Iterator[Problem]:
    for name in ("lr", "clip", "entropy", "kl"):
        schedule, setting = getattr(experiment.algo, name, None), f"algo.{name}"
        if isinstance(schedule, Piecewise):
            steps = [point[0] for point in schedule.points]
            if steps != sorted(set(steps)):
                hint = "write [[0, 3e-4], [1000000, 0]]"
                yield Problem(
                    f"{setting}.points", short(schedule.points), "env steps must increase from point to point", hint
                )
        elif isinstance(schedule, Linear) and schedule.over is None and experiment.stop.env_steps is None:
            yield Problem(f"{setting}.over", "", "is required without stop.env_steps", f"set {setting}.over")
        elif isinstance(schedule, KlAdaptive) and not schedule.lowest <= schedule.start <= schedule.highest:
            hint = f"change {setting}.min or {setting}.max"
            message = f"is outside [{schedule.lowest:g}, {schedule.highest:g}]"
            yield Problem(f"{setting}.start", str(schedule.start), message, hint)


def _workers(experiment: Experiment) -> Iterator[Problem]:
    engine = experiment.engine
    if isinstance(engine.workers, int) and engine.workers and engine.envs % engine.workers:
        near = max(1, round(engine.envs / engine.workers)) * engine.workers
        message = f"must be a multiple of engine.workers = {engine.workers}"
        yield Problem("engine.envs", str(engine.envs), message, f"set engine.envs={near}, or change engine.workers")
    if isinstance(engine.threads, int) and engine.threads > MOST_THREADS:
        message = f"is more than {MOST_THREADS:,}, the maximum"
        yield Problem("engine.threads", str(engine.threads), message, "set engine.threads=auto")
    if engine.kind == "serial" or engine.workers == 0:
        yield from _without_workers(engine)
    if engine.inference == "batched" and experiment.several_policies:
        message = f"works with one policy, but policies has {len(experiment.policy_settings)}"
        yield Problem("engine.inference", "'batched'", message, "set engine.inference=worker")


def _without_workers(engine: Engine) -> Iterator[Problem]:
    none = f"needs workers, but {'engine.kind = serial' if engine.kind == 'serial' else 'engine.workers = 0'} has none"
    if engine.mode == "async":
        yield Problem("engine.mode", "'async'", none, "set engine.mode=sync, or engine.kind=local with workers")
    if engine.affinity:
        yield Problem("engine.affinity", "true", none, "leave engine.affinity out")
    if engine.inference == "batched":
        hint = "set engine.inference=auto, or engine.kind=local with workers"
        yield Problem("engine.inference", "'batched'", none, hint)


RLLIB_SETTINGS = ("runners", "envs_per_runner", "cpus", "gpus", "object_store", "temp_dir", "address", "nodes")


def _not_rllib(experiment: Experiment) -> Iterator[Problem]:
    """Settings and algorithms that need the rllib engine, with another engine."""
    engine, algo = experiment.engine, experiment.algo
    message = f"needs engine.kind = rllib, but it is {engine.kind}"
    for name in RLLIB_SETTINGS:
        value = getattr(engine, name)
        if value != type(engine).model_fields[name].default:
            yield Problem(f"engine.{name}", short(value), message, f"set engine.kind=rllib, or leave {name} out")
    if algo.id in ONLY_RLLIB:
        yield Problem("algo.id", repr(algo.id), message, "leave engine.kind out, or set engine.kind=rllib")


def _rllib(experiment: Experiment) -> Iterator[Problem]:
    engine, algo = experiment.engine, experiment.algo
    if experiment.population is not None:
        message = "is not supported by engine.kind = rllib, whose learners cannot copy each other's weights"
        yield Problem("population", "", message, "set engine.kind=local, or use a sweep with search: population")
    for name in experiment.past:
        message = "is not supported by engine.kind = rllib, whose runners cannot load new versions"
        hint = "set engine.kind=local, or freeze one with policies.NAME.from"
        yield Problem(f"policies.{name}.past", "", message, hint)
    runners = engine.runners if isinstance(engine.runners, int) else None
    if engine.envs_per_runner is not None and runners is None:
        message = "needs a fixed number of runners, but engine.runners is auto"
        yield Problem("engine.envs_per_runner", str(engine.envs_per_runner), message, "set engine.runners=2")
    elif engine.envs_per_runner is None and runners and engine.envs % runners:
        near = max(1, round(engine.envs / runners)) * runners
        message = f"must be a multiple of engine.runners = {runners}"
        yield Problem("engine.envs", str(engine.envs), message, f"set engine.envs={near}, or change engine.runners")
    if runners == 0 and family(algo) in ("appo", "impala"):
        message = f"must be 1 or more: algo.id = {algo.id} samples while the learner learns"
        yield Problem("engine.runners", "0", message, "set engine.runners=1 or more")
    if engine.address is not None and engine.nodes > 1:
        hint = "leave engine.nodes out"
        yield Problem("engine.nodes", str(engine.nodes), f"must be 1 with engine.address = {engine.address}", hint)


def _stop_and_save(experiment: Experiment) -> Iterator[Problem]:
    stop, save = experiment.stop, experiment.save
    if all(getattr(stop, field) is None for field in Stop.model_fields):
        hint = "set stop.env_steps or stop.seconds"
        yield Problem("stop", "", "needs at least one condition, or the run never ends", hint)
    if stop.return_ is not None and experiment.eval.every == 0:
        message = "needs evaluations, but eval.every is 0"
        yield Problem("stop.return", str(stop.return_), message, "set eval.every=10000")
    if save.env_steps is None and save.seconds is None and save.updates is None:
        hint = "set save.seconds or save.env_steps"
        yield Problem("save", "", "needs an interval, or a killed run starts over", hint)
