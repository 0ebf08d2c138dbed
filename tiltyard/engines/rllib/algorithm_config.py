"""Builds the RLlib algorithm of an experiment: its classes and all settings. Checks `algo.options` of rllib:NAME.

settings_map.py lists what RLlib cannot do.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from inspect import signature
from typing import Any

from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.algorithms.tqc import TQCConfig
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from tiltyard.config.algos import Ppo
from tiltyard.config.experiment import family
from tiltyard.config.rllib_algos import Appo, Dqn, Impala, Named, Sac
from tiltyard.config.rllib_algos import Replay as ReplaySettings
from tiltyard.engines.collector import LEARN, stream_seed
from tiltyard.engines.rllib import learners, rl_modules
from tiltyard.engines.rllib.connectors import ReplayBuffer
from tiltyard.engines.rllib.env_runner import NoEnv, Runner
from tiltyard.engines.rllib.settings_map import envs_per_runner, needs, runner_count, schedule
from tiltyard.engines.rllib.worker_spec import KEY, WorkerSpec
from tiltyard.errors import Problem, did_you_mean
from tiltyard.plugins.resolve import short

# RLlib's settings, our learner and our module of each algorithm
PARTS: dict[str, tuple[Any, type[Any], type[Any]]] = {
    "ppo": (PPOConfig, learners.Ppo, rl_modules.ActorCritic),
    "rllib:PPO": (PPOConfig, learners.RllibPpo, rl_modules.ActorCritic),
    "impala": (IMPALAConfig, learners.Impala, rl_modules.ActorCritic),
    "appo": (APPOConfig, learners.Appo, rl_modules.ActorCritic),
    "dqn": (DQNConfig, learners.Dqn, rl_modules.Dueling),
    "sac": (SACConfig, learners.Sac, rl_modules.Squashed),
    "tqc": (TQCConfig, learners.Tqc, rl_modules.Quantiles),
}
ITERATION_SECONDS = 1.0  # for algorithms whose iterations have no natural length
SAMPLE_TIMEOUT = 10.0  # for a round of samples, in units of env.reset_timeout


def make_algorithm(worker_spec: WorkerSpec) -> Algorithm:
    """Build the algorithm and start its runners and learners."""
    algo = make_config(worker_spec).build_algo()
    settings, config = worker_spec.experiment.algo, algo.config
    if family(settings) in ("dqn", "sac"):
        seed = stream_seed(worker_spec.experiment.seed, LEARN)
        kept = _replay(settings, config)
        algo.local_replay_buffer = ReplayBuffer(kept, gamma=config.gamma, n_step=config.n_step, seed=seed)
    return algo


def _replay(settings: Any, config: Any) -> ReplaySettings:
    if isinstance(settings, Dqn | Sac):
        return settings.replay
    theirs = config.replay_buffer_config
    return ReplaySettings(
        size=int(theirs["capacity"]),
        prioritised="Prioritized" in str(theirs["type"]),
        alpha=theirs.get("alpha", 0.6),
        beta=theirs.get("beta", 0.4),
    )


def _parts(algo: Any) -> tuple[Any, type[Any], type[Any]]:
    return PARTS[algo.id] if algo.id in PARTS else PARTS[algo.id.removeprefix("rllib:").lower()]


def make_config(worker_spec: WorkerSpec) -> Any:
    """RLlib's config for a run."""
    experiment, own_config = worker_spec.experiment, worker_spec.as_config()
    algo: Any = experiment.algo
    engine = experiment.engine
    asked = needs(experiment)
    make, learner, module = _parts(algo)
    config = make()
    if not isinstance(algo, Named):
        config.training(gamma=algo.gamma, grad_clip=algo.max_grad_norm, grad_clip_by="global_norm")
    _TRAINING["rllib" if isinstance(algo, Named) else algo.id](config, algo, worker_spec)
    config.environment(NoEnv, env_config=own_config, **worker_spec.spaces(), disable_env_checking=True)
    config.framework("torch")
    rollout = max(algo.rollout, getattr(config, "n_step", 1))
    config.env_runners(
        env_runner_cls=Runner,
        num_env_runners=runner_count(experiment),
        num_envs_per_env_runner=envs_per_runner(experiment),
        rollout_fragment_length=rollout,
        batch_mode="truncate_episodes",
        num_cpus_per_env_runner=1,
        merge_env_runner_states=False,
        use_env_runner_state_server=False,
        sample_timeout_s=SAMPLE_TIMEOUT * experiment.env.reset_timeout,
    )
    config.learners(
        num_learners=asked.learners,
        num_cpus_per_learner=1 if asked.learners else 0,
        num_gpus_per_learner=asked.gpus / max(1, engine.learners),
        learner_class=learner,
        learner_config_dict=own_config,
    )
    config.fault_tolerance(
        restart_failed_env_runners=True,
        max_num_env_runner_restarts=engine.restarts,
        num_consecutive_env_runner_failures_tolerance=engine.restarts,
        delay_between_env_runner_restarts_s=1.0,
        env_runner_health_probe_timeout_s=5.0,
        env_runner_restore_timeout_s=60.0,
    )
    config.debugging(log_level="ERROR")
    config.reporting(metrics_num_episodes_for_smoothing=100)
    config.rl_module(rl_module_spec=_modules(worker_spec, module, config))
    return config


