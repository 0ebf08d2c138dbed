"""Which settings RLlib cannot satisfy and why, and how many processes and which schedules it gets.

algorithm_config.py maps the other settings. Those of `env` and `model` work as on every engine, because our runner and
our module implement them with the same code.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tiltyard.config.algos import Algo, Ppo
from tiltyard.config.experiment import Experiment, family
from tiltyard.config.rllib_algos import Appo, Dqn, Impala, Named, Sac
from tiltyard.config.schedules import KlAdaptive, Linear, Piecewise, Scheduled
from tiltyard.engines.rllib.allocation import allocation
from tiltyard.engines.rllib.ray_cluster import Needs
from tiltyard.errors import Problem
from tiltyard.models import distributions
from tiltyard.plugins.resolve import short
from tiltyard.processes.resources import usable_cores
from tiltyard.types import EnvSpec

# Setting -> (accepted values, why others are refused)
REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "engine.workers": (("auto",), "the number of RLlib's processes is engine.runners"),
    "engine.mode": (("sync",), "the algorithm decides: appo and impala are asynchronous, the others are synchronous"),
    "engine.inference": (("auto", "worker"), "every runner chooses the actions for its own envs"),
    "engine.max_lag": ((20,), "RLlib does not discard old samples"),
    "engine.affinity": ((False,), "Ray places processes"),
    "engine.tune": ((False,), "only the local engine can be tuned"),
    "ppo.advantage": (("gae",), "RLlib's PPO samples with the newest weights; appo and impala correct for older ones"),
    "ppo.rho_clip": ((1.0,), "it applies to advantages other than gae"),
    "ppo.kl_stop": ((None,), "RLlib's learner cannot skip epochs"),
    "ppo.loss": ((None,), "only the learners of the local engine add your term"),
}


def problems(experiment: Experiment, spec: EnvSpec | None = None) -> Iterator[Problem]:
    """Settings that RLlib cannot satisfy; with the env's spec, also algorithms that do not support its actions."""
    algo = experiment.algo
    if not isinstance(algo, Ppo | Impala | Appo | Dqn | Sac | Named):
        message = "is not available with engine.kind = rllib"
        yield Problem("algo.id", repr(algo.id), message, "set algo.id=ppo, or engine.kind=local")
        return
    for setting, (fine, reason) in REFUSED.items():
        section, _, name = setting.partition(".")
        place = algo if section == algo.id else experiment.engine if section == "engine" else None
        value = getattr(place, name) if place is not None else fine[0]
        if value not in fine:
            shown = f"algo.{name}" if section == algo.id else setting
            message = f"is not supported with engine.kind = rllib: {reason}"
            yield Problem(shown, short(getattr(value, "id", value)), message, f"remove {shown}")
    yield from _schedules(experiment)
    yield from _models(experiment)
    if spec is not None:
        yield from _actions(experiment, spec)


def _schedules(experiment: Experiment) -> Iterator[Problem]:
    if isinstance(experiment.algo, Ppo):
        return  # our own learner supports all kinds
    for name in ("lr", "critic_lr", "alpha_lr", "entropy", "epsilon"):
        if isinstance(getattr(experiment.algo, name, None), KlAdaptive):
            message = f"adapts to a KL divergence, which RLlib's {experiment.algo.id} does not report"
            yield Problem(f"algo.{name}", "kl_adaptive", message, f"use a linear schedule for algo.{name}")


def _models(experiment: Experiment) -> Iterator[Problem]:
    model, algo = experiment.model, experiment.algo
    if family(algo) in ("dqn", "sac"):
        if model.memory.kind != "none":
            message = f"needs whole sequences, but algo.id = {algo.id} replays single steps"
            yield Problem("model.memory.kind", repr(model.memory.kind), message, "set algo.id=ppo, appo or impala")
        if family(algo) == "sac" and model.id != "actor_critic":
            message = "is a whole model, but sac needs critics with the action as input"
            hint = "write an encoder and set model.encoder; heads and critics are built around it"
            yield Problem("model.id", repr(model.id), message, hint)
    if not isinstance(algo, Ppo) and experiment.several_policies:
        message = f"must be one: RLlib's {algo.id} trains a single policy here"
        yield Problem("policies", "", message, "use algo.id=ppo")
    if model.normalise.returns and not isinstance(algo, Ppo):
        message = f"is not supported by RLlib's {algo.id}"
        yield Problem("model.normalise.returns", "true", message, "remove model.normalise.returns")


def _actions(experiment: Experiment, spec: EnvSpec) -> Iterator[Problem]:
    parts, algo = spec.action.parts, experiment.algo
    if family(algo) == "dqn" and (len(parts) != 1 or parts[0].kind != "categorical"):
        message = f"needs discrete actions, but {experiment.env.id} has others"
        yield Problem("algo.id", repr(algo.id), message, "use ppo, appo, impala or sac")
    if family(algo) == "sac" and not distributions.can_squash(spec.action):
        message = f"needs bounded continuous actions, but {experiment.env.id} has others"
        yield Problem("algo.id", repr(algo.id), message, "use ppo, appo, impala or dqn")


# ------------------------------------------------------------------------------------------------ sizes


def needs(experiment: Experiment) -> Needs:
    """The processes besides the driver, and their resources."""
    engine = experiment.engine
    learners = engine.learners if engine.learners > 1 else 0
    gpus = (1.0 if engine.gpus is None else engine.gpus) if engine.device != "cpu" else 0.0
    return Needs(runner_count(experiment), learners, gpus * engine.learners)


def runner_count(experiment: Experiment) -> int:
    """The number of runner processes; 0 if the driver samples."""
    engine = experiment.engine
    if engine.runners != "auto":
        return engine.runners
    job = allocation() if engine.address is None else None
    learners = max(1, engine.learners)  # the driver learns and needs a core
    most = max(1, job.cpus if job is not None else (engine.cpus or usable_cores()) * engine.nodes - learners)
    return max(count for count in range(1, min(most, engine.envs) + 1) if engine.envs % count == 0)


def envs_per_runner(experiment: Experiment) -> int:
    """The number of envs in each runner."""
    engine = experiment.engine
    return engine.envs_per_runner or engine.envs // max(1, runner_count(experiment))


def schedule(value: Any, total: int | None) -> Any:
    """A number, or [[env step, value], ...] from env step 0 on."""
    if isinstance(value, Linear):
        return [[0, value.start], [value.over or total or 1, value.end]]
    if isinstance(value, Piecewise):
        points = [[int(step), each] for step, each in value.points]
        return points if points[0][0] == 0 else [[0, points[0][1]], *points]
    return float(value.start if isinstance(value, KlAdaptive) else value)


def epsilon(algo: Algo, config: Any) -> Scheduled | None:
    """The share of random actions, for algorithms that explore so; `config` is RLlib's."""
    if isinstance(algo, Dqn):
        return algo.epsilon
    if family(algo) != "dqn":
        return None
    points = config.epsilon
    if isinstance(points, int | float):
        return float(points)
    return Piecewise(kind="piecewise", points=[[float(step), float(share)] for step, share in points])
