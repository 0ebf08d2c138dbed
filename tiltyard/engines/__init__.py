"""Engines: what happens inside the process tree that learns. One is picked by `engine.kind`; none knows launchers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from tiltyard.config.experiment import Experiment
from tiltyard.errors import UseError
from tiltyard.machine import free_memory
from tiltyard.types import Engine, EnvSpec

LEARNING_COPIES = 3  # the rollout, its float form on the learner's side, and a minibatch with its activations


def make_engine(experiment: Experiment, spec: EnvSpec, base: Sequence[Path]) -> Engine:
    """The engine that the experiment asks for."""
    from tiltyard.engines.serial import SerialEngine

    return SerialEngine(experiment, spec, base)


def check_engine(experiment: Experiment, spec: EnvSpec, base: Sequence[Path]) -> None:
    """Everything about model and size that can be known before a run exists: options, shapes, device, memory."""
    from tiltyard.algos.ppo import Ppo
    from tiltyard.engines.serial import device_named
    from tiltyard.models.net import PolicyNet

    device_named(experiment.engine.device)
    _check_memory(experiment, spec)
    net = PolicyNet(spec, experiment.model, base, seed=0)
    Ppo(experiment.algo, net, experiment.model.memory.bptt, experiment.stop.env_steps, seed=0)


def _check_memory(experiment: Experiment, spec: EnvSpec) -> None:
    """The rollout is allocated whole: more of it than there is memory is refused with the numbers, not tried."""
    numbers = 4 * (8 + spec.action.columns) + spec.action.mask_size
    each = sum(math.prod(item.shape) * (4 if item.dtype != "uint8" else 1) for item in spec.obs.values()) + numbers
    rows, steps = experiment.engine.envs, experiment.algo.rollout
    wanted, free = LEARNING_COPIES * each * rows * steps + rows * spec.env_bytes, free_memory()
    if free is not None and wanted > free:
        raise UseError(
            f"engine.envs = {rows:,} x algo.rollout = {steps:,} needs about {wanted / 2**30:.1f} GiB, "
            f"and {free / 2**30:.1f} GiB are free",
            "use fewer envs or shorter rollouts",
        )
