"""Checks before a run exists: whether model, device and memory fit the experiment. Builds the net that is then trained,
but no engine."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from tiltyard.algos.tunables import parse_tunables
from tiltyard.config.algos import Own, OwnAlgo
from tiltyard.config.clone_algo import Clone
from tiltyard.config.experiment import Experiment
from tiltyard.engines.learner import build_algo, build_net, check_learners, device_named
from tiltyard.engines.policies.frozen import frozen_nets
from tiltyard.engines.policies.matchmaking import Match
from tiltyard.engines.topology import require_worker_files, slots_per_worker
from tiltyard.errors import ConfigError, Problem, UseError
from tiltyard.models.policy_files import saved_policies
from tiltyard.models.policy_net import PolicyNet
from tiltyard.plugins import resolve
from tiltyard.processes.platforms import system_name
from tiltyard.processes.resources import free_memory
from tiltyard.run.state_file import read_tree
from tiltyard.types import Arrays, EnvSpec

LEARNING_COPIES = 3  # per learner: the rollout, the learner's float copy, a minibatch with its activations
# Per learner: weights, gradients, two moments of Adam; weights and moments before an update; evaluator; going to disk.
WEIGHT_COPIES = 9
VERSION_COPIES = 4  # per past version: driver, shared memory, worker, evaluator


def has_workers(experiment: Experiment) -> bool:
    """Whether there will be worker processes, as far as the settings alone show."""
    engine = experiment.engine
    return engine.kind == "local" and (engine.mode == "async" or engine.workers not in ("auto", 0))


def check_engine(
    experiment: Experiment, spec: EnvSpec, base: Sequence[Path], continues: Path | None = None
) -> PolicyNet:
    """Check model options, shapes, device and memory. The weights of the checkpoint that it `continues` must fit.

    Returns the net of the first policy, for an engine in this process to train.
    """
    if experiment.engine.kind == "rllib":
        from tiltyard.engines.rllib.engine import check_rllib

        check_rllib(experiment, spec)
    else:
        device = device_named(experiment.engine.device)
        if experiment.engine.learners > 1:
            check_learners(experiment.engine.learners, device)
        if experiment.engine.affinity and not hasattr(os, "sched_setaffinity"):
            message = "engine.affinity = true: this system cannot pin processes to cores"
            raise UseError(message, "leave engine.affinity out")
        if has_workers(experiment) and isinstance(workers := experiment.engine.workers, int):
            require_worker_files(workers)
    if isinstance(experiment.algo, Clone):
        from tiltyard.engines.cloning import check_cloning  # pyarrow is slow to import and rarely needed

        check_cloning(experiment, spec)
    else:
        _check_memory(experiment, spec)
    _check_weights(experiment, spec, base)
    if experiment.several_policies or experiment.match:
        Match(experiment, spec.agents)
        frozen_nets(experiment, spec, base)
    if experiment.population is not None:
        parse_tunables(experiment.population.space)
    net = build_net(experiment, spec, base, experiment.learning[0])
    if isinstance(experiment.algo, Own | OwnAlgo):
        build_algo(experiment, experiment.learning[0], copy.deepcopy(net), base, seed=0).save()  # with algo.loss
    if continues is not None:
        for name in [name for name in saved_policies(continues) if name in experiment.learning]:
            net.require_fit(read_tree(continues / "policies", name, on_disk="weights/")["weights"])
    elif experiment.model.init:  # not read when continuing: it may be gone by then
        source = Path(experiment.model.init)
        _check_init(net.arrays(), read_tree(source / "policies", saved_policies(source)[0])["weights"])
    return net


def check_platform(experiment: Experiment) -> None:
    """ConfigError for settings that start processes in a way that only Linux has; this is another system."""
    env, engine = experiment.env, experiment.engine
    local = engine.kind == "local"
    needs_linux = (
        (env.isolate == "process", "env.isolate", env.isolate, "env.isolate=thread, or none"),
        (engine.kind != "rllib" and engine.learners > 1, "engine.learners", engine.learners, "engine.learners=1"),
        (local and engine.mode == "async", "engine.mode", engine.mode, "engine.mode=sync"),
        (local and engine.inference == "batched", "engine.inference", engine.inference, "engine.inference=auto"),
        (local and engine.workers not in ("auto", 0), "engine.workers", engine.workers, "engine.workers=0"),
    )
    problems = [
        Problem(setting, str(value), f"needs Linux, and this is {system_name()}", f"set {instead}")
        for wanted, setting, value, instead in needs_linux
        if wanted
    ]
    if problems:
        raise ConfigError(problems)


def _check_init(ours: Arrays, theirs: Arrays) -> None:
    """Refuse initial weights of which none fits."""
    if not any(name in theirs and theirs[name].shape == array.shape for name, array in ours.items()):
        there, here = (", ".join(f"{n} {a.shape}" for n, a in [*side.items()][:3]) for side in (theirs, ours))
        message = f"model.init: none of its weights fits this model (it has {there}, ...; the model has {here}, ...)"
        hint = "start from a run with a similar env and model, or leave model.init out"
        raise UseError(message, hint)


def _check_weights(experiment: Experiment, spec: EnvSpec, base: Sequence[Path]) -> None:
    """Refuse a built-in model that does not fit into memory, measured on the meta device, where plug-ins may fail."""
    if any(resolve.kind_of(text) for _, _, text in resolve.model_plugins(experiment.model)):
        return
    with torch.device("meta"):
        count = PolicyNet(spec, experiment.model, base, seed=0).parameter_count
    learners = experiment.engine.learners * len(experiment.learning)
    versions = sum(past.keep for past in experiment.past.values())
    wanted, free = 4 * count * (WEIGHT_COPIES * learners + VERSION_COPIES * versions), free_memory()
    if wanted > free:
        raise UseError(
            f"a model of {count:,} parameters needs about {wanted / 2**30:.1f} GiB for training, "
            f"but only {free / 2**30:.1f} GiB are free",
            "set smaller widths: model.hidden, model.memory.size, or the encoder's options",
        )


def _check_memory(experiment: Experiment, spec: EnvSpec) -> None:
    """Refuse rollouts that do not fit into memory: they are allocated as a whole."""
    numbers = 4 * (8 + spec.action.columns) + spec.action.mask_size
    each = sum(math.prod(item.shape) * (4 if item.dtype != "uint8" else 1) for item in spec.obs.values()) + numbers
    envs, steps = experiment.envs, experiment.algo.rollout
    rows, copies = envs * len(spec.agents), envs + min(experiment.eval.envs, experiment.eval.episodes)
    engine = experiment.engine
    times = LEARNING_COPIES * engine.learners + (slots_per_worker(engine.mode) if has_workers(experiment) else 0)
    wanted, free = times * each * rows * steps + copies * spec.env_bytes, free_memory()
    if wanted > free:
        raise UseError(
            f"engine.envs = {envs:,} x algo.rollout = {steps:,} needs about {wanted / 2**30:.1f} GiB "
            f"with {copies:,} copies of the env, "
            f"but only {free / 2**30:.1f} GiB are free",
            "use fewer envs or shorter rollouts",
        )
