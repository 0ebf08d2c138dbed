"""Stable-Baselines3's PPO. `zoo` are the tuned settings of rl-zoo3 for the env.

python bench/peers/sb3.py cartpole zoo --seconds 15
"""

import time

import ale_py
import gymnasium
import torch
from doom import DoomBasic
from evaluate import Evaluation
from report import Report
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack


def falling(start: float):
    """A schedule from `start` to 0 over the training."""
    return lambda left: left * start


ZOO_ATARI = {
    "envs": 8, "threads": 2, "policy": "CnnPolicy", "total": 10_000_000, "n_steps": 128, "batch_size": 256,
    "n_epochs": 4, "learning_rate": falling(2.5e-4), "clip_range": falling(0.1), "vf_coef": 0.5, "ent_coef": 0.01,
}  # fmt: skip
ZOO_CARTPOLE = {
    "envs": 8, "threads": 1, "policy": "MlpPolicy", "total": 100_000, "n_steps": 32, "batch_size": 256,
    "n_epochs": 20, "gae_lambda": 0.8, "gamma": 0.98, "ent_coef": 0.0,
    "learning_rate": falling(1e-3), "clip_range": falling(0.2),
}  # fmt: skip
ZOO_LUNAR = {
    "envs": 16, "threads": 1, "policy": "MlpPolicy", "total": 1_000_000, "n_steps": 1024, "batch_size": 64,
    "n_epochs": 4, "gae_lambda": 0.98, "gamma": 0.999, "ent_coef": 0.01,
}  # fmt: skip
PLAIN = {
    "envs": 8, "threads": 1, "policy": "MlpPolicy", "total": 10_000_000, "n_steps": 128, "batch_size": 256,
    "n_epochs": 4,
}  # fmt: skip
SETTINGS = {
    "cartpole": {
        "identical": PLAIN,
        "zoo": ZOO_CARTPOLE,
    },
    "lunarlander": {"zoo": ZOO_LUNAR},
    "pong": {"zoo": ZOO_ATARI, "one-epoch": ZOO_ATARI | {"n_epochs": 1, "envs": 64, "n_steps": 32}},
    "doom_basic": {"zoo": ZOO_ATARI, "one-epoch": ZOO_ATARI | {"n_epochs": 1, "envs": 32, "n_steps": 32}},
}
ENVS = {"cartpole": "CartPole-v1", "lunarlander": "LunarLander-v3", "pong": "PongNoFrameskip-v4"}


def make_envs(task: str, count: int, seed: int) -> VecEnv:
    if task == "pong":
        return VecFrameStack(make_atari_env(ENVS[task], n_envs=count, seed=seed), n_stack=4)
    return make_vec_env(DoomBasic if task == "doom_basic" else ENVS[task], n_envs=count, seed=seed)


class Watch(BaseCallback):
    """Report every update: a rollout starts when the previous update is done."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.report, self.over = report, False
        self.evaluation = Evaluation(ENVS[report.task]) if report.options.steps else None

    def _on_rollout_start(self) -> None:
        steps = self.num_timesteps
        if steps and self.evaluation and self.report.evaluation_due(steps):
            began = time.time()
            value = self.evaluation(lambda obs: self.model.predict(obs, deterministic=True)[0])
            self.report.score(steps, value, time.time() - began)
        self.over = bool(steps) and self.report.update(steps)

    def _on_step(self) -> bool:
        return not self.over


def main() -> None:
    gymnasium.register_envs(ale_py)
    report = Report(SETTINGS)
    settings = dict(report.settings)
    torch.set_num_threads(settings.pop("threads"))
    total, policy = settings.pop("total"), settings.pop("policy")
    envs = make_envs(report.task, settings.pop("envs"), report.seed)
    model = PPO(policy, envs, seed=report.seed, device="cpu", **settings)
    watch = Watch(report)
    report.settings = {name: value for name, value in report.settings.items() if not callable(value)}
    report.start()
    model.learn(total, callback=watch)
    if not watch.over:
        watch._on_rollout_start()
    report.finish("stable_baselines3", "gymnasium", "torch")


if __name__ == "__main__":
    main()