MODULE_OPTIONS = ("dueling", "n_quantiles", "n_critics", "top_quantiles_to_drop_per_net")  # from the algorithm


def _modules(worker_spec: WorkerSpec, module: type[Any], config: Any) -> Any:
    experiment, own = worker_spec.experiment, worker_spec.as_config()[KEY]
    options = {"max_seq_len": experiment.model.memory.bptt, "twin_q": True}
    options |= {name: getattr(config, name) for name in MODULE_OPTIONS if hasattr(config, name)}

    def spec(policy: str) -> RLModuleSpec:
        settings = {KEY: {**own, "policy": policy}, **options}
        return RLModuleSpec(module_class=module, **worker_spec.spaces(), model_config=settings)

    if not experiment.several_policies:
        return spec(experiment.learning[0])
    return MultiRLModuleSpec(rl_module_specs={name: spec(name) for name in experiment.learning})


# ------------------------------------------------------------------------------------------------ per algorithm


def _ppo(config: Any, algo: Ppo, worker_spec: WorkerSpec) -> None:
    experiment = worker_spec.experiment
    batch, count = experiment.batch * len(worker_spec.spec.agents), max(1, experiment.engine.learners)
    config.training(
        lr=schedule(algo.lr, experiment.stop.env_steps),
        train_batch_size_per_learner=max(1, batch // count),
        num_epochs=algo.epochs,
        minibatch_size=min(max(1, algo.minibatch // count), batch),
        shuffle_batch_per_epoch=True,
        use_kl_loss=False,
    )
    if experiment.several_policies:
        names = experiment.learning
        config.multi_agent(policies=set(names), policy_mapping_fn=_policy_of_episode, policies_to_train=names)
    config.reporting(min_time_s_per_iteration=0)


def _policy_of_episode(agent: Any, episode: Any, **_: Any) -> Any:
    """The policy that acted in an episode; runners record it."""
    return episode.module_id


def _impala(config: Any, algo: Impala | Appo, worker_spec: WorkerSpec) -> None:
    total = worker_spec.experiment.stop.env_steps
    config.training(
        lr=schedule(algo.lr, total),
        train_batch_size_per_learner=algo.batch,
        entropy_coeff=schedule(algo.entropy, total),
        vf_loss_coeff=algo.value_coef,
        vtrace_clip_rho_threshold=algo.rho_clip,
        vtrace_clip_pg_rho_threshold=algo.rho_clip,
    )
    config.reporting(min_time_s_per_iteration=ITERATION_SECONDS)


def _appo(config: Any, algo: Appo, worker_spec: WorkerSpec) -> None:
    _impala(config, algo, worker_spec)
    config.training(
        clip_param=algo.clip,
        use_kl_loss=algo.kl > 0,
        kl_coeff=algo.kl,
        kl_target=algo.kl_target,
        target_network_update_freq=algo.target_every,
        use_circular_buffer=False,
        circular_buffer_num_batches=1,
        circular_buffer_iterations_per_batch=1,
    )


def _replay_settings(config: Any, algo: Dqn | Sac, worker_spec: WorkerSpec) -> None:
    count = runner_count(worker_spec.experiment)
    config.training(
        n_step=algo.n_step,
        tau=algo.tau,
        train_batch_size_per_learner=algo.batch,
        target_network_update_freq=algo.target_every,
        num_steps_sampled_before_learning_starts=algo.warmup,
        # RLlib counts one runner too many
        training_intensity=algo.replays * max(1, count) / (count + 1),
        replay_buffer_config={"type": "PrioritizedEpisodeReplayBuffer", "capacity": 1},  # replaced by ours
    )
    config.reporting(min_time_s_per_iteration=ITERATION_SECONDS, min_sample_timesteps_per_iteration=0)


def _dqn(config: Any, algo: Dqn, worker_spec: WorkerSpec) -> None:
    _replay_settings(config, algo, worker_spec)
    lr = schedule(algo.lr, worker_spec.experiment.stop.env_steps)
    config.training(lr=lr, double_q=algo.double, dueling=algo.dueling, num_atoms=1)


def _sac(config: Any, algo: Sac, worker_spec: WorkerSpec) -> None:
    _replay_settings(config, algo, worker_spec)
    total = worker_spec.experiment.stop.env_steps
    config.training(
        lr=None,
        actor_lr=schedule(algo.lr, total),
        critic_lr=schedule(algo.critic_lr, total),
        alpha_lr=schedule(algo.alpha_lr, total),
        initial_alpha=algo.alpha,
        target_entropy="auto" if algo.target_entropy is None else algo.target_entropy,
        twin_q=True,
    )


def _named(config: Any, algo: Named, worker_spec: WorkerSpec) -> None:
    config.training(**algo.options)
    config.reporting(min_time_s_per_iteration=0 if family(algo) == "ppo" else ITERATION_SECONDS)
    if family(algo) in ("dqn", "sac"):
        config.reporting(min_sample_timesteps_per_iteration=0)


_TRAINING: dict[str, Any] = {"ppo": _ppo, "impala": _impala, "appo": _appo, "dqn": _dqn, "sac": _sac, "rllib": _named}


# ---------------------------------------------------------------------------------------------- options of rllib:NAME


ROLLOUT_OPTION = "rollout_fragment_length"  # RLlib's name of algo.rollout
NOT_SETTABLE = {
    **dict.fromkeys(("model", "policy_model_config", "q_model_config", "hiddens"), "the network is set by `model`"),
    **dict.fromkeys(("learner_class", "learner_connector", "learner_config_dict"), "Tiltyard has its own learner"),
    **dict.fromkeys(("num_atoms", "noisy", "sigma0", "v_min", "v_max"), "the network has one output per action"),
    "add_default_connectors_to_learner_pipeline": "Tiltyard has its own learner",
    "twin_q": "there are always two critics",
    "burn_in_len": "single steps are replayed",
    "store_buffer_in_checkpoints": "checkpoints always include the buffer",
}


def option_problems(worker_spec: WorkerSpec) -> Iterator[Problem]:
    """Options that RLlib does not know, that Tiltyard sets itself, or that contradict other settings."""
    algo = worker_spec.experiment.algo
    assert isinstance(algo, Named)
    methods = [vars(kind)["training"] for kind in _parts(algo)[0].__mro__ if "training" in vars(kind)]
    parameters = [each for method in methods for each in signature(method).parameters.values()]
    known = {each.name for each in parameters if each.kind == each.KEYWORD_ONLY} - NOT_SETTABLE.keys()
    wrong = [name for name in algo.options if name not in known]
    for name in wrong:
        why, hint = f"is not an option of {algo.id}", did_you_mean(name, known)
        if name in NOT_SETTABLE:
            why, hint = f"cannot be set: {NOT_SETTABLE[name]}", "remove it"
        yield Problem(f"algo.options.{name}", short(algo.options[name]), why, hint)
    if not wrong:
        config: Any = None
        logging.disable(logging.WARNING)  # RLlib logs which API stack it uses
        try:
            config = make_config(worker_spec)
            config.validate()
        except (ValueError, TypeError, AssertionError) as error:
            reason = " ".join(str(error).partition("To suppress")[0].split())
            reason = reason.replace(ROLLOUT_OPTION, "algo.rollout").replace("to 'auto' OR ", "")
            why = f"RLlib refuses them: {reason}"
            yield Problem("algo.options", short(algo.options), why, "see RLlib's documentation")
        finally:
            logging.disable(logging.NOTSET)
        if isinstance(getattr(config, "n_step", 1), tuple | list):
            yield Problem("algo.options.n_step", short(config.n_step), "must be one number", "set it to 1 or more")
