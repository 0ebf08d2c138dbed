"""Maps every setting of an experiment to RLlib, or refuses it with a reason.

TRANSLATED names what implements a setting, REFUSED why RLlib cannot; each setting is in exactly one of them. Settings
that our runner or module implements work as on every engine, because the same code runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tiltyard.config.algos import Algo, Ppo, family
from tiltyard.config.experiment import Experiment
from tiltyard.config.rllib_algos import Appo, Dqn, Impala, Named, Sac
from tiltyard.config.schedules import KlAdaptive, Linear, Piecewise, Scheduled
from tiltyard.engines.rllib.allocation import allocation
from tiltyard.engines.rllib.ray_cluster import Needs
from tiltyard.errors import Problem
from tiltyard.models import distributions
from tiltyard.plugins.resolve import short
from tiltyard.processes.resources import usable_cores
from tiltyard.types import EnvSpec

RUNNER, MODULE, LEARNER, LOOP = "our runner", "our module", "our learner", "the training loop"

TRANSLATED = {
    "env": RUNNER,  # the whole section: runners make and step envs as all engines do
    "model": MODULE,
    "policies": "several modules",
    "match": RUNNER,
    "stop": LOOP,
    "eval": LOOP,
    "save": LOOP,
    "track": LOOP,
    "seed": "random streams of each runner's rows, the weights and the driver",
    "engine.kind": "this engine",
    "engine.envs": "num_envs_per_env_runner x num_env_runners",
    "engine.runners": "num_env_runners",
    "engine.envs_per_runner": "num_envs_per_env_runner",
    "engine.learners": "num_learners (a single one runs in the driver)",
    "engine.threads": "torch threads of each learner; auto is 1",
    "engine.restarts": "max_num_env_runner_restarts",
    "engine.device": "num_gpus_per_learner",
    "engine.cpus": "ray.init(num_cpus)",
    "engine.gpus": "num_gpus_per_learner",
    "engine.object_store": "ray.init(object_store_memory)",
    "engine.temp_dir": "ray.init(_temp_dir)",
    "engine.address": "ray.init(address)",
    "engine.nodes": "ray.cluster_utils.Cluster",
    **{f"ppo.{name}": LEARNER for name in ("clip", "value_clip", "value_coef", "entropy", "kl", "normalise_advantage")},
    **{f"ppo.{name}": LEARNER for name in ("lr", "gamma", "gae_lambda", "adam_eps")},
    "ppo.id": "PPO",
    "ppo.rollout": "rollout_fragment_length",
    "ppo.minibatch": "minibatch_size",
    "ppo.epochs": "num_epochs",
    "ppo.max_grad_norm": "grad_clip",
}
for _algo, _names in {
    "impala": {"rho_clip": "vtrace_clip_rho_threshold, vtrace_clip_pg_rho_threshold"},
    "appo": {
        "rho_clip": "vtrace_clip_rho_threshold, vtrace_clip_pg_rho_threshold",
        "clip": "clip_param",
        "kl": "kl_coeff, use_kl_loss",
        "kl_target": "kl_target",
        "target_every": "target_network_update_freq",
    },
}.items():
    TRANSLATED |= {
        f"{_algo}.id": _algo.upper(),
        f"{_algo}.rollout": "rollout_fragment_length",
        f"{_algo}.batch": "train_batch_size_per_learner",
        f"{_algo}.lr": "lr",
        f"{_algo}.gamma": "gamma",
        f"{_algo}.value_coef": "vf_loss_coeff",
        f"{_algo}.entropy": "entropy_coeff",
        f"{_algo}.max_grad_norm": "grad_clip",
        f"{_algo}.adam_eps": LEARNER,
        **{f"{_algo}.{name}": theirs for name, theirs in _names.items()},
    }
for _algo in ("dqn", "sac"):
    TRANSLATED |= {
        f"{_algo}.id": _algo.upper(),
        f"{_algo}.rollout": "rollout_fragment_length",
        f"{_algo}.batch": "train_batch_size_per_learner",
        f"{_algo}.replays": "training_intensity",
        f"{_algo}.gamma": "gamma",
        f"{_algo}.n_step": "n_step",
        f"{_algo}.warmup": "num_steps_sampled_before_learning_starts",
        f"{_algo}.target_every": "target_network_update_freq",
        f"{_algo}.tau": "tau",
        f"{_algo}.replay": "replay_buffer_config",
        f"{_algo}.max_grad_norm": "grad_clip",
    }
TRANSLATED |= {
    "dqn.lr": "lr",
    "dqn.double": "double_q",
    "dqn.dueling": MODULE,
    "dqn.epsilon": RUNNER,
    "dqn.adam_eps": LEARNER,
    "sac.lr": "actor_lr",
    "sac.critic_lr": "critic_lr",
    "sac.alpha_lr": "alpha_lr",
    "sac.alpha": "initial_alpha",
    "sac.target_entropy": "target_entropy",
    "rllib.id": "the algorithm of that name",
    "rllib.rollout": "rollout_fragment_length",
    "rllib.options": "training()",
}

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
}


def problems(experiment: Experiment, spec: EnvSpec | None = None) -> Iterator[Problem]:
    """Settings that RLlib cannot satisfy; with the env's spec, also algorithms that do not support its actions."""
    algo = experiment.algo
    if not isinstance(algo, Ppo | Impala | Appo | Dqn | Sac | Named):
        yield Problem(
            "algo.id",
            repr(algo.id),
            "is not available with engine.kind = rllib",
            "set algo.id=ppo, or engine.kind=local",
        )
        return
    for setting, (fine, reason) in REFUSED.items():
        section, _, name = setting.partition(".")
        place = algo if section == algo.id else experiment.engine if section == "engine" else None
        value = getattr(place, name) if place is not None else fine[0]
        if value not in fine:
            shown = f"algo.{name}" if section == algo.id else setting
            yield Problem(
                shown, short(value), f"is not supported with engine.kind = rllib: {reason}", f"remove {shown}"
            )
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


def all_settings(experiment: Experiment) -> list[str]:
    """All settings of an experiment, named as in the two tables."""
    word = "rllib" if isinstance(experiment.algo, Named) else experiment.algo.id
    own = [f"{word}.{name}" for name in type(experiment.algo).model_fields]
    engine = [f"engine.{name}" for name in type(experiment.engine).model_fields]
    return [*own, *engine, "env", "model", "policies", "match", "stop", "eval", "save", "track", "seed"]
