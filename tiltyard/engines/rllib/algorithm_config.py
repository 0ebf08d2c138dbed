"""Builds the RLlib algorithm of an experiment: its classes, and all settings as settings_map.py lists them."""

from __future__ import annotations

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

from tiltyard.config.algos import Ppo, family
from tiltyard.config.rllib_algos import Appo, Dqn, Impala, Named, Sac
from tiltyard.config.rllib_algos import Replay as ReplaySettings
from tiltyard.engines.collector import LEARN, stream_seed
from tiltyard.engines.rllib import learners, rl_modules
from tiltyard.engines.rllib.env_runner import NoEnv, Runner
from tiltyard.engines.rllib.replay_buffer import ReplayBuffer
from tiltyard.engines.rllib.settings_map import envs_per_runner, needs, runner_count, schedule
from tiltyard.engines.rllib.worker_spec import KEY, WorkerSpec, action_space, observation_space

CONFIGS: dict[str, Any] = {
    "ppo": PPOConfig,
    "impala": IMPALAConfig,
    "appo": APPOConfig,
    "dqn": DQNConfig,
    "sac": SACConfig,
    "tqc": TQCConfig,
}
LEARNERS: dict[str, type[Any]] = {
    "ppo": learners.Ppo,
    "impala": learners.Impala,
    "appo": learners.Appo,
    "dqn": learners.Dqn,
    "sac": learners.Sac,
    "tqc": learners.Tqc,
    "rllib:PPO": learners.RllibPpo,
}
MODULES: dict[str, type[Any]] = {"dqn": rl_modules.Dueling, "sac": rl_modules.Squashed, "tqc": rl_modules.Quantiles}
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


def rllib_name(algo: Any) -> str:
    """RLlib's name of the algorithm, in lower case."""
    return str(algo.id).removeprefix("rllib:").lower()


