"""The experiment as one of RLlib's algorithms: which classes, and every number of translate.py put where it belongs."""

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
from tiltyard.engines.rllib.replay_buffer import Replay
from tiltyard.engines.rllib.settings_map import envs_each, needs, runners, schedule
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
    "rllib:PPO": learners.TheirPpo,
}
MODULES: dict[str, type[Any]] = {"dqn": rl_modules.Dueling, "sac": rl_modules.Squashed, "tqc": rl_modules.Quantiles}
SECONDS_EACH = 1.0  # of an iteration, for algorithms whose iterations have no length of their own
TIMEOUT = 10.0  # times as long as a step may take, for a whole round of samples


def algorithm(task: WorkerSpec) -> Algorithm:
    """Built, with its runners and learners started."""
    algo = configured(task).build_algo()
    settings, config = task.experiment.algo, algo.config
    if family(settings) in ("dqn", "sac"):
        seed = stream_seed(task.experiment.seed, LEARN)
        kept = _replay(settings, config)
        algo.local_replay_buffer = Replay(kept, gamma=config.gamma, n_step=config.n_step, seed=seed)
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


def rllibs_name(algo: Any) -> str:
    """RLlib's, in small letters."""
    return str(algo.id).removeprefix("rllib:").lower()


def configured(task: WorkerSpec) -> Any:
    """RLlib's settings for a task."""
    experiment, told = task.experiment, task.told()
    algo, engine = experiment.algo, experiment.engine
    asked = needs(experiment)
    name = rllibs_name(algo)
    config = CONFIGS[name]()
    _TRAINING["rllib" if isinstance(algo, Named) else name](config, task, max(1, engine.learners))
    config.environment(
        NoEnv,
        env_config=told,
        observation_space=observation_space(task.spec),
        action_space=action_space(task),
        disable_env_checking=True,
    )
    config.framework("torch")
    rollout = max(algo.rollout, getattr(config, "n_step", 1))
    config.env_runners(
        env_runner_cls=Runner,
        num_env_runners=runners(experiment),
        num_envs_per_env_runner=envs_each(experiment),
        rollout_fragment_length=rollout,
        batch_mode="truncate_episodes",
        num_cpus_per_env_runner=1,
        merge_env_runner_states=False,
        use_env_runner_state_server=False,
        sample_timeout_s=TIMEOUT * experiment.env.reset_timeout,
    )
    remote = asked.learners
    config.learners(
        num_learners=remote,
        num_cpus_per_learner=1 if remote else 0,
        num_gpus_per_learner=asked.gpus / max(1, engine.learners),
        learner_class=LEARNERS.get(algo.id, LEARNERS[name]),
        learner_config_dict=told,
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
    config.rl_module(rl_module_spec=_modules(task, told, config))
    return config


SHAPES = ("dueling", "n_quantiles", "n_critics", "top_quantiles_to_drop_per_net")  # of a module, from the algorithm


def _modules(task: WorkerSpec, told: dict[str, Any], config: Any) -> Any:
    experiment = task.experiment
    kind = MODULES.get(rllibs_name(experiment.algo), rl_modules.ActorCritic)
    length = {"max_seq_len": experiment.model.memory.bptt, "twin_q": True}
    length |= {name: getattr(config, name) for name in SHAPES if hasattr(config, name)}

    def spec(policy: str) -> RLModuleSpec:
        own = {KEY: {**told[KEY], "policy": policy}}
        return RLModuleSpec(
            module_class=kind,
            observation_space=observation_space(task.spec),
            action_space=action_space(task),
            model_config={**own, **length},
        )

    if len(experiment.policy_settings) == 1:
        return spec(experiment.learning[0])
    return MultiRLModuleSpec(rl_module_specs={name: spec(name) for name in experiment.learning})


# ------------------------------------------------------------------------------------------------ of each algorithm


def _ppo(config: Any, task: WorkerSpec, learners_: int) -> None:
    algo, experiment = task.experiment.algo, task.experiment
    assert isinstance(algo, Ppo)
    batch = experiment.batch * len(task.spec.agents)
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
    if len(experiment.policy_settings) > 1:
        names = experiment.learning
        config.multi_agent(policies=set(names), policy_mapping_fn=_seated, policies_to_train=names)
    config.reporting(min_time_s_per_iteration=0)


def _seated(agent: Any, episode: Any, **_: Any) -> Any:
    """Runners say whose an episode is."""
    return episode.module_id


def _impala(config: Any, task: WorkerSpec, learners_: int) -> None:
    algo, stop = task.experiment.algo, task.experiment.stop
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
    config.reporting(min_time_s_per_iteration=SECONDS_EACH)


def _appo(config: Any, task: WorkerSpec, learners_: int) -> None:
    _impala(config, task, learners_)
    algo = task.experiment.algo
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


def _replaying(config: Any, task: WorkerSpec, learners_: int) -> None:
    algo = task.experiment.algo
    assert isinstance(algo, Dqn | Sac)
    count = runners(task.experiment)
    config.training(
        gamma=algo.gamma,
        n_step=algo.n_step,
        tau=algo.tau,
        grad_clip=algo.max_grad_norm,
        grad_clip_by="global_norm",
        train_batch_size_per_learner=algo.batch,
        target_network_update_freq=algo.target_every,
        num_steps_sampled_before_learning_starts=algo.warmup,
        # RLlib counts one runner more than there are
        training_intensity=algo.replays * max(1, count) / (count + 1),
        replay_buffer_config={"type": "PrioritizedEpisodeReplayBuffer", "capacity": 1},  # ours takes its place
    )
    config.reporting(min_time_s_per_iteration=SECONDS_EACH, min_sample_timesteps_per_iteration=0)


def _dqn(config: Any, task: WorkerSpec, learners_: int) -> None:
    _replaying(config, task, learners_)
    algo = task.experiment.algo
    assert isinstance(algo, Dqn)
    config.training(
        lr=schedule(algo.lr, task.experiment.stop.env_steps), double_q=algo.double, dueling=algo.dueling, num_atoms=1
    )


def _sac(config: Any, task: WorkerSpec, learners_: int) -> None:
    _replaying(config, task, learners_)
    algo, total = task.experiment.algo, task.experiment.stop.env_steps
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


def _named(config: Any, task: WorkerSpec, learners_: int) -> None:
    algo = task.experiment.algo
    assert isinstance(algo, Named)
    config.training(**algo.options)
    config.reporting(min_time_s_per_iteration=0 if family(algo) == "ppo" else SECONDS_EACH)
    if family(algo) in ("dqn", "sac"):
        config.reporting(min_sample_timesteps_per_iteration=0)


_TRAINING = {"ppo": _ppo, "impala": _impala, "appo": _appo, "dqn": _dqn, "sac": _sac, "rllib": _named}
