"""Sample Factory's APPO. `docs` are the settings of its own examples, adapted to two cores (num_workers).

`async` and `serial` use one epoch, in its two modes: workers and a learner, or everything in one process.
python bench/peers/sf.py pong async --seconds 15
"""

import sys
import tempfile
from typing import Any

import ale_py  # noqa: F401 (registers its games)
import gymnasium
from doom import DoomBasic
from report import Report
from sample_factory.algo.runners.runner import AlgoObserver, Runner
from sample_factory.algo.utils.misc import ExperimentStatus
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner
from sf_examples.atari.atari_params import atari_override_defaults
from sf_examples.atari.atari_utils import make_atari_env

SERIAL = {"serial_mode": True, "async_rl": False, "num_workers": 1, "worker_num_splits": 1}
CARTPOLE = {  # the command line in sf_examples/train_gym_env.py
    "num_workers": 2, "num_envs_per_worker": 20, "policy_workers_per_policy": 2, "batch_size": 512, "reward_scale": 0.1,
    "use_rnn": False, "recurrence": 1, "with_vtrace": False,
}  # fmt: skip
ONE_EPOCH = {
    "num_workers": 2, "num_envs_per_worker": 16, "worker_num_splits": 2, "rollout": 32, "batch_size": 256,
    "num_epochs": 1, "num_batches_per_epoch": 1, "async_rl": True, "policy_workers_per_policy": 1,
}  # fmt: skip
SERIAL_ONE_EPOCH = ONE_EPOCH | SERIAL | {"batch_size": 512}
SETTINGS = {
    "cartpole": {
        "docs": CARTPOLE,
        "serial": CARTPOLE | SERIAL | {
            "num_envs_per_worker": 32, "policy_workers_per_policy": 1, "num_batches_per_epoch": 2,
        },
        "identical": SERIAL | {
            "num_envs_per_worker": 8, "rollout": 128, "batch_size": 256, "num_epochs": 4, "num_batches_per_epoch": 4,
            "use_rnn": False, "recurrence": 1, "with_vtrace": False, "encoder_mlp_layers": [64, 64],
            "nonlinearity": "tanh", "actor_critic_share_weights": False, "normalize_input": False,
            "normalize_returns": False,
        },
    },
    "pong": {
        "docs": {"num_workers": 2, "num_envs_per_worker": 4},
        "async": ONE_EPOCH,
        "serial": SERIAL_ONE_EPOCH,
    },
    "doom_basic": {
        "async": ONE_EPOCH | {"reward_scale": 0.01},
        "serial": SERIAL_ONE_EPOCH | {"reward_scale": 0.01},
    },
}  # fmt: skip


def make_env(name: str, cfg: Any, env_config: Any, render_mode: str | None = None) -> gymnasium.Env:
    if name == "pong":
        return make_atari_env("atari_pong", cfg, env_config, render_mode)
    return DoomBasic() if name == "doom_basic" else gymnasium.make("CartPole-v1")


def command_line(report: Report, folder: str) -> list[str]:
    fixed = {
        "env": report.task, "experiment": "bench", "train_dir": folder, "seed": report.seed, "device": "cpu",
        "train_for_env_steps": 10**12, "summaries_use_frameskip": False,
    }  # fmt: skip
    words = []
    for name, value in (fixed | report.settings).items():
        words += [f"--{name}", *map(str, value)] if isinstance(value, list) else [f"--{name}={value}"]
    return words


class Watch(AlgoObserver):
    """Its runner counts the samples that the learner has used; without frame counting, these are env steps."""

    def __init__(self, report: Report) -> None:
        self.report, self.over = report, False

    def on_training_step(self, runner: Runner, training_iteration_since_resume: int) -> None:
        steps = sum(runner.env_steps.values())
        if steps and not self.over and self.report.update(steps):
            self.over = True
            self.report.finish("sample-factory", "gymnasium", "torch")  # it takes many seconds to stop
            runner.cfg.train_for_seconds = 0


def main() -> None:
    report = Report(SETTINGS)
    register_env(report.task, make_env)
    with tempfile.TemporaryDirectory() as folder:
        words = command_line(report, folder)
        parser, _ = parse_sf_args(words)
        if report.task != "cartpole":
            atari_override_defaults(report.task, parser)  # the Nature CNN and its settings
        _, runner = make_runner(parse_full_cfg(parser, words))
        runner.register_observer(Watch(report))
        report.start()
        status = runner.init()
        if status == ExperimentStatus.SUCCESS:
            status = runner.run()
    sys.exit(int(status))


if __name__ == "__main__":
    main()
