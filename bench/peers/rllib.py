"""RLlib's PPO and APPO on its new API stack: two env runners and a learner, as many as two cores support.

python bench/peers/rllib.py cartpole ppo --seconds 15
"""

import ale_py
import gymnasium
import numpy as np
import ray
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.wrappers.atari_wrappers import wrap_atari_for_new_api_stack
from ray.tune import register_env
from report import Report

NATURE = {
    "conv_filters": [[32, 8, 4, "valid"], [64, 4, 2, "valid"], [64, 3, 1, "valid"]],
    "head_fcnet_hiddens": [512], "head_fcnet_activation": "relu", "vf_share_layers": True,
}  # fmt: skip
MLP = {"fcnet_hiddens": [64, 64], "fcnet_activation": "tanh", "vf_share_layers": False}
FOUR_EPOCHS = {"train_batch_size_per_learner": 1024, "minibatch_size": 256, "num_epochs": 4}
SETTINGS = {
    "cartpole": {
        "ppo": {"algo": "ppo", "envs": 4, "model": {}, "lr": 3e-4, "num_epochs": 6, "vf_loss_coeff": 0.01},
        "appo": {"algo": "appo", "envs": 4, "model": {}},
        "identical": {"algo": "ppo", "envs": 4, "model": MLP} | FOUR_EPOCHS,
    },
    "pong": {
        "ppo": {"algo": "ppo", "envs": 4, "model": NATURE} | FOUR_EPOCHS,
        "appo": {"algo": "appo", "envs": 16, "model": NATURE, "circular_buffer_iterations_per_batch": 1},
    },
}


def make_env(config: dict) -> gymnasium.Env:
    if config["task"] == "cartpole":
        return gymnasium.make("CartPole-v1")
    gymnasium.register_envs(ale_py)
    env = gymnasium.make("ale_py:ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0)
    env = wrap_atari_for_new_api_stack(env, dim=84, frameskip=4, framestack=4)
    return gymnasium.wrappers.TransformReward(env, np.sign)


def learned(result: dict, config: PPOConfig | APPOConfig) -> int:
    """Env steps learned from, each counted once. APPO samples faster than it learns and repeats its batches."""
    if isinstance(config, PPOConfig):
        return int(result.get("num_env_steps_sampled_lifetime", 0)) if result.get("learners") else 0
    trained = result.get("learners", {}).get("__all_modules__", {}).get("num_env_steps_trained_lifetime", 0)
    return int(trained / config.circular_buffer_iterations_per_batch)


def main() -> None:
    report = Report(SETTINGS)
    settings = dict(report.settings)
    config = APPOConfig() if settings.pop("algo") == "appo" else PPOConfig()
    register_env("bench", make_env)
    config.environment("bench", env_config={"task": report.task})
    config.env_runners(num_env_runners=2, num_envs_per_env_runner=settings.pop("envs"))
    config.rl_module(model_config=DefaultModelConfig(**settings.pop("model")))
    config.training(**settings).debugging(seed=report.seed, log_level="ERROR")
    config.reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=0)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    algo = config.build_algo()
    report.start()
    while True:
        steps = learned(algo.train(), config)
        if steps and report.update(steps):
            break
    report.finish("ray", "gymnasium", "torch")
    algo.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
