"""PufferLib's PuffeRL with its default settings (config/default.ini), on the CPU, with batch sizes for two cores.

python bench/peers/puffer.py cartpole docs --seconds 15
"""

import ast
import configparser
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import ale_py  # noqa: F401 (registers its games)
import gymnasium
import numpy as np
import pufferlib.emulation
import pufferlib.models
import pufferlib.vector
import torch
from net import Net
from pufferlib import pufferl
from report import Report

SETTINGS = {
    "cartpole": {
        "docs": {"envs": 64, "bptt_horizon": 64, "minibatch_size": 2048},
        "identical": {
            "envs": 8, "bptt_horizon": 128, "minibatch_size": 256, "update_epochs": 4, "optimizer": "adam",
            "learning_rate": 3e-4,
        },
    },
    "pong": {"one-epoch": {"envs": 64, "workers": 2, "bptt_horizon": 32, "minibatch_size": 256}},
}  # fmt: skip


class Policy(Net):
    """Our network with the two methods that PuffeRL calls."""

    def forward_eval(self, obs: torch.Tensor, state: object = None) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(obs)

    def forward(self, obs: torch.Tensor, state: object = None) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(obs)


def make_env(task: str, buf: Any = None, seed: int = 0) -> pufferlib.emulation.GymnasiumPufferEnv:
    if task == "pong":
        env = gymnasium.wrappers.AtariPreprocessing(gymnasium.make("PongNoFrameskip-v4"))
        env = gymnasium.wrappers.FrameStack(env, 4)
        env = gymnasium.wrappers.TransformObservation(env, np.asarray)
    else:
        env = gymnasium.make("CartPole-v1")
    return pufferlib.emulation.GymnasiumPufferEnv(env=env, buf=buf, seed=seed)


def shipped() -> dict[str, Any]:
    """The [train] section of its default.ini."""
    ini = configparser.ConfigParser()
    ini.read(Path(pufferlib.__file__).parent / "config" / "default.ini")
    return {name: _value(text) for name, text in ini["train"].items()}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def main() -> None:
    report = Report(SETTINGS)
    settings = dict(report.settings)
    torch.set_num_threads(1)
    torch.manual_seed(report.seed)
    pufferl.ADVANTAGE_CUDA = torch.cuda.is_available()  # it only checks for a compiler
    envs, workers = settings.pop("envs"), settings.pop("workers", 0)
    backend = pufferlib.vector.Multiprocessing if workers else pufferlib.vector.Serial
    more = {"num_workers": workers} if workers else {}
    vector = pufferlib.vector.make(partial(make_env, report.task), num_envs=envs, backend=backend, **more)
    space = vector.single_observation_space
    policy = Policy(space.shape, int(vector.single_action_space.n))
    with tempfile.TemporaryDirectory() as folder:
        fixed = {"device": "cpu", "env": report.task, "use_rnn": False, "data_dir": folder, "seed": report.seed}
        trainer = pufferl.PuffeRL(shipped() | {"total_timesteps": 10**9} | settings | fixed, vector, policy)
        report.start()
        while True:
            trainer.evaluate()
            trainer.train()
            if report.update(trainer.global_step):
                break
        report.finish("pufferlib", "gymnasium", "torch")
        trainer.close()


if __name__ == "__main__":
    main()