def make_config(worker_spec: WorkerSpec) -> Any:
    """RLlib's config for a run."""
    experiment, own_config = worker_spec.experiment, worker_spec.as_config()
    algo, engine = experiment.algo, experiment.engine
    asked = needs(experiment)
    name = rllib_name(algo)
    config = CONFIGS[name]()
    _TRAINING["rllib" if isinstance(algo, Named) else name](config, worker_spec, max(1, engine.learners))
    config.environment(
        NoEnv,
        env_config=own_config,
        observation_space=observation_space(worker_spec.spec),
        action_space=action_space(worker_spec),
        disable_env_checking=True,
    )
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
    remote = asked.learners
    config.learners(
        num_learners=remote,
        num_cpus_per_learner=1 if remote else 0,
        num_gpus_per_learner=asked.gpus / max(1, engine.learners),
        learner_class=LEARNERS.get(algo.id, LEARNERS[name]),
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
    config.rl_module(rl_module_spec=_modules(worker_spec, own_config, config))
    return config


MODULE_OPTIONS = ("dueling", "n_quantiles", "n_critics", "top_quantiles_to_drop_per_net")  # from the algorithm


def _modules(worker_spec: WorkerSpec, own_config: dict[str, Any], config: Any) -> Any:
    experiment = worker_spec.experiment
    kind = MODULES.get(rllib_name(experiment.algo), rl_modules.ActorCritic)
    options = {"max_seq_len": experiment.model.memory.bptt, "twin_q": True}
    options |= {name: getattr(config, name) for name in MODULE_OPTIONS if hasattr(config, name)}

    def spec(policy: str) -> RLModuleSpec:
        own = {KEY: {**own_config[KEY], "policy": policy}}
        return RLModuleSpec(
            module_class=kind,
            observation_space=observation_space(worker_spec.spec),
            action_space=action_space(worker_spec),
            model_config={**own, **options},
        )

    if not experiment.several_policies:
        return spec(experiment.learning[0])
    return MultiRLModuleSpec(rl_module_specs={name: spec(name) for name in experiment.learning})


# ------------------------------------------------------------------------------------------------ per algorithm


def _ppo(config: Any, worker_spec: WorkerSpec, learners_: int) -> None:
    algo, experiment = worker_spec.experiment.algo, worker_spec.experiment
    assert isinstance(algo, Ppo)
    batch = experiment.batch * len(worker_spec.spec.agents)
    config.training(
        lr=schedule(algo.lr, experiment.stop.env_steps),
        gamma=algo.gamma,
        grad_clip=algo.max_grad_norm,
        grad_clip_by="global_norm",
        train_batch_size_per_learner=max(1, batch // learners_),
        num_epochs=algo.epochs,
        minibatch_size=min(max(1, algo.minibatch // learners_), batch),
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


def _impala(config: Any, worker_spec: WorkerSpec, learners_: int) -> None:
    algo, stop = worker_spec.experiment.algo, worker_spec.experiment.stop
    assert isinstance(algo, Impala | Appo)
    config.training(
        lr=schedule(algo.lr, stop.env_steps),
        gamma=algo.gamma,
        grad_clip=algo.max_grad_norm,
        grad_clip_by="global_norm",
        train_batch_size_per_learner=algo.batch,
        entropy_coeff=schedule(algo.entropy, stop.env_steps),
        vf_loss_coeff=algo.value_coef,
        vtrace_clip_rho_threshold=algo.rho_clip,
        vtrace_clip_pg_rho_threshold=algo.rho_clip,
    )
    config.reporting(min_time_s_per_iteration=ITERATION_SECONDS)


def _appo(config: Any, worker_spec: WorkerSpec, learners_: int) -> None:
    _impala(config, worker_spec, learners_)
    algo = worker_spec.experiment.algo
    assert isinstance(algo, Appo)
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


def _replay_settings(config: Any, worker_spec: WorkerSpec, learners_: int) -> None:
    algo = worker_spec.experiment.algo
    assert isinstance(algo, Dqn | Sac)
    count = runner_count(worker_spec.experiment)
    config.training(
        gamma=algo.gamma,
        n_step=algo.n_step,
        tau=algo.tau,
        grad_clip=algo.max_grad_norm,
        grad_clip_by="global_norm",
        train_batch_size_per_learner=algo.batch,
        target_network_update_freq=algo.target_every,
        num_steps_sampled_before_learning_starts=algo.warmup,
        # RLlib counts one runner too many
        training_intensity=algo.replays * max(1, count) / (count + 1),
        replay_buffer_config={"type": "PrioritizedEpisodeReplayBuffer", "capacity": 1},  # replaced by ours
    )
    config.reporting(min_time_s_per_iteration=ITERATION_SECONDS, min_sample_timesteps_per_iteration=0)


def _dqn(config: Any, worker_spec: WorkerSpec, learners_: int) -> None:
    _replay_settings(config, worker_spec, learners_)
    algo = worker_spec.experiment.algo
    assert isinstance(algo, Dqn)
    config.training(
        lr=schedule(algo.lr, worker_spec.experiment.stop.env_steps),
        double_q=algo.double,
        dueling=algo.dueling,
        num_atoms=1,
    )


def _sac(config: Any, worker_spec: WorkerSpec, learners_: int) -> None:
    _replay_settings(config, worker_spec, learners_)
    algo, total = worker_spec.experiment.algo, worker_spec.experiment.stop.env_steps
    assert isinstance(algo, Sac)
    config.training(
        lr=None,
        actor_lr=schedule(algo.lr, total),
        critic_lr=schedule(algo.critic_lr, total),
        alpha_lr=schedule(algo.alpha_lr, total),
        initial_alpha=algo.alpha,
        target_entropy="auto" if algo.target_entropy is None else algo.target_entropy,
        twin_q=True,
    )


def _named(config: Any, worker_spec: WorkerSpec, learners_: int) -> None:
    algo = worker_spec.experiment.algo
    assert isinstance(algo, Named)
    config.training(**algo.options)
    config.reporting(min_time_s_per_iteration=0 if family(algo) == "ppo" else ITERATION_SECONDS)
    if family(algo) in ("dqn", "sac"):
        config.reporting(min_sample_timesteps_per_iteration=0)


_TRAINING = {"ppo": _ppo, "impala": _impala, "appo": _appo, "dqn": _dqn, "sac": _sac, "rllib": _named}
